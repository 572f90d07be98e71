"""Structured answers of a model that has no end token: they end with the last token that their form allows."""

import json

import pytest

from .harness import CHAT, HI, TEXT, serving, write_tiny, write_tokenizer

pytestmark = pytest.mark.anyio
FORMS = [
    ({"choice": ["abc"]}, "abc"),
    ({"regex": "[a]{2}"}, "aa"),
    ({"json": {"const": "x"}}, '"x"'),
    ({"regex": "b\\x00c\\x00"}, "b\x00c\x00"),
]


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """TINY, whose files name no end token."""
    folder = write_tiny(tmp_path_factory.mktemp("endless"))
    return write_tokenizer(folder, end=None, config_ends=None, generation_ends=None)


async def test_the_last_token_of_a_form_is_part_of_its_text(endless):
    """It was taken for an end token and left out: "ab" of the choice "abc", `"x` of the JSON text "x". Token 0 was the
    library's end token, so a form that needs it ended before it. With room for just the form it ended by length."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"n": {"enum": ["Rome", "Oslo"]}}, "required": ["n"]}}}  # fmt: skip
    async with serving(endless) as server:
        assert server.engine.machine.grammars.words.no_end == 266
        for form, text in FORMS:
            for most in (40, len(text)):
                asked = {"max_tokens": most, "structured_outputs": form}
                whole, _ = await server.both(CHAT, {**HI, **asked})
                assert (whole.texts, whole.reasons) == ([text], ["stop"])
                whole, _ = await server.both(TEXT, {"prompt": "a", **asked, "stop": ["never"]})
                assert (whole.texts, whole.reasons) == ([text], ["stop"])
                assert whole.body["usage"]["completion_tokens"] == len(text)
        stopped = await server.ask(
            TEXT, {"prompt": "a", "max_tokens": 9, "structured_outputs": FORMS[0][0], "stop_token_ids": [98]}
        )
        assert (stopped.texts, stopped.reasons) == (["a"], ["stop"]), "what the request calls an end is one"
        named = {"type": "function", "function": {"name": "f"}}
        called = await server.ask(CHAT, {**HI, "max_tokens": 90, "tools": [tool], "tool_choice": named})
        (call,) = called.choices[0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["n"] in ("Rome", "Oslo")
        empty = await server.refused(TEXT, {"prompt": "a", "structured_outputs": {"regex": "x{0}"}})
        assert "only an empty text" in empty["message"]


async def test_beams_end_with_the_last_token_of_a_form(endless):
    """A search wrote token 0 behind a complete form, until its length: 9 tokens for the choice "ab"."""
    beams = {"prompt": "a", "use_beam_search": True, "n": 2}
    async with serving(endless) as server:
        for most in (2, 9):
            found = await server.ask(
                TEXT, {**beams, "max_tokens": most, "structured_outputs": {"choice": ["cd", "ab"]}}
            )
            assert (set(found.texts), found.reasons) == ({"ab", "cd"}, ["stop", "stop"])
        for form, text in FORMS:
            found = await server.ask(TEXT, {**beams, "n": 1, "max_tokens": 40, "structured_outputs": form})
            assert (found.texts, found.reasons) == ([text], ["stop"])
        open_end = await server.ask(TEXT, {**beams, "max_tokens": 3, "structured_outputs": {"regex": "(a|b)+"}})
        assert set(open_end.reasons) == {"length"} and {len(text) for text in open_end.texts} == {3}


@pytest.mark.parametrize("ends", [True, False])
async def test_a_stop_token_before_min_tokens_is_one_of_the_form(tiny, endless, ends):
    """The choice "abc" with the stop token "c" and min_tokens 5 was "abccc": the mask let it through as the only way
    on, the form did not take it and asked for it again. A stop string, too, ends nothing before min_tokens; behind
    them both end the answer in the middle of its form, as asked."""
    cases = [
        ({"choice": ["abc"]}, 99, "abc"),
        ({"choice": ["abc"]}, 98, "abc"),
        ({"regex": "a(b|c){2}"}, 98, "acc"),
        ({"regex": "[b]{3}"}, 98, "bbb"),
        ({"json": {"const": "x"}}, 34, '"x"'),
        ({"json": {"enum": [11]}}, 49, "11"),
    ]
    async with serving(tiny if ends else endless) as server:
        for form, stop, text in cases:
            asked = {"max_tokens": 12, "min_tokens": 6, "stop_token_ids": [stop], "structured_outputs": form}
            for body in ({"n": 1}, {"n": 3, "temperature": 1, "seed": 1}, {"stop": [text[-1]]}, {"ignore_eos": True}):
                for path, more in ((TEXT, {"prompt": "a"}), (CHAT, HI)):
                    whole, _ = await server.both(path, {**more, **asked, **body})
                    assert set(whole.texts) == {text} and set(whole.reasons) == {"stop"}, (form, body)
                    assert {choice["stop_reason"] for choice in whole.choices} == {None}
                    assert whole.usage["completion_tokens"] == (len(text) + ends) * len(whole.texts)
        held = {"prompt": "a", "max_tokens": 12, "structured_outputs": {"choice": ["abc"]}}
        for least, text in ((0, "ab"), (2, "ab"), (3, "abc")):
            for stop in ({"stop_token_ids": [99]}, {"stop": ["c"]}):
                whole, _ = await server.both(TEXT, {**held, "min_tokens": least, **stop})
                assert (whole.texts, whole.reasons) == ([text], ["stop"]), (least, stop)
        beams = await server.ask(TEXT, {**held, "use_beam_search": True, "n": 2, "stop": [], "stop_token_ids": []})
        assert beams.texts[0] == "abc"
        refused = await server.ask(TEXT, {**held, "use_beam_search": True, "stop_token_ids": [99]})
        assert refused.status == 400 and refused.error["param"] == "stop_token_ids"
