"""parts.py: how long the context is, what a start-up says about itself; the whole way in with a random checkpoint."""

import asyncio
import json
import re
import time

import pytest

from tinyserve.config import build
from tinyserve.engine import engine
from tinyserve.engine.engine import Engine
from tinyserve.engine.parts import Phases, _bar, context, load_parts
from tinyserve.errors import ConfigError, TinyserveError


def test_the_context_is_what_all_agree_on():
    """The checkpoint promises 8192, its tokenizer 4096: 4096; asked 2048: 2048; asked 16384: refused."""
    assert context(None, 8192, None) == 8192
    assert context(-1, 8192, 4096) == 4096
    assert context(2048, 8192, 4096) == 2048
    with pytest.raises(ConfigError, match="8192"):
        context(16384, 8192, None)


def test_phases_add_up():
    phases = Phases()
    for _ in range(2):
        with phases("weights"):
            pass
    with phases("cache"):
        pass

    assert list(phases.seconds) == ["weights", "cache"]
    assert phases.report().startswith("weights 0.00 s, cache 0.00 s, together")


def test_a_start_that_is_cancelled_ends_at_the_next_tensor():
    """Cancelled in the first of 100 tensors of 10 ms: the thread gives up long before the last."""
    read = []

    def slow(config, phases):
        with phases("weights"), _bar(False, phases.check) as progress:
            for number in range(100):
                time.sleep(0.01)
                read.append(number)
                progress(number, 100)

    async def work():
        starting = asyncio.create_task(Engine.start(build({"model": "x"})))
        while not read:
            await asyncio.sleep(0.005)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "load_parts", slow)
        asyncio.run(work())
    assert 0 < len(read) < 50


def test_too_long_a_context_is_refused_before_weights_are_read(tmp_path):
    """config.json promises 64 positions: 65 are refused although the folder has no weights and no tokenizer at all."""
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="more than the 64 tokens"):
        load_parts(build({"model": str(tmp_path), "max_model_len": 65}), Phases())
    with pytest.raises(TinyserveError, match="tokenizer"):
        load_parts(build({"model": str(tmp_path), "max_model_len": 64}), Phases())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"chat_template": "/no/such.jinja"}, "--chat-template /no/such.jinja: no such file"),
        ({"chat_template": "{% if"}, "--chat-template: .*not valid Jinja"),
        ({"tool_call_parser": "hermse"}, "--tool-call-parser hermse: no such parser. Did you mean hermes?"),
        ({"reasoning_parser": "no_module:X"}, "--reasoning-parser no_module:X: it cannot be imported"),
        ({"device": "gpu:0"}, "--device gpu:0: there is no such device"),
    ],
)
def test_wrong_names_are_told_before_anything_is_loaded(monkeypatch, options, told):
    """They were told after torch, the device and the tokenizer: 3 to 6 seconds after the start."""

    def forbidden(*_):
        raise AssertionError("loaded")

    for name in ("open_foundry", "load_parts"):
        monkeypatch.setattr(engine, name, forbidden)
    with pytest.raises(ConfigError, match=told):
        asyncio.run(Engine.start(build({"model": "/nothing", **options})))


def test_no_bar_is_drawn_into_a_file(capsys):
    """stderr is no terminal here: 0 bytes of bar, and the check for a stop is still made once per tensor."""
    calls = []
    with _bar(True, lambda: calls.append(1)) as progress:
        progress(1, 2)
        progress(2, 2)
    assert capsys.readouterr().err == "" and len(calls) == 2


def test_a_report_of_phases_shows_what_no_phase_covers():
    """Two phases in no time, and the sum beside all the time that has passed."""
    phases = Phases()
    with phases("import"):
        pass
    with phases("weights"):
        pass

    assert re.fullmatch(r"import 0\.0\d s, weights 0\.0\d s, together 0\.0\d of \d+\.\d\d s", phases.report())
