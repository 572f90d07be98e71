"""The ASGI app: routes, and around them what holds for every request.

    Front: request id, in-flight count, HTTP metrics
      CORS (only when origins are allowed; around the guard, so that browsers may read refusals too)
        Guard: header limit, Host, API key, an answer for every exception
          Router -> one function per route: (request, service) -> response

A route raises what is wrong; `describe` in errors.py says how that looks to the client.

Before: the protocol files.  After: serve.py, which puts the app behind a socket.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route, Router

from ..errors import Overloaded, shown
from ..telemetry import HttpCall
from . import adapters, admin, anthropic, control, dashboard, docs, embeddings, models, pages, responses, tokens
from .admin import orca
from .errors import (
    Ambiguous,
    Failure,
    HeadersTooLarge,
    Unauthorized,
    Unexpected,
    WrongHost,
    answer_to,
    describe,
    is_own,
)
from .face import Service
from .generate import generate
from .openai_chat import chat_completions
from .openai_completions import completions
from .turns import Turns

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 256
BODIES = 32  # times --max-body-bytes: what all running requests together may have sent
OPEN = {"/health", "/ping", "/version", "/load", "/metrics", "/metrics/"}  # probes and scrapers have no API key
OPEN |= {
    "/docs",
    "/openapi.json",
    "/",
    "/dashboard",
}  # browsers cannot send one there; they tell nothing of this server's model
ANY_HOST = {"/health", "/ping"}  # probes of a cluster ask by address
_NOT_YET = {
    "rerank": "reranking", "score": "reranking", "audio": "audio", "images": "making images", "pooling": "pooling",
    "classify": "classification", "realtime": "the realtime API",
}  # fmt: skip
_ANSWERED = ("/v1", "/v2", "/inference")  # what counts as load
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_UNCOUNTED = {"/metrics", "/dashboard/state", "/health", "/load", "/ping", "/version"}

Handler = Callable[[Request, Service], Awaitable[Any]]
_DESCRIBED: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/embeddings", embeddings.embeddings),
    ("POST", "/v1/responses", responses.create),
    ("GET", "/v1/responses/{response_id}", responses.retrieve),
    ("DELETE", "/v1/responses/{response_id}", responses.delete),
    ("POST", "/v1/responses/{response_id}/cancel", responses.cancel),
    ("GET", "/v1/responses/{response_id}/input_items", responses.input_items),
    ("POST", "/v1/messages", anthropic.messages),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
    ("POST", "/inference/v1/generate", generate),
    ("POST", "/inference/v1/abort_requests", control.abort_requests),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{name:path}", models.one_model),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("GET", "/health", admin.health),
    ("GET", "/ping", admin.health),
    ("POST", "/ping", admin.health),
    ("GET", "/version", admin.version),
    ("GET", "/load", admin.load),
    ("GET", "/server_info", control.server_info),
    ("GET", "/dashboard/state", dashboard.state),
    ("GET", "/dashboard/trace", dashboard.trace),
    ("POST", "/pause", control.pause),
    ("POST", "/resume", control.resume),
    ("GET", "/is_paused", control.is_paused),
    ("POST", "/reset_prefix_cache", control.reset_prefix_cache),
    ("POST", "/abort_requests", control.abort_requests),
    ("POST", "/v1/load_lora_adapter", adapters.load),
    ("POST", "/v1/unload_lora_adapter", adapters.unload),
    ("GET", "/metrics", admin.metrics),
    ("GET", "/metrics/", admin.metrics),
    ("GET", "/web/{name}", pages.asset),
)
ROUTES = (
    *_DESCRIBED,
    *docs.pages(_DESCRIBED),
    ("GET", "/", pages.chat_page),
    ("GET", "/dashboard", dashboard.dashboard),
)


def create_app(service: Service) -> Front:
    """The app of one service; its engine may come later."""
    methods: dict[str, dict[str, Handler]] = {}
    for method, path, handler in ROUTES:
        methods.setdefault(path, {})[method] = handler
    options = service.config.server
    app: Any = Guard(_Routes(service, methods), options.api_key, options.allowed_hosts)
    if options.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
        )
    return Front(app, service)


class _Routes:
    """The router, with a short way to paths without parameters: nearly all requests ask for two or three of these."""

    def __init__(self, service: Service, methods: dict[str, dict[str, Handler]]) -> None:
        self._plain: dict[tuple[str, str], _Endpoint] = {}
        routes = []
        for path, found in methods.items():
            endpoint = _Endpoint(service, path, found)
            routes.append(Route(path, endpoint, methods=list(found)))
            if "{" not in path:
                self._plain |= dict.fromkeys([(method, path) for method in found], endpoint)
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._plain.get((scope["method"], _path(scope)), self._router)(scope, receive, send)


class _Endpoint:
    """Calls the handler of a route's method, then the response that it returns."""

    def __init__(self, service: Service, path: str, handlers: dict[str, Handler]) -> None:
        self._service = service
        self._path = path
        self._handlers = handlers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["tinyserve.route"] = self._path
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        response = await self._handlers[method](Request(scope, receive), self._service)
        await response(scope, receive, send)


