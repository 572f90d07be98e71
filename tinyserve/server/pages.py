"""The chat page at `/` (and the dashboard's): a few files that the browser loads from here and from nowhere else.

It is a client like any other: it calls /v1/models and /v1/chat/completions with the visitor's key. The policy that goes
with it allows scripts, styles and connections of this server only, and no inline script, so that even a mistake in the
page could not make text of a model run.

Before: web/ (the files).  After: app.py.
"""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from .face import Service
from .schema import Param, facts, text

_FOLDER = Path(__file__).parent / "web"
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_FILES = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.suffix in _KINDS}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_file(name: str) -> Response:
    """A file of the page, with its policy."""
    return Response(_FILES[name], media_type=_KINDS[Path(name).suffix], headers=HEADERS)


async def chat_page(_request: Request, _service: Service) -> Response:
    """The page; there while the model is still loading."""
    return page_file("index.html")


@facts("Server", "A file of the pages", answer={"type": "string"}, media="text/javascript", refusals=(404,), path=[
    Param("name", text(), "Such as `chat.js`."),
])  # fmt: skip
async def asset(request: Request, _service: Service) -> Response:
    """A script or a style sheet of the chat page or of the dashboard; these need no API key."""
    name = request.path_params["name"]
    if name not in _FILES:
        raise HTTPException(404)
    return page_file(name)
