"""`run-batch`: every line of a file is answered as over HTTP, or carries its error."""

import asyncio
import codecs
import contextlib
import errno
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.scripted import ScriptModel
from tinyserve.__main__ import main
from tinyserve.cli.batch import Batch
from tinyserve.cli.batch_files import Line, Sink, Source, open_both
from tinyserve.errors import ConfigError, EngineError
from tinyserve.server.face import Service

from .harness import CHAT, HI, TEXT, serving

ASK = {"model": "tiny", **HI, "max_tokens": 3, "temperature": 0}
LINES = [
    {"custom_id": "chat", "method": "POST", "url": CHAT, "body": ASK},
    {"custom_id": "text", "url": TEXT, "body": {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 2}},
    {"custom_id": "unknown", "method": "POST", "url": CHAT, "body": {**ASK, "model": "nobody"}},
    {"custom_id": "wrong", "method": "POST", "url": CHAT, "body": {**ASK, "temperature": "hot"}},
    {"custom_id": "stream", "method": "POST", "url": CHAT, "body": {**ASK, "stream": True}},
    {"custom_id": "route", "method": "POST", "url": "/pause", "body": {}},
    {"custom_id": "method", "method": "GET", "url": "/v1/models", "body": {}},
    {"custom_id": "empty", "method": "POST", "url": CHAT},
    [1],
]


class Kept:
    """A sink that keeps what is written."""

    def __init__(self):
        self.data = b""

    async def write(self, line):
        self.data += line


def source_of(tmp_path, data, most=2**20):
    path = tmp_path / "lines"
    path.write_bytes(data)
    return Source(str(path), os.open(path, os.O_RDONLY), most)


def read(data):
    return {answer["custom_id"]: answer for answer in map(json.loads, data.splitlines())}


@pytest.mark.anyio
async def test_every_line_has_its_answer_or_its_error(tok, tmp_path):
    """10 lines, a blank one between them: 10 answers, each under its name."""
    data = codecs.BOM_UTF8 + b"\r\n\r\n".join([*(json.dumps(line).encode() for line in LINES), b"{no JSON"])
    async with serving(ScriptModel([97, 98, 99]), tok) as server:
        sink = Kept()
        batch = Batch(Service(server.engine.config, server.engine), sink)
        await batch.run(source_of(tmp_path, data).lines(), 4)
        usual = (await server.ask(CHAT, ASK)).body
    found = read(sink.data)

    assert len(sink.data.splitlines()) == 10 and (batch.answered, batch.refused) == (10, 8)
    assert any("Line 19: It is not valid JSON" in (one["error"] or {}).get("message", "")
               for one in map(json.loads, sink.data.splitlines()))  # fmt: skip
    assert found["chat"]["error"] is None and found["chat"]["response"]["status_code"] == 200
    assert found["chat"]["response"]["body"]["choices"] == usual["choices"]
    assert found["chat"]["response"]["request_id"] == found["chat"]["response"]["body"]["id"]
    assert found["unknown"]["id"] == "batch_req_" + found["unknown"]["response"]["request_id"]
    assert [choice["text"] for choice in found["text"]["response"]["body"]["choices"]] == ["ab", "ab"]
    for name, status, word in (("unknown", 404, "nobody"), ("wrong", 400, "temperature")):
        response = found[name]["response"]
        assert response["status_code"] == status and word in response["body"]["error"]["message"]
    for name in ("stream", "route", "method", "empty", None):
        assert found[name]["response"] is None and found[name]["error"]["message"]
    assert (
        "come whole" in found["stream"]["error"]["message"] and "/v1/embeddings" in found["route"]["error"]["message"]
    )


@pytest.mark.anyio
async def test_so_many_lines_are_under_way_and_no_more_are_read(tok):
    """Of 40 lines, 3 at a time: what is read is what is answered and 3 more at most."""
    line = json.dumps(LINES[0]).encode()
    async with serving(ScriptModel([97, 98, 99], seconds=0.002), tok) as server:
        batch, read, most = Batch(Service(server.engine.config, server.engine), Kept()), 0, 0

        async def lines():
            nonlocal read
            for number in range(40):
                read += 1
                assert read - batch.answered <= 3
                yield Line(number, len(line), line)

        async def watch():
            nonlocal most
            while True:
                most = max(most, len(server.engine.streams))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        await batch.run(lines(), 3)
        watching.cancel()
    assert (batch.answered, batch.refused) == (40, 0) and 1 < most <= 3


