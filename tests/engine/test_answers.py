"""answer.py, streams.py, logprobs.py: what a reader gets, at whatever pace it reads."""

import asyncio

import pytest

from tinyserve.engine.answer import Answer
from tinyserve.engine.logprobs import TokenTexts, named
from tinyserve.request import FinishReason, Request, SamplingParams
from tinyserve.step import TokenLogprobs

from .toy import EOS, EOT, ToyRunner, answer, assert_idle, letters, make_parts, script, settle, start, tokenizer

PEPPER = (97, 240, 159, 140, 182, 195, 169, 46)  # a, a pepper in four bytes, e acute in two, a full stop
STOPPING = (65, 66, 67, 257, 71, 72, 73, 74, 75)  # ABC DEF G H I J K
END_IDS = {"eos_ids": {EOS}, "extra_eos_ids": {EOT}}


def ask(rule, prompt="x", *, parts=None, abort_after=None, **fields):
    """The answer to one call: (text, ids, last output, all outputs). The engine must be idle afterwards."""

    async def work():
        engine = await start(rule, parts=make_parts(**(parts or {})))
        params = SamplingParams(**{"temperature": 0, "max_tokens": 20} | fields)
        texts, ids, last, pieces = await answer(engine.generate(prompt, params))
        await settle(engine)
        assert_idle(engine)
        await engine.close()
        return texts[0], ids[0], last[0], pieces

    return asyncio.run(asyncio.wait_for(work(), 20))


def test_characters_split_over_tokens_come_whole():
    """C01 (a): eight tokens, four characters; no piece holds U+FFFD."""
    text, ids, last, pieces = ask(script(*PEPPER))

    assert (text, ids, last.finish_reason) == ("a\U0001f336\u00e9.", (*PEPPER, EOS), FinishReason.STOP)
    assert all("\ufffd" not in piece.text for piece in pieces)


def test_a_character_cut_by_the_limit_ends_with_a_replacement():
    """C01 (b): max_tokens 3 ends inside the pepper: `a` and U+FFFD, as a full decode gives."""
    text, ids, last, _ = ask(script(*PEPPER), max_tokens=3)

    assert (text, len(ids), last.finish_reason) == ("a\ufffd", 3, FinishReason.LENGTH)


def test_bytes_that_are_no_character_do_not_block_what_follows():
    """C01 (d), (e): 0xff alone; fifty of them are all out at the end."""
    assert ask(script(97, 255, 98))[0] == "a\ufffdb"
    assert ask(script(97, *[255] * 50), max_tokens=60)[0] == "a" + "\ufffd" * 50


def test_a_stop_string_over_several_tokens():
    """C02 (a): ABC, 8 completion tokens (the ones up to J), and no piece ever holds a D."""
    text, ids, last, pieces = ask(script(*STOPPING), stop=["DEFGHIJ"])

    assert (text, last.finish_reason, last.stop_reason) == ("ABC", FinishReason.STOP, "DEFGHIJ")
    assert (last.usage.completion_tokens, ids) == (8, STOPPING[:8])
    assert not any("D" in piece.text for piece in pieces)


def test_a_stop_string_kept_in_the_output():
    assert ask(script(*STOPPING), stop=["DEFGHIJ"], include_stop_str_in_output=True)[0] == "ABCDEFGHIJ"


def test_a_stop_string_that_does_not_come_is_given_out():
    """C02 (c): X instead of J: all eleven characters."""
    text, _, last, _ = ask(script(65, 66, 67, 257, 71, 72, 73, 88, 75), stop=["DEFGHIJ"])

    assert (text, last.stop_reason) == ("ABCDEFGHIXK", None)


def test_a_stop_string_inside_a_token():
    assert ask(script(*STOPPING), stop="E")[0] == "ABCD"
    assert ask(script(*PEPPER), stop=["\U0001f336"])[0] == "a"


