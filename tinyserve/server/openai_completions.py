"""POST /v1/completions: one or several raw prompts (texts or token ids) continued.

A request with p prompts and n answers each has p * n choices; choice index = prompt index * n + answer index. With
`echo` each choice begins with its prompt, and the prompt's logprobs come with it.

Before: prompts.py, sampling.py, logprobs.py.  After: sse.py (sends it), engine/engine.py (makes the outputs).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson
from attrs import frozen
from starlette.requests import Request

from ..request import Output
from . import answers, spans
from .beam import beam_outputs, read_beam, with_form
from .bodies import COMPLETION
from .face import Service
from .fields import Fields, read_body
from .logprobs import TextLogprobs, joined, prompt_logprobs
from .openai_chat import name_of
from .prompts import Prompt, read
from .requestlog import log_request
from .sampling import StreamOptions, read_sampling, read_stream, request_options
from .schema import facts
from .sse import ChoiceWriter, Generation, Progress, alive

MAX_CHOICES = 16384  # prompts times answers
DEFAULT_MAX_TOKENS = 16


@frozen(kw_only=True)
class Shape:
    """How the choices are written; see ChatWriter's. logprobs: whether they were asked for. n: answers per prompt."""

    prompts: Sequence[Prompt]
    n: int
    echo: bool
    logprobs: bool
    prompt_logprobs: bool
    token_ids: bool
    ids_as_text: bool
    fingerprint: str | None = None


@facts("Completions", "Continue texts", body=COMPLETION, answer=answers.COMPLETION, stream=answers.COMPLETION_EVENTS)
async def completions(request: Request, service: Service) -> Generation:
    """What the model writes after raw prompts: no chat template.

    Raises: RequestError, Overloaded, EngineDead; all before the first byte."""
    engine = service.ready()
    options = service.config.server
    fields = await read_body(request, options, COMPLETION)
    model = service.model_name(fields.text("model"))
    if fields.raw("suffix"):
        fields.refuse("suffix", "this model cannot fill in between two texts.")
    stream = read_stream(fields, service)
    echo = fields.flag("echo")
    decided = _decided(fields, echo)
    beam = read_beam(fields, decided["max_tokens"])
    alone = {"n": 1} if beam else {}
    sampling = read_sampling(fields, engine.default_sampling, stream=stream.stream, **decided, **alone)
    beam = with_form(beam, sampling)
    more = request_options(fields, service)
    prompts = await read(engine, fields, "prompt")
    choices = beam.beam_width if beam else sampling.n  # of each prompt
    if len(prompts) * choices > MAX_CHOICES:
        many = f"{len(prompts)} prompts with {choices} answers each"
        fields.refuse("n", f"{many} are above the {MAX_CHOICES} allowed choices.")
    shape = Shape(
        prompts=prompts,
        n=choices,
        echo=echo,
        logprobs=sampling.logprobs is not None,
        prompt_logprobs=fields.given("prompt_logprobs"),
        token_ids=fields.flag("return_token_ids"),
        ids_as_text=fields.flag("return_tokens_as_token_ids", options.return_tokens_as_token_ids),
        fingerprint=service.fingerprint,
    )
    request_id = "cmpl-" + name_of(request, fields)
    writer = CompletionWriter(request_id, model, engine.tokenizer, shape, stream, options.enable_prompt_tokens_details)
    log_request(service.config.log, request_id, sampling, sum(len(p.ids) for p in prompts), fields.raw("prompt"))
    names = [f"{request_id}-{number}" for number in range(len(prompts))]
    if beam:
        ask = partial(beam_outputs, engine, params=beam, logprobs=sampling.logprobs is not None)
    else:
        ask = partial(engine.generate, sampling=sampling)
    sources = [ask(prompt.ids, request_id=name, **more) for name, prompt in zip(names, prompts, strict=True)]
    sources = [
        service.spans.watch(source, request, spans.TEXT, name=name, model=model, sampling=sampling, n=shape.n)
        for name, source in zip(names, sources, strict=True)
    ]
    progress = Progress(writer.head, engine.progress, names) if stream.progress else None
    kept = alive(engine, options.sse_keep_alive_interval, *names)
    return Generation(sources, shape.n, writer, stream=stream.stream, progress=progress, **kept)


