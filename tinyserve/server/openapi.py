"""The OpenAPI 3.1 document, made of the declarations that requests are held to.

    ROUTES (method, path, handler with `facts`) + bodies' Params  ->  one JSON object, made once per app

Before: schema.py, answers.py.  After: docs.py (shows it to people), app.py (serves it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from inspect import cleandoc
from typing import Any

from .. import __version__
from .answers import ANTHROPIC_ERROR, ERROR
from .schema import Facts, Param

REFUSALS = {
    400: "The request is wrong; `param` names the field at fault.",
    401: "No API key, or a wrong one.",
    403: "The route is switched off, or the server was called by a name that is not its own.",
    404: "The model, or what the path names, does not exist.",
    408: "The body did not arrive in time.",
    409: "What is asked is already so.",
    413: "The body, or a list in it, is too large.",
    417: "The header Expect asks for something else than 100-continue.",
    431: "The headers are too large.",
    500: "A request that was right could not be answered.",
    503: "Loading, shutting down, paused, or too much waits; Retry-After says when to come back.",
}
PAGES = {
    "/": "A page to chat on.",
    "/dashboard": "The running batch, the cache's blocks and the steps, live.",
    "/docs": "This page.",
    "/openapi.json": "The same facts for programs, as an OpenAPI document.",
}
_ALWAYS = (401, 403, 417, 431, 500, 503)
_OF_BODIES = (400, 404, 408, 413)
INTRODUCTION = """\
OpenAI's API, with vLLM's additional fields, and Anthropic's messages.

Every field may be null, which means its default. A field that is declared here is honoured, or refused with a 400 that
names it, or its sentence says that it changes no answer; other fields are ignored. JSON has no NaN and no infinity, in
either direction. Sampling fields that a request leaves out come from the model's generation config, then from the
defaults named here.

With stream: true the answer is a series of server-sent events. The HTTP status is sent with the first of them, so that
whatever goes wrong before is an HTTP error; after it, an error is an event of its own. Lines that begin with a colon
keep silent connections open."""


def document(routes: Iterable[tuple[str, str, Any]], root_path: str = "", *, keys: bool = False) -> dict[str, Any]:
    """The document of these routes. root_path: where a proxy shows the server. keys: whether a key is asked for."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {"Error": ERROR, "MessageError": ANTHROPIC_ERROR}
    for method, path, handler in routes:
        told: Facts | None = getattr(handler, "facts", None)
        if told is None:
            continue
        if told.body is not None:
            schemas[told.body.name] = told.body.schema()
        shown = path.replace("{name:path}", "{name}")
        paths.setdefault(shown, {})[method.lower()] = _operation(method, shown, handler, told)
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "tinyserve", "version": __version__, "description": INTRODUCTION},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _operation(method: str, path: str, handler: Any, told: Facts) -> dict[str, Any]:
    statuses = sorted({*_ALWAYS, *(_OF_BODIES if told.body is not None else ()), *told.refusals})
    operation: dict[str, Any] = {
        "operationId": method.lower() + re.sub(r"\W+", "_", path),
        "tags": [told.tag],
        "summary": told.title,
        "description": re.split(r"\s+Raises:", cleandoc(handler.__doc__ or ""))[0].strip(),
        "responses": {"200": _answer(told)} | {str(status): _refusal(status, path) for status in statuses},
    }
    if told.body is not None:
        reference = {"schema": {"$ref": f"#/components/schemas/{told.body.name}"}}
        operation["requestBody"] = {"required": True, "content": {"application/json": reference}}
    if told.query or told.path:
        operation["parameters"] = [_parameter(param, "query") for param in told.query]
        operation["parameters"] += [_parameter(param, "path") for param in told.path]
    return operation


def _answer(told: Facts) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "The answer."}
    if told.answer is not None:
        answer["content"] = {told.media: {"schema": told.answer}}
    if told.stream:
        events = {"schema": {"type": "string", "description": f"With stream: true.\n\n{told.stream}"}}
        answer.setdefault("content", {})["text/event-stream"] = events
    return answer


def _refusal(status: int, path: str) -> dict[str, Any]:
    name = "MessageError" if path.startswith("/v1/messages") else "Error"
    refusal: dict[str, Any] = {
        "description": REFUSALS[status],
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
    }
    if status == 503:
        refusal["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
    return refusal


def _parameter(param: Param, where: str) -> dict[str, Any]:
    schema = dict(param.kind.schema)
    if param.default is not None:
        schema["default"] = param.default
    needed = where == "path" or param.required
    return {"name": param.name, "in": where, "required": needed, "description": param.help, "schema": schema}
