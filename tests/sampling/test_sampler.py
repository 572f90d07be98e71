"""The whole sampler: order of the rules, independence of rows, seeds, bad rows, what an idle feature costs."""

import contextlib

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.harness import interpreting
from tests.sampling.oracle import edited, filtered
from tinyserve.kernels.philox import uniform_reference
from tinyserve.request import Request, SamplingParams
from tinyserve.sampling.sampler import GrammarMask, Sampler
from tinyserve.step import RowParams

INF, NAN = float("inf"), float("nan")
V, LENGTH = 320, 64
FLAT = torch.full((V,), -100.0)
FLAT[97:107] = 0.0


class Rows:
    """A token table with a sampler on top: rows are opened with a prompt and grow by what is sampled."""

    def __init__(self, slots=8, vocab=V, **options):
        self.sampler = Sampler(slots, vocab, LENGTH, "cpu", **options)
        self.tokens = torch.full((slots, LENGTH), 10**6, dtype=torch.int32)
        self.lengths = [0] * slots

    def open(self, slot, params, prompt=(1, 2, 3), output=()):
        known = [*prompt, *output]
        self.tokens[slot] = 10**6
        self.tokens[slot, : len(known)] = torch.tensor(known, dtype=torch.int32)
        self.lengths[slot] = len(known)
        self.sampler.open(slot, len(prompt), params)

    def sample(self, logits, slots, grammar=None):
        positions = [self.lengths[slot] for slot in slots]
        return self.sampler.sample(logits.clone(), slots, positions, self.tokens, grammar)

    def step(self, logits, slots):
        """Sample, and write the tokens into the rows."""
        tokens = self.sample(logits, slots).to_host()[0]
        for slot, token in zip(slots, tokens, strict=True):
            self.tokens[slot, self.lengths[slot]] = token
            self.lengths[slot] += 1
        return tokens

    def run(self, logits, slot, count):
        return [self.step(logits[None], [slot])[0] for _ in range(count)]


def normal(rows, vocab=V, seed=0, spread=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def of(**sampling):
    """Row parameters as a request with these sampling parameters has them."""
    seed = sampling.pop("seed", None) or 0
    return RowParams.of(
        Request(
            id="r", prompt_ids=(1,), sampling=SamplingParams(**sampling), seed=seed, eos_ids={260}, extra_eos_ids={261}
        )
    )


CASES = [
    RowParams(temperature=0.0),
    RowParams(temperature=0.7, seed=3),
    RowParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.3, temperature=0.0),
    RowParams(bias=((5, 100.0), (7, -100.0), (9, 2.5)), allowed=(5, 7, 9, 11, 260), masked=(260, 5), min_tokens=3),
    RowParams(
        bad_words=((4,), (8, 6), (8, 8, 10), (2, 12)), bias=((6, 50.0), (2, 30.0)), repetition_penalty=1.5, top_k=40
    ),
    RowParams(top_k=7, top_p=0.6, min_p=0.02, temperature=1.4),
    RowParams(min_p=0.3, frequency_penalty=2.0, masked=(1, 2), min_tokens=2, top_p=0.9),
    RowParams(repetition_penalty=0.5, temperature=2.0, top_p=0.2),
]
OUTPUTS = [(), (8,), (8, 8, 2, 9, 9, 9), (260, 5), (1, 8, 8), (7,), (3, 1), (5, 5, 5, 5)]


