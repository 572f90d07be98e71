"""POST /tokenize and /detokenize: what the engine would make of a text or a conversation, without running it.

Before: fields.py, openai_chat.py (how messages are read).  After: app.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from . import answers
from .bodies import DETOKENIZE, TOKENIZE
from .face import Service
from .fields import Fields, read_body
from .logprobs import token_bytes
from .openai_chat import read_messages, read_tools, template_options
from .schema import facts

MAX_TOKENS = 2**22  # to decode; more than any context


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
        ids = await engine.tokenize(prompt, add_special_tokens=fields.flag("add_special_tokens", True))
    names = None
    if fields.flag("return_token_strs"):
        names = [token_bytes(engine.tokenizer, token).decode("utf-8", "replace") for token in ids]
    answer = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": list(ids), "token_strs": names}
    return Response(orjson.dumps(answer), media_type="application/json")


@facts("Tokens", "Token ids to text", body=DETOKENIZE, answer=answers.TEXT)
async def detokenize(request: Request, service: Service) -> Response:
    """The text of `tokens`, special tokens included."""
    engine = service.ready()
    options = service.config.server
    fields = await read_body(request, options, DETOKENIZE)
    service.model_name(fields.text("model"))
    text = await asyncio.to_thread(_decoded, engine.tokenizer, fields)
    return Response(orjson.dumps({"prompt": text}), media_type="application/json")


def _decoded(tokenizer: Any, fields: Fields) -> str:
    ids = fields.items("tokens", int, "a list of token ids", MAX_TOKENS)
    if ids is None:
        fields.refuse("tokens", "a list of token ids is needed.")
    size = tokenizer.vocab_size
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        fields.refuse("tokens", f"token id {wrong} is outside the vocabulary of {size} tokens.")
    return tokenizer.decode(ids, skip_special_tokens=False)
