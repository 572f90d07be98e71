"""C11: JSON that is not ASCII."""

import json

import pytest

from tests.scripted import ScriptModel

from .harness import CHAT, HI, serving, write_tokenizer
from .test_c05_streamed_arguments import ASK, both, calls_of, script

CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "京都", "e": "🌶"}}\n</tool_call>'


@pytest.mark.anyio
async def test_arguments_are_sent_once(tok):
    """a: the join parses to the same object, not once escaped and once raw."""
    assert len(script(CALL).script) == 62
    whole, stream = await both(CALL, tok)
    calls, _, _ = calls_of(stream)
    assert json.loads(calls[0]["arguments"]) == {"city": "京都", "e": "🌶"}
    assert whole.choices[0]["message"]["tool_calls"][0]["function"]["arguments"] == calls[0]["arguments"]


@pytest.mark.anyio
async def test_a_mask_allows_the_bytes_of_a_letter(tok):
    """b: {"enum": ["é"]} gives "é", byte 195 and then 169."""
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["é"]}}}}
    async with serving(ScriptModel(), tok) as server:
        whole, _ = await server.both(CHAT, {**HI, **body, "temperature": 0, "return_token_ids": True})
        assert whole.text == '"é"' and whole.choices[0]["token_ids"][:4] == [34, 195, 169, 34]


@pytest.mark.anyio
async def test_odd_letters_in_a_message(tok):
    """c: half of a pair is a 400; d: NUL does no harm."""
    async with serving(ScriptModel(), tok) as server:
        half = '{"model": "tiny", "messages": [{"role": "user", "content": "\\ud83c"}]}'
        assert (await server.ask(CHAT, content=half)).status == 400
        assert (await server.ask(CHAT, {**HI, "messages": [{"role": "user", "content": "a\0b"}]})).status == 200


@pytest.mark.anyio
async def test_a_call_in_the_history_is_shown_as_it_was(tmp_path):
    """e: the template sees 京都, not an escape."""
    template = "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls else m.content }}{% endfor %}"
    folder = write_tokenizer(tmp_path, template=template)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"city": "京都"})}}
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    async with serving(ScriptModel(), folder) as server:
        assert "京都" in await server.prompt_text({**ASK, "messages": history})
