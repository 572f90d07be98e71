"""`bench serve`: figures against numpy's own, times of requests, and servers of every kind, good and bad."""

import asyncio
import json
import math
import signal
import sys
from contextlib import asynccontextmanager

import numpy as np
import pytest

from tests.cases.harness import serving as serve_model
from tests.cases.harness import write_tokenizer
from tests.scripted import FlatModel
from tinyserve.__main__ import main
from tinyserve.bench import serve
from tinyserve.bench.client import Server
from tinyserve.bench.figures import summary, table
from tinyserve.bench.load import load, progress_bar, send_times
from tinyserve.bench.prompts import random_prompts, read_prompts, size
from tinyserve.bench.requests import Endpoint, Record, ask
from tinyserve.errors import ConfigError


@pytest.fixture
def anyio_backend():
    return "asyncio"


def record(sent, pieces, tokens, ended=None, **more):
    return Record(
        sent=sent, pieces=pieces, ended=ended or pieces[-1], prompt_tokens=7, output_tokens=tokens, whole=True, **more
    )


# ---- figures


def test_percentiles_are_numpys():
    """50 requests of 1 to 30 pieces: each of 4 x 5 figures equals what numpy makes of the same times."""
    draw = np.random.default_rng(0)
    records = []
    for _ in range(50):
        sent = draw.uniform(0, 5)
        pieces = (sent + np.cumsum(draw.exponential(0.05, draw.integers(1, 30)))).tolist()
        records.append(record(sent, pieces, len(pieces) + 2))
    ttft = np.array([r.pieces[0] - r.sent for r in records]) * 1000
    e2el = np.array([r.pieces[-1] - r.sent for r in records]) * 1000
    values = {
        "ttft": ttft,
        "e2el": e2el,
        "tpot": (e2el - ttft) / [len(r.pieces) + 1 for r in records],
        "itl": np.concatenate([np.diff(r.pieces) for r in records]) * 1000,
    }

    found = summary(records, 10.0, goodput={}, points=[90, 99.9])

    for name, of in values.items():
        expected = [of.mean(), np.median(of), of.std(), np.percentile(of, 90), np.percentile(of, 99.9)]
        keys = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p90", "p99.9")]
        assert [found[key] for key in keys] == pytest.approx(expected)
    tokens = sum(r.tokens for r in records)
    assert found["output_throughput"] == tokens / 10 and found["total_token_throughput"] == (tokens + 350) / 10
    assert found["request_throughput"] == 5 and found["request_goodput"] is None


def test_goodput_needs_every_limit():
    """Of 4 whole requests: one is late, one slow, one long; the one-token answer has a tpot of 0. 2 in 4 s: 0.5."""
    records = [
        record(0, [0.1, 0.2, 0.3], 3),
        record(0, [0.9, 1.0, 1.1], 3),
        record(0, [0.1, 0.9], 2),
        record(0, [0.2], 1),
        Record(error="500: no"),
    ]

    found = summary(records, 4.0, goodput={"ttft": 500, "tpot": 200, "e2el": 1000}, points=[99])

    assert found["request_goodput"] == 0.5
    assert (found["completed"], found["failed"]) == (4, 1)
    assert "Request goodput (req/s):" in table(found, ["ttft"])


def test_peaks():
    """Two requests of 4 tokens in 2 pieces overlap for a moment; the third begins when the first ends."""
    records = [record(0, [0.5, 2.0], 4), record(1.0, [1.5, 1.75], 4), record(2.0, [2.5], 1)]

    found = summary(records, 3.0, goodput={}, points=[])

    assert found["max_concurrent_requests"] == 2
    assert found["max_output_tokens_per_s"] == 4


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_requests_are_a_gamma_process(burstiness):
    """4000 gaps: the last is sent at n / rate, and a gap's deviation is its mean over the root of the burstiness."""
    times = send_times(4000, 50.0, burstiness, seed=3)
    gaps = np.diff(times, prepend=0.0)

    assert times[-1] == pytest.approx(80.0)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
    assert np.array_equal(times, send_times(4000, 50.0, burstiness, seed=3))
    assert not np.array_equal(times, send_times(4000, 50.0, burstiness, seed=4))


