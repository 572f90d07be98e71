"""Codes of GGUF blocks in as many bits as the file gives them: the same products, and the file's size in memory."""

import pytest
import torch

from tests.checkpoint.test_dequantize import random_rows
from tests.kernels.harness import interpreting, nan_outputs
from tinyserve.checkpoint.dequantize import decode
from tinyserve.checkpoint.gguf import BLOCK_SIZES, GGUFTensor
from tinyserve.checkpoint.gguf_codes import KEPT, too_large
from tinyserve.checkpoint.gguf_names import GGUFStored
from tinyserve.layers.linear import Linear
from tinyserve.quant.grouped import Grouped
from tinyserve.quant.planes import dense as dense_of

# Bytes in memory for each byte of the file, in float32: with scales as halves Q5_K takes 1.10.
SIZES = {"Q5_0": 1.0, "Q5_1": 1.0, "Q5_K": 1.28, "Q6_K": 1.0, "Q3_K": 1.04, "Q2_K": 1.0, "IQ4_NL": 1.0}


def stored(kind, rows, seed):
    """A matrix of two blocks of 256 columns (or as many smaller ones) a row, as a file holds it."""
    numbers, _ = BLOCK_SIZES[kind]
    data = random_rows(kind, rows, 512 // numbers)
    return GGUFStored(GGUFTensor(f"part{seed}.weight", (rows, 512), kind, data))


@pytest.mark.parametrize("kind", SIZES)
def test_products_are_those_of_the_numbers_in_the_file(kind):
    """Two parts in one layer with a bias; 1, 9 and 70 rows, 9 gated too: within 1e-5 of the decoder's numbers."""
    parts = [stored(kind, rows, rows) for rows in (24, 40)]
    layer = Linear(512, (24, 40), bias=True)
    layer.format = Grouped(KEPT[kind][0], planes=True)
    with interpreting(), nan_outputs():
        layer.allocate(torch.float32, torch.device("cpu"))
        layer.bias.data.normal_()
        for part, tensor in enumerate(parts):
            layer.load("weight", part, tensor)
        layer.finish()
        xs = [torch.randn(tokens, 512) for tokens in (1, 9, 70)]
        found, gated = [layer(x) for x in xs], layer.gated(xs[1], "silu")

    dense = torch.cat([decode(torch.from_numpy(one.tensor.data), kind) for one in parts])
    wanted = [torch.nn.functional.linear(x, dense, layer.bias) for x in xs]
    wanted.append(torch.nn.functional.silu(wanted[1][:, :32]) * wanted[1][:, 32:])
    for y, expected in zip((*found, gated), wanted, strict=True):
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert layer.packed.bits == KEPT[kind][0].fine
    held = sum(own.nbytes for own in layer.buffers())
    assert held <= SIZES[kind] * sum(one.nbytes for one in parts)
    torch.testing.assert_close(dense_of(layer.packed, torch.float32), dense, rtol=1e-6, atol=1e-6)


def test_files_that_take_little_more_keep_their_bytes():
    """A tenth of Q6_K beside Q8_0 stays in bytes; a file of Q6_K, or of Q5_0 with some Q4_1, does not."""
    q4, q5, q6, q8 = (stored(kind, 8, 0) for kind in ("Q4_1", "Q5_0", "Q6_K", "Q8_0"))
    assert not too_large([q8] * 9 + [q6])
    assert too_large([q6]) and too_large([q5, q5, q4]) and not too_large([])