@pytest.mark.anyio
async def test_lines_that_no_request_can_have(tok, tmp_path):
    """A body 500 deep (read, but not written again: it ended the whole run), one of 17 MB, names that are none or come
    again: each has its answer, and its number where it has no name."""
    deep = b'{"custom_id": "deep", "url": "%s", "body": {"model": %s}}' % (CHAT.encode(), b"[" * 500 + b"]" * 500)
    long = json.dumps({"custom_id": "long", "url": CHAT, "body": {**ASK, "user": "x" * 17 * 2**20}}).encode()
    named = [json.dumps({**LINES[0], "custom_id": name}).encode() for name in (["x"], "a", "a", 7)]
    async with serving(ScriptModel([97, 98, 99]), tok) as server:
        sink = Kept()
        batch = Batch(Service(server.engine.config, server.engine), sink)
        await batch.run(source_of(tmp_path, b"\n".join([deep, long, *named]), 2**24).lines(), 1)
    answers = [json.loads(line) for line in sink.data.splitlines()]

    assert [answer["custom_id"] for answer in answers] == ["deep", None, None, "a", "a", 7]
    errors = [(answer["error"] or {}).get("message", "") for answer in answers]
    for number, words in enumerate(("nested too deeply", "17825957 bytes", "custom_id must be a text")):
        assert f"Line {number + 1}: " in errors[number] and words.split()[-1] in errors[number]
    assert errors[3:] == ["", "", ""] and "1 have the custom_id of another line" in batch.report()


def test_the_command(tiny, tmp_path):
    """With a model of random weights, under a server's key that no line has: 5 equal greedy answers of 3 tokens in the
    place of what was in the file."""
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    sink.write_text("answers of another day\n")
    source.write_text("".join(json.dumps({**LINES[0], "custom_id": str(number)}) + "\n" for number in range(5)))
    files = ["run-batch", "-i", str(source), "-o", str(sink)]
    options = [str(tiny), "--served-model-name", "tiny", "--num-gpu-blocks-override", "64", "--device", "cpu"]
    assert main([*files, *options, "--api-key", "k", "--max-num-seqs", "2"]) == 0
    found = read(sink.read_bytes())
    bodies = [answer["response"]["body"] for answer in found.values()]
    assert set(found) == set("01234") and len(sink.read_bytes().splitlines()) == 5
    assert [body["usage"]["completion_tokens"] for body in bodies] == [3] * 5
    assert len({body["choices"][0]["message"]["content"] for body in bodies}) == 1


def test_answers_of_another_day_stay_until_the_model_is_loaded(tmp_path, capsys):
    """A model that is not there; answers asked for into the file of requests by another name."""
    source, sink, linked = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "link.jsonl"))
    source.write_text(json.dumps(LINES[0]))
    sink.write_text("kept")
    linked.hardlink_to(source)
    assert main(["run-batch", "-i", str(source), "-o", str(sink), "--model", str(tmp_path / "none")]) != 0
    assert sink.read_text() == "kept"
    assert main(["run-batch", "-i", str(source), "-o", str(linked), "--model", str(tmp_path / "none")]) == 2
    assert "same file" in capsys.readouterr().err and source.read_text()


# ---- the two files


async def collected(source):
    return [line async for line in source.lines()]


@pytest.mark.parametrize("size", [1, 7, 2**20])
def test_lines_are_the_same_however_they_come(tmp_path, monkeypatch, size):
    """Pieces of 1, 7 and many bytes; blank lines count but do not come; the last line ends without its end."""
    monkeypatch.setattr("tinyserve.cli.batch_files.PIECE", size)
    data = b"one\r\n\n  \n" + b"x" * 50 + b"\n\xff\x00\nlast"
    found = asyncio.run(collected(source_of(tmp_path, data, 20)))

    assert [(line.number, line.size, line.data.strip()) for line in found] == [
        (1, 4, b"one"), (4, 50, b""), (5, 2, b"\xff\x00"), (6, 4, b"last")
    ]  # fmt: skip
    assert [line.size for line in asyncio.run(collected(source_of(tmp_path, b"y" * 50, 20)))] == [50]


def test_a_line_that_does_not_come_can_be_given_up():
    """A pipe whose writer says half a line and then nothing: a thread that waited there kept the process alive."""
    reader, writer = os.pipe()

    async def wait():
        lines = Source("-", reader, 100).lines()
        waiting = asyncio.create_task(anext(lines))
        os.write(writer, b"whole\nhal")
        assert (await waiting).data == b"whole"
        waiting = asyncio.create_task(anext(lines))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait({waiting})
        return waiting.cancelled(), threading.active_count()

    before = threading.active_count()
    given_up, threads = asyncio.run(wait())
    assert given_up and threads <= before
    os.close(reader)
    os.close(writer)


