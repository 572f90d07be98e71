"""POST /v1/chat/completions: messages in, an assistant message out, whole or as a stream of deltas.

    JSON -> Fields -> template and tokenizer (engine.encode_chat) -> ids, SamplingParams -> engine.generate
         -> Output ... -> ChatWriter -> events or one JSON object

Stream order for each choice: a delta with the role once the engine gave something, deltas with text, a last chunk with
the finish reason; then one chunk without choices that holds the usage, if asked for; then [DONE].

Before: fields.py, sampling.py, logprobs.py.  After: sse.py (sends it), engine/engine.py (makes the outputs).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from attrs import evolve, frozen
from starlette.requests import Request

from ..errors import RequestError
from ..request import Output, Usage
from . import answers, spans
from .amount import MAX_MESSAGES, check_messages
from .beam import beam_outputs, read_beam, with_form
from .bodies import CHAT, EFFORTS
from .face import Service
from .fields import Fields, read_body
from .logprobs import chat_logprobs, prompt_logprobs
from .reading import Reading, Readings, deltas
from .requestlog import log_request
from .sampling import StreamOptions, cut_prompt, read_sampling, read_stream, request_options
from .schema import facts
from .sse import ChoiceWriter, Generation, Progress, alive
from .tools import ToolPlan, plan_tools


@frozen(kw_only=True)
class Shape:
    """How the answers of one chat request are written.

    Args:
        role: of the answer.   echo: text that goes in front of each answer, or "".
        prompt_ids: the rendered conversation.   n: answers.
        logprobs: alternatives per token that are shown, None for no logprobs at all.
        named: ids that are shown besides.
        token_ids: whether ids are reported.   ids_as_text: whether logprob tokens are written as token_id:N.
        readings: how thoughts and calls are found in the answers; None: they are nothing but text.
        fingerprint: see Service.
        hidden: nothing is reported of the answers' tokens, as some belong to a thought that is not shown.
    """

    role: str
    echo: str
    prompt_ids: Sequence[int]
    n: int
    logprobs: int | None
    named: Sequence[int]
    token_ids: bool
    ids_as_text: bool
    readings: Readings | None = None
    fingerprint: str | None = None
    hidden: bool = False

    @property
    def answer_ids(self) -> bool:
        return self.token_ids and not self.hidden


@facts("Chat", "Answer a conversation", body=CHAT, answer=answers.CHAT, stream=answers.CHAT_EVENTS)
async def chat_completions(request: Request, service: Service) -> Generation:
    """The model's next message in a conversation, or several with n.

    Raises: RequestError, Overloaded, EngineDead; all before the first byte."""
    engine = service.ready()
    options = service.config.server
    fields = await read_body(request, options, CHAT)
    model = service.model_name(fields.text("model"))
    stream = read_stream(fields, service)
    decided = _decided(fields, engine.default_sampling, service.config.model.max_logprobs)
    beam = read_beam(fields, decided["max_tokens"] or engine.max_model_len)
    alone = {"n": 1} if beam else {}
    sampling = read_sampling(fields, engine.default_sampling, stream=stream.stream, **decided, **alone)
    messages = read_messages(fields)
    plan = read_tools(fields, service)
    template = template_options(fields, service, plan)
    more = request_options(fields, service)
    ids = cut_prompt(fields, await engine.encode_chat(messages, **template), engine.max_model_len)
    readings = Readings.of(
        engine,
        plan,
        ids,
        sampling,
        thoughts=fields.flag("include_reasoning", True),
        special=fields.raw("skip_special_tokens") is False,
    )
    sampling = await readings.prepared(sampling)
    beam = with_form(beam, sampling)
    role = "assistant" if template["add_generation_prompt"] else str(messages[-1].get("role"))
    shape = Shape(
        role=role,
        echo=_echo(fields, messages, role),
        prompt_ids=ids,
        n=beam.beam_width if beam else sampling.n,
        logprobs=sampling.logprobs,
        named=sampling.logprob_token_ids or (),
        token_ids=fields.flag("return_token_ids"),
        ids_as_text=fields.flag("return_tokens_as_token_ids", options.return_tokens_as_token_ids),
        fingerprint=service.fingerprint,
        readings=None if readings.plain else readings,
        hidden=readings.hides_thoughts,
    )
    request_id = "chatcmpl-" + name_of(request, fields)
    writer = ChatWriter(request_id, model, engine.tokenizer, shape, stream, options.enable_prompt_tokens_details)
    log_request(service.config.log, request_id, sampling, len(ids), messages)
    if beam:
        asked = {"logprobs": sampling.logprobs is not None, "thinks": True, "request_id": request_id}
        outputs = beam_outputs(engine, ids, beam, **asked, **more)
    else:
        outputs = engine.generate(ids, sampling, request_id=request_id, thinks=True, **more)
    outputs = service.spans.watch(
        outputs, request, spans.CHAT, name=request_id, model=model, sampling=sampling, n=shape.n
    )  # fmt: skip
    progress = Progress(writer.head, engine.progress, [request_id]) if stream.progress else None
    kept = alive(engine, options.sse_keep_alive_interval, request_id)
    return Generation([outputs], shape.n, writer, stream=stream.stream, progress=progress, **kept)


def name_of(request: Request, fields: Fields) -> str:
    """The id of a request: the header's, else the body's, else a new one. It goes to the log, so it has one line."""
    sent = next((value for name, value in request.scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    name = (sent or fields.text("request_id") or uuid.uuid4().hex)[:256]
    return name if name.isprintable() else "".join(c if c.isprintable() else "?" for c in name)


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation, as far as its shape goes; what is in a message is checked with the template."""
    given = fields.raw("messages")
    if isinstance(given, list):
        check_messages(given)
    messages = fields.items("messages", dict, "a list of messages", MAX_MESSAGES)
    if not messages:
        fields.refuse("messages", "at least one message is needed.")
    return messages