def test_stop_strings_wait_for_min_tokens():
    """`A` is token 1 and token 4; with min_tokens 2 only the second one stops."""
    text, ids, last, _ = ask(script(65, 66, 67, 65, 68), stop=["A"], min_tokens=2)

    assert (text, len(ids), last.stop_reason) == ("ABC", 4, "A")


def test_a_stop_string_at_the_very_limit_is_a_stop():
    """max_tokens 2 ends the answer in the same step in which the stop string completes: STOP wins."""
    text, _, last, _ = ask(script(65, 66, 67), stop=["AB"], max_tokens=2)

    assert (text, last.finish_reason, last.stop_reason) == ("", FinishReason.STOP, "AB")


def test_several_end_ids():
    """C24 (a), (b), (d): the extra end id stops with itself as the reason; ignored, the text hides it."""
    text, _, last, _ = ask(script(97, EOT, 98), parts=END_IDS)
    assert (text, last.finish_reason, last.stop_reason) == ("a", FinishReason.STOP, EOT)

    text, ids, last, _ = ask(script(97, EOT, 98), parts=END_IDS, ignore_eos=True, max_tokens=3)
    assert (text, ids, last.finish_reason) == ("ab", (97, EOT, 98), FinishReason.LENGTH)

    text, _, last, _ = ask(script(97, EOT, 98), stop_token_ids=[97])
    assert (text, last.stop_reason) == ("", 97)


def test_the_end_token_is_shown_only_when_asked():
    shown = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    assert ask(script(97))[0] == "a"
    assert ask(script(97), include_stop_str_in_output=True)[0] == "a"
    assert ask(script(97), **shown)[0] == "a<|eos|>"


def test_zero_tokens_give_an_empty_answer_with_prompt_logprobs():
    """C03 (b): usage 2 / 0, reason length, two prompt entries of which the first is None."""
    text, ids, last, pieces = ask(letters, "ab", max_tokens=0, prompt_logprobs=1)

    assert (text, ids, last.finish_reason) == ("", (), FinishReason.LENGTH)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 0)
    entries = pieces[0].prompt_logprobs
    assert entries[0] is None and next(iter(entries[1])) == ord("b") and len(entries) == 2
    assert entries[1][ord("b")].decoded_token == "b"


