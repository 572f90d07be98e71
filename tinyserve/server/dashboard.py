"""The dashboard at `/dashboard`: the live batch, the queue, the cache's blocks, and the last steps on a time line.

    engine.look() -> /dashboard/state (once a second, by the page)
                  -> /dashboard/trace (the steps as a Chrome trace, for chrome://tracing or ui.perfetto.dev)

Requests are shown by their ids and sizes; no text of anybody is.

Before: face.py, pages.py.  After: app.py.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from . import answers
from .face import Service
from .pages import page_file
from .schema import facts

SEQUENCES = 300
BLOCKS = 4096
STEPS = 300


async def dashboard(_request: Request, _service: Service) -> Response:
    """The page."""
    return page_file("dashboard.html")


@facts("Server", "What runs now", answer=answers.STATE)
async def state(_request: Request, service: Service) -> Response:
    """Numbers of the moment, sequences that run and wait, a map of the cache's blocks, and the last steps."""
    seen = service.ready().look(sequences=SEQUENCES, blocks=BLOCKS)
    told = {
        "running": seen.stats.running,
        "waiting": seen.stats.waiting,
        "preemptions": seen.stats.preemptions,
        "kv_cache_usage": seen.stats.kv_usage,
        "prefix_hit_rate": seen.stats.prefix_hits / max(1, seen.stats.prefix_queries),
        "sequences": [_sequence(one, seen.now) for one in seen.sequences],
        "blocks": {
            "map": "".join(map(str, seen.blocks)),
            "stride": seen.stride,
            "count": seen.num_blocks,
            "size": seen.block_size,
        },
        "steps": [
            {
                "age_ms": round(1000 * (seen.now - step.start), 2),
                "ms": round(1000 * (step.end - step.start), 2),
                "tokens": step.tokens,
                "prompt_tokens": step.prompt,
                "sequences": step.sequences,
                "generated": step.generated,
            }
            for step in seen.steps[-STEPS:]
        ],
    }
    return Response(orjson.dumps(told), media_type="application/json", headers={"cache-control": "no-store"})


def _sequence(one: Any, now: float) -> dict[str, Any]:
    return {
        "id": one.id.rpartition("/")[0][:80],
        "state": "running" if one.running else "waiting",
        "prompt_tokens": one.prompt,
        "tokens": one.known - one.prompt,
        "computed": one.computed,
        "blocks": one.blocks,
        "seconds": round(now - (one.started or one.arrival), 2),
    }


@facts("Server", "The last steps as a Chrome trace", answer=answers.TRACE)
async def trace(_request: Request, service: Service) -> Response:
    """Up to 2000 steps; steps in flight at the same time stand on lines of their own."""
    seen = service.ready().look(sequences=0, blocks=1)
    origin = seen.steps[0].start if seen.steps else 0.0
    events: list[dict[str, Any]] = []
    ends: list[float] = []  # of the last step on each line
    for step in seen.steps:
        line = next((number for number, end in enumerate(ends) if end <= step.start), len(ends))
        ends[line : line + 1] = [step.end]
        begin = round(1e6 * (step.start - origin), 1)
        numbers = {"tokens": step.tokens, "prompt": step.prompt, "sequences": step.sequences, "new": step.generated}
        name = "decode" if not step.prompt else "prefill" if step.prompt == step.tokens else "mixed"
        duration = round(1e6 * (step.end - step.start), 1)
        events.append(
            {"name": name, "ph": "X", "pid": 1, "tid": line + 1, "ts": begin, "dur": duration, "args": numbers}
        )
        count = {"decode": step.tokens - step.prompt, "prompt": step.prompt}
        events.append({"name": "tokens", "ph": "C", "pid": 1, "ts": begin, "args": count})
    name = {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "tinyserve steps"}}
    disposition = {"content-disposition": 'attachment; filename="tinyserve-steps.json"'}
    return Response(orjson.dumps({"traceEvents": [name, *events]}), media_type="application/json", headers=disposition)