def read_tools(fields: Fields, service: Service) -> ToolPlan:
    """What the request says about tools. Raises: RequestError."""
    return plan_tools(
        fields.items("tools", dict, "a list of tools"),
        fields.raw("tool_choice"),
        service.config.server,
        parallel=fields.flag("parallel_tool_calls", True),
    )


def template_options(fields: Fields, service: Service, plan: ToolPlan) -> dict[str, Any]:
    """What goes to the chat template beside the messages. Raises: RequestError: an untrusted template."""
    trusted = service.config.server.trust_request_chat_template
    if fields.given("chat_template") and not trusted:
        fields.refuse("chat_template", "the server must be started with --trust-request-chat-template to accept one.")
    kwargs = fields.mapping("chat_template_kwargs") or {}
    for name in ("chat_template", "tokenize"):
        if name in kwargs:
            raise RequestError(f"chat_template_kwargs must not contain {name!r}.", param=f"chat_template_kwargs.{name}")
    kwargs = {**effort_variables(fields.choice("reasoning_effort", EFFORTS)), **kwargs}
    keep_open = fields.flag("continue_final_message")
    if keep_open and fields.raw("add_generation_prompt"):
        fields.refuse("continue_final_message", "contradicts add_generation_prompt: true.")
    return {
        **({"tools": list(plan.tools)} if plan.tools else {}),
        "documents": fields.items("documents", dict, "a list of objects"),
        "add_generation_prompt": fields.flag("add_generation_prompt", not keep_open),
        "continue_final_message": keep_open,
        "chat_template": fields.text("chat_template"),
        "untrusted": True,
        "chat_template_kwargs": {**service.config.server.default_chat_template_kwargs, **kwargs},
        "add_special_tokens": fields.flag("add_special_tokens"),
    }


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Variables of chat templates that say how much to think, by the names that families have for it."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", "thinking": effort != "none"}


def _decided(fields: Fields, defaults: Mapping[str, Any], most_logprobs: int) -> dict[str, Any]:
    most = fields.integer("max_completion_tokens", fields.integer("max_tokens", defaults.get("max_tokens")))
    if most is not None and most < 1:
        name = "max_completion_tokens" if fields.given("max_completion_tokens") else "max_tokens"
        fields.refuse(name, f"must be at least 1, got {most}.")
    top = fields.integer("top_logprobs", 0)
    asked = fields.flag("logprobs")
    if top and not asked:
        fields.refuse("top_logprobs", "needs logprobs: true.")
    if top < -1:
        fields.refuse("top_logprobs", f"must be -1 or more, got {top}.")
    if top > most_logprobs != -1:
        fields.refuse("top_logprobs", f"must be at most {most_logprobs} (--max-logprobs), got {top}.")
    return {"max_tokens": most, "logprobs": top if asked else None}


def _echo(fields: Fields, messages: Sequence[Mapping[str, Any]], role: str) -> str:
    if not fields.flag("echo") or messages[-1].get("role") != role:
        return ""
    content = messages[-1].get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


