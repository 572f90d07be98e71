"""`tinyserve bench`: figures that can be checked by hand, and one real run of a tiny model of noise."""

import asyncio
import json
import os
import re
import signal
from pathlib import Path

import pytest
from attrs import frozen

import tinyserve
from tests.engine.test_device_graphs import FAMILIES, SHAPE
from tinyserve.__main__ import main
from tinyserve.bench.command import figures
from tinyserve.bench.figures import percentiles
from tinyserve.bench.measure import Measured, Work, measure
from tinyserve.bench.progress import Progress


@frozen
class Timing:
    first_token_ts: float
    last_token_ts: float


@frozen
class Piece:
    token_ids: tuple
    metrics: Timing


class Scripted:
    """An engine whose requests start a second after another and make two tokens a second."""

    def __init__(self, clock):
        self.clock, self.asked = clock, []

    async def generate(self, prompt, sampling):
        self.asked.append((len(prompt), sampling.max_tokens, sampling.ignore_eos))
        first = self.clock + len(self.asked)
        await asyncio.sleep(0)
        for k in range(sampling.max_tokens):
            yield Piece((7,), Timing(first, first + k / 2))


def test_times_are_the_engines_own(monkeypatch):
    """Two requests: first tokens after 1 and 2 s, 3 tokens each, half a second apart."""
    monkeypatch.setattr("tinyserve.bench.measure.time.monotonic", lambda: 100.0)
    engine = Scripted(100.0)

    found = asyncio.run(measure(engine, Work(prompts=[[1] * 4, [2] * 5], outputs=[3, 3])))

    assert engine.asked == [(4, 3, True), (5, 3, True)]
    assert (found.prompt_tokens, found.output_tokens) == (9, 6)
    assert found.first_ms == [1000, 2000] and found.latency_ms == [2000, 3000]
    assert found.pace_ms == 500 and found.prefill_seconds == 2


def test_random_work_is_the_same_every_time():
    work = Work.random(5, (2, 9), 4, ids=50)

    assert work == Work.random(5, (2, 9), 4, ids=50) != Work.random(5, (2, 9), 4, ids=50, seed=1)
    nano = Work.random(256, (100, 1024), (100, 1024))
    assert sum(nano.outputs) == 133_966
    assert all(2 <= len(prompt) <= 9 and max(prompt) < 50 for prompt in work.prompts) and list(work.outputs) == [4] * 5


MEASURED = Measured(
    seconds=2.0, prompt_tokens=150, output_tokens=50, first_ms=[1], latency_ms=[9], pace_ms=1, prefill_seconds=1
)


def test_percentiles_and_rates():
    """0 to 100: the 90th is 90. 50 output and 150 prompt tokens in 2 s: 25 and 100 a second."""
    assert percentiles(range(101)) == {"mean": 50, "p50": 50, "p90": 90, "p99": 99}
    assert percentiles([3.0]) == {"mean": 3, "p50": 3, "p90": 3, "p99": 3}
    assert figures("throughput", [MEASURED])["output_tok_s"]["p50"] == 25
    assert figures("throughput", [MEASURED])["total_tok_s"]["p50"] == 100


