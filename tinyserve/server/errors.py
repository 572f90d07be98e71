"""Errors in OpenAI's shape, with the right HTTP status.

    {"error": {"message": ..., "type": ..., "param": dotted field or null, "code": text or the status}}

or, below /v1/messages, in Anthropic's: {"type": "error", "error": {"type", "message"}}.

A RequestError is the sender's fault and its text is shown; of an unexpected exception only the fact is shown, the rest
goes to the log.

Before: errors.py (the tree).  After: app.py (handlers), sse.py (errors inside a started stream).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import orjson
from attrs import field, frozen
from starlette.responses import Response

from ..errors import EngineDead, EngineError, Overloaded, RequestError, TinyserveError

logger = logging.getLogger("tinyserve.server")

_TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    405: "MethodNotAllowed", 408: "RequestTimeout", 413: "RequestTooLarge", 415: "UnsupportedMediaType",
    417: "ExpectationFailed", 431: "RequestHeaderFieldsTooLarge",
    500: "InternalServerError", 501: "NotImplementedError",
    503: "ServiceUnavailableError", 505: "HTTPVersionNotSupported",
}  # fmt: skip
_ANTHROPIC = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


@frozen
class Failure:
    """An error as it goes to the client."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(factory=dict)

    def body(self) -> bytes:
        """The JSON object."""
        kind = _TYPES.get(self.status, "Error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code or self.status}
        return orjson.dumps({"error": error})

    def anthropic_body(self) -> bytes:
        """The JSON object in Anthropic's shape."""
        kind = _ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": self.message}})


def answer_to(scope: Mapping[str, Any], failure: Failure) -> Response:
    """The HTTP answer, in the shape that clients of the asked path expect."""
    body = failure.anthropic_body() if "/v1/messages" in scope["path"] else failure.body()
    return Response(body, failure.status, headers=dict(failure.headers), media_type="application/json")


class TooLarge(RequestError):
    """The body, or a list in it, is above a cap."""

    status = 413


class BodyTooLarge(TooLarge):
    """The body is above its limit; the client need not send the rest."""


class HeadersTooLarge(RequestError):
    """All headers together are above the cap."""

    status = 431


class Ambiguous(RequestError):
    """Two statements of where the body ends: what a proxy takes for the next request may have passed its checks."""


class Unexpected(RequestError):
    """The client expects (Expect) what this server does not do."""

    status = 417


class Unauthorized(RequestError):
    """No key, or a wrong one."""

    status = 401


class WrongHost(RequestError):
    """The server was called by a name that is not its own."""

    status = 403


class BodyTimeout(RequestError):
    """The body did not arrive in time."""

    status = 408


class Stopping(Overloaded):
    """The server stops before the body of a request is here as a whole."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down.", retry_after=5)


def is_own(error: BaseException) -> bool:
    """Whether a task must pass `error` on: it is cancelled itself. What it waited for may be cancelled without it."""
    if isinstance(error, asyncio.CancelledError):
        return bool(asyncio.current_task().cancelling())
    return not isinstance(error, Exception)


def describe(error: BaseException) -> Failure:
    """What the client is told about `error`."""
    if isinstance(error, RequestError):
        headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}
        if isinstance(error, (Ambiguous, BodyTooLarge, BodyTimeout, Unexpected)):
            headers = {"Connection": "close"}  # what follows on this connection is no request, or not to be trusted
        return Failure(error.status, str(error), error.param, error.code, headers)
    if isinstance(error, Overloaded):
        close = {"Connection": "close"} if isinstance(error, Stopping) else {}
        return Failure(503, str(error), headers={"Retry-After": str(error.retry_after), **close})
    if isinstance(error, EngineDead):
        return Failure(503, str(error) or "The engine has stopped.", code="engine_dead")
    if isinstance(error, (EngineError, TinyserveError)):
        logger.error("request failed: %s", error)
        return Failure(500, str(error))
    logger.error("unexpected error while answering", exc_info=error)
    return Failure(500, "The server hit an unexpected error while answering; its log has the details.")
