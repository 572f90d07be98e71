"""C09: JSON schema: recursion, enum, pattern, closed objects."""

import json

import jsonschema
import pytest

from tests.scripted import ScriptModel

from .harness import CHAT, HI, serving

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["k", "kids"],
    "properties": {
        "k": {"enum": ["α", 'b"c', 7, None]},
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "kids": {"type": "array", "maxItems": 2, "items": {"$ref": "#"}},
    },
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "tree", "schema": SCHEMA, "strict": True}}


@pytest.mark.anyio
async def test_answers_of_a_random_model_satisfy_the_schema(tiny):
    """20 seeds: what ends with stop validates, at least 3 do; a cut one is a beginning that can be continued."""
    async with serving(tiny) as server:
        ended = 0
        for seed in range(20):
            body = {**HI, "response_format": FORMAT, "temperature": 1, "seed": seed, "max_tokens": 120}
            reply = await server.ask(CHAT, body)
            if reply.reason == "stop":
                ended += 1
                jsonschema.validate(json.loads(reply.text), SCHEMA)
            else:
                assert accepts(server, reply.text, whole=False), reply.text
        assert ended >= 3


def accepts(server, text, *, whole=True):
    """Whether the compiled grammar takes a text."""
    from tinyserve.structured import StructuredOutputsParams

    grammars, tokenizer = server.engine.machine.grammars, server.engine.tokenizer
    match = grammars.compiled(StructuredOutputsParams(json=SCHEMA).constraint()).result(10).deep_copy()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return match.try_consume_tokens(ids) == len(ids) and (not whole or match.is_accepting())


@pytest.mark.anyio
async def test_fixed_strings(tok):
    good = [
        '{"k":"α","kids":[]}',
        '{"k":7,"id":"AB-123","kids":[{"k":null,"kids":[]}]}',
        '{"k":"b\\"c","kids":[{"k":7,"kids":[]},{"k":7,"kids":[]}]}',
    ]
    bad = [
        '{"k":"x","kids":[]}', '{"k":"7","kids":[]}', '{"k":7}', '{"k":7,"kids":[],"z":1}',
        '{"k":7,"id":"AB-12","kids":[]}', '{"k":7,"kids":[{"k":7,"kids":[]},{"k":7,"kids":[]},{"k":7,"kids":[]}]}',
    ]  # fmt: skip
    async with serving(ScriptModel(), tok) as server:
        assert [accepts(server, text) for text in good] == [True] * len(good)
        assert [accepts(server, text) for text in bad] == [False] * len(bad)