def test_half_a_line_is_taken_back(tmp_path, monkeypatch):
    """The disk is full after 5 of 9 bytes: the file ends with the line before."""
    path, room = tmp_path / "out", 13

    def write(descriptor, data, write=os.write):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(descriptor, data[:room])
        room -= done
        return done

    monkeypatch.setattr(os, "write", write)
    sink = Sink("out", os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), True)
    asyncio.run(sink.write(b"before.\n"))
    with pytest.raises(EngineError, match="-o out: No space left on device; the answers before are whole"):
        asyncio.run(sink.write(b"too much\n"))
    sink.close()
    assert path.read_bytes() == b"before.\n"


@pytest.mark.parametrize(("source", "sink", "shell"), [
    ("in", "in", ""), ("-", "in", "< in"), ("/dev/stdin", "in", "< in"), ("in", "-", ">> in"), ("-", "-", "< in >> in"),
    ("in", "/dev/stdout", ">> in"), ("/proc/self/fd/5", "in", "5< in"), ("link", "in", ""), ("in", "hard", ""),
    ("-", "hard", "< link"), ("pipe", "pipe", ""), ("./../here/in", "in", ""),
])  # fmt: skip
def test_one_file_for_both_is_refused_by_any_name(source, sink, shell, tmp_path, capfd):
    """`-i - -o F < F` emptied F. What is read stays."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "in").write_text("what is asked")
    (folder / "link").symlink_to("in")
    (folder / "hard").hardlink_to(folder / "in")
    os.mkfifo(folder / "pipe")
    code = f"import sys; from tinyserve.cli.batch_files import open_both; open_both({source!r}, {sink!r}, 9)[1].clear()"
    line = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(code)} {shell}"
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=variables, capture_output=True, text=True, timeout=120)

    assert done.returncode == 1 and "are the same file" in done.stderr
    assert (folder / "in").read_text() == "what is asked"


@pytest.mark.parametrize(("sink", "shell", "left"), [
    ("out", "", ""), ("link", "", ""), ("-", ">> out", "old"), ("/dev/stdout", ">> out", "old"),
    ("out", ">> out", "old"), ("/dev/fd/7", "7>> out", "old"), ("/proc/self/fd/7", "7>> out", "old"),
    ("-", "> out", ""),
])  # fmt: skip
def test_only_a_file_that_nobody_else_has_open_is_emptied(sink, shell, left, tmp_path):
    """`-o /dev/stdout >> F` emptied F, to which the shell was to append."""
    (tmp_path / "out").write_text("old")
    (tmp_path / "link").symlink_to("out")
    code = (
        "import asyncio; from tinyserve.cli.batch_files import open_both; "
        f"sink = open_both('/dev/null', {sink!r}, 9)[1]; sink.clear(); asyncio.run(sink.write(b'new')); sink.close()"
    )
    line = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(code)} {shell}"
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    subprocess.run(["bash", "-c", line], cwd=tmp_path, env=variables, check=True, timeout=120)

    assert (tmp_path / "out").read_text() == left + "new"


def test_files_that_cannot_be_opened_are_told(tmp_path):
    (tmp_path / "in").write_text("")
    wrong = [("in", ".", "-o .*Is a directory"), (".", "out", "-i .*Is a directory")]
    wrong += [("in", "in/out", "Not a directory"), ("in", "x" * 300, "File name too long")]
    for source, sink, word in wrong:
        with pytest.raises(ConfigError, match=word) as caught:
            open_both(str(tmp_path / source), str(tmp_path / sink), 9)
        assert "\n" not in str(caught.value)


# ---- how a run ends


def answering(tiny, source, sink, *more):
    """The command that answers a file with a model of random weights."""
    options = ["--served-model-name", "tiny", "--num-gpu-blocks-override", "64", "--device", "cpu"]
    return ["run-batch", "-i", str(source), "-o", str(sink), str(tiny), *options, *more]


def test_a_full_disk_is_told(tiny, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(LINES[0]))
    assert main(answering(tiny, source, "/dev/full")) == 1
    assert "-o /dev/full: No space left" in capsys.readouterr().err


RUN = """
import asyncio, sys
from types import SimpleNamespace
from tests.server.conftest import FakeEngine
from tinyserve.__main__ import main
from tinyserve.cli import batch
from tinyserve.errors import EngineDead

