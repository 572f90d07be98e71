"""dequantize.py against the `gguf` package's numpy decoder, on random blocks of every type."""

import gguf
import numpy as np
import pytest
import torch

from tinyserve.checkpoint.dequantize import BY_GGUF_PACKAGE, DECODERS, PLAIN, decode, dequantize
from tinyserve.checkpoint.gguf import BLOCK_SIZES, GGUFTensor

# Where the float16 scales of a block lie: random bytes there would be NaN now and then.
SCALES = {
    **{"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "IQ4_NL": [0], "IQ4_XS": [0], "Q8_1": [0, 2]},
    **{"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q2_K": [80, 82]},
    **{"Q3_K": [108], "Q6_K": [208], "TQ1_0": [52], "TQ2_0": [64], "MXFP4": []},
    **{
        "IQ1_S": [0],
        "IQ2_XXS": [0],
        "IQ2_XS": [0],
        "IQ2_S": [0],
        "IQ3_XXS": [0],
        "IQ3_S": [0],
        "IQ1_M": [],
        "NVFP4": [],
    },
}


def random_rows(kind, rows, blocks, seed=0):
    generator = np.random.default_rng(seed)
    _, size = BLOCK_SIZES[kind]
    data = generator.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scale = generator.normal(size=(rows, blocks, 1)).astype(np.float16)
        data[..., at : at + 2] = scale.view(np.uint8)
    return data.reshape(rows, blocks * size)


@pytest.mark.parametrize("kind", sorted((DECODERS.keys() | BY_GGUF_PACKAGE) - {"Q8_1", "Q8_K"}))
def test_random_blocks_decode_to_the_bit(kind):
    """Expected: no number differs from gguf's decoder, in three dimensions and over several pieces."""
    data = random_rows(kind, 6, 5)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])

    actual = decode(torch.from_numpy(data), kind)

    np.testing.assert_array_equal(expected, actual.numpy())


def test_every_block_type_of_the_format_has_a_decoder():
    assert BLOCK_SIZES.keys() == DECODERS.keys() | BY_GGUF_PACKAGE | PLAIN.keys()


def test_types_known_to_the_gguf_package_are_all_known_here():
    """gguf grows types; Q1_0 (a size without a decoder there) is the one that this version leaves out."""
    known = {kind.name for kind in gguf.quants._type_traits}

    assert known - BLOCK_SIZES.keys() == set()


def test_pieces_join_without_a_seam(monkeypatch):
    """70 blocks in pieces of 3: the last piece is short."""
    data = torch.from_numpy(random_rows("Q4_1", 7, 10))
    expected = decode(data, "Q4_1")
    monkeypatch.setattr("tinyserve.checkpoint.dequantize.PIECE_NUMBERS", 96)

    assert torch.equal(expected, decode(data, "Q4_1"))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "F64", "I8", "I32"])
def test_plain_numbers(kind):
    numbers = torch.arange(-6, 6).view(3, 4).to(PLAIN[kind])
    data = numbers.view(torch.uint8).numpy()

    actual = dequantize(GGUFTensor("x", (3, 4), kind, data))

    assert actual.dtype == torch.float32
    assert torch.equal(numbers.float(), actual)


def test_8_bit_activation_types_by_hand():
    numbers = np.arange(-16, 16, dtype=np.int8)
    q8_1 = np.concatenate([np.array([0.5, 7], np.float16).view(np.uint8), numbers.view(np.uint8)])
    q8_k = np.concatenate(
        [np.array([0.25], np.float32).view(np.uint8), np.tile(numbers.view(np.uint8), 8), np.zeros(32, np.uint8)]
    )

    assert decode(torch.from_numpy(q8_1[None]), "Q8_1").tolist() == [(numbers * 0.5).tolist()]
    assert decode(torch.from_numpy(q8_k[None]), "Q8_K").tolist() == [np.tile(numbers * 0.25, 8).tolist()]


def test_other_dtypes_round_from_float32():
    data = torch.from_numpy(random_rows("Q5_0", 4, 3))

    assert torch.equal(decode(data, "Q5_0").to(torch.bfloat16), decode(data, "Q5_0", torch.bfloat16))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_numbers_come_back_close(kind):
    """A sanity check that the layout is right, not only equal to the oracle's: error below one step of the grid."""
    numbers = np.random.default_rng(1).normal(size=(8, 256)).astype(np.float32)
    data = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])

    error = (decode(torch.from_numpy(data), kind).numpy() - numbers).__abs__().max()

    assert error < (0.05 if kind == "Q8_0" else 0.6)
