"""`run-batch`: every line of a file is answered as over HTTP, or carries its error."""

import asyncio
import codecs
import io
import json
from pathlib import Path

import pytest

from tests.scripted import ScriptModel
from tinyserve.__main__ import main
from tinyserve.cli.batch import Batch
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


def read(data):
    return {answer["custom_id"]: answer for answer in map(json.loads, data.splitlines())}


@pytest.mark.anyio
async def test_every_line_has_its_answer_or_its_error(tok):
    """10 lines, a blank one between them: 10 answers, each under its name."""
    data = codecs.BOM_UTF8 + b"\n\n".join([*(json.dumps(line).encode() for line in LINES), b"{no JSON"])
    async with serving(ScriptModel([97, 98, 99]), tok) as server:
        sink = io.BytesIO()
        batch = Batch(Service(server.engine.config, server.engine), sink)
        await batch.run(io.BytesIO(data), 4)
        usual = (await server.ask(CHAT, ASK)).body
    found = read(sink.getvalue())

    assert len(sink.getvalue().splitlines()) == 10 and (batch.answered, batch.refused) == (10, 8)
    assert found["chat"]["error"] is None and found["chat"]["response"]["status_code"] == 200
    assert found["chat"]["response"]["body"]["choices"] == usual["choices"]
    assert found["chat"]["response"]["request_id"] == found["chat"]["response"]["body"]["id"]
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
        batch, read, most = Batch(Service(server.engine.config, server.engine), io.BytesIO()), 0, 0

        def lines():
            nonlocal read
            for _ in range(40):
                read += 1
                assert read - batch.answered <= 3
                yield line

        async def watch():
            nonlocal most
            while True:
                most = max(most, len(server.engine.streams))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        await batch.run(lines(), 3)
        watching.cancel()
    assert (batch.answered, batch.refused) == (40, 0) and 1 < most <= 3


def test_the_command(tiny, tmp_path):
    """With a model of random weights, under a server's key that no line has; then into a folder that is not there."""
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    sink.write_text("answers of another day\n")
    source.write_text("".join(json.dumps({**LINES[0], "custom_id": str(number)}) + "\n" for number in range(5)))
    files = ["run-batch", "-i", str(source), "-o", str(sink)]
    options = [str(tiny), "--served-model-name", "tiny", "--num-gpu-blocks-override", "64", "--device", "cpu"]
    assert main([*files, *options, "--api-key", "k", "--max-num-seqs", "2"]) == 0
    found = read(sink.read_bytes())
    assert set(found) == set("01234")
    assert {answer["response"]["body"]["choices"][0]["message"]["content"] for answer in found.values()} != {""}


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


def test_a_full_disk_is_told(tiny, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(LINES[0]))
    files = ["run-batch", "-i", str(source), "-o", "/dev/full"]
    options = [str(tiny), "--served-model-name", "tiny", "--num-gpu-blocks-override", "64", "--device", "cpu"]
    assert main([*files, *options]) != 0
    assert "No space left" in capsys.readouterr().err


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
        (["-i", "-", "-o", "-", "--max-concurrency", "x"], "max-concurrency"),
        (["-i", "-", "-o", "-", "--max-modle-len", "4"], "did you mean"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(argv, word, capsys):
    assert main(["run-batch", *argv]) == 2
    assert word in capsys.readouterr().err
