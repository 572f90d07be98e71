"""Routes that change the running server, there only with --enable-admin-routes: pause, abort, forget cached prefixes.

They are guarded by the API keys like any other, and refuse what a web page of another origin makes a browser send.
/server_info only tells, so it needs no flag.

Before: face.py.  After: app.py.
"""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

import orjson
from attrs import asdict
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from ..errors import RequestError
from . import answers
from .face import EngineFace, Service
from .fields import query_flag, read_body
from .schema import Body, Param, choice, facts, flag, listed, text

_LIBRARIES = ("torch", "triton", "starlette", "hypercorn", "tokenizers")
_TAG = "Administration"
ABORT = Body("AbortRequest", [
    Param("request_ids", listed(text(), "a list of request ids", most=1024),
          "Ids as they stand in answers; none: all requests."),
])  # fmt: skip


class Forbidden(RequestError):
    """The route is switched off, or a foreign web page asks for it."""

    status = 403


def allowed(request: Request, service: Service) -> EngineFace:
    """The engine, for somebody who may change it. Raises: Forbidden."""
    options = service.config.server
    if not options.enable_admin_routes:
        raise Forbidden("Start the server with --enable-admin-routes to have this route.")
    origin = request.headers.get("origin")
    same = origin is None or urlsplit(origin).netloc == request.headers.get("host")
    if not same and origin not in options.allowed_origins:
        raise Forbidden("This route does not take requests from other web origins.")
    return service.ready()


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


@facts(_TAG, "Stop computing", answer=answers.PAUSED, refusals=(400, 403), query=[
    Param("mode", choice("abort", "wait", "keep"), "abort ends what runs; wait lets it finish; keep freezes it, and "
          "new requests queue up. With the first two, new requests get a 503.", "abort"),
    Param("clear_cache", flag(), "Forget cached prefixes as well.", False),
])  # fmt: skip
async def pause(request: Request, service: Service) -> Response:
    """Returns once no step is under way, or once a call of `/resume` has undone it."""
    engine = allowed(request, service)
    clear = query_flag(request, "clear_cache")
    await engine.pause(request.query_params.get("mode", "abort"))
    if clear:
        engine.reset_prefix_cache()
    return _json({"is_paused": engine.is_paused})


@facts(_TAG, "Go on", answer=answers.PAUSED, refusals=(403,))
async def resume(request: Request, service: Service) -> Response:
    """Take requests again, and go on with those that were kept."""
    allowed(request, service).resume()
    return _json({"is_paused": False})


@facts(_TAG, "Whether it is paused", answer=answers.PAUSED, refusals=(403,))
async def is_paused(request: Request, service: Service) -> Response:
    """Whether `/pause` holds the engine."""
    return _json({"is_paused": allowed(request, service).is_paused})


@facts(_TAG, "Forget cached prefixes", answer=answers.SUCCESS, refusals=(400, 403), query=[
    Param("reset_running_requests", flag(), "Put running requests back into the queue first, so that all of the cache "
          "can go.", False),
])  # fmt: skip
async def reset_prefix_cache(request: Request, service: Service) -> Response:
    """success is false while requests hold blocks; cached blocks that no request uses are forgotten all the same."""
    engine = allowed(request, service)
    return _json({"success": engine.reset_prefix_cache(preempt_running=query_flag(request, "reset_running_requests"))})


@facts(_TAG, "Abort requests", body=ABORT, answer=answers.ABORTED, refusals=(403,))
async def abort_requests(request: Request, service: Service) -> Response:
    """End requests by their ids; their readers get what there is, with finish_reason `abort`."""
    engine = allowed(request, service)
    fields = await read_body(request, service.config.server, ABORT)
    if unknown := sorted(fields.values.keys() - {"request_ids"}):  # without ids, all requests are meant
        fields.refuse(unknown[0], "is no field of this route, which has request_ids.")
    names = set(fields.items("request_ids", str) or [])
    aborted = engine.abort(lambda name: name in names or _whole(name) in names) if names else engine.abort(None)
    return _json({"aborted": aborted})


def _whole(name: str) -> str:
    """The id that a client knows: a completions request has one engine request per prompt, with a number behind."""
    whole, _, number = name.rpartition("-")
    return whole if name.startswith("cmpl-") and number.isdecimal() else name


@facts("Server", "Configuration", answer=answers.INFO, refusals=(400,), query=[
    Param("config_format", choice("json", "text"), "text: one line per option.", "json"),
])  # fmt: skip
async def server_info(request: Request, service: Service) -> Response:
    """Versions, options (without keys) and the numbers of the moment."""
    engine = service.ready()
    form = request.query_params.get("config_format", "json")
    if form not in ("json", "text"):
        raise RequestError("config_format must be json or text.", param="config_format")
    config: Any = asdict(service.config)
    config["server"]["api_key"] = f"{len(service.config.server.api_key)} keys"
    if form == "text":
        config = "\n".join(f"{name}={value}" for group in config.values() for name, value in group.items())
    stats = engine.stats()
    return _json(
        {
            "version": __version__,
            "config": config,
            "model": {"names": list(engine.served_names), "max_model_len": engine.max_model_len},
            "now": {"running": stats.running, "waiting": stats.waiting, "kv_cache_usage": stats.kv_usage},
            "system": {
                "python": platform.python_version(),
                "platform": platform.platform(),
                **{name: _version(name) for name in _LIBRARIES},
            },
        }
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
