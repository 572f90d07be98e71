"""One GGUF file, opened: its metadata as a dict and its tensors as views of the mapped file.

A GGUF file is a header, key/value metadata (tokenizer included), one record a tensor, then the tensors' bytes. This
reader walks the header once and copies nothing of the tensors. It trusts nobody: every length is compared with what
is left of the file before it is used, so a cut or hostile file costs a CheckpointError, never a crash or a huge
allocation. It knows block sizes, not block contents (dequantize.py does), and no tensor library.

Before: source.py (which file).  After: dequantize.py (bytes to numbers), text/gguf_vocab.py (metadata to tokenizer).

Source: the GGUF specification in the ggml repository, docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen

from ..errors import CheckpointError

MAX_DIMS = 4
MAX_NAME_BYTES = 65535
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

# Type id in the file -> name, numbers in a block, bytes of a block.
BLOCK_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
BLOCK_SIZES = {name: (numbers, size) for name, numbers, size in BLOCK_TYPES.values()}


@frozen
class GGUFTensor:
    """One tensor of the file, not decoded.

    Args:
        name: as in the file, e.g. "blk.0.attn_q.weight".
        shape: torch's order, slowest first: (rows, columns) for a matrix. The file stores it the other way round.
        type: block type, a key of BLOCK_SIZES, such as "Q4_1".
        data: uint8 [*shape[:-1], bytes of a row], a view of the mapped file.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    data: np.ndarray = field(repr=False, eq=False)


class GGUFFile:
    """A GGUF file (or all files of a split one, opened through its first), mapped and indexed.

    Args:
        path: the file; for a split model `...-00001-of-0000N.gguf`, whose siblings lie beside it.

    Attributes:
        metadata: key -> int, float, bool, str, list[str], or a numpy array for arrays of numbers.
        tensors: name -> GGUFTensor, in file order.

    Raises:
        CheckpointError: not GGUF, big-endian, cut short, or any length that does not fit the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata, self.tensors = _read(self.path)
        parts = int(self.metadata.get("split.count", 1) or 1)
        for other in _siblings(self.path, parts):
            _, more = _read(other)
            twice = self.tensors.keys() & more.keys()
            if twice:
                raise CheckpointError(f"{other}: tensor {min(twice)!r} is also in an earlier part of the split model.")
            self.tensors.update(more)

    @property
    def architecture(self) -> str:
        """`general.architecture`, such as "llama". Raises: CheckpointError when the file does not say."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise CheckpointError(f"{self.path}: the metadata has no general.architecture, so the model is unknown.")
        return name


def _siblings(path: Path, parts: int) -> list[Path]:
    if parts <= 1:
        return []
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if not match or int(match[2]) != parts:
        raise CheckpointError(
            f"{path}: the model is split into {parts} files; name the first, ...-00001-of-{parts:05}.gguf."
        )
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[2]}.gguf") for number in range(2, parts + 1)]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    try:
        with path.open("rb") as file:
            # A private, copy-on-write mapping: numpy calls it writable, so tensors made of it need no copy.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path}: cannot be opened as a GGUF file: {error}") from error
    reader = _Reader(path, data)
    return reader.read()


