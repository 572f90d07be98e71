"""What an answer reports and in which portions: named ids, scored prompts, flat logprobs, output kinds, intervals."""

import asyncio
import itertools
import math

import numpy as np
import pytest

from tinyserve.engine.flat import FlatLogprobs
from tinyserve.engine.logprobs import TokenTexts, named
from tinyserve.errors import RequestError
from tinyserve.request import FinishReason, Logprob, RequestOutputKind, SamplingParams
from tinyserve.step import TokenLogprobs

from .test_llm import make, quiet
from .toy import EOS, answer, assert_idle, letters, make_parts, script, settle, start, tokenizer

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def pieces_of(rule=letters, prompt="x", *, parts=None, options=None, **fields):
    """All outputs of one call, in order."""

    async def work():
        engine = await start(rule, parts=make_parts(**(parts or {})), **(options or {}))
        params = SamplingParams(**{"temperature": 0, "max_tokens": 12} | fields)
        *_, pieces = await answer(engine.generate(prompt, params))
        await settle(engine)
        assert_idle(engine)
        await engine.close()
        return pieces

    return asyncio.run(asyncio.wait_for(work(), 20))


# ---- named ids


def test_named_ids_stand_behind_the_best_and_have_no_rank():
    """Order: the chosen token, the best two, then the named ids that are not among them."""
    record = TokenLogprobs(99, -3.0, 3, (97, 98), (-0.5, -1.0), (-9.0, -1.0, -3.0))

    entry = named(record, TokenTexts(tokenizer()), asked=(65, 98, 99))

    assert list(entry.items()) == [
        (99, Logprob(-3.0, 3, "c")), (97, Logprob(-0.5, 1, "a")), (98, Logprob(-1.0, 2, "b")),
        (65, Logprob(-9.0, None, "A")),
    ]  # fmt: skip


def test_named_ids_are_reported_for_every_token():
    """The rule gives four letters; 33 has -20. Oracle: the rule itself on the tokens so far."""
    with make() as llm:
        params = SamplingParams(temperature=0, max_tokens=5, logprobs=0, logprob_token_ids=[100, 33])
        result = quiet(llm, [97, 98, 99], params)[0].outputs[0]

    known = [97, 98, 99]
    for token, entry in zip(result.token_ids, result.logprobs, strict=True):
        scores = letters(known, 3)
        assert {id: one.logprob for id, one in entry.items()} == {id: scores.get(id, -20.0) for id in {token, 100, 33}}
        known.append(token)


def test_ids_outside_the_vocabulary_are_refused():
    for fields, param in (
        ({"logprobs": 0, "logprob_token_ids": [320]}, "logprob_token_ids"),
        ({"prompt_logprob_token_ids": [[320], [1]]}, "prompt_logprob_token_ids"),
    ):
        with pytest.raises(RequestError) as caught:
            pieces_of(prompt=[97, 98, 99], **fields)
        assert caught.value.param == param


# ---- scored prompts


@pytest.mark.parametrize("budget", [4, 2048])
def test_prompt_rows_are_scored_from_their_start(budget):
    """Prompt of 10, start 6: rows 0-2 belong to the tokens at 7, 8 and 9; short rows end in -inf."""
    prompt, ids = list(range(97, 107)), [[97, 33], [98], [-1, 99]]
    with make(max_num_batched_tokens=budget, max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0, prompt_logprob_token_ids=ids, prompt_logprob_start=6)
        result = quiet(llm, prompt, params)[0]

    def score(row, token):
        return letters(prompt[: 7 + row], 1).get(token, -20.0)

    right = [[score(0, 97), score(0, 33)], [score(1, 98), -math.inf], [-math.inf, score(2, 99)]]
    assert result.prompt_token_id_logprobs.dtype == np.float32
    assert result.prompt_token_id_logprobs == pytest.approx(np.array(right, dtype=np.float32))
    assert result.prompt_logprobs is None


def test_one_list_of_ids_serves_all_rows():
    with make() as llm:
        result = quiet(llm, [97, 98, 99], SamplingParams(prompt_logprob_token_ids=[97, 98], prompt_logprobs=1))[0]

    assert result.prompt_token_id_logprobs.shape == (2, 2)
    assert [len(entry or ()) for entry in result.prompt_logprobs] == [0, 2, 2]


def test_a_scored_prompt_is_not_read_from_the_cache():
    """The same prompt of 40 twice, then scored: all 39 rows are there."""
    prompt = [97 + i % 10 for i in range(40)]
    with make() as llm:
        for _ in range(2):
            quiet(llm, prompt)
        result = quiet(llm, prompt, SamplingParams(max_tokens=1, prompt_logprob_token_ids=[97]))[0]

    assert result.prompt_token_id_logprobs.shape == (39, 1) and result.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprob_token_ids": [[1]]}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": [[1]] * 3}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": [1], "prompt_logprob_start": 2}, "prompt_logprob_start"),
        ({"prompt_logprob_token_ids": [1] * 21}, "prompt_logprob_token_ids"),
    ],
)
def test_rows_that_do_not_fit_the_prompt(fields, param):
    """A prompt of 3 from position 0 has 2 rows; --max-logprobs 20 bounds a row."""
    with pytest.raises(RequestError) as caught:
        pieces_of(prompt=[97, 98, 99], **fields)

    assert caught.value.param == param


# ---- flat logprobs


