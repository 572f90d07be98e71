"""C01: a token is not a character. Text is cut at code points, never at tokens and never at grapheme clusters."""

import pytest

from tests.scripted import ScriptModel

from .harness import CHAT, HI, TEXT, serving

pytestmark = pytest.mark.anyio
PEPPER = [97, 240, 159, 140, 182, 195, 169, 46]  # a, four bytes, two bytes, a full stop
BODY = {"model": "tiny", "prompt": "x", "temperature": 0, "max_tokens": 20}


@pytest.mark.parametrize(("path", "body"), [(TEXT, BODY), (CHAT, {**HI, "temperature": 0, "max_tokens": 20})])
async def test_characters_are_never_halved(tok, path, body):
    """(a): deltas join to the text, and none holds U+FFFD."""
    async with serving(ScriptModel(PEPPER), tok) as server:
        whole, stream = await server.both(path, body)

    assert whole.text == "a🌶é."
    assert not any("\ufffd" in delta for delta in stream.deltas[0])
    assert [delta for delta in stream.deltas[0] if delta] == ["a", "🌶", "é", "."]


async def test_a_limit_inside_a_character(tok):
    """(b): two of four bytes are one U+FFFD, as in a full decode, in both modes."""
    async with serving(ScriptModel(PEPPER), tok) as server:
        whole, _ = await server.both(TEXT, {**BODY, "max_tokens": 3})

    assert (whole.text, whole.reason) == ("a\ufffd", "length")


async def test_a_combining_accent_is_not_waited_for(tok):
    """(c): the e goes out with its own token, the accent follows."""
    async with serving(ScriptModel([101, 204, 129]), tok) as server:
        whole, stream = await server.both(TEXT, BODY)

    assert whole.text == "e\u0301"
    assert [delta for delta in stream.deltas[0] if delta] == ["e", "\u0301"]


async def test_an_impossible_byte_does_not_block_what_follows(tok):
    """(d): equal to the full decode."""
    async with serving(ScriptModel([97, 255, 98]), tok) as server:
        whole, _ = await server.both(TEXT, BODY)
        assert whole.text == "a\ufffdb" == server.engine.tokenizer.decode([97, 255, 98])


@pytest.mark.parametrize("limit", [20, 60])
async def test_nothing_is_held_back_for_ever(tok, limit):
    """(e): 50 impossible bytes all come, none later than four tokens after its own: what is kept is bounded."""
    script = [97] + 50 * [255]
    async with serving(ScriptModel(script), tok) as server:
        body = {**BODY, "max_tokens": limit, "return_token_ids": True}
        whole, stream = await server.both(TEXT, body)
        assert whole.text == server.engine.tokenizer.decode(script[:limit])

    made = shown = 0
    for choice in (choice for chunk in stream.chunks for choice in chunk["choices"]):
        made += len([token for token in choice["token_ids"] if token < 256])
        shown += len(choice["text"])
        assert made - shown <= 4


@pytest.mark.parametrize(
    ("script", "text"), [([], ""), ([97], "a"), ([159, 140, 182], "🌶"), ([159, 97], "a"), ([255], "\ufffd")]
)
async def test_a_prompt_that_ends_inside_a_character(tok, script, text):
    """The answer may complete it; the prompt's own U+FFFD does not come a second time, least of all without a token."""
    async with serving(ScriptModel(script), tok) as server:
        body = {**BODY, "prompt": [120, 240]}
        assert await server.text(body) == text
        empty, _ = await server.both(TEXT, {**body, "max_tokens": 0})
        assert (empty.text, empty.usage["completion_tokens"]) == ("", 0)
