"""The commands: where options come from, how mistakes are answered, the chat client, and a server's whole life."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tinyserve.__main__ import main
from tinyserve.cli.parse import chosen, read_config
from tinyserve.errors import ConfigError

from .served import in_thread
from .server.conftest import FakeEngine, service_of

ROOT = Path(__file__).parent.parent
TINY = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def read(*argv):
    return read_config(argv, "tinyserve serve", "")


def python(code, **options):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, **options)


# ---- options


def test_the_command_line_beats_the_environment_beats_the_file(monkeypatch, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("port: 1\nmax-num-seqs: 1k\nblock_size: 32\nhf-overrides: {a: 1}\n")
    monkeypatch.setenv("TINYSERVE_PORT", "2")
    monkeypatch.setenv("TINYSERVE_BLOCK_SIZE", "64")
    config = read("--config", str(file), "--port", "3")

    assert (config.server.port, config.cache.block_size, config.scheduler.max_num_seqs) == (3, 64, 1000)
    assert config.model.hf_overrides == {"a": 1}


def test_forms_that_vllm_takes():
    config = read(
        "folder", "--max_model_len=4k", "--no-enable-prefix-caching", "--served-model-name", "a", "b", "--api-key", "k",
        "--hf-overrides.rope.factor", "2", "--hf-overrides.name=x", "--allowed-origins", '["*"]', "-q", "gguf",
    )  # fmt: skip

    assert (config.model.model, config.model.max_model_len, config.model.quantization) == ("folder", 4000, "gguf")
    assert config.model.served_model_name == ("a", "b")
    assert config.model.hf_overrides == {"rope": {"factor": 2}, "name": "x"}
    assert (config.server.allowed_origins, config.server.api_key) == (("*",), ("k",))
    assert not config.cache.enable_prefix_caching


def test_a_list_may_be_one_word():
    """A list in one word, with commas as in the environment, has all its elements: 2, 3 and 1, not 1, 1 and 1."""
    config = read(
        "--allowed-hosts", "localhost,*.example.org", "--cudagraph-capture-sizes", "1,2,4", "--api-key", '["a,b"]'
    )  # fmt: skip

    assert config.server.allowed_hosts == ("localhost", "*.example.org")
    assert config.runner.cudagraph_capture_sizes == (1, 2, 4)
    assert config.server.api_key == ("a,b",)


def test_keys_of_an_object_add_to_its_json():
    config = read("--hf-overrides", '{"a": 1, "b": {"c": 2}}', "--hf-overrides.b.d", "[3]")

    assert config.model.hf_overrides == {"a": 1, "b": {"c": 2, "d": [3]}}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-modle-len", "4"], "did you mean --max-model-len"),
        (["--max-modle-len=4"], "did you mean --max-model-len"),
        (["--max-model"], "did you mean"),  # no abbreviations: they break when a flag is added
        (["-tp", "2"], "--tensor-parallel-size is an option of vLLM"),
        (["--max-cpu-loras", "4"], "need --enable-lora"),
        (["--max-messages", "4"], r"unknown option --max-messages. See --help.$"),
        (["--ctx-size", "4"], "say --max-model-len"),
        (["--tp", "4"], "--tp: --tensor-parallel-size is an option of vLLM that tinyserve does not have yet"),
        (["--disable-radix-cache"], "See --help"),
        (["-z", "4"], "unknown option -z. See"),
        (["--async-scheduling"], "--depth 2"),
        (["--no-async-scheduling"], "--depth 1"),
        (["--lora-modules", "a=b"], "need --enable-lora"),
        (["--max-lora-rank", "32"], "need --enable-lora"),
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key="], "--api-key is empty"),
        (["--root-path", "api"], "begin with a slash"),
        (["--root-path", "/api/"], "not end with one"),
        (["--port"], "expected one argument"),
        (["--port", "x"], "--port: must be a whole number"),
        (["--dtype", "float8"], "--dtype"),
        (["a", "b"], "unexpected argument 'b'"),
        (["a", "--model", "b"], "two models"),
        (["--config", "/does/not/exist"], "--config"),
        (["--hf-overrides.a"], "a value is needed"),
        (["--hf-overrides.", "1"], "a key is missing"),
        (["--hf-overrides.a", "{"], r"--hf-overrides.a: while parsing .* \^?.*\.$"),
        (["--hf-overrides.a", "2020-99-99"], "--hf-overrides.a: month"),
        (["--hf-overrides.a", "[" * 5000], "nested too deeply"),
        (["--hf-overrides.a", "1", "--hf-overrides.a.b", "1"], "a already has a value"),
        (["--kv-cache-memory-bytes", "-2GiB"], "must be at least 1, got -2147483648"),
        (["--enforce-eager=maybe"], "--enforce-eager: must be true or false"),
        (["--no-enforce-eager", "false"], "takes no value: leave out 'false'"),
        (["--tensor-parallel-size"], "leave it out, or say 1"),
        (["--pp-size", "2"], "--pp-size: --pipeline-parallel-size is an option of vLLM"),
        (["-O0"], "--enforce-eager"),
        (["--default-chat-template-kwargs", '{"messages": 1}'], "must not contain 'messages'"),
        (["--no-disable-log-requests"], "--enable-log-requests"),
        (["--enable-expert-parallel", "a"], "leave it out"),
        (["--structured-outputs-config.backend", "xgrammar"], "or say auto or guidance"),
        (["--kv-transfer-config.kv_role", "both"], "does not have yet: leave it out"),
    ],
)
def test_mistakes_are_answered_with_what_would_be_right(argv, message):
    with pytest.raises(ConfigError, match=message):
        read(*argv)


def test_a_command_line_that_asks_for_what_happens_anyway():
    """Each was refused as an option that is not there yet; none takes the model's name for its value."""
    config = read(
        "-tp", "1", "--pipeline_parallel_size=1", "-dp=1", "--tp-size", "1", "-O3", "--enable-expert-parallel", "false",
        "--no-enable-eplb", "--swap-space", "0", "--num-scheduler-steps", "1", "--cpu-offload-gb", "0.0",
        "--structured-outputs-config.backend", "auto", "--limit-mm-per-prompt", '{"image": 0}', "--task", "generate",
        "--distributed-executor-backend", "uni", "--disable-log-requests", "folder", "--disable-custom-all-reduce",
    )  # fmt: skip

    assert chosen(config) == {"model": "folder"}