def test_flat_logprobs_read_like_the_dicts():
    fields = {"temperature": 0, "max_tokens": 6, "logprobs": 3, "prompt_logprobs": 2}
    with make() as llm:
        plain = quiet(llm, "abcd", SamplingParams(**fields))[0]
        flat = quiet(llm, "abcd", SamplingParams(**fields, flat_logprobs=True))[0]

    found, right = flat.outputs[0].logprobs, plain.outputs[0].logprobs
    assert isinstance(found, FlatLogprobs) and isinstance(right, list)
    assert list(found) == right and len(found) == 6
    assert found[-1] == right[-1] and list(found[1:4:2]) == right[1:4:2]
    assert flat.outputs[0].cumulative_logprob == plain.outputs[0].cumulative_logprob
    assert isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert [entry or None for entry in flat.prompt_logprobs] == plain.prompt_logprobs
    with pytest.raises(IndexError):
        found[6]


def test_flat_logprobs_hold_numbers_only():
    """Two positions of 2 and 1 entries, then another container behind them."""
    flat = FlatLogprobs.of([{1: Logprob(-0.5, 1, "a"), 2: Logprob(-1.0, 2, "b")}, {3: Logprob(-2.0)}])
    flat.extend(FlatLogprobs.of([None, {4: Logprob(-3.0, 7)}]))

    assert (flat.start_indices, flat.end_indices) == ([0, 2, 3, 3], [2, 3, 3, 4])
    assert (flat.token_ids, flat.logprobs, flat.ranks) == ([1, 2, 3, 4], [-0.5, -1.0, -2.0, -3.0], [1, 2, None, 7])
    assert flat[2] == {} and flat[3] == {4: Logprob(-3.0, 7)}


# ---- portions


def test_what_each_kind_yields():
    """12 tokens: pieces that add up; prefixes that grow; one whole answer. All end in the same."""
    delta, growing = pieces_of(logprobs=1), pieces_of(logprobs=1, output_kind=CUMULATIVE)
    (whole,) = pieces_of(logprobs=1, output_kind=FINAL_ONLY)

    assert len(delta) > 1 and len(growing) > 1 and len(pieces_of(output_kind=DELTA)) > 1
    assert "".join(piece.text for piece in delta) == whole.text == growing[-1].text
    assert sum((piece.token_ids for piece in delta), ()) == whole.token_ids == growing[-1].token_ids
    assert len(whole.token_ids) == len(whole.logprobs) == len(growing[-1].logprobs) == 12
    for before, after in itertools.pairwise(growing):
        assert after.text.startswith(before.text) and after.token_ids[: len(before.token_ids)] == before.token_ids
    assert [piece.finished for piece in growing] == [False] * (len(growing) - 1) + [True]
    assert whole.finish_reason is FinishReason.LENGTH and whole.usage.completion_tokens == 12


def test_kinds_of_several_answers():
    """n=3: FINAL_ONLY gives three outputs, CUMULATIVE keeps the answers apart."""
    fields = {"temperature": 1.0, "seed": 5, "n": 3}
    finals = sorted(pieces_of(**fields, output_kind=FINAL_ONLY), key=lambda piece: piece.index)
    last = {piece.index: piece for piece in pieces_of(**fields, output_kind=CUMULATIVE)}

    assert [piece.index for piece in finals] == [0, 1, 2]
    assert [piece.token_ids for piece in finals] == [last[index].token_ids for index in range(3)]


def test_llm_gives_whole_answers_whatever_is_asked():
    with make() as llm:
        texts = {
            quiet(llm, "x", SamplingParams(temperature=0, max_tokens=8, output_kind=kind))[0].outputs[0].text
            for kind in (None, *RequestOutputKind)
        }

    assert len(texts) == 1 and len(texts.pop()) == 8


@pytest.mark.parametrize(
    ("server", "asked", "sizes"),
    [(1, 5, [1, 5, 5, 1]), (5, 2, [1, 5, 5, 1]), (5, 6, [1, 6, 5]), (1, None, None), (4, None, [1, 4, 4, 3])],
)
def test_the_interval_is_the_larger_of_the_servers_and_the_requests(server, asked, sizes):
    pieces = pieces_of(stream_interval=asked, options={"stream_interval": server})
    found = [len(piece.token_ids) for piece in pieces]

    assert sum(found) == 12
    assert sizes is None or found == sizes


# ---- ends


def test_a_repetition_ends_the_answer_with_all_of_its_text():
    detection = {"max_pattern_size": 2, "min_pattern_size": 2, "min_count": 3}
    (whole,) = pieces_of(
        script(97, *[98, 99] * 9), repetition_detection=detection, output_kind=FINAL_ONLY, max_tokens=40
    )

    assert (whole.text, whole.finish_reason, whole.stop_reason) == (
        "abcbcbc", FinishReason.REPETITION, "repetition_detected",
    )  # fmt: skip


def test_a_stop_string_that_ends_after_min_tokens_counts_from_its_beginning():
    """min_tokens 2: `BC` is complete with token 3 and cuts at B; `AB` was complete with token 2 and never counts."""
    fields = {"min_tokens": 2, "output_kind": FINAL_ONLY}
    (cut,) = pieces_of(script(65, 66, 67, 68), stop=["AB", "BC"], **fields)
    (free,) = pieces_of(script(65, 66, 67, 68), stop=["AB", "B"], **fields)

    assert (cut.text, cut.stop_reason, len(cut.token_ids)) == ("A", "BC", 3)
    assert (free.text, free.stop_reason, free.token_ids[-1]) == ("ABCD", None, EOS)


def test_the_operators_limit_for_an_answer_is_an_upper_bound():
    """max_new_tokens 3 set by path or override: 12 and None become 3, 2 stays."""
    for asked, given in ((12, 3), (None, 3), (2, 2)):
        (whole,) = pieces_of(parts={"max_new_tokens": 3}, max_tokens=asked, output_kind=FINAL_ONLY)
        assert (len(whole.token_ids), whole.finish_reason) == (given, FinishReason.LENGTH)