def test_no_gaps_and_even_gaps():
    assert send_times(3, math.inf, 1.0, 0).tolist() == [0, 0, 0]
    assert send_times(4, 2.0, math.inf, 0).tolist() == [0.5, 1, 1.5, 2]


# ---- what is asked


def test_prompts_of_a_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Hi"}, {"prompt": [1, 2], "output_tokens": 3}, {"messages": [{"role": "user", "content": "x"}]}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")

    found = read_prompts(file, 4, 9)

    assert [prompt.output for prompt in found] == [9, 3, 9, 9]
    assert [found[0].content, found[1].content] == ["Hi", [1, 2]] and found[3] == found[0]
    assert len(read_prompts(file, None, 9)) == 3
    assert json.loads(Endpoint.of("chat", {"model": "m"}).body(found[2]))["messages"] == lines[2]["messages"]
    with pytest.raises(ConfigError, match="--endpoint chat"):
        Endpoint.of("completions", {}).body(found[2])
    file.write_text('{"text": "Hi"}')
    with pytest.raises(ConfigError, match="line 1"):
        read_prompts(file, None, 9)


def test_random_prompts_are_the_same_every_time():
    how = {"seed": 5, "ids": 50}
    found = random_prompts(20, (2, 9), 4, text=False, **how)

    assert found == random_prompts(20, (2, 9), 4, text=False, **how)
    assert all(2 <= len(prompt.content) <= 9 and max(prompt.content) < 50 for prompt in found)
    words = random_prompts(20, (2, 9), 4, text=True, **how)
    assert [len(prompt.content.split()) for prompt in words] == [len(prompt.content) for prompt in found]
    assert size("7") == 7 and size("2:9") == (2, 9)


# ---- servers


@asynccontextmanager
async def answering(write):
    """A server that gives each connection to `write(number, writer)` once it has read a request."""
    count = 0

    async def connected(reader, writer):
        nonlocal count
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                count += 1
                if await write(count, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text, reason=None):
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": reason}]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = chunk(b": wait\n\n") + chunk(event("a")) + chunk(event("b", "length") + USAGE) + chunk(DONE) + b"0\r\n\r\n"


async def asked(url, times=1):
    server, records = Server(url), [Record() for _ in range(times)]
    for one in records:
        await ask(server, Endpoint.of("completions", {}), b"{}", one)
    server.close()
    return records


@pytest.mark.anyio
@pytest.mark.parametrize("step", [1, 7, 10_000])
async def test_an_answer_is_read_however_it_is_cut(step):
    """The bytes of two answers in pieces of 1, 7 and all: two pieces of text each, 3 tokens as the usage says."""

    async def write(count, writer):
        whole = STREAM + WHOLE
        for at in range(0, len(whole), step):
            writer.write(whole[at : at + step])
            await writer.drain()

    async with answering(write) as url:
        records = await asked(url, 2)

    assert [(r.error, r.whole, len(r.pieces), r.tokens, r.prompt_tokens) for r in records] == [
        (None, True, 2, 3, 4)
    ] * 2


def test_tokens_without_a_text_are_an_answer():
    """Random weights write ids that stand for nothing: "the answer was empty", and nothing was measured at all."""
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 9}}\n\n'

    async def write(_, writer):
        writer.write(STREAM + chunk(event("", "length") + usage + DONE) + b"0\r\n\r\n")

    async def work():
        async with answering(write) as url:
            return await asked(url)

    (found,) = asyncio.run(work())
    assert (found.error, found.whole, found.tokens, len(found.pieces)) == (None, True, 9, 1)
    assert found.ttft == found.latency > 0


def test_of_nothing_no_times_are_shown():
    """Stopped before the first answer: a median of 0.00 ms was printed."""
    nothing = table(summary([Record(sent=1.0)], 2.0, goodput={}, points=[50]), ["ttft", "e2el"])
    assert "Unfinished requests (stopped):            1" in nothing and "(ms)" not in nothing