@pytest.mark.parametrize("place", [contextlib.nullcontext, interpreting], ids=["reference", "kernels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_rule_in_its_order(place, dtype):
    """All logits of eight rows that ask for different things, read back in processed_logits mode."""
    rows = Rows(logprobs_mode="processed_logits")
    for slot, (params, output) in enumerate(zip(CASES, OUTPUTS, strict=True)):
        rows.open(slot, evolve(params, logprobs=-1), output=output)
    order = [3, 0, 6, 7, 2, 5, 1, 4]
    logits = normal(8).to(dtype)

    with place():
        tokens, bad, records = rows.sample(logits, order).to_host()

    for row, slot in enumerate(order):
        expected = filtered(edited(logits[row], CASES[slot], [1, 2, 3], list(OUTPUTS[slot])), CASES[slot])
        actual = dict(zip(records[row].top_tokens, records[row].top_logprobs, strict=True))

        assert not bad[row] and expected[tokens[row]] > -INF
        torch.testing.assert_close(
            torch.tensor([actual[token] for token in range(V)]), torch.tensor(expected), rtol=1e-5, atol=1e-5
        )


def test_neighbours_change_nothing():
    """Breaks if a row's parameters, bias or penalties reach another row, or if the order of rows matters."""
    logits = normal(8)
    alone = []
    for slot, (params, output) in enumerate(zip(CASES, OUTPUTS, strict=True)):
        rows = Rows()
        rows.open(slot, params, output=output)
        alone += rows.sample(logits[slot : slot + 1], [slot]).to_host()[0]
    together = Rows()
    for slot, (params, output) in enumerate(zip(CASES, OUTPUTS, strict=True)):
        together.open(slot, params, output=output)
    order = [5, 2, 7, 0, 1, 6, 3, 4]

    assert together.sample(logits, list(range(8))).to_host()[0] == alone
    assert together.sample(logits[order], order).to_host()[0] == [alone[slot] for slot in order]


def test_greedy_ignores_seeds_and_filters():
    logits = normal(1)[0]
    runs = []
    for sampling in ({"seed": 1}, {"seed": 2}, {}, {"top_p": 0.5, "top_k": 3}):
        rows = Rows()
        rows.open(0, of(temperature=0, **sampling))
        runs.append(rows.run(logits, 0, 8))

    assert runs[0] == [int(logits.argmax())] * 8
    assert runs.count(runs[0]) == 4


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"temperature": 1e-6}, {"temperature": 0.01}, {"top_p": 1e-6}])
def test_settings_that_leave_one_token_are_greedy(sampling):
    logits = normal(1)[0]
    rows = Rows()
    rows.open(0, of(**{"temperature": 1.0, "seed": 7} | sampling))

    assert rows.run(logits, 0, 8) == [int(logits.argmax())] * 8


def test_top_k_off_in_all_its_spellings():
    logits, runs = normal(1)[0], []
    for sampling in ({}, {"top_k": -1}, {"top_k": 0}, {"top_k": V}, {"top_k": 10000}, {"top_k": 2**31 - 1}):
        rows = Rows()
        rows.open(0, of(seed=7, **sampling))
        runs.append(rows.run(logits, 0, 8))

    assert runs.count(runs[0]) == 6 and len(set(runs[0])) > 1


def test_equal_seeds_give_equal_tokens_and_other_seeds_do_not():
    def run(seed, slot):
        rows = Rows()
        rows.open(slot, RowParams(seed=seed))
        return rows.run(FLAT, slot, 20)

    assert run(-5, 0) == run(-5, 6)
    assert len({tuple(run(seed, 0)) for seed in (-5, 0, 1, 2, 2**63 - 1, -(2**63))}) == 6


def test_the_random_stream_is_the_inverse_cdf_of_philox():
    """Ten equal tokens: token = 97 + floor(10 u), u from (seed, position)."""
    rows = Rows()
    rows.open(2, RowParams(seed=42))
    u = uniform_reference(torch.full((20,), 42), torch.arange(3, 23))

    assert rows.run(FLAT, 2, 20) == (97 + (u * 10).floor().int()).tolist()


@pytest.mark.parametrize(
    "params",
    [
        RowParams(seed=11),
        RowParams(seed=11, frequency_penalty=0.5),
        RowParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.3),
        RowParams(seed=11, min_tokens=9, masked=(97, 98), bad_words=((99, 100), (101,))),
    ],
)
def test_a_preempted_row_goes_on_as_if_nothing_had_happened(params):
    """Breaks if output tokens known when the row comes back count as prompt, or the random stream restarts."""
    logits = FLAT + normal(1, spread=0.3)[0]
    rows = Rows()
    rows.open(0, params)
    whole = rows.run(logits, 0, 14)
    rows.open(1, params)
    first = rows.run(logits, 1, 6)
    rows.sampler.close(1)
    rows.open(1, RowParams(seed=99, bias=((97, 100.0),)))  # somebody else has the row meanwhile
    rows.run(logits, 1, 3)
    rows.sampler.close(1)
    rows.open(5, params, output=first)

    assert first + rows.run(logits, 5, 8) == whole


