"""POST /inference/v1/generate: token ids in, token ids out, for programs that do their own templates and tokenising.

`sampling_params` are those of the Python library, with its defaults (not the model's): what is not said is neutral.
Text is made only on request (`output_mode: "text"`) or where stop strings need it.

Before: schema.py, sampling.py.  After: sse.py (sends it), app.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from attrs import frozen
from starlette.requests import Request

from ..request import Logprob, Output
from . import answers, spans
from .bodies import INT64, MODEL, SAMPLING, STREAMING
from .face import Service
from .fields import read_body
from .logprobs import finite, prompt_logprobs
from .openai_chat import name_of
from .requestlog import log_request
from .sampling import StreamOptions, read_sampling, read_stream, request_options
from .schema import Body, Param, choice, documented, facts, flag, inside, integer, refusal, text
from .sse import ChoiceWriter, Generation, alive

_NOT_PARAMETERS = {"truncate_prompt_tokens", "truncation_side", "use_beam_search", "length_penalty", "best_of"}

BODY = Body("GenerateRequest", [
    MODEL,
    Param("token_ids", documented({"type": "array", "items": {"type": "integer", "minimum": 0}}, "a list of token ids",
                                  list),
          "The prompt.", required=True),
    Param("sampling_params", inside(
        *(param for param in SAMPLING if param.name not in _NOT_PARAMETERS),
        Param("max_tokens", integer(0, 2**31 - 1), "Most tokens of an answer; the context may end it before.", 16),
        Param("logprobs", integer(-1), "Report log-probabilities, with so many alternatives; -1: all."),
        Param("detokenize", flag(), "false makes no text, whatever output_mode says.", True),
        STREAMING[2],
    ), "How tokens are chosen.", required=True),
    *STREAMING[:2],
    Param("output_mode", choice("tokens", "text"), "text adds the text of each answer.", "tokens"),
    Param("priority", integer(*INT64), "Lower runs earlier, with --scheduling-policy priority.", 0),
    Param("cache_salt", text(), "Cached prefixes are shared only among requests with an equal one."),
    Param("request_id", text(), "The answer's id; the header X-Request-Id wins."),
    *refusal("features", "kv_transfer_params", off=[{}]),
])  # fmt: skip


@frozen(kw_only=True)
class Shape:
    """How the answers are written. logprobs: alternatives per token, None for none at all."""

    prompt_tokens: int
    n: int
    logprobs: int | None
    text: bool


@facts("Token ids", "Token ids in and out", body=BODY, answer=answers.GENERATED, stream=answers.GENERATED_EVENTS)
async def generate(request: Request, service: Service) -> Generation:
    """Continue a prompt of token ids.

    Raises: RequestError, Overloaded, EngineDead; all before the first byte.
    """
    engine = service.ready()
    options = service.config.server
    fields = await read_body(request, options, BODY)
    model = service.model_name(fields.text("model"))
    stream = read_stream(fields, service)
    ids = fields.raw("token_ids")
    if set(map(type, ids)) - {int}:
        raise fields.wrong("token_ids", "a list of token ids")
    if not ids or min(ids) < 0:
        fields.refuse("token_ids", "at least one id is needed, none of them negative.")
    params = fields.inner("sampling_params")
    with_text = fields.text("output_mode", "tokens") == "text"
    sampling = read_sampling(
        params,
        {},
        stream=stream.stream,
        max_tokens=params.integer("max_tokens", 16),
        logprobs=params.integer("logprobs"),
        detokenize=params.flag("detokenize", True) and (with_text or params.given("stop")),
    )
    if stream.stream and sampling.prompt_logprobs:
        fields.refuse("sampling_params", "prompt_logprobs are not available when streaming.")
    name = name_of(request, fields)
    shape = Shape(prompt_tokens=len(ids), n=sampling.n, logprobs=sampling.logprobs, text=with_text)
    writer = TokenWriter(name, shape, stream, details=options.enable_prompt_tokens_details)
    log_request(service.config.log, name, sampling, len(ids), ids)
    outputs = engine.generate(ids, sampling, request_id=name, **request_options(fields, service))
    outputs = service.spans.watch(
        outputs, request, spans.TEXT, name=name, model=model, sampling=sampling, n=sampling.n
    )  # fmt: skip
    return Generation(
        [outputs], sampling.n, writer, stream=stream.stream, **alive(engine, options.sse_keep_alive_interval, name)
    )


class TokenWriter(ChoiceWriter):
    """Writes the answers of one request, as chunks or as one object."""

    def __init__(self, name: str, shape: Shape, stream: StreamOptions, *, details: bool) -> None:
        super().__init__(
            {"request_id": name},
            prompts=[shape.prompt_tokens],
            n=shape.n,
            include_usage=stream.include_usage,
            details=details,
        )
        self._shape = shape
        self._stream = stream

    def events(self, output: Output) -> bytes:
        """One chunk, or b"" when nothing is new."""
        self._tally.count(output, self._shape.n)
        if not (output.token_ids or output.text or output.finished):
            return b""
        usage = self._tally.so_far(output.usage) if self._stream.continuous else b""
        return b"%b%b]%b}\n\n" % (self.head, orjson.dumps(self._choice(output.index, [output])), usage)

    def body(self) -> bytes:
        """All answers."""
        first = next((o.prompt_logprobs for o in self._choices[0] if o.prompt_logprobs is not None), None)
        answer = {
            **self._identity,
            "choices": [self._choice(index, outputs) for index, outputs in sorted(self._choices.items())],
            "prompt_logprobs": prompt_logprobs(first),
            "usage": self._tally.total(),
        }
        return orjson.dumps(answer)

    def _choice(self, index: int, outputs: Sequence[Output]) -> dict[str, Any]:
        last = outputs[-1]
        choice: dict[str, Any] = {
            "index": index,
            "token_ids": [token for output in outputs for token in output.token_ids],
            "logprobs": self._logprobs(outputs),
            "finish_reason": last.finish_reason and last.finish_reason.value,
            "stop_reason": last.stop_reason,
        }
        return {**choice, "text": "".join(output.text for output in outputs)} if self._shape.text else choice

    def _logprobs(self, outputs: Sequence[Output]) -> dict[str, Any] | None:
        if self._shape.logprobs is None:
            return None
        content = []
        for output in outputs:
            for token, entry in zip(output.token_ids, output.logprobs or (), strict=False):
                best = sorted(entry.items(), key=lambda item: -item[1].logprob)
                content.append({**_named(token, entry[token]), "top_logprobs": [_named(*item) for item in best]})
        return {"content": content}


def _named(token: int, found: Logprob) -> dict[str, Any]:
    return {"token_id": token, "logprob": finite(found.logprob), "rank": found.rank}
