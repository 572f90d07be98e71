"""C15: text, texts, ids, lists of ids; each prompt counted once, each choice at its place; and what is no prompt."""

import pytest

from tests.scripted import FlatModel

from .harness import TEXT, serving, write_tokenizer

pytestmark = pytest.mark.anyio
BODY = {"model": "tiny", "n": 2, "seed": 1}
FORMS = (("a", 2, 1), (["a", "bb"], 4, 3), ([97], 2, 1), ([[97], [98, 98]], 4, 3))


async def test_choices_and_counts(tok):
    """2, 4, 2, 4 choices in order, 1, 3, 1, 3 prompt tokens; ids give the answers of texts, alone those of a batch."""
    async with serving(FlatModel(), tok) as server:
        answers = []
        for prompt, choices, tokens in FORMS:
            whole, stream = await server.both(TEXT, {**BODY, "prompt": prompt})
            assert [choice["index"] for choice in whole.choices] == list(range(choices)) == sorted(stream.deltas)
            assert whole.counts == (tokens, 16 * choices, tokens + 16 * choices)
            answers.append(whole.texts)
        reversed_batch, _ = await server.both(TEXT, {**BODY, "prompt": ["bb", "a"]})

    one, two, one_of_ids, two_of_ids = answers
    assert one == one_of_ids and two == two_of_ids
    assert two[:2] == one and reversed_batch.texts == two[2:] + two[:2]
    assert one[0] != one[1]


async def test_ids_get_no_bos(tmp_path):
    """With a tokenizer that puts one in front of texts."""
    async with serving(FlatModel(), write_tokenizer(tmp_path, add_bos=True)) as server:
        counts = [
            (await server.both(TEXT, {**BODY, "prompt": prompt}))[0].usage["prompt_tokens"] for prompt, *_ in FORMS
        ]

    assert counts == [2, 5, 1, 3]


@pytest.mark.parametrize("prompt", [["a", [97]], [], [[]], "", ["a", ""], [[97], []], [97, "a"]])
async def test_what_is_no_prompt(tok, prompt):
    """400 for the whole request."""
    async with serving(FlatModel(), tok) as server:
        assert (await server.refused(TEXT, {**BODY, "prompt": prompt}))["param"] == "prompt"


async def test_the_empty_text_with_an_automatic_bos(tmp_path):
    """It is one token then, and served."""
    async with serving(FlatModel(), write_tokenizer(tmp_path, add_bos=True)) as server:
        one, _ = await server.both(TEXT, {**BODY, "prompt": ""})
        two, _ = await server.both(TEXT, {**BODY, "prompt": ["a", ""]})

    assert (one.usage["prompt_tokens"], len(one.choices)) == (1, 2)
    assert (two.usage["prompt_tokens"], len(two.choices)) == (3, 4)
