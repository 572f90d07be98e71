"""parts.py: how long the context is, what a start-up says about itself; the whole way in with a random checkpoint."""

import asyncio
import time

import pytest

from tinyserve.config import build
from tinyserve.engine import engine
from tinyserve.engine.engine import Engine
from tinyserve.engine.parts import Phases, _bar, context
from tinyserve.errors import ConfigError


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
        await asyncio.sleep(0.05)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "load_parts", slow)
        asyncio.run(work())
    assert 0 < len(read) < 50
