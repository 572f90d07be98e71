"""From bytes to checked values: strict JSON, and typed reading of fields that names the one at fault.

orjson refuses what Python's own parser lets through: NaN, Infinity, 1e999, lone surrogates, bytes that are not UTF-8,
a thousand nested brackets. Every field may be null, which means its default. Numbers that go to SamplingParams are
checked there; what is read here is the shape around them.

Before: errors.py, schema.py (what a body may hold).  After: sampling.py and the protocol files.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from ..checks import MAX_TOKEN_LIST
from ..config import ServerOptions
from ..errors import RequestError, shown
from .amount import check_amount
from .errors import BodyTimeout, BodyTooLarge
from .schema import Body, Param

OFF_LOOP_BYTES = 64 * 1024  # larger bodies are parsed in a thread; 2.6 ms a megabyte
CHUNK_TIMEOUT = 60.0  # seconds between two pieces of a body
_WHOLE = re.compile(r"-?[0-9]{1,30}", re.ASCII)
_DIGITS = 4300  # of an integer; Python reads no more


async def read_body(request: Request, options: ServerOptions, body: Body) -> Fields:
    """The body of a POST, held to its declaration.

    Raises: RequestError: as read_json, and naming the first field that is wrong or cannot be honoured.
    """
    fields = await read_json(request, options.max_body_bytes)
    try:
        body.check(fields.values)
    except RequestError as error:
        raise fields.exactly(error, body) from None
    return Fields(fields.values, declared=body, source=fields.source)


async def read_json(request: Request, max_bytes: int) -> Fields:
    """The body of a POST as an object.

    Raises: RequestError: wrong media type or JSON; TooLarge: above `max_bytes`, or so many messages or other values
    that parsing them would stop everybody else (amount.py).
    """
    headers = dict(reversed(request.scope["headers"]))  # of a name that comes twice, the first counts
    _check_media_type(headers)
    body = await _read_body(request, headers.get(b"content-length", b"0"), max_bytes)
    if len(body) > OFF_LOOP_BYTES:
        await asyncio.to_thread(check_amount, body, max_bytes)
        value = await asyncio.to_thread(_parse, body)
    else:
        value = _parse(body)
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.")
    return Fields(value, source=body)


def query_flag(request: Request, name: str) -> bool:
    """A parameter of the URL that is true or false; false when missing. Raises: RequestError."""
    given = request.query_params.get(name, "false").lower()
    if given not in ("true", "false", "1", "0"):
        raise RequestError(f"{name} must be true or false, got {shown(given)}.", param=name)
    return given in ("true", "1")


def query_integer(request: Request, param: Param) -> int | None:
    """A parameter of the URL that is a whole number; its default when missing. Raises: RequestError."""
    given = request.query_params.get(param.name)
    if given is None:
        return param.default
    value = int(given) if _WHOLE.fullmatch(given) else given
    param.kind.check(value, param.name)
    return value


def query_word(request: Request, param: Param) -> str | None:
    """A parameter of the URL that is one of some words; its default when missing. Raises: RequestError."""
    given = request.query_params.get(param.name, param.default)
    if given is not None:
        param.kind.check(given, param.name)
    return given


def _check_media_type(headers: Mapping[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    # A browser sends other types to foreign sites without asking them first, so those are refused.
    if kind != b"application/json" and (kind or b"origin" in headers):
        told = repr(kind[:64].decode("latin-1")) if kind else "none"
        cure = "; with curl, -H 'Content-Type: application/json'"
        raise RequestError(f"Content-Type must be application/json, got {told}{cure}.")
    coding = headers.get(b"content-encoding", b"identity").strip().lower()
    if coding not in (b"", b"identity"):
        told = shown(coding.decode("latin-1"))
        raise RequestError(f"Content-Encoding {told} is not understood; send the body uncompressed.")


async def _read_body(request: Request, announced: bytes, max_bytes: int) -> bytes:
    if announced.isdigit() and int(announced) > max_bytes:
        raise BodyTooLarge(f"The body has {announced.decode()} bytes; at most {max_bytes} are allowed.")
    pieces, size, more = [], 0, True
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(CHUNK_TIMEOUT) as silence:
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                pieces.append(message.get("body", b""))
                more = message.get("more_body", False)
                size += len(pieces[-1])
                if size > max_bytes:
                    raise BodyTooLarge(f"The body has more than {max_bytes} bytes.")
                if more:
                    silence.reschedule(clock() + CHUNK_TIMEOUT)
    except TimeoutError:
        raise BodyTimeout(f"No part of the body arrived for {CHUNK_TIMEOUT:.0f} seconds.") from None
    return b"".join(pieces)


def _parse(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if b"\0" in body[:4] or not _is_utf8(body):
            raise RequestError("The body is not UTF-8, which JSON has to be.") from None
        raise RequestError(f"The body is not valid JSON: {error}.") from None


def _exact(body: bytes) -> dict[str, Any]:
    """A body that was understood, with all digits of its integers; {} if it is too large to be read a second time."""

    def integer(digits: str) -> float:
        return int(digits) if len(digits) <= _DIGITS else float(digits)

    if len(body) > OFF_LOOP_BYTES:
        return {}
    try:
        return json.loads(body, parse_int=integer)
    except (ValueError, RecursionError):
        return {}


def _at(value: Any, path: str, default: Any) -> Any:
    """What stands at a dotted path in an object."""
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return default
        value = value[name]
    return value


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


class Fields:
    """A JSON object, read field by field. Every reader returns `default` for a missing field and for null.

    Args:
        path: where this object stands in the body, e.g. "stream_options.".
        declared: what it may hold; a field that is not declared there cannot be read, so that the document is whole.
        source: the whole body as it came.
    """

    def __init__(
        self, values: Mapping[str, Any], path: str = "", declared: Body | None = None, source: bytes = b""
    ) -> None:
        self.values = values
        self.path = path
        self.source = source
        self._declared = declared

    def raw(self, name: str) -> Any:
        """The value as it is; None when missing."""
        if self._declared is not None and name not in self._declared.params:
            raise LookupError(f"{self._declared.name} declares no field {name}")
        return self.values.get(name)

    def given(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.raw(name) is not None

    def holds(self, name: str) -> bool:
        """Whether this body declares the field, and it is there."""
        declared = self._declared is None or name in self._declared.params
        return declared and self.raw(name) is not None

    def wrong(self, name: str, expected: str) -> RequestError:
        """The error for a field of a wrong type."""
        value = shown(_at(_exact(self.source), self.path + name, self.values.get(name)))
        return RequestError(f"{self.path}{name} must be {expected}, got {value}.", param=self.path + name)

    def exactly(self, error: RequestError, body: Body) -> RequestError:
        """A refusal that shows numbers as they were sent: the parser makes floats of integers beyond 64 bits."""
        sent = _exact(self.source)
        try:
            body.check(sent)
        except RequestError as exact:
            return exact
        value = _at(sent, error.param or "", None)
        return (
            error
            if value is None
            else RequestError(f"{error.param} must fit in 64 bits, got {shown(value)}.", param=error.param)
        )

    def refuse(self, name: str, why: str) -> None:
        """Raise a 400 that names the field."""
        raise RequestError(f"{self.path}{name}: {why}", param=self.path + name)

    def text(self, name: str, default: str | None = None) -> str | None:
        return self._typed(name, str, "a string", default)

    def flag(self, name: str, default: bool = False) -> bool:
        return self._typed(name, bool, "true or false", default)

    def integer(self, name: str, default: int | None = None) -> int | None:
        return self._typed(name, int, "an integer", default)

    def items(
        self, name: str, kind: type | tuple[type, ...] = object, expected: str = "a list", most: int = MAX_TOKEN_LIST
    ) -> list[Any] | None:
        """A list of at most `most` elements, which are of `kind`."""
        values = self._typed(name, list, expected, None)
        if values and len(values) > most:
            self.refuse(name, f"has {len(values)} entries; at most {most} are allowed.")
        for value in values or ():
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
                raise self.wrong(name, expected)
        return values

    def mapping(self, name: str) -> dict[str, Any] | None:
        return self._typed(name, dict, "an object", None)

    def inner(self, name: str) -> Fields | None:
        """An object inside this one, to be read in the same way."""
        values = self.mapping(name)
        declared = None if self._declared is None else self._declared.params[name].kind.inner
        return None if values is None else Fields(values, f"{self.path}{name}.", declared, self.source)

    def choice(self, name: str, choices: tuple[str, ...], default: str | None = None) -> str | None:
        value = self.text(name, default)
        if value is not None and value not in choices:
            raise self.wrong(name, "one of " + ", ".join(choices))
        return value

    def _typed(self, name: str, kind: type, expected: str, default: Any) -> Any:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.wrong(name, expected)
        return value