def test_switches_take_words():
    """`--enable-prefix-caching false` served a model called false, with prefix caching."""
    config = read("--enable-prefix-caching", "false", "--enforce-eager=yes", "--enable_chunked_prefill=0", "a")

    assert chosen(config) == {
        "model": "a", "enable_prefix_caching": False, "enforce_eager": True, "enable_chunked_prefill": False
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nport: 2", "port stands there twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "twice"),
        ("seed: 2020-99-99", "month"),
        ("[" * 5000, "nested too deeply"),
        ("tensor-parallel-size: 2", "say 1"),
        ("1", "by name"),
        ("? [a]\n: 1", "unhashable"),
        ("model:\n  name: x", "--model: must be text"),
        ("port: [80]", "--port: must be a whole number"),
        ("max-model-len: 1.0e+400", "whole number, got inf"),
        ("a: \x07", "special characters"),
        ("api-key: {k: s3cret}", "not shown"),
        ("prot: 1", "did you mean --port"),
        ("port: x", "options.yaml"),
        ("[1]", "by name"),
        ("a: [", "config"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    file = tmp_path / "options.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=message) as caught:
        read("--config", str(file))
    assert "\n" not in str(caught.value) and "s3cret" not in str(caught.value)


def test_a_file_may_ask_for_what_happens_anyway(tmp_path):
    """With a mark of byte order, as editors of Windows write it."""
    file = tmp_path / "options.yaml"
    file.write_text("\ufefftensor-parallel-size: 1\nenable_expert_parallel: false\nport: 1\n", "utf-8")

    assert chosen(read("--config", str(file))) == {"port": 1}


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "latin").write_bytes(b"model: \xe9")
    for name, message in (("latin", "no text in UTF-8"), (".", "Is a directory")):
        with pytest.raises(ConfigError, match=message):
            read("--config", str(tmp_path / name))