def test_logit_bias():
    logits = normal(1)[0]
    best = int(logits.argmax())
    cases = {
        ((97, 100.0),): 97,
        ((best, -100.0),): int(logits.clone().index_fill_(0, torch.tensor(best), -INF).argmax()),
        tuple((token, -100.0) for token in range(V)): best,
        ((319, 90.0),): 319,
    }
    for bias, token in cases.items():
        rows = Rows()
        rows.open(0, of(temperature=0, logit_bias=dict(bias)))

        assert rows.run(logits, 0, 3) == [token] * 3


def test_min_tokens_holds_back_every_end_token():
    logits = FLAT.clone()
    logits[[260, 261, 50]] = 30.0
    rows = Rows()
    rows.open(0, of(temperature=0, min_tokens=3, stop_token_ids=(50,), ignore_eos=True))

    assert rows.run(logits, 0, 5) == [97, 97, 97, 50, 50]


def test_bad_words_block_the_last_token_only_after_the_rest():
    """Word (97, 98): 97 is free, 98 is blocked right after 97. The prompt's end never counts as a beginning."""
    logits = FLAT.clone()
    logits[98] = 5.0
    rows = Rows()
    rows.open(0, RowParams(temperature=0.0, bad_words=((97, 98), (99,))), prompt=(1, 97))

    assert rows.run(logits, 0, 1) == [98]
    rows.open(0, RowParams(temperature=0.0, bad_words=((97, 98), (99,))), prompt=(1,), output=(97,))
    assert rows.run(logits, 0, 2) == [97, 97]


def test_frequencies_are_those_of_the_filtered_softmax():
    """Chi-square, 4 kept tokens, 3 degrees of freedom: 21.1 is exceeded once in 10**4; the seeds are fixed."""
    logits = torch.full((V,), -50.0)
    logits[[10, 300, 20, 30, 40]] = torch.tensor([1.0, 0.8, 0.5, 0.0, -1.0])
    count = 4000
    rows = Rows(slots=count)
    for slot in range(count):
        rows.open(slot, RowParams(seed=slot, temperature=1.5, top_k=4))
    tokens = torch.tensor(rows.sample(logits.expand(count, -1), range(count)).to_host()[0])
    share = (logits[[10, 20, 30, 300]] / 1.5).softmax(-1)
    ids, seen = tokens.unique(return_counts=True)

    assert ids.tolist() == [10, 20, 30, 300]
    assert ((seen - share * count) ** 2 / (share * count)).sum() < 21.1


@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
def test_a_bad_row_fails_alone(wrong):
    logits = normal(3)
    good = Rows()
    hurt = Rows()
    for rows in (good, hurt):
        for slot in range(3):
            rows.open(slot, RowParams(seed=slot, logprobs=2, frequency_penalty=0.5, top_p=0.9, bias=((3, 1.0),)))
    tokens, _, records = good.sample(logits, [0, 1, 2]).to_host()
    logits[1] = wrong

    actual, bad, found = hurt.sample(logits, [0, 1, 2]).to_host()

    assert bad == [False, True, False]
    assert (actual[0], actual[2]) == (tokens[0], tokens[2])
    assert found == [records[0], None, records[2]]