class Front:
    """The outermost layer; see the module's docstring."""

    def __init__(self, app: Any, service: Service) -> None:
        self._app = app
        self._service = service
        self._turns = Turns()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        scope["tinyserve.arrival"] = time.time_ns()
        scope["app"] = self  # makes the router raise its 404 and 405 instead of writing them as plain text
        state = _Answering(send, [*self._request_id(scope), *self._load(scope)])
        scope["tinyserve.answer"] = state  # the guard, too, has to know whether there is one
        counted = _path(scope).startswith(_ANSWERED)
        self._service.inflight += counted
        body = _Receiving(receive, self._service)
        try:
            if counted:
                await self._turns.take()
            await self._app(scope, body.receive, state.send)
        finally:
            self._service.inflight -= counted
            self._service.receiving -= body.bytes
            self._count(scope, state)

    def _request_id(self, scope: Any) -> list[tuple[bytes, bytes]]:
        if not self._service.config.server.enable_request_id_headers:
            return []
        sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        return [(b"x-request-id", sent[:256] or uuid.uuid4().hex.encode())]

    def _load(self, scope: Any) -> list[tuple[bytes, bytes]]:
        """How busy the engine is, for load balancers that ask with each request (ORCA)."""
        asked = next((value for name, value in scope["headers"] if name == b"endpoint-load-metrics-format"), b"")
        if not asked or self._service.engine is None or not _path(scope).startswith(_ANSWERED):
            return []
        return orca(asked, self._service.engine.stats())

    def _count(self, scope: Any, state: _Answering) -> None:
        route = scope.get("tinyserve.route", "none")
        if self._service.engine is None or route in _UNCOUNTED or state.status is None:
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        call = HttpCall(
            handler=route,
            method=scope["method"] if scope["method"] in _METHODS else "other",  # clients may make up any word
            status=state.status,
            seconds=time.monotonic() - state.start,
            received=int(announced) if announced.isdigit() and len(announced) < 16 else 0,
            sent=state.bytes,
        )
        self._service.engine.metrics.http(call)