class ChatWriter(ChoiceWriter):
    """Writes the answers of one request, as events or as one object."""

    def __init__(
        self, request_id: str, model: str, tokenizer: Any, shape: Shape, stream: StreamOptions, details: bool
    ) -> None:
        identity = {
            "id": request_id, "object": "chat.completion", "created": int(time.time()), "model": model,
            "system_fingerprint": shape.fingerprint,
        }  # fmt: skip
        chunk = {**identity, "object": "chat.completion.chunk"}
        super().__init__(
            identity,
            chunk,
            prompts=[len(shape.prompt_ids)],
            n=shape.n,
            include_usage=stream.include_usage,
            details=details,
        )
        self._tokenizer = tokenizer
        self._shape = shape
        self._stream = stream
        self._started: set[int] = set()
        self._readings: dict[int, Reading] = {}

    # ---- stream

    def events(self, output: Output) -> bytes:
        """Role chunk (once per choice), then text, then the finish reason; b"" when nothing is new."""
        self._tally.count(output, self._shape.n)
        parts = []
        if output.index not in self._started:
            self._started.add(output.index)
            parts.append(self._first(output))
        reported = output.finished or output.logprobs or (self._shape.answer_ids and output.token_ids)
        if self._shape.readings is not None:
            parts += self._read(output, bool(reported))
        elif output.text or reported:
            delta = b'{"content":' + orjson.dumps(output.text) + b"}" if output.text or not output.finished else b"{}"
            parts.append(self._delta(output, delta, output.finish_reason.value if output.finished else None))
        return b"".join(parts)

    def _reading(self, index: int) -> Reading:
        reading = self._readings.get(index)
        if reading is None:
            reading = self._readings[index] = self._shape.readings.new()
        return reading

    def _read(self, output: Output, reported: bool) -> list[bytes]:
        """The chunks of an output with thoughts or calls; what is reported of tokens stands in the last one."""
        reading = self._reading(output.index)
        found = deltas(reading.take(output))
        self._tally.thought(output.index, reading.reasoning_tokens)
        if not found and not reported:
            return []
        *before, last = found or [{} if output.finished else {"content": ""}]
        chunks = [
            self._chunk(output.index, orjson.dumps(delta), b'"logprobs":null,"finish_reason":null', b"")
            for delta in before
        ]
        reason = reading.finish_reason(output) if output.finished else None
        return [*chunks, self._delta(output, orjson.dumps(last), reason)]

    def _first(self, output: Output) -> bytes:
        delta = orjson.dumps({"role": self._shape.role, "content": ""})
        usage = b""
        if self._stream.continuous:
            usage = self._tally.so_far(_nothing_yet(output))
        if self._shape.token_ids:
            usage += b',"prompt_token_ids":' + orjson.dumps(list(self._shape.prompt_ids))
        first = self._chunk(output.index, delta, b'"logprobs":null,"finish_reason":null', usage)
        if self._shape.echo:
            delta = b'{"content":' + orjson.dumps(self._shape.echo) + b"}"
            first += self._chunk(output.index, delta, b'"logprobs":null,"finish_reason":null', b"")
        return first

    def _delta(self, output: Output, delta: bytes, reason: str | None) -> bytes:
        logprobs = self._logprobs([output])
        tail = b'"logprobs":' + (orjson.dumps(logprobs) if logprobs else b"null") + b',"finish_reason":'
        tail += b'"%b"' % reason.encode() if reason else b"null"
        if output.finished:
            tail += b',"stop_reason":' + orjson.dumps(output.stop_reason)
        if self._shape.answer_ids:
            tail += b',"token_ids":' + orjson.dumps(list(output.token_ids))
        usage = self._tally.so_far(output.usage) if self._stream.continuous else b""
        return self._chunk(output.index, delta, tail, usage)

    def _chunk(self, index: int, delta: bytes, tail: bytes, usage: bytes) -> bytes:
        return b'%b{"index":%d,"delta":%b,%b}]%b}\n\n' % (self.head, index, delta, tail, usage)

    # ---- one object

    def add(self, output: Output) -> None:
        """Keep an output for `body`."""
        super().add(output)
        if self._shape.readings is not None:
            reading = self._reading(output.index)
            reading.take(output)
            self._tally.thought(output.index, reading.reasoning_tokens)

    def body(self) -> bytes:
        """The `chat.completion` object."""
        first = next((o.prompt_logprobs for o in self._choices[0] if o.prompt_logprobs is not None), None)
        answer = {
            **self._identity,
            "choices": [self._choice(index, outputs) for index, outputs in sorted(self._choices.items())],
            "usage": {"prompt_tokens_details": None, **self._tally.total()},
            "service_tier": None,
            "prompt_logprobs": prompt_logprobs(first),
            "prompt_token_ids": list(self._shape.prompt_ids) if self._shape.token_ids else None,
        }
        return orjson.dumps(answer)

    def _choice(self, index: int, outputs: list[Output]) -> dict[str, Any]:
        message, reason = self._message(index, outputs)
        ids = [token for output in outputs for token in output.token_ids]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(outputs),
            "finish_reason": reason,
            "stop_reason": outputs[-1].stop_reason,
            "token_ids": ids if self._shape.answer_ids else None,
        }

    def _message(self, index: int, outputs: list[Output]) -> tuple[dict[str, Any], str]:
        """The message of a choice, and why it ended."""
        content, reason, more = "".join(output.text for output in outputs), outputs[-1].finish_reason.value, {}
        if self._shape.readings is not None:
            reading = self._reading(index)
            found, reason = reading.message(), reading.finish_reason(outputs[-1])
            content, more = found.content, {"reasoning": found.reasoning}
            if found.reasoning is not None:
                more["reasoning_content"] = found.reasoning
            if found.calls:
                more["tool_calls"] = found.calls
        message = {
            "role": self._shape.role,
            "content": self._shape.echo + (content or "") if self._shape.echo else content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
            **more,
        }
        return message, reason

    def _logprobs(self, outputs: Sequence[Output]) -> dict[str, Any] | None:
        shape = self._shape
        if shape.logprobs is None or shape.hidden:
            return None
        return chat_logprobs(
            outputs, self._tokenizer, top=shape.logprobs, named=shape.named, ids_as_text=shape.ids_as_text
        )


def _nothing_yet(output: Output) -> Usage:
    return evolve(output.usage, completion_tokens=0)
