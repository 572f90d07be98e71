"""C02: stop strings are defined on text. Held back is the longest tail that may still begin one, and no more."""

import pytest

from tests.scripted import DEF, ScriptModel

from .harness import TEXT, serving
from .test_c01_split_characters import PEPPER

pytestmark = pytest.mark.anyio
SCRIPT = [65, 66, 67, DEF, 71, 72, 73, 74, 75]
BODY = {"model": "tiny", "prompt": "x", "temperature": 0, "max_tokens": 20}


async def test_a_stop_string_over_several_tokens(tok):
    """(a): 8 completion tokens, no delta with a D, and A leaves at latest with B's step."""
    async with serving(ScriptModel(SCRIPT), tok) as server:
        body = {**BODY, "stop": ["DEFGHIJ"], "return_token_ids": True}
        whole, stream = await server.both(TEXT, body)
        again = await server.stream(TEXT, {**body, "stream_options": {"include_usage": True}})

    assert (whole.text, whole.reason, whole.choices[0]["stop_reason"]) == ("ABC", "stop", "DEFGHIJ")
    assert whole.usage["completion_tokens"] == again.usage["completion_tokens"] == 8
    assert not any("D" in delta for delta in stream.deltas[0])
    shown = ""
    for choice in (choice for chunk in stream.chunks for choice in chunk["choices"]):
        shown += choice["text"]
        assert 66 not in choice["token_ids"] or shown.startswith("A")


async def test_the_stop_string_may_be_shown(tok):
    """(b): the string itself and nothing after it."""
    async with serving(ScriptModel(SCRIPT), tok) as server:
        whole, _ = await server.both(TEXT, {**BODY, "stop": ["DEFGHIJ"], "include_stop_str_in_output": True})

    assert (whole.text, whole.reason, whole.usage["completion_tokens"]) == ("ABCDEFGHIJ", "stop", 8)


async def test_a_stop_string_that_does_not_come(tok):
    """(c): one letter is another: all of the text comes, and the end token ends it."""
    script = [88 if token == 74 else token for token in SCRIPT]
    async with serving(ScriptModel(script), tok) as server:
        whole, _ = await server.both(TEXT, {**BODY, "stop": ["DEFGHIJ"]})

    assert (whole.text, whole.reason, whole.choices[0]["stop_reason"]) == ("ABCDEFGHIXK", "stop", None)


@pytest.mark.parametrize("extra", [{}, {"max_tokens": 5}], ids=["end token", "limit"])
async def test_what_is_held_back_at_the_end_is_not_lost(tok, extra):
    """The answer ends while its tail could still begin the stop string."""
    async with serving(ScriptModel(SCRIPT[:5]), tok) as server:
        whole, _ = await server.both(TEXT, {**BODY, "stop": ["DEFGHIJ"], **extra})

    assert (whole.text, whole.reason) == ("ABCDEFG", "length" if extra else "stop")


async def test_a_stop_string_inside_a_token(tok):
    """(d): what stands before it in the token DEF is kept."""
    async with serving(ScriptModel(SCRIPT), tok) as server:
        whole, _ = await server.both(TEXT, {**BODY, "stop": "E"})

    assert (whole.text, whole.reason) == ("ABCD", "stop")


async def test_an_empty_stop_string(tok):
    """(e)"""
    async with serving(ScriptModel(SCRIPT), tok) as server:
        assert (await server.refused(TEXT, {**BODY, "stop": [""]}))["param"] == "stop"


async def test_a_stop_string_of_four_bytes(tok):
    """(f)"""
    async with serving(ScriptModel(PEPPER), tok) as server:
        whole, stream = await server.both(TEXT, {**BODY, "stop": ["🌶"]})

    assert (whole.text, whole.reason) == ("a", "stop")
    assert not any("\ufffd" in delta for delta in stream.deltas[0])