def test_an_unknown_variable_is_told_with_the_nearest_one(monkeypatch, caplog):
    """Those of Kubernetes, seven in every pod beside a service of our name, are not."""
    monkeypatch.setenv("TINYSERVE_MAX_MODLE_LEN", "4k")
    monkeypatch.setenv("TINYSERVE_PORT_80_TCP_ADDR", "10.0.0.1")
    monkeypatch.setenv("TINYSERVE_SERVICE_HOST", "10.0.0.1")
    read()

    assert "TINYSERVE_MAX_MODLE_LEN is ignored" in caplog.text and "--max-model-len?" in caplog.text
    assert len(caplog.records) == 1


def test_a_wrong_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("TINYSERVE_PORT", "x")

    with pytest.raises(ConfigError, match="TINYSERVE_PORT"):
        read()


def test_only_what_was_chosen_is_shown_and_no_key():
    assert chosen(read("--port", "1", "--api-key", "secret")) == {"port": 1, "api_key": "***"}


def test_help_names_every_option(capsys):
    from tinyserve.config import flags

    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out

    assert all(flag.cli in text for flag in flags())
    assert "collect-env" in text


@pytest.mark.parametrize(
    ("argv", "code"),
    [(["--version"], 0), (["--prot", "1"], 2), (["bench"], 2), (["cha"], 2), (["bogus"], 2),
     (["bench-mark"], 2), (["no/such-model", "--prot"], 2), (["plan", "/does/not/exist"], 1),
     (["chat", "--url", "http://127.0.0.1:9/v1", "-q", "x"], 1), (["chat", "--nope"], 2), (["quantize"], 2),
     (["quantize", "a", "b", "--skip", "("], 2), (["quantize", "a", "b", "--group-size", "x"], 2),
     (["collect-env", "x"], 2),
     (["chat", "--url", "unix:/does/not/exist", "-q", "x"], 1), (["chat", "--url", "http://[", "-q", "x"], 1),
     (["chat", "--url", "http://a b:x/", "-q", "x"], 1), (["chat", "--url", "ftp://a", "-q", "x"], 2),
     (["bench", "latency", "--batch-size", "0"], 2), (["bench", "throughput", "--num-prompts", "0"], 2),
     (["bench", "serve", "--ready-check-timeout-sec", "nan"], 2), (["bench", "serve", "--header", "a=b\nc"], 2),
     (["chat", "--api-key", "a\nb", "-q", "x"], 2), (["complete", "--max-tokens", "1e400", "-q", "x"], 2), ([""], 2)],
)  # fmt: skip
def test_exit_codes(argv, code, capsys):
    assert main(argv) == code
    captured = capsys.readouterr()
    assert captured.out if code == 0 else captured.err.startswith("tinyserve: ") and captured.err.count("\n") == 1


@pytest.mark.parametrize("argv", [
    ["--help"], ["--version"], ["plan", "--help"], ["bench", "--help"], ["chat", "--help"], ["collect-env"],
    ["plan", "--nope"],
])  # fmt: skip
def test_who_does_not_read_on_is_no_error(argv):
    """`tinyserve --help | head -1` ended with a traceback: not a word, and the code of a tool that SIGPIPE ended."""
    reader, writer = os.pipe()
    os.close(reader)
    quiet = subprocess.PIPE if argv[-1] != "--nope" else writer
    command = [sys.executable, "-m", "tinyserve", *argv]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=writer, stderr=quiet, timeout=120)
    os.close(writer)

    assert done.returncode == (141 if quiet != writer else 2) and not done.stderr


@pytest.mark.parametrize(("output", "code"), [("/dev/full", 1), (None, 0)])
def test_an_output_that_takes_nothing_is_told(output, code):
    """A full disk is an error; an output that was closed is a wish. Neither is a traceback."""
    shell = f"exec {sys.executable} -m tinyserve --version >{output or '&-'}"
    done = subprocess.run(["sh", "-c", shell], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=120)

    assert done.returncode == code and done.stderr.count("\n") == code and "Traceback" not in done.stderr
    assert code == 0 or "No space left" in done.stderr