class _Reader:
    """A cursor over the header; every step checks what is left."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.size = path, data, 0, len(data)

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {what} (at byte {self.at} of {self.size}). The file is damaged; fetch it again."
        )

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise self.fail(f"{what} needs {count} bytes, {self.size - self.at} are left")

    def number(self, layout: str, what: str) -> int:
        self.need(struct.calcsize(layout), what)
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.number("<Q", what)
        if limit is not None and length > limit:
            raise self.fail(f"{what} is {length} bytes long, at most {limit} are allowed")
        self.need(length, what)
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def texts(self, count: int, what: str) -> list[str]:
        """`count` strings. The one loop per vocabulary entry there is: a string's place depends on all before it."""
        self.need(8 * count, what)
        data, at, size = self.data, self.at, self.size
        length_at = struct.Struct("<Q").unpack_from
        found: list[str] = []
        add = found.append
        for _ in range(count):
            start = at + 8
            if start > size:
                break
            at = start + length_at(data, at)[0]
            if at > size:
                break
            add(data[start:at].decode("utf-8", "replace"))
        if len(found) < count:
            raise self.fail(f"{what} ends after {len(found)} of {count} strings")
        self.at = at
        return found

    def value(self, what: str) -> Any:
        kind = self.number("<I", what)
        if kind == STRING:
            return self.text(what)
        if kind == ARRAY:
            return self.array(what)
        return self.numbers(kind, 1, what)[0].item()

    def array(self, what: str) -> Any:
        kind, count = self.number("<I", what), self.number("<Q", what)
        if kind == STRING:
            return self.texts(count, what)
        return self.numbers(kind, count, what)

    def numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        dtype = SCALARS.get(kind)
        if dtype is None:
            raise self.fail(f"{what} has the unknown value type {kind}")
        self.need(count * dtype.itemsize, what)
        self.at += count * dtype.itemsize
        raw = self.data[self.at - count * dtype.itemsize : self.at]
        return np.frombuffer(raw, np.uint8) != 0 if kind == BOOL else np.frombuffer(raw, dtype)

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self.data[:4] != b"GGUF":
            raise CheckpointError(f"{self.path}: not a GGUF file: it starts with {self.data[:4]!r} instead of b'GGUF'.")
        self.at = 4
        version = self.number("<I", "the version")
        if version and version & 0xFFFF == 0:
            raise CheckpointError(f"{self.path}: a big-endian GGUF file; convert it to little-endian.")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path}: GGUF version {version}; versions 2 and 3 can be read.")
        tensors, pairs = self.number("<Q", "the tensor count"), self.number("<Q", "the metadata count")
        self.need(13 * pairs + 24 * tensors, f"{pairs} metadata entries and {tensors} tensors")  # their least sizes
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.text("a metadata key", MAX_NAME_BYTES)
            metadata[key] = self.value(f"metadata {key!r}")
        records = [self.record() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self.fail(f"general.alignment is {alignment!r}, not a power of two")
        start = -(-self.at // alignment) * alignment
        found: dict[str, GGUFTensor] = {}
        for record in records:
            if record[0] in found:
                raise self.fail(f"tensor {record[0]!r} is there twice")
            found[record[0]] = self.tensor(*record, start, alignment)
        return metadata, found

    def record(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text("a tensor name", MAX_NAME_BYTES)
        count = self.number("<I", f"tensor {name!r}")
        if not 1 <= count <= MAX_DIMS:
            raise self.fail(f"tensor {name!r} has {count} dimensions, 1 to {MAX_DIMS} are allowed")
        shape = tuple(self.number("<Q", f"tensor {name!r}") for _ in range(count))
        return name, shape[::-1], self.number("<I", f"tensor {name!r}"), self.number("<Q", f"tensor {name!r}")

    def tensor(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, alignment: int
    ) -> GGUFTensor:
        if kind not in BLOCK_TYPES:
            raise self.fail(f"tensor {name!r} has the unknown block type {kind}")
        type_name, numbers, block_bytes = BLOCK_TYPES[kind]
        if 0 in shape or shape[-1] % numbers or offset % alignment:
            raise self.fail(
                f"tensor {name!r} of shape {list(shape)} at offset {offset} does not fit blocks of {type_name}"
            )
        row_bytes = shape[-1] // numbers * block_bytes
        size = row_bytes
        for length in shape[:-1]:
            size *= length
        if start + offset + size > self.size:
            raise self.fail(f"tensor {name!r} ends at byte {start + offset + size}, behind the end of the file")
        data = np.frombuffer(self.data, np.uint8, size, start + offset)
        return GGUFTensor(name, shape, type_name, data.reshape(*shape[:-1], row_bytes))
