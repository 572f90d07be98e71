"""Adapters come and go while the server runs: POST /v1/load_lora_adapter and /v1/unload_lora_adapter.

A loaded adapter is a model of its own to clients: its name goes into `model`, and /v1/models lists it. The routes read
any folder of this machine, so they are there only with --enable-admin-routes, like those of control.py.

Before: control.py, engine/adapters.py.  After: app.py.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from .control import allowed
from .face import Service
from .fields import read_body
from .schema import Body, Param, facts, flag, harmless, integer, refusal, text

_TAG = "Administration"
_NAME = Param("lora_name", text(), "Its name, for `model`.", required=True)
LOAD = Body("LoadAdapterRequest", [
    _NAME,
    Param("lora_path", text(), "A folder with adapter_config.json and adapter_model.safetensors.", required=True),
    Param("load_inplace", flag(), "Take the place of an adapter of this name; requests that run keep theirs.", False),
    *refusal("is_3d_lora_weight", off=(False,), why="adapters of experts are not built."),
])  # fmt: skip
UNLOAD = Body("UnloadAdapterRequest", [
    _NAME, *harmless(integer(), "lora_int_id", help="Accepted; the name says which one is meant."),
])  # fmt: skip
_ANSWER = {"answer": {"type": "string"}, "media": "text/plain"}


@facts(_TAG, "Load a LoRA adapter", body=LOAD, refusals=(400, 403), **_ANSWER)
async def load(request: Request, service: Service) -> PlainTextResponse:
    """Returns once requests may ask for it. Nothing changes when it cannot be used; the message says why."""
    engine = allowed(request, service)
    fields = await read_body(request, service.config.server, LOAD)
    name = fields.text("lora_name")
    await engine.adapters.load(name, fields.text("lora_path"), replace=fields.flag("load_inplace"))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@facts(_TAG, "Unload a LoRA adapter", body=UNLOAD, refusals=(400, 403, 404), **_ANSWER)
async def unload(request: Request, service: Service) -> PlainTextResponse:
    """New requests for it are a 404 from now on; those that run end with it."""
    engine = allowed(request, service)
    fields = await read_body(request, service.config.server, UNLOAD)
    name = fields.text("lora_name")
    engine.adapters.unload(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
