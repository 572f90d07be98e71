"""The embedding look-up against its reference."""

import pytest
import torch

from tests.kernels.harness import assert_close, gapped, randn
from tinyserve.kernels import embedding


@pytest.mark.parametrize("count, width", [(0, 64), (1, 576), (7, 77), (3, 1), (2, 5000)])
@pytest.mark.parametrize("scale", [1.0, 24.0])
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_embed_is_its_reference(device, dtype, count, width, scale, index_type):
    table = gapped(randn(50, width, dtype=dtype, device=device))
    tokens = torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(1)).to(index_type).to(device)

    actual = embedding.embed(tokens, table, scale=scale)

    assert_close(actual, embedding.embed_reference(tokens, table, scale=scale))
    assert torch.equal(actual, embedding.embed(tokens, table, scale=scale))


@pytest.mark.parametrize("function", [embedding.embed, embedding.embed_reference])
def test_an_id_outside_the_vocabulary_gives_nan(device, function):
    """Breaks if id 4 of a 4-row table reads foreign memory, or -1 wraps to the last row."""
    table = torch.ones(5, 3, device=device)[:4]

    out = function(torch.tensor([-1, 3, 4], device=device), table)

    assert out.isnan().tolist() == [[True] * 3, [False] * 3, [True] * 3]


def test_refusals(device):
    table = torch.ones(4, 3, device=device)

    with pytest.raises(ValueError, match=r"tokens must be \[T\] int32 or int64, contiguous, are \[1\] torch.float32"):
        embedding.embed(torch.ones(1, device=device), table)
    with pytest.raises(ValueError, match=r"embed: table: expected \[rows, columns\], got \[3\]"):
        embedding.embed(torch.zeros(1, dtype=torch.int32, device=device), table[0])


@pytest.mark.gpu
def test_a_table_of_more_than_2_to_the_31_elements(device):
    """Breaks at row 524288: the offset 2**31 wraps in 32 bits."""
    table = torch.zeros(524290, 4096, dtype=torch.float16, device=device)
    table[-1] = 2

    out = embedding.embed(torch.tensor([524289, 1], dtype=torch.int32, device=device), table)

    assert out[:, 0].tolist() == [2.0, 0.0]


def compile_cases():
    def case(dtype, index_type=torch.int32):
        embedding.embed(torch.empty(4, dtype=index_type), torch.empty(1000, 576, dtype=dtype), scale=2.0)

    yield lambda: case(torch.float32, torch.int64)
    yield lambda: case(torch.float16)
    yield lambda: case(torch.bfloat16)
