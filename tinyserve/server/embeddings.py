"""POST /v1/embeddings: one vector for each text, the hidden state of its last token, of length 1.

    input -> ids -> engine/embedding.py -> [H] float32 -> numbers or base64

Models made for it (Qwen3-Embedding, E5-Mistral) are decoders trained to put a text's meaning there; any other decoder
gives a vector too, a less useful one. Texts share the prefix cache with everything else.

Before: prompts.py, engine/embedding.py.  After: app.py.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..engine.embedding import ONE_TOKEN, embed
from ..engine.intake import Call
from ..engine.outputs import EmbeddingRequestOutput
from ..errors import RequestError
from ..request import Output
from . import answers, spans
from .bodies import EMBEDDING
from .face import Service
from .fields import Fields, read_body
from .openai_chat import name_of
from .prompts import read
from .requestlog import log_request
from .sampling import request_options
from .schema import facts
from .sse import Departure


@facts("Embeddings", "Turn texts into vectors", body=EMBEDDING, answer=answers.EMBEDDINGS)
async def embeddings(request: Request, service: Service) -> Any:
    """The hidden state of each text's last token, scaled to length 1.

    Raises: RequestError, Overloaded, EngineDead.
    """
    engine = service.ready()
    fields = await read_body(request, service.config.server, EMBEDDING)
    model = service.model_name(fields.text("model"))
    if fields.given("dimensions"):
        fields.refuse("dimensions", "this model's vectors cannot be cut; leave it out.")
    more = request_options(fields, service)
    prompts = await read(engine, fields, "input")
    name = "embd-" + name_of(request, fields)
    count = sum(len(prompt.ids) for prompt in prompts)
    log_request(service.config.log, name, ONE_TOKEN, count, fields.raw("input"))

    def outputs(call: Call) -> AsyncGenerator[Output, None]:
        facts = {"name": call.request_id, "model": model, "sampling": ONE_TOKEN}
        return service.spans.watch(engine.outputs(call), request, spans.EMBEDDINGS, **facts)

    normalize = fields.flag("use_activation", True)
    jobs = [
        embed(SimpleNamespace(outputs=outputs), prompt.ids, normalize=normalize, request_id=f"{name}-{number}", **more)
        for number, prompt in enumerate(prompts)
    ]
    departure = Departure(request.receive)
    try:
        vectors = await _vectors(jobs)
    except BaseException as error:
        if departure.caused(error):
            raise ClientDisconnect from None
        raise _of_input(error) from None
    finally:
        departure.end()
    body = {
        "id": name,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": _data(vectors, fields),
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
    written = await asyncio.to_thread(orjson.dumps, body, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(written, media_type="application/json")


def _of_input(error: BaseException) -> BaseException:
    """What the engine says of a prompt, said of the field that was sent."""
    if not isinstance(error, RequestError) or error.param != "prompt":
        return error
    return RequestError(str(error).replace("prompt:", "input:", 1), param="input", code=error.code)


async def _vectors(jobs: Sequence[Coroutine[Any, Any, EmbeddingRequestOutput]]) -> list[np.ndarray]:
    """What all jobs give. When one fails, or nobody waits any more, all are ended."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        return [found.outputs.embedding for found in await asyncio.gather(*tasks)]
    finally:
        for task in tasks:
            task.cancel()


def _data(vectors: list[np.ndarray], fields: Fields) -> list[dict[str, Any]]:
    vectors = [vector.astype("<f4") for vector in vectors]
    if fields.choice("encoding_format", ("float", "base64"), "float") == "base64":
        shown: list[Any] = [base64.b64encode(vector.tobytes()).decode() for vector in vectors]
    else:
        shown = vectors
    return [{"index": index, "object": "embedding", "embedding": vector} for index, vector in enumerate(shown)]