def test_a_grammar_mask_comes_first():
    bits = torch.zeros(1, V // 32, dtype=torch.int32)
    bits[0, 1] = 0b110  # ids 33 and 34
    logits = normal(2)
    rows = Rows()
    for slot in (0, 1):
        rows.open(slot, RowParams(temperature=0.0, logprobs=3))

    tokens, _, records = rows.sample(logits, [0, 1], GrammarMask(bits, torch.tensor([1]))).to_host()

    assert tokens == [int(logits[0].argmax()), 33 + int(logits[1, 33:35].argmax())]
    assert records[1].top_logprobs[2] == -INF and sum(2.718281828**x for x in records[1].top_logprobs) == pytest.approx(
        1
    )


def test_plain_rows_call_no_transform(monkeypatch):
    """The cost of what nobody asks for: one op for the tokens, nothing gathered twice."""

    class Never:
        def wants(self, params):
            return params.min_tokens == 77

        def __getattr__(self, name):
            return lambda *args: None if name == "close" else pytest.fail(f"{name} was called")

    rows = Rows(custom=[Never()])
    rows.sampler._transforms = [Never()]
    for slot in range(4):
        rows.open(slot, RowParams(temperature=0.0))
    first = rows.sampler._table.gather((0, 1, 2, 3))
    rows.sample(normal(4), [0, 1, 2, 3])

    assert rows.sampler._table.gather((0, 1, 2, 3)) is first


def test_custom_transforms_come_last():
    class Only:
        def wants(self, params):
            return params.seed == 5

        def open(self, slot, params): ...

        def close(self, slot): ...

        def apply(self, logits, rows, context):
            assert [context.slots[row] for row in rows] == [2]
            logits[list(rows), 123] = 1000.0

    rows = Rows(custom=[Only()])
    rows.open(1, RowParams(temperature=0.0, seed=4))
    rows.open(2, RowParams(temperature=0.0, seed=5, bad_words=((123,),)))
    logits = normal(2)

    assert rows.sample(logits, [1, 2]).to_host()[0] == [int(logits[0].argmax()), 123]


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_rows_that_come_and_go_never_mix(data):
    """A random life of four slots; each step's tokens equal those of a sampler that knows only that row."""
    rows, params = Rows(slots=4, vocab=40), {}
    for _ in range(data.draw(st.integers(1, 6))):
        slot = data.draw(st.integers(0, 3))
        if slot in params and data.draw(st.booleans()):
            rows.sampler.close(slot)
            del params[slot]
        else:
            params[slot] = data.draw(row_params())
            rows.open(slot, params[slot], prompt=(1, 2, 3))
        slots = data.draw(st.permutations(sorted(params)))
        logits = normal(len(slots), 40, seed=data.draw(st.integers(0, 99)))
        before = list(rows.lengths), rows.tokens.clone()
        actual = rows.step(logits, slots) if slots else []
        for row, slot in enumerate(slots):
            single = Sampler(4, 40, LENGTH, "cpu")
            single.open(slot, 3, params[slot])
            alone = single.sample(logits[row : row + 1].clone(), [slot], [before[0][slot]], before[1])

            assert alone.to_host()[0] == [actual[row]]


def row_params():
    ids = st.integers(0, 39)
    return st.builds(
        RowParams,
        temperature=st.sampled_from([0.0, 0.01, 1.0]),
        seed=st.integers(-(2**63), 2**63 - 1),
        top_k=st.sampled_from([0, 3]),
        top_p=st.sampled_from([1.0, 0.8]),
        frequency_penalty=st.sampled_from([0.0, 1.5]),
        bias=st.lists(st.tuples(ids, st.floats(-9, 9)), max_size=3, unique_by=lambda pair: pair[0]).map(tuple),
        allowed=st.none() | st.lists(ids, min_size=1, unique=True).map(tuple),
        bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    )


def test_no_rows_and_unknown_rows():
    rows = Rows()
    tokens, bad, records = rows.sample(torch.empty(0, V), []).to_host()

    assert (tokens, bad, records) == ([], [], [])
    with pytest.raises(ValueError, match="row 3 is not open"):
        rows.sample(normal(1), [3])
    with pytest.raises(ValueError, match="prompt_len must be in"):
        rows.sampler.open(0, LENGTH + 1, RowParams())
    with pytest.raises(ValueError, match="logprobs_mode must be one of"):
        Rows(logprobs_mode="cooked")


def test_inference_mode_on_and_off():
    """The runner samples inside torch.inference_mode; a notebook may not. Both see what was opened in the other."""
    rows, logits = Rows(), normal(2)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            rows.open(0, RowParams(seed=1, allowed=(5, 6, 7), frequency_penalty=0.5, top_p=0.9, logprobs=2))
            rows.open(1, RowParams(seed=2, bias=((3, 2.0),)))
            tokens, bad, _ = rows.sample(logits, [0, 1]).to_host()

            assert tokens[0] in (5, 6, 7) and bad == [False, False]
