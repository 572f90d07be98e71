"""The random numbers: known answers, bit equality of kernel and reference, independence of the batch."""

import pytest
import torch

from tests.kernels.harness import interpreting
from tinyserve.kernels import philox

# Known answers published with the Random123 library: counter, key -> four words.
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
SEEDS = [0, 1, -1, -5, 42, 2**31, -(2**31), 2**32 + 7, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_philox_gives_the_published_words(counter, key, words):
    out = philox.philox_reference(torch.tensor(counter)[:, None], torch.tensor(key)[:, None])

    assert out[:, 0].tolist() == words


@pytest.mark.parametrize("positions_type", [torch.int32, torch.int64])
def test_kernel_and_reference_are_equal_to_the_bit(device, positions_type):
    """Breaks for negative seeds if the key's high word is lost, e.g. seed -5."""
    seeds = torch.tensor(SEEDS).repeat_interleave(20).to(device)
    positions = torch.arange(20, dtype=positions_type).repeat(len(SEEDS)).to(device) ** 5

    actual = philox.uniform(seeds, positions)

    assert torch.equal(actual, philox.uniform_reference(seeds, positions))
    assert len(set(actual.tolist())) == 200


def test_a_row_does_not_depend_on_its_place():
    seeds, positions = torch.arange(1000), torch.arange(1000) % 7
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))

    assert torch.equal(philox.uniform(seeds, positions)[order], philox.uniform(seeds[order], positions[order]))


def test_numbers_are_uniform_along_positions_and_along_seeds():
    """Breaks if a cell of 50 strays from 2000 by more than 5 standard deviations (224)."""
    many, zero = torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64)
    for seeds, positions in ((zero, many), (many, zero)):
        u = philox.uniform(seeds, positions)
        cells = torch.histc(u, 50, 0, 1)

        assert u.min() >= 0 and u.max() < 1
        assert (cells - 2000).abs().max() < 224
        assert abs(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]) < 0.02


def test_no_rows_and_wrong_types():
    empty = torch.empty(0, dtype=torch.int64)
    with interpreting():
        assert philox.uniform(empty, empty).shape == (0,)
    with pytest.raises(ValueError, match="uniform: seeds"):
        philox.uniform(torch.zeros(2, dtype=torch.int32), torch.zeros(2))


def compile_cases():
    for kind in (torch.int32, torch.int64):
        yield lambda kind=kind: philox.uniform(torch.empty(9, dtype=torch.int64), torch.empty(9, dtype=kind))