def test_latency_of_a_model_of_noise(tmp_path, capsys):
    """From the command line to a JSON file: 2 runs of 2 requests, 3 tokens each."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 4, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | FAMILIES["llama"] | small))
    file = tmp_path / "out.json"
    sizes = ["--batch-size", "2", "--input-len", "4", "--output-len", "3", "--runs", "2", "--output-json", str(file)]

    code = main(["bench", "latency", str(tmp_path), "--load-format", "dummy", "--device", "cpu", *sizes])

    assert code == 0
    result = json.loads(file.read_text())
    assert result["runs"] == 2 and len(result["seconds"]) == 2
    assert 0 < result["ttft_ms"]["p50"] <= result["latency_ms"]["p99"]
    assert "ms_per_token" in capsys.readouterr().out

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [1, 2, 3], "output_tokens": 2}\n{"prompt": "Hi"}\n')
    sizes = ["--num-prompts", "3", "--output-len", "4", "--runs", "1", "--dataset-path", str(prompts)]
    code = main(["bench", "throughput", str(tmp_path), "--load-format", "dummy", "--device", "cpu", *sizes])

    assert code == 0
    assert "requests_s" in capsys.readouterr().out


def work_of(count):
    return Work(prompts=[[1] * 4] * count, outputs=[3] * count)


def test_a_measurement_says_how_far_it_is(monkeypatch, capsys):
    """A run of 2 requests is told of while it lasts and after; nothing was said for minutes."""
    monkeypatch.setattr("tinyserve.bench.progress.EVERY", 0.01)
    told = Progress(work_of(2), 1, 2)

    async def once():
        told.answered()
        await asyncio.sleep(0.05)
        return MEASURED

    assert not asyncio.run(told.stopped_by_signals(told.all(once)))
    lines = capsys.readouterr().err.splitlines()
    assert "1 warm-up and 2 runs, each of 2 requests with 14 tokens" in lines[0]
    assert "warm-up 1 of 1: 1 of 2 requests answered after 0 s" in lines
    assert "run 1 of 2: 2.0 s, about 2 s left" in lines and lines[-1] == "run 2 of 2: 2.0 s"
    assert told.runs == [MEASURED] * 2


@pytest.mark.parametrize("over", [0, 2])
def test_a_signal_ends_a_measurement_with_the_runs_that_are_over(over, capsys):
    """After two runs of five there are their figures; before the first nothing, and no traceback."""
    told = Progress(work_of(1), 0, 5)

    async def once():
        if len(told.runs) == over:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        return MEASURED

    async def whole():
        stopped = await told.stopped_by_signals(told.all(once))
        await asyncio.sleep(0)  # it is not cancelled any more
        return stopped

    if over:
        assert asyncio.run(whole()) and len(told.runs) == over
    else:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(whole())
    assert f"stopped in run {over + 1} of 5, after {over} of 5 runs" in capsys.readouterr().err


def test_starts_that_are_interrupted_leave_their_figures(monkeypatch, capsys):
    """Two starts of five, then Ctrl-C; before the first there is nothing to show."""
    told = iter([[1.0, 2.0, 3.0], [1.5, 2.5, 3.5]])

    def started(cold, argv):
        if (one := next(told, None)) is None:
            raise KeyboardInterrupt
        return one

    monkeypatch.setattr("tinyserve.bench.command._started", started)
    assert main(["bench", "startup", "m", "--runs", "5"]) == 130
    said = capsys.readouterr()
    assert "run 2 of 5: 3.5 s" in said.err and "[3.0, 3.5]" in said.out
    assert main(["bench", "startup", "m", "--runs", "5"]) == 130 and not capsys.readouterr().out


@pytest.mark.parametrize("kind", ["latency", "throughput", "startup"])
def test_the_help_of_a_measurement_names_the_model_and_every_default(kind, capsys):
    with pytest.raises(SystemExit):
        main(["bench", kind, "--help"])
    told = " ".join(capsys.readouterr().out.split())

    assert f"bench {kind} [MODEL] [options]" in told and "tinyserve serve --help" in told
    for name in ("--runs",) if kind == "startup" else ("--input-len", "--output-len", "--runs", "--warmup"):
        assert re.search(rf"{name}[^\[]*(N:M)?[^\[]*\[\d+\]", told), name


def test_a_start_is_a_process_of_its_own(tmp_path, monkeypatch, capfd):
    """One run, with an empty cache of kernels: Python first, then the engine, then a token."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 4, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | FAMILIES["llama"] | small))
    file = tmp_path / "out.json"
    options = ["--load-format", "dummy", "--device", "cpu", "--runs", "1", "--cold", "--output-json", str(file)]
    monkeypatch.setenv("PYTHONPATH", str(Path(tinyserve.__file__).parent.parent))

    assert main(["bench", "startup", str(tmp_path), *options]) == 0

    found = json.loads(file.read_text())
    assert 0 < found["engine_begins_s"]["p50"] < found["ready_s"]["p50"] < found["first_token_s"]["p50"]
    assert found["each_s"] == [pytest.approx(found["first_token_s"]["p50"], abs=0.01)]
    phases, total = re.search(r"together ([\d.]+) of ([\d.]+) s", capfd.readouterr().err).groups()
    assert float(phases) >= 0.95 * float(total)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["latenzy"], "latency"),
        (["latency", "m", "--runs", "many"], "runs"),
        (["latency", "m", "--runs", "-1"], "negative"),
        ([], "serve, latency, throughput, startup, anchors, kernels"),
    ],
)
def test_mistakes_are_one_line(argv, said, capsys):
    assert main(["bench", *argv]) == 2
    assert said in capsys.readouterr().err
