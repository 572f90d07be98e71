"""request.py: the default and the range of every sampling field, and which fields exclude each other."""

import json
import math
import warnings

import numpy as np
import pytest
from attrs import asdict

from tinyserve.errors import RequestError
from tinyserve.request import BeamSearchParams, RepetitionDetectionParams, Request, RequestOutputKind, SamplingParams
from tinyserve.step import RowParams
from tinyserve.structured import Constraint, outgrows

# vLLM's defaults, written down once more; output_kind is the one that differs: None leaves it to the caller's face.
DEFAULTS = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": (), "stop_token_ids": (), "bad_words": (),
    "include_stop_str_in_output": False, "ignore_eos": False, "max_tokens": 16, "min_tokens": 0, "logprobs": None,
    "prompt_logprobs": None, "logprob_token_ids": None, "prompt_logprob_token_ids": None, "prompt_logprob_start": None,
    "flat_logprobs": False, "detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "output_kind": None, "stream_interval": None, "logit_bias": None, "allowed_token_ids": None,
    "repetition_detection": None, "skip_reading_prefix_cache": None, "extra_args": None, "structured_outputs": None,
    "thinking_token_budget": None, "trace_decode_token_ids": None, "routed_experts_prompt_start": None,
    "watermarking": None,
}  # fmt: skip

ACCEPTED = [
    {"n": 16384}, {"presence_penalty": -2}, {"frequency_penalty": 2.0}, {"repetition_penalty": 1e6},
    {"repetition_penalty": 1e-3}, {"temperature": 2}, {"top_p": 1e-9}, {"top_k": -1}, {"top_k": 10**6}, {"min_p": 1},
    {"seed": -5}, {"seed": 2**63 - 1}, {"stop": "x"}, {"stop": ["x"] * 64}, {"bad_words": ["x"] * 128},
    {"max_tokens": None}, {"max_tokens": 0}, {"min_tokens": 16}, {"logprobs": -1}, {"prompt_logprobs": 0},
    {"logprobs": 0, "logprob_token_ids": range(128)}, {"prompt_logprob_token_ids": [[1, -1], []]},
    {"prompt_logprob_token_ids": [1, 2], "prompt_logprob_start": 3}, {"stream_interval": 1},
    {"logit_bias": {"1": 100, 2: -100}}, {"allowed_token_ids": [0]}, {"skip_reading_prefix_cache": False},
    {"extra_args": {"a": [2**63 - 1, "x", {"b": 1.5}]}}, {"thinking_token_budget": -1}, {"watermarking": False},
    {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 4, "min_count": 2}},
    {"output_kind": RequestOutputKind.CUMULATIVE},
]  # fmt: skip

REFUSED = [
    {"n": 0}, {"n": 16385}, {"n": 1.0}, {"n": True}, {"presence_penalty": 2.1}, {"frequency_penalty": -2.1},
    {"repetition_penalty": 0}, {"repetition_penalty": math.inf}, {"temperature": -0.1}, {"temperature": 2.1},
    {"temperature": math.nan}, {"temperature": "hot"}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -2}, {"top_k": 1.5},
    {"min_p": -0.1}, {"min_p": 1.1}, {"seed": 2**63}, {"seed": 1.0}, {"stop": ""}, {"stop": ["a", ""]}, {"stop": [1]},
    {"stop": 5}, {"stop": ["x"] * 65}, {"stop_token_ids": [-1]}, {"stop_token_ids": ["1"]}, {"stop_token_ids": 7},
    {"stop_token_ids": [[1]]}, {"bad_words": [""]}, {"bad_words": ["x"] * 129}, {"include_stop_str_in_output": 1},
    {"ignore_eos": "yes"}, {"max_tokens": -1}, {"max_tokens": 1.5}, {"min_tokens": -1}, {"min_tokens": 17},
    {"logprobs": -2}, {"prompt_logprobs": -2}, {"logprobs": 1.0}, {"logprob_token_ids": [1]},
    {"logprob_token_ids": range(129), "logprobs": 1}, {"logprob_token_ids": [-1], "logprobs": 1},
    {"prompt_logprob_token_ids": 3}, {"prompt_logprob_token_ids": [[-2]]}, {"prompt_logprob_token_ids": [1, [2]]},
    {"prompt_logprob_start": 1}, {"prompt_logprob_start": -1, "prompt_logprob_token_ids": [1]},
    {"flat_logprobs": None}, {"detokenize": 0}, {"skip_special_tokens": 2}, {"spaces_between_special_tokens": "no"},
    {"output_kind": 1}, {"stream_interval": 0}, {"logit_bias": {"a": 1}}, {"logit_bias": {1: 101}},
    {"logit_bias": {"1_0": 1}}, {"logit_bias": {"\u0665": 1}}, {"logit_bias": {"5": 1, "05": 2}},
    {"logit_bias": {"9" * 5000: 1}}, {"logit_bias": {"--5": 1}}, {"logit_bias": {1.5: 1}},
    {"logit_bias": {1: math.nan}}, {"logit_bias": {-1: 1}}, {"logit_bias": [1]}, {"allowed_token_ids": []},
    {"allowed_token_ids": "ab"}, {"skip_reading_prefix_cache": 1}, {"extra_args": [1]},
    {"extra_args": {"a": [{"b": 2**63}]}}, {"repetition_detection": {"max_pattern_size": 4, "min_count": 1}},
    {"repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 2}}, {"repetition_detection": {"size": 1}},
    {"repetition_detection": 3}, {"repetition_detection": {"max_pattern_size": 1025}}, {"structured_outputs": 5},
    {"structured_outputs": {"json": {}, "regex": "a"}}, {"structured_outputs": {"xml": "a"}},
    {"structured_outputs": {"choice": []}}, {"structured_outputs": {"json_object": False}},
    {"structured_outputs": {"json": "", "regex": None}}, {"thinking_token_budget": -2}, {"trace_decode_token_ids": [1]},
    {"routed_experts_prompt_start": 0}, {"watermarking": True},
]  # fmt: skip