FAULTS = {
    "500: {": b'HTTP/1.1 500 No\r\nContent-Length: 13\r\n\r\n{"error": 13}',
    "503": b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n",
    "middle of the answer": STREAM + chunk(event("a")),
    "ended before the answer did": STREAM + chunk(event("a")) + b"0\r\n\r\n",
    "was empty": STREAM + chunk(DONE) + b"0\r\n\r\n",
    "by an error": STREAM + chunk(event("a")) + chunk(b'data: {"error": {"message": "x"}}\n\n' + DONE) + b"0\r\n\r\n",
    "not what OpenAI": STREAM + chunk(b"data: {\n\n" + DONE) + b"0\r\n\r\n",
    "completion_tokens": STREAM
    + chunk(b'data: {"usage": {"prompt_tokens": 1, "completion_tokens": -9}}\n\n' + DONE)
    + b"0\r\n\r\n",
    "1e308": STREAM
    + chunk(b'data: {"usage": {"prompt_tokens": 1, "completion_tokens": 1e308}}\n\n' + DONE)
    + b"0\r\n\r\n",
    "does not speak HTTP": b"220 mail.example ready\r\n\r\n\r\n",
}


@pytest.mark.anyio
@pytest.mark.parametrize("said", FAULTS)
async def test_what_went_wrong_is_a_failed_request(said):
    """Of three answers the second is bad: it alone fails, and with a reason."""

    async def write(count, writer):
        writer.write(FAULTS[said] if count == 2 else STREAM + WHOLE)
        return count == 2

    async with answering(write) as url:
        records = await asked(url, 3)

    assert [r.whole for r in records] == [True, False, True]
    assert said in records[1].error
    found = summary(records, 1.0, goodput={}, points=[])
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (2, 1, 6)


@pytest.mark.anyio
@pytest.mark.parametrize(("said", "limit", "piece"), [
    ("does not end", {"MOST_PIECES": 50}, chunk(event("a"))), ("does not end", {"MOST_LINE": 5000}, chunk(b"x" * 999)),
    ("did not end in 0 seconds", {"LONGEST": 0.3}, chunk(b": alive\n\n")),
])  # fmt: skip
async def test_an_answer_without_end_is_given_up(monkeypatch, said, limit, piece):
    """Pieces for ever, one line for ever, comments for ever: the measurement took as long, and its memory grew."""
    for name, value in limit.items():
        monkeypatch.setattr(f"tinyserve.bench.requests.{name}", value)

    async def write(count, writer):
        writer.write(STREAM)
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        return True

    async with answering(write) as url:
        (found,) = await asyncio.wait_for(asked(url), 5)
    assert said in found.error and not found.whole and len(found.pieces) < 200


@pytest.mark.anyio
async def test_a_connection_that_was_closed_meanwhile_is_no_failure():
    """The server closes each connection after its answer, without saying so: 5 requests, all whole."""

    async def write(count, writer):
        writer.write(STREAM + WHOLE)
        return True

    async with answering(write) as url:
        records = await asked(url, 5)

    assert all(one.whole for one in records)


@pytest.mark.anyio
async def test_no_server():
    (found,) = await asked("http://127.0.0.1:9")
    assert "no connection" in found.error and not found.whole


@pytest.mark.anyio
async def test_never_more_requests_than_allowed():
    """12 requests with a limit of 3: the server sees at most 3 together, and all are whole."""
    together = most = 0

    async def write(count, writer):
        nonlocal together, most
        together += 1
        most = max(most, together)
        await asyncio.sleep(0.01)
        together -= 1
        writer.write(STREAM + WHOLE)

    async with answering(write) as url:
        server = Server(url)
        bodies = [b"{}"] * 12
        run = await load(
            server, Endpoint.of("chat", {}), bodies, [0.0] * 12, limit=3, bar=progress_bar(12, shown=False)
        )
        server.close()

    assert most == 3 and len(run.records) == 12 and all(one.whole for one in run.records) and not run.stopped


# ---- the whole command


async def measured(url, *argv):
    """The figures of the command, in this loop."""
    return await serve.run(serve.arguments(["--base-url", url, "--disable-tqdm", *argv]))


