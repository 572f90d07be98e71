"""GET /v1/models and /v1/models/{id}: what is served, and how long its context is.

Before: face.py.  After: app.py.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from . import answers
from .face import Service
from .schema import Param, facts, text


def _card(service: Service, name: str) -> dict[str, Any]:
    engine = service.ready()
    adapter = service.adapter(name)
    allowed = ("sampling", "logprobs", "view")
    denied = ("create_engine", "search_indices", "fine_tuning", "is_blocking")
    permission = {"id": f"modelperm-{name}", "object": "model_permission", "created": service.created}
    permission |= {f"allow_{what}": True for what in allowed}
    permission |= {what if what == "is_blocking" else f"allow_{what}": False for what in denied}
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "tinyserve",
        "root": service.config.model.model if adapter is None else adapter.path,
        "parent": None if adapter is None else engine.served_names[0],
        "max_model_len": engine.max_model_len if adapter is None else None,
        "permission": [{**permission, "organization": "*", "group": None}],
    }


@facts("Models", "What is served", answer=answers.MODELS)
async def list_models(_request: Request, service: Service) -> Response:
    """One card per served name, and one per adapter that is loaded."""
    engine = service.ready()
    cards = [_card(service, name) for name in (*engine.served_names, *(one.name for one in engine.adapters.loaded))]
    return Response(orjson.dumps({"object": "list", "data": cards}), media_type="application/json")


@facts("Models", "One of them", answer=answers.MODEL, refusals=(404,), path=[Param("name", text(), "A served name.")])
async def one_model(request: Request, service: Service) -> Response:
    """The card of one name; without one, as under `/v1/models`. Raises: UnknownModel."""
    name = request.path_params["name"]
    if not name:
        return await list_models(request, service)
    return Response(orjson.dumps(_card(service, name)), media_type="application/json")
