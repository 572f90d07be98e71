"""C23: one BOS, whoever puts it there: the template, the tokenizer, or the text itself."""

import pytest

from tests.scripted import BOS, ScriptModel

from .harness import CHAT, HI, TEXT, serving, write_tokenizer

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """TOK that prepends BOS as Llama tokenizers do, and T0, which writes it too."""
    return write_tokenizer(tmp_path_factory.mktemp("bos"), add_bos=True)


async def test_chat(folder):
    """(a), (f): 20 tokens (21 = doubled), and the tokenize route gives the same ids."""
    async with serving(ScriptModel([97]), folder) as server:
        whole, _ = await server.both(CHAT, {**HI, "return_token_ids": True})
        known = await server.ids(HI)

    ids = [BOS, *b"[user]Hi[assistant]"]
    assert whole.usage["prompt_tokens"] == known["count"] == 20
    assert whole.body["prompt_token_ids"] == known["tokens"] == ids


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"prompt": "x"}, [BOS, 120]),
        ({"prompt": "<|bos|>x"}, [BOS, 120]),
        ({"prompt": "<|bos|>x", "add_special_tokens": False}, [BOS, 120]),
        ({"prompt": "x", "add_special_tokens": False}, [120]),
        ({"prompt": [120]}, [120]),
    ],
    ids=["b", "c", "d", "without", "e"],
)
async def test_completions(folder, fields, ids):
    """(b)-(e): 2, 2, 2 and 1 tokens; the tokenize route agrees."""
    async with serving(ScriptModel([97]), folder) as server:
        whole, _ = await server.both(TEXT, {"model": "tiny", **fields, "return_token_ids": True})
        assert whole.choices[0]["prompt_token_ids"] == ids
        assert whole.usage["prompt_tokens"] == len(ids)
        if isinstance(fields["prompt"], str):
            assert (await server.ids(fields))["tokens"] == ids