class Lasting(FakeEngine):
    machine = SimpleNamespace(max_running=4)

    async def wait_closed(self):
        while len(self.calls) < 2 or not dying:
            await asyncio.sleep(0.01)
        raise EngineDead("the loop ended: boom")

async def load(config):
    if seconds:
        print("loading", file=sys.stderr, flush=True)
    await asyncio.sleep(seconds)
    return Lasting(b"abc")

seconds, dying = float(sys.argv[1]), sys.argv[2] == "dying"
batch._load = load
sys.exit(main(["run-batch", "-i", "-", *sys.argv[3:]]))
"""


@contextlib.contextmanager
def running(*argv, lines=2, loads=0.0, dying=False, **streams):
    """A run with a fake engine, whose input stays open behind two lines."""
    command = [sys.executable, "-c", RUN, str(loads), "dying" if dying else "", *argv]
    streams = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    process = subprocess.Popen(command, cwd=Path(__file__).parent.parent.parent, **streams)
    try:
        process.stdin.write((json.dumps(LINES[0]) + "\n").encode() * lines)
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stderr.close()


def test_an_engine_that_dies_ends_a_run_whose_answers_nobody_reads():
    """The thread that waited for room in the pipe was waited for in turn, for ever."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b" " * 4096):
            pass
    os.set_blocking(writer, True)
    try:
        with running("-o", "-", dying=True, stdout=writer) as process:
            assert process.wait(60) == 1 and b"boom" in process.stderr.read()
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_a_word_and_whole_lines(tmp_path, number):
    """Two answers, then a signal while the third line does not come: the log says so, and the code is 128 and its
    number. It died without a word; with Ctrl-C it waited for the next line."""
    sink = tmp_path / "out.jsonl"
    with running("-o", str(sink)) as process:
        while not sink.exists() or sink.read_bytes().count(b"\n") < 2:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        told = process.stderr.read().decode()
    assert f"stopped by {number.name}: 2 requests" in told and "Traceback" not in told
    assert len([json.loads(line) for line in sink.read_bytes().splitlines()]) == 2


def test_a_signal_while_loading_leaves_answers_of_another_day(tmp_path):
    sink = tmp_path / "out.jsonl"
    sink.write_text("old")
    with running("-o", str(sink), loads=600) as process:
        assert process.stderr.readline() == b"loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert b"while loading" in process.stderr.read()
    assert sink.read_text() == "old"


def test_an_engine_that_dies_ends_a_run(tmp_path):
    """Its input still open: exit code 1 and the cause, where every line that came would have been refused."""
    with running("-o", str(tmp_path / "out"), dying=True) as process:
        assert process.wait(60) == 1
        told = process.stderr.read().decode()
    assert "tinyserve: the loop ended: boom" in told and "Traceback" not in told


def test_answers_that_nobody_reads_end_a_run_quietly(tmp_path):
    """`run-batch -i - -o - | head -1`, its input still open: 141 as of any tool, and no waiting for the next line. A
    pipe by name is an error, as whoever named it wanted its answers."""
    reader, writer = os.pipe()
    os.close(reader)
    with running("-o", "-", stdout=writer) as process:
        os.close(writer)
        assert process.wait(60) == 141 and process.stderr.read() == b""
    os.mkfifo(tmp_path / "pipe")
    ours = os.open(tmp_path / "pipe", os.O_RDWR)  # which waits for nobody
    with running("-o", str(tmp_path / "pipe"), lines=1) as process:
        assert select.select([ours], [], [], 60)[0]
        os.close(ours)
        process.stdin.write((json.dumps(LINES[0]) + "\n").encode())
        process.stdin.flush()
        assert process.wait(60) == 1
        assert b"nobody reads it any more" in process.stderr.read()


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "--input-file"),
        (["-i", "x.jsonl"], "--output-file"),
        (["-i", "no/such", "-o", "-"], "No such file"),
        ([*["-i", __file__], *["-o", f"{Path(__file__).parent}/./test_batch.py"]], "same file"),
        (["-i", "https://host/a", "-o", "-"], "this machine"),
        (["-i", "-", "-o", "no/such/folder"], "No such file"),
        (["-i", "-", "-o", "-", "--max-concurrency", "0"], "at least 1"),
        (["-i", "-", "-o", "-", "--max-concurrency", "1G"], "at most 65536"),
        (["-i"], "expected one argument"),
        (["-i", "-", "-o", "-", "--max-concurrency", "x"], "max-concurrency"),
        (["-i", "-", "-o", "-", "--max-modle-len", "4"], "did you mean"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(argv, word, capsys):
    assert main(["run-batch", *argv]) == 2
    assert word in capsys.readouterr().err