def test_a_plan_needs_a_config_and_no_weights(tmp_path, capsys):
    """Hidden 64, 2 layers: 320 x 64 embeddings counted once although the head is named too, as it is tied."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64

    assert main(["plan", str(tmp_path), "--device", "cpu"]) == 0
    assert f"{(320 * 64 + 2 * layer + 64) / 1e6:,.1f} M by its config" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--chat-template", "nosuch.jinja"], "--chat-template nosuch.jinja: no such file"),
        (["--tool-call-parser", "foo"], "foo"),
        (["--quantization", "awq"], "plain numbers"),
        (["--device", "tpu"], "no such device"),
        (["--batch-invariant"], "needs a GPU"),
        (["--max-model-len", "99999"], "--max-model-len 99999"),
        (["--enable-lora", "--lora-modules", "a=nowhere"], "nowhere"),
        (["--gpu-memory-utilization", "1e-9", "--kv-cache-memory-bytes", "1"], "does not fit"),
    ],
)
def test_a_plan_refuses_what_serve_refuses(argv, message, tmp_path, capsys):
    """`serve` ended with 2 where `plan` with the same options printed a plan."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    device = [] if "--device" in argv else ["--device", "cpu"]
    code = main(["plan", str(tmp_path), *device, *argv])
    told = capsys.readouterr()

    assert code in (1, 2) and message in told.out + told.err
    assert "does not fit" in told.out or not told.out


