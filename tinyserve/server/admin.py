"""Routes for whoever runs the server: health, version, load, metrics.

Before: face.py, telemetry.py.  After: app.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from ..errors import EngineDead, Overloaded
from . import answers
from .face import Service
from .schema import facts

MOST_NOTED = 100_000  # sequences whose adapters are told
STALLED_SECONDS = 60.0  # longer than any step: a probe that fails has the server restarted


@facts("Server", "Whether requests are answered")
async def health(_request: Request, service: Service) -> Response:
    """200 when requests would be answered; 503 while loading, draining, dead, or when no step ends any more."""
    stalled = service.ready().stalled_seconds
    if stalled > STALLED_SECONDS:
        raise Overloaded(f"Requests wait, and no step has finished for {stalled:.0f} seconds.", retry_after=30)
    return Response(status_code=200)


@facts("Server", "Version", answer=answers.VERSION)
async def version(_request: Request, _service: Service) -> Response:
    """The version of tinyserve."""
    return Response(orjson.dumps({"version": __version__}), media_type="application/json")


@facts("Server", "Load", answer=answers.LOAD)
async def load(_request: Request, service: Service) -> Response:
    """Generating requests that are being answered now."""
    return Response(orjson.dumps({"server_load": service.inflight}), media_type="application/json")


@facts("Server", "Metrics", answer={"type": "string"}, media="text/plain")
async def metrics(_request: Request, service: Service) -> Response:
    """Prometheus text; also of an engine that has died, which is when it is wanted most."""
    engine = service.engine or service.ready()
    with contextlib.suppress(EngineDead):
        engine.check_health()
        engine.metrics.queues(engine.stats())
        engine.adapters.note(lambda: engine.look(sequences=MOST_NOTED, blocks=1).sequences)
    text, kind = await asyncio.to_thread(engine.metrics.exposition)
    return Response(text, headers={"content-type": kind})


def orca(form: bytes, stats: Any) -> list[tuple[bytes, bytes]]:
    """The header that tells a load balancer how busy the engine is; none for a format that nobody knows.

    Source: Envoy's ORCA, in the two text formats TEXT and JSON.
    """
    values = {"kv_cache_usage_perc": stats.kv_usage, "num_requests_waiting": stats.waiting}
    if form.strip().upper() == b"TEXT":
        told = b"TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in values.items()).encode()
    elif form.strip().upper() == b"JSON":
        told = b"JSON " + orjson.dumps({"named_metrics": values})
    else:
        return []
    return [(b"endpoint-load-metrics", told)]
