"""The sampler: kernel against reference, both against the distribution that was asked for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.harness import gapped, interpreting, randn
from tinyserve.kernels import sample as file
from tinyserve.kernels.philox import uniform_reference
from tinyserve.kernels.sample import sample, sample_reference

INF, NAN = float("inf"), float("nan")
SHAPES = [(0, 320), (1, 320), (3, 1001), (5, 1), (2, 2048), (1, 49152), (33, 7)]


def arguments(rows, *, temperature=1.0, seed=7, device="cpu"):
    return (
        torch.full((rows,), temperature, device=device),
        torch.arange(rows, device=device) * 1_000_003 + seed,
        torch.arange(rows, dtype=torch.int32, device=device) + 5,
    )


def assert_drawn(tokens, logits, temperature, seeds, positions):
    """By the definition, in float64: u lies in the token's piece of the CDF, within 2e-6 of float32 noise."""
    logits, temperature = logits.double().cpu(), temperature.double().cpu()
    u = uniform_reference(seeds.cpu(), positions.cpu()).double()
    for token, row, t, number in zip(tokens.tolist(), logits, temperature.tolist(), u.tolist(), strict=True):
        if t == 0:
            assert token == int((row == row.max()).nonzero()[0])
            continue
        share = (row / t).softmax(-1)
        end = float(share[: token + 1].sum())

        assert share[token] > 0 and end - float(share[token]) - 2e-6 <= number <= end + 2e-6


@pytest.mark.parametrize("rows, vocab", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 2.0])
def test_kernel_is_its_reference(device, dtype, rows, vocab, temperature):
    logits = gapped(randn(rows, vocab, dtype=dtype, device=device, spread=4))
    given_ = arguments(rows, temperature=temperature, device=device)
    log_z, expected_z = torch.empty(2, rows, device=device)

    tokens, bad = sample(logits, *given_, log_z=log_z)
    expected, expected_bad = sample_reference(logits, *given_, log_z=expected_z)

    assert torch.equal(bad, expected_bad)
    assert (tokens != expected).sum() <= 1  # one row of 33 may stand at a border of the CDF
    assert_drawn(tokens, logits, *given_)
    assert_drawn(expected, logits, *given_)
    assert tokens.dtype == torch.int32 and bad.dtype == torch.bool and not bad.any()
    torch.testing.assert_close(log_z, expected_z, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_z, (logits.float() / (temperature or 1)).logsumexp(-1), rtol=1e-5, atol=1e-4)
    assert torch.equal(tokens, sample(logits, *given_)[0])


@pytest.mark.parametrize("vocab", [320, 1001, 49152])
def test_the_reference_is_the_definition(vocab):
    logits = randn(60, vocab, dtype=torch.float32, device="cpu", spread=3)
    temperature, seeds, positions = arguments(60)
    temperature = torch.tensor([0.0, 0.5, 1.0]).repeat(20)

    tokens, _ = sample(logits, temperature, seeds, positions)

    assert_drawn(tokens, logits, temperature, seeds, positions)