@pytest.mark.parametrize(
    ("command", "own", "hidden"),
    [
        ("serve", ["--host", "--ssl-keyfile", "--max-num-queued-reqs"], []),
        ("run-batch", ["-i FILE", "-o FILE", "--max-concurrency N", '"custom_id": "a"'], ["--host", "--ssl-keyfile"]),
        ("plan", ["--gpu-memory-utilization"], ["--port", "--allowed-origins"]),
    ],
)
def test_help_shows_what_means_something_to_a_command(command, own, hidden, capsys):
    """run-batch had its own options in a sentence, and a hundred lines of a server's in rows."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    told = capsys.readouterr().out

    assert all(text in told for text in own) and not any(f"{name} " in told for name in hidden)
    assert read("--port", "1").server.port == 1


def test_a_plan_without_room_for_an_answer_says_so(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINY))

    assert main(["plan", str(tmp_path), "--device", "cpu", "--max-model-len", "1"]) == 0
    assert "1 token, which leaves no room" in capsys.readouterr().out


def test_a_plan_of_an_unknown_architecture_says_what_serve_does(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"architectures": ["NewForCausalLM"]}))

    assert main(["plan", str(tmp_path), "--device", "cpu"]) == 1
    assert "tinyserve[transformers]" in capsys.readouterr().err


def test_an_interrupt_while_python_imports_shows_no_traceback(tmp_path):
    """Ctrl-C in the first 0.3 s printed where the import was; a process that is to ignore it goes on doing so."""
    pauses = tmp_path / "pauses"  # what is imported first says that it is, and waits
    pauses.mkdir()
    (pauses / "contextlib.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    code = "import runpy, sys, tinyserve; sys.modules.pop('contextlib', None); sys.path.insert(0, sys.argv.pop(1)); "
    code += "runpy.run_module('tinyserve', run_name='__main__', alter_sys=True)"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(pauses)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == "" and process.returncode == -signal.SIGINT


def test_importing_is_instant_and_leaves_torch_alone():
    """Under 0.1 s in the best of three fresh processes (10 ms when idle), without torch."""
    code = (
        "import time; start = time.perf_counter(); import tinyserve; took = time.perf_counter() - start; import sys;"
        "assert 'torch' not in sys.modules; assert tinyserve.SamplingParams(n=2).n == 2; print(took)"
    )
    times = [float(python(code).stdout) for _ in range(3)]

    assert min(times) < 0.1


def test_collect_env_prints_versions(capsys):
    assert main(["collect-env"]) == 0
    assert "torch" in capsys.readouterr().out


# ---- the terminal client


@pytest.fixture
def server():
    """A server with a fake engine, in a thread with a loop of its own."""
    engine = FakeEngine("Père".encode())

    async def make():
        return service_of(engine, port=0, api_key="k")

    with in_thread(make) as running:
        yield engine, running.address + "/v1"


def test_one_question(server, capsys):
    _, url = server

    assert main(["chat", "--url", url, "--api-key", "k", "-q", "Who?"]) == 0
    assert capsys.readouterr().out.startswith("P")


def test_a_conversation_remembers_and_forgets(server, monkeypatch, capsys):
    engine, url = server
    lines = iter(["one", "two", "/help", "/nope", "/reset", "three", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    monkeypatch.setenv("TINYSERVE_API_KEY", "k")

    assert main(["chat", "--url", url, "--system-prompt", "Be brief."]) == 0
    sent = [[message["role"] for message in messages] for messages, _ in engine.chats]
    assert sent == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert "no command /nope" in capsys.readouterr().out


def test_a_failed_turn_is_taken_back(server, monkeypatch, capsys):
    engine, url = server
    engine.fail_at = 1
    lines = iter(["one", "two", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))

    assert main(["chat", "--url", url, "--api-key", "k"]) == 0
    assert [len(messages) for messages, _ in engine.chats] == [1, 1]
    assert "NaN" in capsys.readouterr().err


def test_host_and_port_make_the_address(server, capsys):
    """--port was an unrecognized argument, without a word of --url."""
    _, url = server
    port = url.split(":")[2].split("/")[0]

    assert main(["chat", "--port", port, "--api-key", "k", "-q", "Who?"]) == 0
    assert capsys.readouterr().out.startswith("P")


def test_tls_where_there_is_none_is_told(server, capsys):
    """It said that no server answers, and to start one."""
    _, url = server

    assert main(["chat", "--url", url.replace("http", "https"), "--api-key", "k", "-q", "x"]) == 1
    assert f"is no TLS server. If it speaks plain HTTP: --url {url}" in capsys.readouterr().err


def test_an_error_in_an_answer_begins_a_line(server, capsys):
    engine, url = server
    engine.fail_at = 1

    assert main(["chat", "--url", url, "--api-key", "k", "-q", "x"]) == 1
    assert capsys.readouterr().out == "P\n"


def test_complete(server, capsys):
    _, url = server

    assert main(["complete", "--url", url, "--api-key", "k", "-q", "x", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out == "P\n"


def test_nothing_to_complete_is_told(server, monkeypatch, capsys):
    """It ended without a word."""
    _, url = server
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))

    assert main(["complete", "--url", url, "--api-key", "k"]) == 0
    assert "no text came in" in capsys.readouterr().err


def test_a_wrong_key_is_explained(server, capsys):
    _, url = server

    assert main(["chat", "--url", url, "--api-key", "x", "-q", "x"]) == 1
    told = capsys.readouterr().err
    assert "401" in told and "--api-key" in told and "TINYSERVE_API_KEY" in told


def test_an_address_without_its_end_is_explained(server, capsys):
    _, url = server

    assert main(["chat", "--url", url.removesuffix("/v1"), "--api-key", "k", "-q", "x"]) == 1
    assert f"--url {url}" in capsys.readouterr().err


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"data": []}', b'{"data": [{"id": "m"}]}', b"\xff"])
def test_another_kind_of_server_is_told_in_a_line(body, capsys):
    """Whatever answers 200 to everything: a page, another list of models, or one with streams that are none."""

    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body if self.command == "GET" else b'data: {"error": "no"}\n\n')

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever).start()
        assert main(["chat", "--url", f"http://127.0.0.1:{other.server_port}/v1", "-q", "x"]) == 1
        other.shutdown()
    told = capsys.readouterr().err
    assert told.startswith("tinyserve: ") and told.count("\n") == 1


def test_a_server_serves_also_when_nobody_reads_its_greeting():
    reader, writer = os.pipe()
    os.close(reader)
    process, address = start(stdout=writer)
    os.close(writer)
    try:
        assert wait_ready(address)[-1] == 200
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0 and "the greeting is not shown" in err and "Traceback" not in err
    finally:
        process.kill()


# ---- the life of a server process

LIFE = """
import asyncio, sys
sys.path.insert(0, "tests/..")
from tinyserve.cli import serve
from tests.server.conftest import FakeEngine

