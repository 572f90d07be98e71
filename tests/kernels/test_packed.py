"""The order of packed codes, and numbers made of them, against plain indexing."""

import pytest
import torch

from tests.kernels.harness import assert_close, randn
from tinyserve.kernels.packed import Packed, can_pack, packed_dense, packed_dense_reference, tile_of, tiled, untiled

# bits, kind, width, zeros: True a tensor, else the middle of all
LAYOUTS = {
    "int4-128": (4, "int", 128, 8),
    "int4-128-zeros": (4, "int", 128, True),
    "int4-row": (4, "int", 0, 8),
    "int4-64": (4, "int", 64, True),
    "int4-32": (4, "int", 32, True),
    "int4-48": (4, "int", 48, True),
    "int2-16": (2, "int", 16, True),
    "int4-32-added": (4, "int", 32, "added"),
    "int8-row": (8, "int", 0, 0),
    "uint8-32": (8, "uint", 32, True),
    "fp8-row": (8, "e4m3", 0, 0),
    "fp8-128": (8, "e4m3", 128, 0),
}


def numbers(codes):
    """What codes stand for, as a person would say it."""
    return codes.to("cpu").to(torch.float32)


def weight_of(name, rows, columns, *, device, seed=1):
    """A Packed of random codes, and its numbers [N, K] in float32, computed without it."""
    bits, kind, width, zeros = LAYOUTS[name]
    make = torch.Generator().manual_seed(rows + seed)
    count = -(-columns // width) if width else 1
    with torch.device("cpu"):
        codes = torch.randint(0, 2**bits, (rows, columns), generator=make, dtype=torch.int32).to(torch.uint8)
        if kind == "e4m3":
            codes = torch.where(codes & 127 == 127, torch.zeros_like(codes), codes).view(torch.float8_e4m3fn)  # no NaN
        elif name == "int8-row":
            codes = codes.view(torch.int8)
        spread = {"e4m3": 0.01, "int": 4 * 2.0**-bits, "uint": 2.0**-6}[kind] * columns**-0.5
        scales = randn(rows, count, dtype=torch.float16, device="cpu", spread=spread, seed=2)
        middle = (
            torch.full((rows, count), 2 ** (bits - 1), dtype=torch.uint8) if zeros is True or zeros == "added" else None
        )
        if middle is not None:
            middle[::2] -= 1
        group = torch.arange(columns) // width if width else torch.zeros(columns, dtype=torch.int64)
        added = zeros == "added"
        if added:
            middle = -middle.half() * scales
        subtract = float(zeros) if middle is None else middle.float()[:, group]
        dense = (numbers(codes) - (0 if added else subtract)) * scales.float()[:, group] + (subtract if added else 0)
        packed = codes if bits == 8 else tiled(codes, bits, tile_of(width))
    kind = "int" if kind == "uint" else kind
    scales = scales if count % 2 == 0 else scales.float()
    middle = None if middle is None else middle.to(scales.dtype)
    given = [None if one is None else one.to(device) for one in (packed, scales, middle)]
    return Packed(*given, columns, bits, width, kind, zeros if middle is None else 0, added), dense


def test_words_hold_pieces_of_a_tile():
    """Column 32 of a tile of 128 stands in bits 4 to 7 of its first word; 70 columns fill two tiles of 48 or less."""
    codes = torch.arange(256).remainder(16).to(torch.uint8)[None]

    words = tiled(codes, 4, 128)

    assert words.shape == (1, 64) and int(words[0, 3]) == 3 + (3 << 4) + (3 << 8) + (3 << 12)
    assert int(words[0, 33]) == 1 + (1 << 4) + (1 << 8) + (1 << 12)
    for bits, tile in ((4, 128), (4, 16), (2, 32)):
        codes = torch.randint(0, 2**bits, (5, 70), dtype=torch.uint8)
        assert torch.equal(untiled(tiled(codes, bits, tile), bits, tile, 70), codes)
    assert [tile_of(width) for width in (0, 512, 128, 48, 32)] == [128, 128, 128, 16, 32]
    assert not can_pack(4, 8, "int") and not can_pack(4, 32, "table") and can_pack(4, 48, "int")


@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers(device, dtype, name):
    """To the last bit of float32; 259 columns are no multiple of anything."""
    for columns in (259, 1024):
        weight, dense = weight_of(name, 5, columns, device=device)

        assert_close(packed_dense_reference(weight, torch.float32).cpu(), dense, scale=0.1)
        assert_close(packed_dense(weight, dtype).cpu(), dense.to(dtype), scale=0.1)


def compile_cases():
    for name in ("int4-32-added",):
        weight = meta_weight(name, 4096, 4096)
        yield lambda weight=weight: packed_dense(weight, torch.bfloat16)


def meta_weight(name, rows, columns):
    """A Packed without numbers."""
    bits, kind, width, zeros = LAYOUTS[name]
    tile, count = tile_of(width), columns // width if width else 1
    dtype = torch.int16 if bits < 8 else torch.float8_e4m3fn if kind == "e4m3" else torch.int8
    codes = torch.empty(rows, columns if bits == 8 else -(-columns // tile) * tile * bits // 16, dtype=dtype)
    scales = torch.empty(rows, count, dtype=torch.float16)
    middle = torch.empty(rows, count, dtype=torch.float16) if zeros is True or zeros == "added" else None
    return Packed(codes, scales, middle, columns, bits, width, kind, zeros if middle is None else 0, zeros == "added")
