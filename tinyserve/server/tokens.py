"""POST /tokenize and /detokenize: what the engine would make of a text or a conversation, without running it.

Before: fields.py, openai_chat.py (how messages are read).  After: app.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from . import answers
from .bodies import DETOKENIZE, TOKENIZE
from .face import EngineFace, Service
from .fields import Fields, read_body
from .logprobs import token_bytes
from .openai_chat import read_messages, read_tools, template_options
from .prompts import check_length, most_tokens
from .schema import facts

AT_ONCE = 1024  # tokens whose texts are written between two turns of everybody else; 1 ms


@facts("Tokens", "Text to token ids", body=TOKENIZE, answer=answers.TOKENS)
async def tokenize(request: Request, service: Service) -> Response:
    """Ids of `prompt`, or of `messages` as the chat route would render them; equal to what those routes use."""
    engine = service.ready()
    options = service.config.server
    fields = await read_body(request, options, TOKENIZE)
    service.model_name(fields.text("model"))
    if fields.given("messages"):
        messages = read_messages(fields)
        ids = await engine.encode_chat(messages, **template_options(fields, service, read_tools(fields, service)))
    else:
        prompt = fields.text("prompt")
        if prompt is None:
            fields.refuse("prompt", "a prompt or messages are needed.")
        special, most = fields.flag("add_special_tokens", True), most_tokens(engine)
        ids = await engine.tokenize(prompt, add_special_tokens=special, limit=most)
        check_length(fields, "prompt", engine, len(ids))
    names = await _written(engine.tokenizer, ids) if fields.flag("return_token_strs") else b"null"
    answer = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": list(ids)}
    return Response(orjson.dumps(answer)[:-1] + b',"token_strs":' + names + b"}", media_type="application/json")


async def _written(tokenizer: Any, ids: Sequence[int]) -> bytes:
    """The texts of tokens as a JSON list. There may be more than anybody would wait for, so others have their turns."""
    pieces = []
    for at in range(0, len(ids), AT_ONCE):
        some = [token_bytes(tokenizer, token).decode("utf-8", "replace") for token in ids[at : at + AT_ONCE]]
        pieces.append(orjson.dumps(some)[1:-1])
        await asyncio.sleep(0)
    return b"[" + b",".join(pieces) + b"]"


@facts("Tokens", "Token ids to text", body=DETOKENIZE, answer=answers.TEXT)
async def detokenize(request: Request, service: Service) -> Response:
    """The text of `tokens`, special tokens included."""
    engine = service.ready()
    options = service.config.server
    fields = await read_body(request, options, DETOKENIZE)
    service.model_name(fields.text("model"))
    text = await asyncio.to_thread(_decoded, engine, fields)
    return Response(orjson.dumps({"prompt": text}), media_type="application/json")


def _decoded(engine: EngineFace, fields: Fields) -> str:
    given = fields.raw("tokens")
    if given is None:
        fields.refuse("tokens", "a list of token ids is needed.")
    check_length(fields, "tokens", engine, len(given))
    ids = fields.items("tokens", int, "a list of token ids", len(given))
    tokenizer = engine.tokenizer
    size = tokenizer.vocab_size
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        fields.refuse("tokens", f"token id {wrong} is outside the vocabulary of {size} tokens.")
    return tokenizer.decode(ids, skip_special_tokens=False)