def _decided(fields: Fields, echo: bool) -> dict[str, Any]:
    most = fields.integer("max_tokens", DEFAULT_MAX_TOKENS)
    if most < 0:
        fields.refuse("max_tokens", f"must not be negative, got {most}.")
    logprobs = fields.integer("logprobs")
    decided: dict[str, Any] = {"max_tokens": most, "logprobs": logprobs}
    if echo and logprobs is not None and not fields.given("prompt_logprobs"):
        decided["prompt_logprobs"] = logprobs
    return decided


class CompletionWriter(ChoiceWriter):
    """Writes the choices of one request, as events or as one object."""

    def __init__(
        self, request_id: str, model: str, tokenizer: Any, shape: Shape, stream: StreamOptions, details: bool
    ) -> None:
        identity = {
            "id": request_id, "object": "text_completion", "created": int(time.time()), "model": model,
            "system_fingerprint": shape.fingerprint,
        }  # fmt: skip
        prompts = [len(prompt.ids) for prompt in shape.prompts]
        super().__init__(identity, prompts=prompts, n=shape.n, include_usage=stream.include_usage, details=details)
        self._tokenizer = tokenizer
        self._shape = shape
        self._stream = stream
        self._logprobs: dict[int, TextLogprobs] = {}
        self._started: set[int] = set()

    def _prompt(self, index: int) -> Prompt:
        return self._shape.prompts[index // self._shape.n]

    def _written(self, output: Output, *, first: bool) -> tuple[str, dict[str, Any] | None]:
        """Text and logprobs of an output; the first of a choice has the echoed prompt in front."""
        shape = self._shape
        prompt = self._prompt(output.index)
        text = (prompt.text if first and shape.echo else "") + output.text
        if not shape.logprobs:
            return text, None
        if output.index not in self._logprobs:
            self._logprobs[output.index] = TextLogprobs(self._tokenizer, ids_as_text=shape.ids_as_text)
        writer = self._logprobs[output.index]
        pieces = []
        if output.prompt_logprobs is not None and shape.echo:
            pieces.append(writer.piece(prompt.ids, output.prompt_logprobs))
        pieces.append(writer.piece(output.token_ids, output.logprobs or ()))
        return text, joined(pieces)

    # ---- stream

    def events(self, output: Output) -> bytes:
        """One chunk, or b"" when nothing is new (a prompt computed in several steps, half a character)."""
        self._tally.count(output, self._shape.n)
        first = output.index not in self._started
        self._started.add(output.index)
        text, logprobs = self._written(output, first=first)
        ids = self._shape.token_ids and output.token_ids
        if not (text or output.finished or ids or (logprobs and logprobs["tokens"])):
            return b""
        tail = b'"logprobs":' + orjson.dumps(logprobs) + b',"finish_reason":'
        tail += b'"%b"' % output.finish_reason.value.encode() if output.finished else b"null"
        if output.finished:
            tail += b',"stop_reason":' + orjson.dumps(output.stop_reason)
        if self._shape.token_ids:
            tail += b',"token_ids":' + orjson.dumps(list(output.token_ids))
            if first:
                tail += b',"prompt_token_ids":' + orjson.dumps(list(self._prompt(output.index).ids))
        usage = self._tally.so_far(output.usage) if self._stream.continuous else b""
        return b'%b{"index":%d,"text":%b,%b}]%b}\n\n' % (self.head, output.index, orjson.dumps(text), tail, usage)

    # ---- one object

    def body(self) -> bytes:
        """The `text_completion` object."""
        answer = {
            **self._identity,
            "choices": [self._choice(index, outputs) for index, outputs in sorted(self._choices.items())],
            "usage": {"prompt_tokens_details": None, **self._tally.total()},
            "service_tier": None,
        }
        return orjson.dumps(answer)

    def _choice(self, index: int, outputs: list[Output]) -> dict[str, Any]:
        written = [self._written(output, first=number == 0) for number, output in enumerate(outputs)]
        shape, last = self._shape, outputs[-1]
        of_prompt = next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None)
        ids = [token for output in outputs for token in output.token_ids]
        return {
            "index": index,
            "text": "".join(text for text, _ in written),
            "logprobs": joined([logprobs for _, logprobs in written if logprobs]) if shape.logprobs else None,
            "finish_reason": last.finish_reason.value,
            "stop_reason": last.stop_reason,
            "token_ids": ids if shape.token_ids else None,
            "prompt_token_ids": list(self._prompt(index).ids) if shape.token_ids else None,
            "prompt_logprobs": prompt_logprobs(of_prompt) if shape.prompt_logprobs else None,
        }
