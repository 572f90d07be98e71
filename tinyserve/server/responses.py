"""The responses API: POST /v1/responses makes one; GET, cancel and DELETE reach those that are kept.

    items -> chat messages -> template and tokenizer -> engine.generate -> ResponseWriter -> events or one object

A response is kept unless `store` is false, so that a later one can go on from it and GET can show it. In the background
it is made whoever is connected; its events can be followed again from any of them.

Before: responses_items.py, responses_writer.py, responses_store.py.  After: sse.py (sends it), app.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from ..config import ServerOptions
from ..errors import ContextLengthExceeded, RequestError, shown
from ..request import SamplingParams
from . import answers, spans
from .face import EngineFace, Service
from .fields import Fields, query_flag, query_integer, query_word, read_body
from .formats import of_format
from .openai_chat import effort_variables, name_of
from .reading import Readings
from .requestlog import log_request
from .responses_items import BODY, INCLUDE, LOGPROBS, listed_input, read_input
from .responses_store import Follow, Kept, Run
from .responses_writer import ResponseWriter, Shape, stamp
from .sampling import read_sampling, request_options
from .schema import Param, choice, facts, flag, integer, listed, text
from .sse import Generation, alive
from .tools import ToolPlan, plan_tools

_ID = [Param("response_id", text(), "The id of a kept response.")]
_INCLUDE = Param("include", listed(choice(*INCLUDE)), "Accepted; a response shows what it was made with.")
_AFTER = Param("starting_after", integer(0), "With stream: sequence number of the last event that is known already.")
_FOLLOW = [
    Param("stream", flag(), "Follow its events; only of background responses with stream.", False),
    _AFTER,
    _INCLUDE,
    Param("include_obfuscation", flag(), "Accepted; it changes no answer.", False),
]
_LIMIT = Param("limit", integer(1, 100), "At most so many items.", 20)
_ORDER = Param("order", choice("asc", "desc"), "desc: the newest first.", "desc")
_LISTED = [_LIMIT, _ORDER, Param("after", text(), "Go on behind the item with this id, in the same order."), _INCLUDE]


@facts("Responses", "Make a response", body=BODY, answer=answers.RESPONSE, stream=answers.RESPONSE_EVENTS)
async def create(request: Request, service: Service) -> Any:
    """The model's answer to a list of items; may be kept, and made in the background.

    Raises: RequestError, Overloaded, EngineDead; all before the first byte.
    """
    engine = service.ready()
    options = service.config.server
    fields = await read_body(request, options, BODY)
    model = service.model_name(fields.text("model"))
    name = "resp_" + uuid.uuid4().hex  # never the sender's: who knows the id may read the response
    stream, background = fields.flag("stream"), fields.flag("background")
    if background and not fields.flag("store", True):
        fields.refuse("background", "needs store: true, or nobody could get the response.")
    plan = _plan(fields, options)
    logprobs = _logprobs(fields)
    most = fields.integer("max_output_tokens", engine.default_sampling.get("max_tokens"))
    if most is not None and most < 1:
        fields.refuse("max_output_tokens", f"must be at least 1, got {most}.")
    sampling = read_sampling(
        fields,
        engine.default_sampling,
        stream=stream or background,
        max_tokens=most,
        logprobs=logprobs,
        **_form(fields),
    )
    more = request_options(fields, service)
    before = _before(fields, service)
    messages = read_input(fields, before.conversation if before else [])
    ids = await _encoded(engine, fields, messages, service, plan)
    readings = Readings.of(engine, plan, ids, sampling, special=fields.raw("skip_special_tokens") is False)
    sampling, reading = await readings.prepared(sampling), readings.new()
    log_request(service.config.log, f"{name} {name_of(request, fields)}", sampling, len(ids), messages)
    kept: Kept | None = None

    def ended() -> None:
        if kept is not None and (kept.run is None or name in service.responses.kept):  # else it was deleted
            kept.conversation = [*kept.conversation, *writer.messages()]
            service.responses.put(name, kept)

    shape = Shape(
        tokenizer=engine.tokenizer,
        prompt_tokens=len(ids),
        logprobs=logprobs,
        reader=reading.parts,
        thought_tokens=lambda: reading.reasoning_tokens,
        ended=ended,
    )
    writer = ResponseWriter(_head(fields, name, model, sampling), shape)
    outputs = engine.generate(ids, sampling, request_id=name, thinks=True, **more)
    outputs = service.spans.watch(outputs, request, spans.CHAT, name=name, model=model, sampling=sampling)
    if fields.flag("store", True):
        said = messages[1:] if fields.given("instructions") else messages
        kept = Kept(writer, list(said), listed_input(fields.raw("input"), before.all_items() if before else []))
    if not background:
        return Generation([outputs], 1, writer, stream=stream, **alive(engine, options.sse_keep_alive_interval, name))
    service.responses.make_room()
    kept.run = _started(service, writer, outputs, keep_events=stream)
    service.responses.put(name, kept)
    return Follow(kept.run, 0, options.sse_keep_alive_interval) if stream else _json(writer.snapshot())


def _started(service: Service, writer: ResponseWriter, outputs: Any, *, keep_events: bool) -> Run:
    """A run that counts as a request in flight, so that a server that stops waits for it."""

    def ended() -> None:
        service.inflight -= 1

    service.inflight += 1
    return Run(writer, outputs, ended, keep_events=keep_events)


@facts("Responses", "Look at a response", answer=answers.RESPONSE, stream=answers.RESPONSE_EVENTS,
       query=_FOLLOW, path=_ID, refusals=(400, 404))  # fmt: skip
async def retrieve(request: Request, service: Service) -> Any:
    """A kept response as it is now, or with stream=true its events from one on."""
    kept = service.responses.get(request.path_params["response_id"])
    after = query_integer(request, _AFTER)
    query_flag(request, "include_obfuscation")
    _check_include(request)
    if not query_flag(request, "stream"):
        if after is not None:
            raise RequestError("starting_after is allowed only together with stream=true.", param="starting_after")
        return _json(kept.writer.snapshot())
    if kept.run is None or kept.run.events is None:
        raise RequestError("Only a response made with background and stream can be followed.", param="stream")
    if after is not None and after >= (made := len(kept.run.events)):
        last = f"the last one has the number {made - 1}" if made else "there is none yet"
        raise RequestError(f"starting_after: this response has no event {after}; {last}.", param="starting_after")
    return Follow(kept.run, 0 if after is None else after + 1, service.config.server.sse_keep_alive_interval)


def _check_include(request: Request) -> None:
    for name in ("include", "include[]"):
        for asked in request.query_params.getlist(name):
            _INCLUDE.kind.check([asked], name)


@facts("Responses", "List what a response answers", answer=answers.ITEMS, query=_LISTED, path=_ID, refusals=(400, 404))
async def input_items(request: Request, service: Service) -> Response:
    """The items that a kept response was made from: those sent with it, and the conversation that it goes on from."""
    items = service.responses.get(request.path_params["response_id"]).items
    limit, order, after = query_integer(request, _LIMIT), query_word(request, _ORDER), request.query_params.get("after")
    _check_include(request)
    if order == "desc":
        items = items[::-1]
    if after is not None:
        place = next((number for number, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise RequestError(f"after: this response has no item {shown(after)}.", param="after")
        items = items[place + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = len(items) > len(page)
    return _json({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})


@facts("Responses", "Cancel a response", answer=answers.RESPONSE, path=_ID, refusals=(400, 404))
async def cancel(request: Request, service: Service) -> Response:
    """End a response that is made in the background; one that has ended stays as it is."""
    kept = service.responses.get(request.path_params["response_id"])
    if kept.run is None:
        raise RequestError("Only a response made in the background can be cancelled.", param="response_id")
    kept.run.cancel()
    await kept.run.ended()
    return _json(kept.writer.snapshot())


@facts("Responses", "Forget a response", answer=answers.DELETED, path=_ID, refusals=(404,))
async def delete(request: Request, service: Service) -> Response:
    """Forget a kept response; one that is still being made ends."""
    name = request.path_params["response_id"]
    service.responses.delete(name)
    return _json({"id": name, "object": "response", "deleted": True})


def _plan(fields: Fields, options: ServerOptions) -> ToolPlan:
    """What the request says about tools, which this API describes one level higher than the chat route."""
    tools = []
    for tool in fields.items("tools", dict, "a list of tools") or ():
        inner = {name: value for name, value in tool.items() if name != "type"}
        tools.append({"type": tool.get("type", "function"), "function": inner})
    return plan_tools(tools, fields.raw("tool_choice"), options, parallel=fields.flag("parallel_tool_calls", True))


def _form(fields: Fields) -> dict[str, Any]:
    """The form that `text.format` asks for, as sampling parameters."""
    text = fields.inner("text")
    form = text.inner("format") if text is not None else None
    if form is None or form.text("type") == "text":
        return {}
    if fields.raw("structured_outputs"):
        fields.refuse("structured_outputs", "only one form can be asked for, and there is text.format already.")
    return {"structured_outputs": of_format(form, "text.format", flat=True)}


def _before(fields: Fields, service: Service) -> Kept | None:
    """The response that this one goes on from. Raises: RequestError: it is not there, or has not ended."""
    name = fields.text("previous_response_id")
    if not name:
        return None
    found = service.responses.get(name)
    if found.running:
        fields.refuse("previous_response_id", "that response is still being made: wait for its end, or cancel it.")
    return found


def _logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", 0)
    if top < 0:
        fields.refuse("top_logprobs", f"must not be negative, got {top}.")
    return top if LOGPROBS in (fields.items("include", str) or ()) else None


async def _encoded(
    engine: EngineFace, fields: Fields, messages: Sequence[Mapping[str, Any]], service: Service, plan: ToolPlan
) -> list[int]:
    """Ids of the conversation. With truncation "auto" the oldest messages that are not the system's are left out
    until the rest fits."""
    kwargs = {**service.config.server.default_chat_template_kwargs, **(fields.mapping("chat_template_kwargs") or {})}
    reasoning = fields.inner("reasoning")
    if reasoning is not None and reasoning.given("effort"):
        kwargs = {**effort_variables(reasoning.text("effort")), **kwargs}
    tools = {"tools": list(plan.tools)} if plan.tools else {}
    auto = fields.choice("truncation", ("auto", "disabled"), "disabled") == "auto"
    dropped = 0
    while True:
        try:
            return await engine.encode_chat(
                _without_oldest(messages, dropped), add_generation_prompt=True, chat_template_kwargs=kwargs, **tools
            )
        except ContextLengthExceeded:
            dropped = dropped * 2 or 1
            if not auto or dropped >= 2 * len(messages):
                raise


def _without_oldest(messages: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Without the first `count` messages, but with the system's and the last one."""
    body, last = messages[:-1], messages[-1:]
    old = [index for index, message in enumerate(body) if message["role"] not in ("system", "developer")][:count]
    return [message for index, message in enumerate(body) if index not in set(old)] + list(last)


def _head(fields: Fields, name: str, model: str, sampling: SamplingParams) -> dict[str, Any]:
    """The members of the object that do not change: what was asked, defaults filled in."""
    reasoning = fields.mapping("reasoning") or {}
    return {
        "id": name,
        "object": "response",
        "created_at": stamp(),
        "model": model,
        "background": fields.flag("background"),
        "instructions": fields.text("instructions"),
        "max_output_tokens": fields.integer("max_output_tokens"),
        "max_tool_calls": None,
        "metadata": fields.mapping("metadata") or {},
        "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "previous_response_id": fields.text("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "store": fields.flag("store", True),
        "temperature": sampling.temperature,
        "text": {"format": (fields.mapping("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": fields.raw("tool_choice") or ("auto" if fields.given("tools") else "none"),
        "tools": fields.items("tools") or [],
        "top_logprobs": fields.integer("top_logprobs", 0),
        "top_p": sampling.top_p,
        "truncation": fields.text("truncation", "disabled"),
        "user": fields.raw("user"),
    }


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