class Guard:
    """Refuses what no route should see, and turns whatever a route raises into an answer.

    Args:
        keys: API keys; none means that everybody may ask.
        hosts: names by which this server may be called; none means any. A page of another site can make its own name
            point here, and is then, to the browser, of the same origin as this server; but the name is still its own.
    """

    def __init__(self, app: Any, keys: Sequence[str], hosts: Sequence[str] = ()) -> None:
        self._app = app
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        state: _Answering = scope["tinyserve.answer"]
        try:
            self._check(scope)
            await self._app(scope, receive, send)
        except ClientDisconnect:
            return
        except BaseException as error:
            if is_own(error):
                raise
            failure = _of_router(error, scope) if isinstance(error, HTTPException) else describe(error)
            if state.status is None:
                await answer_to(scope, failure)(scope, receive, send)

    def _check(self, scope: Any) -> None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if size > MAX_HEADER_BYTES or len(headers) > MAX_HEADERS:
            raise HeadersTooLarge(
                f"There are {len(headers)} headers with {size} bytes; at most {MAX_HEADERS} with {MAX_HEADER_BYTES} "
                "bytes are allowed."
            )
        if self._hosts and _path(scope) not in ANY_HOST:
            self._check_host(next((value for name, value in headers if name == b"host"), b""))
        if scope.get("http_version") != "1.0":
            wanted = [value for name, value in headers if name == b"expect" and value.lower() != b"100-continue"]
            if wanted:
                raise Unexpected(f"Expect: {shown(wanted[0].decode('latin-1'))} cannot be met; only 100-continue can.")
        names = {name for name, _ in headers}
        if b"transfer-encoding" in names and b"content-length" in names:
            raise Ambiguous("Content-Length and Transfer-Encoding contradict each other; send one of them.")
        if not self._keys or scope["method"] == "OPTIONS" or _path(scope) in OPEN or _path(scope).startswith("/web/"):
            return
        sent = dict(reversed(headers))  # of a name that comes twice, the first counts
        scheme, _, key = sent.get(b"authorization", b"bearer " + sent.get(b"x-api-key", b"")).partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # every key is compared, and by digest, so that the time taken tells nothing about them
        if scheme.lower() != b"bearer" or not any([hmac.compare_digest(digest, known) for known in self._keys]):
            raise Unauthorized(
                "Incorrect or missing API key. Send the header 'Authorization: Bearer <key>' or 'X-Api-Key: <key>'."
            )

    def _check_host(self, sent: bytes) -> None:
        host = sent.decode("latin-1").lower()
        bare = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        name = bare.removeprefix("[").removesuffix("]").rstrip(".")
        labels = name.split(".")
        known = {host, bare, name, "*", *("*." + ".".join(labels[at:]) for at in range(1, min(len(labels), 16)))}
        if not name or not known & self._hosts:
            raise WrongHost(f"This server does not answer to the name {host[:200]!r} (--allowed-hosts).")


class _Receiving:
    """Adds up what is received of bodies; all requests together may not fill the memory."""

    def __init__(self, receive: Any, service: Service) -> None:
        self._receive = receive
        self._service = service
        self.bytes = 0

    async def receive(self) -> Any:
        message = await self._receive()
        size = len(message.get("body", b""))
        self.bytes += size
        self._service.receiving += size
        if size and self._service.receiving > BODIES * self._service.config.server.max_body_bytes:
            raise Overloaded("The bodies of all running requests together are too large now. Retry later.")
        return message


class _Answering:
    """Notes the status and the size of what goes out, and adds headers."""

    def __init__(self, send: Any, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.start = time.monotonic()
        self.status: int | None = None
        self.bytes = 0

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.bytes += len(message.get("body", b""))
        elif message["type"] == "http.response.start":
            self.status = message["status"]
            if self._headers:
                message = {**message, "headers": [*message["headers"], *self._headers]}
        await self._send(message)


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _path(scope: Any) -> str:
    """The path that the router will see: without the prefix of a proxy. The key is asked for on the same one."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _instead(path: str) -> str:
    """What is said beside a path that nothing has: what is not built yet, or the one that was meant."""
    steps = path.strip("/").split("/")
    if what := next((what for word, what in _NOT_YET.items() if word in steps), ""):
        return f": {what} is not built yet"
    close = difflib.get_close_matches(path[:64], {path for _, path, _ in ROUTES}, n=1, cutoff=0.8)
    return f"; the nearest one is {close[0]}" if close else ""


def _of_router(error: HTTPException, scope: Any) -> Failure:
    path, method = scope["path"][:200], scope["method"][:200]
    texts = {404: f"There is no route {path}{_instead(path)}.", 405: f"{path} does not take {method}."}
    message = texts.get(error.status_code, str(error.detail))
    return Failure(error.status_code, message, headers=error.headers or {})
