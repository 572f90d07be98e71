"""gguf.py: what a good file says, and that a bad one costs an error and nothing else."""

import contextlib
import struct
import time

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import real_models
from tinyserve.checkpoint.gguf import BLOCK_SIZES, GGUFFile
from tinyserve.errors import CheckpointError


def write_file(path, *, tensors=True):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 0.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("general.name", "tiny é")
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", ""])
    writer.add_array("tokenizer.ggml.scores", [0.0, -1.5, 2.0])
    writer.add_array("flags", [True, False])
    if tensors:
        writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
        rows = gguf.quants.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor("packed", rows, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_file(tmp_path_factory.mktemp("gguf") / "good.gguf")


def test_metadata_and_tensors(good):
    file = GGUFFile(good)

    assert file.architecture == "llama"
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["llama.rope.freq_base"] == 0.5
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert file.metadata["general.name"] == "tiny é"
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "é", ""]
    assert file.metadata["tokenizer.ggml.scores"].tolist() == [0.0, -1.5, 2.0]
    assert file.metadata["flags"].tolist() == [True, False]
    assert file.tensors["plain"].shape == (2, 3)
    assert file.tensors["plain"].data.view("<f4").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (file.tensors["packed"].type, file.tensors["packed"].shape) == ("Q4_1", (3, 64))
    assert file.tensors["packed"].data.shape == (3, 40)


def test_every_cut_of_the_file_is_refused(good, tmp_path):
    """Each prefix, byte by byte: only the whole file can be read (the writer pads its end to 32 bytes)."""
    whole = good.read_bytes()
    last = GGUFFile(good).tensors["packed"].data.nbytes % 32
    path = tmp_path / "cut.gguf"
    for length in range(len(whole) - (32 - last)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            GGUFFile(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_headers_never_crash(good, tmp_path_factory, data):
    """Up to 4 bytes of the header replaced: read or refused, within a blink, whatever the lengths claim."""
    content = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 500))] = data.draw(st.sampled_from([0, 1, 127, 128, 255]))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    start = time.perf_counter()

    with contextlib.suppress(CheckpointError):
        GGUFFile(path)

    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("count", [2**64 - 1, 2**40, 2**32])
def test_a_claimed_length_allocates_nothing(tmp_path, count):
    """A 60-byte file that claims 2**64 - 1 strings: refused before any list is made."""
    path = tmp_path / "claims.gguf"
    key = struct.pack("<Q", 1) + b"k"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    for kind in (8, 6):
        path.write_bytes(head + key + struct.pack("<IIQ", 9, kind, count) + bytes(20))
        with pytest.raises(CheckpointError, match="needs"):
            GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, count, count) + bytes(20))
    with pytest.raises(CheckpointError, match="needs"):
        GGUFFile(path)


def test_big_endian_is_named(tmp_path):
    path = tmp_path / "big.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))

    with pytest.raises(CheckpointError, match="big-endian"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be opened"),
        (b"PK\3\4" + bytes(40), "not a GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
    ],
)
def test_other_files_are_named(tmp_path, content, reason):
    path = tmp_path / "other.gguf"
    path.write_bytes(content)

    with pytest.raises(CheckpointError, match=reason):
        GGUFFile(path)


def test_split_models_are_opened_through_the_first_part(tmp_path):
    for part in (1, 2):
        writer = gguf.GGUFWriter(tmp_path / f"m-{part:05}-of-00002.gguf", "llama")
        writer.add_uint16("split.count", 2)
        writer.add_tensor(f"t{part}", np.full((1, 2), part, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    file = GGUFFile(tmp_path / "m-00001-of-00002.gguf")

    assert list(file.tensors) == ["t1", "t2"]
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match="00002-of-00002"):
        GGUFFile(tmp_path / "m-00001-of-00002.gguf")


def test_block_sizes_are_ggmls():
    """The package's Q8_1 is 40 bytes (float scales); ggml's is 36. It never lies in files."""
    theirs = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}

    assert {n: s for n, s in BLOCK_SIZES.items() if n != "Q8_1"} == {n: theirs[n] for n in BLOCK_SIZES if n != "Q8_1"}


def test_a_vocabulary_of_262144_is_read_in_a_moment():
    """0.1 s here; the gguf package needs 13.7 s. The bound leaves room for a busy machine."""
    path = real_models.gemma3()
    GGUFFile(path)
    start = time.process_time()

    file = GGUFFile(path)

    assert time.process_time() - start < 1.0
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 262144
    assert len(file.tensors) == 236


def test_smollm2_header():
    file = GGUFFile(real_models.smollm2())

    assert len(file.tensors) == 272
    assert file.tensors["token_embd.weight"].type == "Q8_0"
    assert file.tensors["blk.0.ffn_down.weight"].shape == (576, 1536)
    assert file.metadata["tokenizer.ggml.pre"] == "smollm"
