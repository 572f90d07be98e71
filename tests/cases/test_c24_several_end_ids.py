"""C24: chat models end turns with another id than the base end token; every file that names one is believed."""

import pytest

from tests.scripted import EOS, EOT, ScriptModel

from .harness import TEXT, serving, write_tokenizer

pytestmark = pytest.mark.anyio
BODY = {"model": "tiny", "prompt": "x", "temperature": 0}
SCRIPT = [97, EOT, 98]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """generation_config.json names 260 and 261; the tokenizer 260."""
    return write_tokenizer(tmp_path_factory.mktemp("ends"), generation_ends=[EOS, EOT])


async def test_the_other_end_id(folder):
    """(a), (c): `a`, no <|eot|> in the text; a user's stop strings add to the end ids."""
    async with serving(ScriptModel(SCRIPT), folder) as server:
        for extra in ({}, {"stop": ["zz"]}):
            whole, stream = await server.both(TEXT, {**BODY, **extra})
            assert (whole.text, whole.reason, whole.counts) == ("a", "stop", (1, 2, 3))
            assert not any("<" in delta for delta in stream.deltas[0])
        shown, _ = await server.both(TEXT, {**BODY, "skip_special_tokens": False})
        assert shown.text == "a"


async def test_end_ids_may_be_ignored(folder):
    """(b): `ab`, three tokens."""
    async with serving(ScriptModel(SCRIPT), folder) as server:
        whole, _ = await server.both(TEXT, {**BODY, "ignore_eos": True, "max_tokens": 3})

    assert (whole.text, whole.reason, whole.usage["completion_tokens"]) == ("ab", "length", 3)


async def test_stop_token_ids(folder):
    """(d): at once, with itself as the stop reason."""
    async with serving(ScriptModel(SCRIPT), folder) as server:
        whole, stream = await server.both(TEXT, {**BODY, "stop_token_ids": [97]})

    assert (whole.text, whole.reason, whole.choices[0]["stop_reason"]) == ("", "stop", 97)
    assert whole.usage["completion_tokens"] == 1
    assert stream.chunks[-1]["choices"][0]["stop_reason"] == 97


@pytest.mark.parametrize("script", [[97, EOT, EOT, 98], [EOT, EOT, 98, 98], [EOS, EOT, EOS, 98]])
async def test_min_tokens_masks_all_end_ids(folder, script):
    """(e): none of them, nor a stop token id, among the first three tokens; the fourth may end it."""
    async with serving(ScriptModel(script), folder) as server:
        body = {**BODY, "min_tokens": 3, "stop_token_ids": [99], "return_token_ids": True}
        whole, _ = await server.both(TEXT, body)
        stopping, _ = await server.both(TEXT, {**body, "stop_token_ids": [98]})

    for answer in (whole, stopping):
        ids = answer.choices[0]["token_ids"]
        assert not {EOS, EOT, 99} & set(ids[:3])
        assert len(ids) > 3 and answer.reason == "stop"
    assert 98 not in stopping.choices[0]["token_ids"][:3]


@pytest.mark.parametrize("token", [EOS, EOT])
async def test_the_union_ends(tmp_path, token):
    """(f): the config says 260 only, the tokenizer's end token is 261: both end."""
    folder = write_tokenizer(tmp_path, end="<|eot|>", config_ends=EOS, generation_ends=None)
    async with serving(ScriptModel([97, token, 98]), folder) as server:
        whole, _ = await server.both(TEXT, BODY)

    assert (whole.text, whole.reason, whole.usage["completion_tokens"]) == ("a", "stop", 2)