@pytest.mark.parametrize("wrong", [NAN, INF, -NAN])
@pytest.mark.parametrize("at", [0, 2047, 2048, 3000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_is_flagged_and_hurts_nobody(device, dtype, wrong, at, temperature):
    logits = randn(3, 3001, dtype=dtype, device=device)
    given_ = arguments(3, temperature=temperature, device=device)
    expected, _ = sample(logits, *given_)
    logits[1, at] = wrong

    for op in (sample, sample_reference):
        tokens, bad = op(logits, *given_)

        assert bad.tolist() == [False, True, False]
        assert tokens.tolist() == [int(expected[0]), 0, int(expected[2])]


def test_a_row_of_minus_infinity_is_bad_and_one_finite_logit_is_enough(device, dtype):
    logits = torch.full((3, 3001), -INF, dtype=dtype, device=device)
    logits[1, 2500] = -30
    logits[2, 0] = 30
    for temperature in (0.0, 1.0):
        for op in (sample, sample_reference):
            tokens, bad = op(logits, *arguments(3, temperature=temperature, device=device))

            assert bad.tolist() == [True, False, False]
            assert tokens.tolist() == [0, 2500, 0]


def test_the_lowest_id_wins_a_tie(device):
    logits = torch.zeros(2, 5000, device=device)
    logits[0, [4999, 2100, 2060]] = 3.0

    for op in (sample, sample_reference):
        assert op(logits, *arguments(2, temperature=0.0, device=device))[0].tolist() == [2060, 0]


def test_a_row_does_not_depend_on_the_rows_beside_it(device):
    logits = randn(9, 5000, dtype=torch.float32, device=device, spread=3)
    temperature, seeds, positions = arguments(9, device=device)
    temperature = torch.linspace(0, 2, 9, device=device)
    together, _ = sample(logits, temperature, seeds, positions)
    order = torch.tensor([3, 8, 0, 5], device=device)

    mixed, _ = sample(logits[order], temperature[order], seeds[order], positions[order])
    alone = [
        int(sample(logits[i : i + 1], temperature[i : i + 1], seeds[i : i + 1], positions[i : i + 1])[0])
        for i in range(9)
    ]

    assert alone == together.tolist()
    assert mixed.tolist() == together[order].tolist()


def test_the_filter_keeps_what_is_above_and_the_first_ties(device):
    """Breaks at 60 draws from 5 tokens if the tie at id 4000 (after last_tie 3000) is ever drawn."""
    logits = torch.full((60, 4100), -1.0, device=device)
    logits[:, [7, 3000, 4000]] = 1.0
    logits[:, [2047, 2048]] = 1.5
    threshold = torch.ones(60, device=device)
    last_tie = torch.full((60,), 3000, dtype=torch.int32, device=device)

    tokens, bad = sample(logits, *arguments(60, device=device), threshold, last_tie)

    assert torch.equal(tokens, sample_reference(logits, *arguments(60, device=device), threshold, last_tie)[0])
    assert set(tokens.tolist()) == {7, 2047, 2048, 3000} and not bad.any()


# top_k, top_p, min_p: none, each alone, k with p, all three, k above the number of peaks, a flat nucleus
FILTERS = [
    (0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.2), (20, 0.9, 0.0), (50, 0.8, 0.05), (6000, 1.0, 0.0),
    (0, 0.95, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("vocab, spread", [(320, 3.0), (20000, 4.0), (9000, 0.3)])
def test_filters_are_found_on_the_way(device, dtype, vocab, spread):
    """Tokens as with the thresholds of `threshold_reference`; rows that ask for none beside rows that do."""
    rows = 2 * len(FILTERS)
    logits = gapped(randn(rows, vocab, dtype=dtype, device=device, spread=spread))
    temperature, seeds, positions = arguments(rows, device=device)
    temperature[rows // 2 :] = 0.7
    temperature[3] = 0.0
    logits[6, 11] = NAN
    columns = [torch.tensor(column, device=device).repeat(2) for column in zip(*FILTERS, strict=True)]
    filters = (columns[0].int(), columns[1], columns[2])
    given_ = (logits, temperature, seeds, positions)
    log_z, expected_z = torch.empty(2, rows, device=device)

    tokens, bad = sample(*given_, filters=filters, log_z=log_z)
    expected, expected_bad = sample_reference(*given_, filters=filters, log_z=expected_z)

    assert torch.equal(bad, expected_bad) and bad.sum() == 1
    assert (tokens != expected).sum() <= 1  # a border of the CDF, or one token more or less in a nucleus
    sure = (~bad) & (torch.arange(rows, device=device) != 3)
    torch.testing.assert_close(log_z[sure], expected_z[sure], rtol=1e-4, atol=1e-4)
    assert torch.equal(tokens, sample(*given_, filters=filters)[0])


def test_filters_of_a_row_with_few_possible_tokens(device):
    """A grammar leaves 3 tokens of 9000, fewer than k: each is drawn, and by the same numbers as without the filter."""
    logits = torch.full((40, 9000), -INF, device=device)
    logits[:, [5, 4100, 8999]] = 0.5
    given_ = arguments(40, device=device)
    filters = [torch.full((40,), x, device=device) for x in (20, 1.0, 0.0)]
    filters[0] = filters[0].int()

    tokens, bad = sample(logits, *given_, filters=tuple(filters))

    assert not bad.any() and set(tokens.tolist()) == {5, 4100, 8999}
    assert torch.equal(tokens, sample(logits, *given_)[0])


def test_frequencies_follow_the_softmax():
    """Chi-square over 10 cells, 9 degrees of freedom: 33.7 is exceeded once in 10**4 runs; the seeds are fixed."""
    count, logits = 40_000, torch.tensor([0.0, 1, 2, 3, -1, -INF, 0.5, 2.5, 1.5, -3, 0.1])
    for temperature in (0.7, 1.0, 1.6):
        for seeds, positions in (
            (torch.arange(count), torch.full((count,), 3)),
            (torch.full((count,), 3), torch.arange(count)),
        ):
            tokens, _ = sample(logits.expand(count, -1), torch.full((count,), temperature), seeds, positions)
            expected = (logits / temperature).softmax(-1) * count
            seen = torch.bincount(tokens, minlength=11)
            real = expected > 0

            assert seen[5] == 0
            assert ((seen - expected)[real] ** 2 / expected[real]).sum() < 33.7


def test_frequencies_across_tiles():
    """Tokens in four tiles with 0.1, 0.2, 0.3, 0.4; chi-square, 3 degrees of freedom, limit 21.1 (one in 10**4)."""
    logits = torch.full((1, 7000), -INF)
    share = torch.tensor([0.1, 0.2, 0.3, 0.4])
    logits[0, [5, 2048, 6143, 6999]] = share.log()
    count = 4000

    tokens, _ = sample(logits.expand(count, -1), torch.ones(count), torch.arange(count), torch.zeros(count).long())
    ids, seen = tokens.unique(return_counts=True)

    assert ids.tolist() == [5, 2048, 6143, 6999]
    assert ((seen - share * count) ** 2 / (share * count)).sum() < 21.1


@given(
    st.lists(st.one_of(st.floats(-80, 80, width=32), st.just(-INF)), min_size=1, max_size=40),
    st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.0]),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**31 - 1),
)
@settings(max_examples=60, deadline=None)
def test_only_a_possible_token_is_drawn(values, temperature, seed, position):
    logits = torch.tensor([values])
    given_ = torch.tensor([temperature]), torch.tensor([seed]), torch.tensor([position])
    with interpreting():
        token, bad = sample(logits, *given_)

    expected, expected_bad = sample_reference(logits, *given_)

    assert torch.equal(bad, expected_bad)
    assert bool(bad) == all(value == -INF for value in values)
    assert bool(bad) or (values[int(token)] > -INF and values[int(expected)] > -INF)


def test_the_end_of_the_distribution(monkeypatch):
    """u = 1 - 2**-24, the largest there is, must take the last token with weight, not one after it."""
    logits = torch.full((1, 5000), -INF)
    logits[0, :4000] = 0.0
    monkeypatch.setattr(file, "uniform_reference", lambda seeds, positions: torch.tensor([1 - 2**-24]))

    assert int(sample(logits, *arguments(1))[0]) == 3999


def test_refusals():
    with pytest.raises(ValueError, match="sample: filters are"):
        sample(torch.ones(2, 4), *arguments(2), filters=tuple(torch.ones(3, 1)))
    with pytest.raises(ValueError, match="sample: logits are"):
        sample(torch.ones(2, 4), *arguments(3))
    with pytest.raises(ValueError, match="last dimension must be contiguous"):
        sample(torch.ones(4, 2).t(), *arguments(2))


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits(device):
    """Breaks at row 14134 of 151936: the offset 2**31 wraps in 32 bits."""
    rows, vocab = 14140, 151936
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=device)
    logits[-1, 151935] = 50
    for temperature in (0.0, 1.0):
        tokens, bad = sample(logits, *arguments(rows, temperature=temperature, device=device))

        assert int(tokens[-1]) == 151935 and not bad.any()


def compile_cases():
    row, logits = torch.empty(3), torch.empty(3, 151936, dtype=torch.bfloat16)
    seeds, positions = torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.int32)
    last_tie = top_k = torch.empty(3, dtype=torch.int32)
    yield lambda: sample(logits.float(), row, seeds, positions, log_z=row)
    yield lambda: sample(logits, row, seeds, positions, row, last_tie)
    yield lambda: sample(logits, row, seeds, positions, filters=(top_k, row, row))
