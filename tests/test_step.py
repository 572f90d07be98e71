"""step.py: a step survives the trip through one int32 buffer."""

from hypothesis import given
from hypothesis import strategies as st

from tinyserve.request import Request, SamplingParams
from tinyserve.step import RowParams, SeqSlice, SlotOpening, StepInput, TableEdit

ids = st.integers(0, 2**31 - 1)
floats = st.floats(-100, 100, width=32)
tuples = st.lists(ids, max_size=5).map(tuple)
params = st.builds(
    RowParams,
    temperature=floats, top_p=floats, top_k=ids, min_p=floats,
    presence_penalty=floats, frequency_penalty=floats, repetition_penalty=floats,
    seed=st.integers(-(2**63), 2**63 - 1), min_tokens=ids,
    logprobs=st.none() | st.integers(-1, 20), prompt_logprobs=st.none() | st.integers(-1, 20),
    logprob_ids=tuples, prompt_start=ids, pooled=st.booleans(),
    prompt_ids=st.lists(st.lists(st.integers(-1, 2**31 - 1), max_size=3).map(tuple), max_size=3).map(tuple),
    bias=st.lists(st.tuples(ids, floats), max_size=3).map(tuple),
    allowed=st.none() | tuples, masked=tuples, bad_words=st.lists(tuples, max_size=3).map(tuple),
)  # fmt: skip
steps = st.builds(
    StepInput,
    step_id=ids,
    slices=st.lists(st.builds(SeqSlice, ids, ids, ids, tuples, st.booleans()), max_size=4).map(tuple),
    opened=st.lists(st.builds(SlotOpening, ids, ids, tuples, params), max_size=3).map(tuple),
    closed=tuples,
    edits=st.lists(st.builds(TableEdit, ids, ids, ids, tuples), max_size=3).map(tuple),
)


@given(steps)
def test_unpack_inverts_pack(step):
    assert StepInput.unpack(step.pack()) == step


def test_row_params_of_a_greedy_request_switch_the_filters_off():
    request = Request(id="a", prompt_ids=(1,), sampling=SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1))

    row = RowParams.of(request)

    assert (row.temperature, row.top_p, row.top_k, row.min_p) == (0.0, 1.0, 0, 0.0)


def test_min_tokens_masks_every_end_id_even_with_ignore_eos():
    sampling = SamplingParams(min_tokens=2, ignore_eos=True, stop_token_ids=[9])
    request = Request(id="a", prompt_ids=(1,), sampling=sampling, eos_ids={2}, extra_eos_ids={3})

    assert RowParams.of(request).masked == (2, 3, 9)
    assert request.stop_on(2) == (False, None)
    assert request.stop_on(9) == (True, 9)


def test_where_the_scoring_of_a_prompt_starts():
    """prompt_logprobs need every position; named ids only those from their start."""
    assert RowParams().scores_from() is None
    assert RowParams(prompt_ids=((1,),), prompt_start=4).scores_from() == 4
    assert RowParams(prompt_ids=((1,),), prompt_start=4, prompt_logprobs=0).scores_from() == 0
