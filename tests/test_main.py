"""The commands: where options come from, how mistakes are answered, the chat client, and a server's whole life."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tinyserve.__main__ import main
from tinyserve.cli.parse import chosen, read_config
from tinyserve.errors import ConfigError
from tinyserve.server.serve import Server, open_socket

from .server.conftest import FakeEngine, service_of

ROOT = Path(__file__).parent.parent


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
    ],
)
def test_mistakes_are_answered_with_what_would_be_right(argv, message):
    with pytest.raises(ConfigError, match=message):
        read(*argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [("prot: 1", "did you mean --port"), ("port: x", "options.yaml"), ("[1]", "by name"), ("a: [", "config")],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    file = tmp_path / "options.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=message):
        read("--config", str(file))


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
     (["chat", "--url", "http://127.0.0.1:9/v1", "-q", "x"], 1), (["chat", "--nope"], 2)],
)  # fmt: skip
def test_exit_codes(argv, code, capsys):
    assert main(argv) == code
    captured = capsys.readouterr()
    assert captured.out if code == 0 else captured.err.startswith("tinyserve: ")


def test_a_plan_needs_a_config_and_no_weights(tmp_path, capsys):
    """Hidden 64, 2 layers: 320 x 64 embeddings counted once although the head is named too, as it is tied."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64

    assert main(["plan", str(tmp_path), "--device", "cpu"]) == 0
    assert f"{(320 * 64 + 2 * layer + 64) / 1e6:,.1f} M by its config" in capsys.readouterr().out


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
    ready, address, stop = threading.Event(), [], []

    async def serve():
        service = service_of(engine, port=0, api_key="k")
        running = Server(service, open_socket(service.config.server))
        await running.start()
        address.append(running.address)
        stop.extend((asyncio.get_running_loop(), asyncio.Event()))
        ready.set()
        await stop[1].wait()
        await running.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    yield engine, address[0] + "/v1"
    stop[0].call_soon_threadsafe(stop[1].set)
    thread.join(10)


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


def test_complete(server, capsys):
    _, url = server

    assert main(["complete", "--url", url, "--api-key", "k", "-q", "x", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out == "P\n"


def test_a_wrong_key_is_explained(server, capsys):
    _, url = server

    assert main(["chat", "--url", url, "--api-key", "x", "-q", "x"]) == 1
    assert "401" in capsys.readouterr().err


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


def start(*argv, code=LIFE):
    """The process, and its address, which it logs before the model is loaded."""
    command = [sys.executable, "-c", code, "--port", "0", *argv]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
    process, address = start("--shutdown-timeout", "10", "--log-format", "json")
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
        assert all(json.loads(line)["level"] == "INFO" for line in err.splitlines() if line)
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