def test_defaults():
    assert asdict(SamplingParams()) == DEFAULTS


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_what_is_accepted(fields):
    SamplingParams(**fields)


@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_what_is_refused_names_its_field(fields):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)

    assert caught.value.param == next(iter(fields))


def test_spellings_of_one_meaning():
    params = SamplingParams(stop="x", stop_token_ids=[3, 1, 3], logprobs=True, prompt_logprobs=False, seed=-1)

    assert (params.stop, params.stop_token_ids, params.logprobs, params.prompt_logprobs) == (("x",), (3, 1), 1, None)
    assert params.seed is None
    assert SamplingParams(logit_bias={"5": 1}).logit_bias == {5: 1.0}
    ids = np.array([[1, 2], [3, -1]], dtype=np.int32)
    assert SamplingParams(prompt_logprob_token_ids=ids).prompt_logprob_token_ids == ((1, 2), (3, -1))


def test_fields_that_exclude_each_other():
    for fields, param in (
        ({"n": 2, "temperature": 0}, "n"),
        ({"n": 2, "temperature": 1e-6}, "n"),
        ({"stop": "x", "detokenize": False}, "stop"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**fields)
        assert caught.value.param == param


def test_small_temperatures():
    """Below 1e-5 is greedy; up to 0.01 is raised to 0.01, with a warning; 0.01 is itself."""
    assert SamplingParams(temperature=9e-6).greedy and not SamplingParams(temperature=0.01).greedy
    with pytest.warns(UserWarning, match="raised to 0.01"):
        assert SamplingParams(temperature=1e-3).effective_temperature == 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SamplingParams(temperature=0.01).effective_temperature == 0.01


@pytest.mark.parametrize(("penalty", "sent"), [(1e-44, 1e-30), (1e38, 1e30), (1.5, 1.5)])
def test_penalties_that_float32_cannot_use_are_saturated(penalty, sent):
    """1e-44 is 0 as a divisor after rounding: the row would be infinite, and the request an error of the model's."""
    request = Request(id="a", prompt_ids=(1,), sampling=SamplingParams(repetition_penalty=penalty))

    assert RowParams.of(request).repetition_penalty == sent


def test_an_end_token_that_is_also_a_stop_token_has_no_stop_reason():
    """The order is: end token (no reason), then stop tokens (the id); ignore_eos leaves the latter."""
    ends = {"id": "a", "prompt_ids": (1,), "eos_ids": {2}, "extra_eos_ids": {3}}
    request = Request(**ends, sampling=SamplingParams(stop_token_ids=[2, 3, 4]))
    ignoring = Request(**ends, sampling=SamplingParams(stop_token_ids=[2], ignore_eos=True))

    assert [request.stop_on(token) for token in (2, 3, 4, 5)] == [(True, None), (True, 3), (True, 4), (False, None)]
    assert [ignoring.stop_on(token) for token in (2, 3)] == [(True, 2), (False, None)]


def test_scored_prompts_are_computed_not_read_from_the_cache():
    def reads(**fields):
        return Request(id="a", prompt_ids=(1, 2), sampling=SamplingParams(**fields)).reads_cache

    assert reads() and not reads(prompt_logprobs=0) and not reads(prompt_logprob_token_ids=[1])
    assert reads(prompt_logprobs=0, skip_reading_prefix_cache=False) and not reads(skip_reading_prefix_cache=True)


def test_records_of_vllms_names():
    detection = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=1, min_count=4)

    assert SamplingParams(repetition_detection=detection).repetition_detection is detection
    assert [kind.name for kind in RequestOutputKind] == ["CUMULATIVE", "DELTA", "FINAL_ONLY"]
    with pytest.raises(RequestError, match="structured_outputs"):
        BeamSearchParams(beam_width=2, max_tokens=3, structured_outputs={"regex": "a", "choice": ["b"]})


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf")])
def test_numbers_of_any_size_are_refused_as_requests(value):
    """Breaks if a huge int meets math.isfinite (OverflowError) or the limit of digits that Python prints."""
    for name in ("temperature", "top_p", "seed", "n", "max_tokens", "top_k", "min_p"):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 200
    with pytest.raises(RequestError):
        SamplingParams(logit_bias={1: value})


def test_what_is_too_long_is_found_without_writing_it():
    """16 MB held the interpreter for 0.7 s; never is a value refused whose JSON is short enough."""
    for value in ([0] * 7, {"ab": [[], "x", {}], "c": None}, "abc", 7, [[[]]], {"a": {"b": 1.5}}):
        assert not outgrows(value, len(json.dumps(value)))
    assert outgrows([0] * 7, 20) and outgrows({"ab": "cdef"}, 13) and outgrows("abc", 4)
    deep = []
    deep.append(deep)
    assert outgrows(deep, 1000)
    with pytest.raises(RequestError, match="longer than 262144 characters"):
        Constraint(kind="json", value={"enum": ["x"] * 60_000}, param="field")