class Lasting(FakeEngine):
    async def wait_closed(self):
        await asyncio.Event().wait()

async def load(config):
    await asyncio.sleep(0.5)
    return Lasting(b"a" * 50, delay=0.02)

serve._load = load
sys.exit(serve.run(sys.argv[1:]))
"""


def start(*argv, code=LIFE, stdout=subprocess.PIPE):
    """The process, and its address, which it logs before the model is loaded."""
    command = [sys.executable, "-c", code, "--port", "0", *argv]
    process = subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "listening on" in line:
            return process, line.split("listening on ")[1].split(";")[0].strip()
    raise AssertionError(process.communicate())


def wait_ready(address):
    statuses = []
    for _ in range(200):
        statuses.append(httpx.get(address + "/health").status_code)
        if statuses[-1] == 200:
            return statuses
        time.sleep(0.02)
    raise AssertionError(statuses)


def test_a_server_loads_serves_drains_and_leaves():
    """503 while loading, 200 after; SIGTERM lets the running 1 s answer end within its 10 s; exit code 0."""
    process, address = start("--shutdown-timeout", "10")
    try:
        assert wait_ready(address)[0] == 503
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with httpx.stream("POST", address + "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        out, err = process.communicate(timeout=10)
        last = json.loads(rest[-4].removeprefix("data: "))
        assert rest[-2] == "data: [DONE]" and last["choices"][0]["finish_reason"] == "stop"
        assert process.returncode == 0, err
        assert "curl" in out and "OpenAI" in out and "Ready in" in out
        assert all(line.startswith("INFO ") for line in err.splitlines() if line)
    finally:
        process.kill()


def test_a_log_of_json_holds_nothing_else():
    """The greeting's 18 lines of text came between the records, where both streams are collected."""
    process, address = start("--log-format", "json")
    try:
        wait_ready(address)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        records = [json.loads(line) for line in err.splitlines() if line]
        assert process.returncode == 0 and not out and {one["level"] for one in records} == {"INFO"}
        assert any(re.match(r"Ready in [\d.]+ s: .* tokens, at http", one["message"]) for one in records)
    finally:
        process.kill()


STUCK = LIFE.replace("await asyncio.sleep(0.5)", "import time; await asyncio.to_thread(time.sleep, 20)")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_loading_ends_the_process(number):
    """The thread that loads is stuck for 20 s; the process says why it ends, and is gone after 0.5 s (3 at most)."""
    process, _ = start(code=STUCK)
    try:
        begin = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=10)
        assert time.monotonic() - begin < 3
        assert process.returncode == 0 and "stopped while loading" in err
    finally:
        process.kill()


DYING = LIFE.replace(
    "await asyncio.Event().wait()", "await asyncio.sleep(0.3); raise EngineDead('the loop ended: boom')"
)
DYING = DYING.replace("import asyncio, sys", "import asyncio, sys\nfrom tinyserve.errors import EngineDead")


def test_a_server_whose_engine_dies_ends_with_an_error():
    """Exit code 1 and the cause in the log, so that whoever runs it starts another."""
    process, _ = start(code=DYING)
    try:
        _, err = process.communicate(timeout=20)
        assert process.returncode == 1 and "boom" in err
    finally:
        process.kill()


SLOW = LIFE.replace('b"a" * 50, delay=0.02', 'b"a" * 200, delay=0.05')


def test_the_time_to_drain_ends():
    """0.3 s to drain, and an answer of 10 s: its stream ends with abort and [DONE]; exit code 0."""
    process, address = start("--shutdown-timeout", "0.3", code=SLOW)
    try:
        wait_ready(address)
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with httpx.stream("POST", address + "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            begin = time.monotonic()
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        process.communicate(timeout=10)
        assert time.monotonic() - begin < 6
        last = json.loads(rest[-4].removeprefix("data: "))
        assert rest[-2] == "data: [DONE]" and last["choices"][0]["finish_reason"] == "abort"
        assert process.returncode == 0
    finally:
        process.kill()