@pytest.mark.anyio
async def test_our_own_server_over_a_socket(tmp_path):
    """20 requests of 5 ids at 100 a second, 8 tokens each: 160 tokens, none failed, first pieces before last ones."""
    sizes = ["--num-prompts", "20", "--input-len", "5", "--output-len", "8", "--ignore-eos", "--random-vocab", "100"]
    async with serve_model(FlatModel(), write_tokenizer(tmp_path), socket=True) as server:
        url = str(server.http.base_url)
        found = await measured(url, *sizes, "--request-rate", "100", "--goodput", "e2el:60000")
        chat = await measured(url, *sizes, "--endpoint", "chat", "--num-warmups", "1")

    for figures in (found, chat):
        assert (figures["completed"], figures["failed"], figures["model_id"]) == (20, 0, "tiny")
        assert figures["total_output_tokens"] == 160 and figures["errors"] == []
        assert 0 < figures["median_ttft_ms"] <= figures["median_e2el_ms"]
    assert found["total_input_tokens"] == 100
    assert found["duration"] >= 0.2 and found["request_goodput"] == pytest.approx(20 / found["duration"])


def test_stopping_shows_what_was_measured(tmp_path):
    """Ctrl-C while some requests hang: the 3 answered ones are in the figures, and the exit code is 130."""
    file = tmp_path / "out.json"

    async def work():
        all_sent = asyncio.Event()

        async def write(count, writer):
            writer.write(STREAM + (WHOLE if count <= 3 else chunk(event("a"))))
            if count == 8:
                all_sent.set()

        async with answering(write) as url:
            command = [sys.executable, "-m", "tinyserve", "bench", "serve", "--base-url", url, "--model", "m"]
            command += ["--num-prompts", "8", "--ready-check-timeout-sec", "0", "--output-json", str(file)]
            child = await asyncio.create_subprocess_exec(*command, stdout=-1)
            await asyncio.wait_for(all_sent.wait(), 60)
            await asyncio.sleep(0.2)
            child.send_signal(signal.SIGINT)
            out, _ = await child.communicate()
            return out.decode(), child.returncode

    out, code = asyncio.run(work())

    found = json.loads(file.read_text())
    assert code == 130
    assert (found["stopped"], found["completed"], found["failed"], found["unfinished"]) == (True, 3, 0, 5)
    assert "Successful requests:                      3" in out


def test_a_command_for_vllm_is_understood():
    """The words of `vllm bench serve` for host, route, data and lengths."""
    words = (
        "--backend openai-chat --host h --port 81 --dataset-name random --random-input-len 3 --random-output-len 2:4"
    )

    options = serve.arguments([*words.split(), "--request-rate", "inf"])

    assert (options.base_url, options.endpoint) == ("http://h:81", "chat")
    assert (options.input_len, options.output_len) == (3, (2, 4))
    assert serve.arguments(["--endpoint", "/v1/completions"]).endpoint == "/v1/completions"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--request-rate", "0"], "request-rate"),
        (["--num-prompts", "0"], "num-prompts"),
        (["--dataset-name", "custom"], "--dataset-path"),
        (["--save-result"], "--save-result"),
        (["--goodput", "itl:3"], "'itl' is none of ttft, tpot, e2el"),
        (["--goodput", "ttft"], "milliseconds"),
        (["--input-len", "9:3"], "input-len"),
        (["--percentile-metrics", "ttft,x"], "'x'"),
        (["--endpoint", "embeddings", "--model", "m"], "--endpoint"),
        (["--base-url", "ftp://x"], "--base-url"),
        (["--port", "99999"], "--base-url must be"),
        (["--base-url", "http://[::1"], "--base-url must be"),
        (["--base-url", "http://a..b", "--model", "m", "--ready-check-timeout-sec", "1"], "no connection"),
        (["--num-promts", "3"], "did you mean --num-prompts?"),
        (["--header", "a"], "NAME=VALUE"),
        (["--output-json", "/"], "--output-json"),
        (["--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0"], "not ready"),
    ],
)
def test_mistakes_are_one_line(argv, said, capsys):
    assert main(["bench", "serve", *argv]) in (1, 2)
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_what_is_waited_for_is_said(capsys):
    """Ten minutes without a word, when no server was there."""
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0.1"]) == 1
    waiting, failed = capsys.readouterr().err.splitlines()
    assert "waiting for http://127.0.0.1:9, 0.1 s at most (no connection" in waiting and "not ready" in failed