def test_prompt_logprobs_come_once_and_over_chunks():
    async def work():
        engine = await start(letters, max_num_batched_tokens=8, max_num_seqs=4)
        params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2)
        *_, pieces = await answer(engine.generate("A PROMPT OF THIRTY-ONE CHARACTERS", params))
        await engine.close()
        return pieces

    pieces = asyncio.run(work())
    assert [piece.prompt_logprobs is not None for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [len(entry or ()) for entry in pieces[0].prompt_logprobs] == [0] + [3] * 32


def test_logprobs_have_the_sampled_token_first():
    """Three alternatives and the sampled one among them: 3 entries; logprobs=0: the sampled one alone."""
    _, ids, _, pieces = ask(letters, logprobs=3, max_tokens=4)
    entries = [entry for piece in pieces for entry in piece.logprobs]
    assert [next(iter(entry)) for entry in entries] == list(ids)
    assert all(len(entry) == 3 and entry[token].rank == 1 for entry, token in zip(entries, ids, strict=True))

    assert all(len(entry) == 1 for piece in ask(letters, logprobs=0)[3] for entry in piece.logprobs)


def test_logprob_texts_of_a_split_character():
    """The pepper's first three bytes read as "", the fourth as the pepper; an alternative is read in its place."""
    texts = TokenTexts(tokenizer())

    assert [texts.advance(token) for token in PEPPER[:4]] == ["a", "", "", ""]
    assert [texts.alternative(token) for token in (98, 182, 240, 255)] == ["b", "\U0001f336", "", "\ufffd"]
    assert [texts.advance(token) for token in PEPPER[4:]] == ["\U0001f336", "", "\u00e9", "."]


def test_a_record_without_the_sampled_token_gets_one_more_entry():
    record = TokenLogprobs(99, -9.0, 7, (97, 98), (-0.1, -2.0))

    entry = named(record, TokenTexts(tokenizer()))

    assert [(token, one.rank, one.decoded_token) for token, one in entry.items()] == [
        (99, 7, "c"),
        (97, 1, "a"),
        (98, 2, "b"),
    ]


def test_a_slow_reader_gets_joined_pieces_and_loses_nothing():
    """The reader sleeps while 100 tokens are made: a handful of pieces, with all text, ids and logprobs."""

    async def work():
        engine = await start(letters)
        params = SamplingParams(temperature=0, max_tokens=100, logprobs=1)
        fast = await answer(engine.generate("x", params))
        outputs = engine.generate("x", params)
        pieces = [await anext(outputs)]
        await settle(engine)
        async for output in outputs:
            pieces.append(output)
        await engine.close()
        return fast, pieces

    (texts, ids, last, all_pieces), pieces = asyncio.run(work())

    assert len(all_pieces) > 50 and len(pieces) <= 3
    assert "".join(piece.text for piece in pieces) == texts[0]
    assert tuple(token for piece in pieces for token in piece.token_ids) == ids[0]
    assert sum(len(piece.logprobs) for piece in pieces) == 100
    assert (pieces[-1].finish_reason, pieces[-1].usage) == (last[0].finish_reason, last[0].usage)


def test_stream_interval_groups_tokens():
    """Interval 5 of 12 tokens: the first at once, then 5, 5, and the last."""

    async def work():
        engine = await start(letters, stream_interval=5)
        *_, pieces = await answer(engine.generate("x", SamplingParams(temperature=0, max_tokens=12)))
        await engine.close()
        return [len(piece.token_ids) for piece in pieces]

    assert asyncio.run(work()) == [1, 5, 5, 1]


def test_text_that_cannot_be_made_fails_one_request_only(monkeypatch):
    """The detokenizer of one request raises: that request ends with an error, its neighbour is complete."""
    advance = Answer.advance

    def broken(self, update):
        if self.name == "victim":
            raise ValueError("no such byte")
        return advance(self, update)

    monkeypatch.setattr(Answer, "advance", broken)

    async def work():
        engine = await start(letters)
        calls = [engine.generate("x", SamplingParams(temperature=0), request_id=name) for name in ("victim", "other")]
        found = await asyncio.gather(*map(answer, calls))
        await settle(engine)
        assert_idle(engine)
        await engine.close()
        return found

    (_, _, victim, _), (_, ids, _, _) = asyncio.run(work())
    assert victim[0].finish_reason is FinishReason.ERROR and "no such byte" in str(victim[0].error)
    assert len(ids[0]) == 16


def test_abort_gives_the_reader_what_was_held_back():
    """`DEF` may begin a stop string; when the request is aborted it comes out with the ABORT output."""
    request = Request(id="r", prompt_ids=(120,), sampling=SamplingParams(stop=["DEFG"]))
    piece = Answer(request, "r", 0, tokenizer())
    piece._stops.push("DEF")

    last = piece.ended(FinishReason.ABORT)

    assert (last.text, last.finish_reason) == ("DEF", FinishReason.ABORT)


def test_timing_tells_first_and_last_token():
    """Steps of 5 ms, 6 tokens: the first after at least 5 ms, the last at least 20 ms later."""

    async def work():
        engine = await start(letters, runner=ToyRunner(letters, seconds=0.005))
        _, _, last, _ = await answer(engine.generate("x", SamplingParams(temperature=0, max_tokens=6)))
        await engine.close()
        return last[0].metrics

    timing = asyncio.run(work())
    assert timing.num_generation_tokens == 6
    assert timing.first_token_latency >= 0.005
    assert timing.last_token_ts - timing.first_token_ts >= 0.02


@pytest.mark.parametrize("detokenize", [True, False])
def test_without_detokenizing_there_are_ids_only(detokenize):
    text, ids, _, _ = ask(script(97, 98), detokenize=detokenize)

    assert (text, ids) == ("ab" if detokenize else "", (97, 98, EOS))
