"""/openapi.json for programs and /docs for people: the same facts, nothing loaded from elsewhere.

The page is plain HTML without scripts, made once per app: routes with their fields, the command line's options, and the
metrics. Everything on it comes from declarations: handlers' `facts`, config.flags(), telemetry's tables.

Before: openapi.py, config.py, telemetry.py.  After: app.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from html import escape
from typing import Any, get_args

import orjson
from starlette.requests import Request
from starlette.responses import Response

from ..config import flags
from ..engine.adapters import METRIC
from ..options import Flag
from ..telemetry import described
from ..text.parsers.registry import known_parsers
from .face import Service
from .openapi import PAGES, REFUSALS, document

EVENTS = "text/event-stream"
_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --code: #8882; --dim: #767676; --link: #0b62c4; }
@media (prefers-color-scheme: dark) { :root { --link: #7ab7ff; --dim: #9a9a9a; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
a { color: var(--link); } code, pre { font: 0.9em ui-monospace, monospace; background: var(--code); }
code { padding: 0.1em 0.3em; border-radius: 3px; overflow-wrap: anywhere; }
pre { padding: 0.7em; overflow-x: auto; border-radius: 5px; }
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0 1.5rem; font-size: 0.93em; }
th, td { text-align: left; vertical-align: top; padding: 0.3em 0.6em; border-bottom: 1px solid var(--line); }
td:first-child { white-space: nowrap; } .dim { color: var(--dim); }
h3 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; } details summary { cursor: pointer; }
nav ul { columns: 2; padding-left: 1.2rem; }
@media (max-width: 40rem) { nav ul { columns: 1; } td:first-child { white-space: normal; } }
"""


def pages(routes: Sequence[tuple[str, str, Any]]) -> tuple[tuple[str, str, Any], ...]:
    """The two routes that describe `routes`."""

    @lru_cache(4)
    def told(root_path: str, keys: bool) -> tuple[bytes, bytes]:
        found = document(routes, root_path, keys=keys)
        return orjson.dumps(found), page(found).encode()

    def both(service: Service) -> tuple[bytes, bytes]:
        return told(service.config.server.root_path, bool(service.config.server.api_key))

    async def openapi_json(_request: Request, service: Service) -> Response:
        """The OpenAPI document of this server."""
        return Response(both(service)[0], media_type="application/json")

    async def docs(_request: Request, service: Service) -> Response:
        """The same as a page, with the command line's options and the metrics."""
        return Response(both(service)[1], media_type="text/html", headers=_HEADERS)

    return ("GET", "/openapi.json", openapi_json), ("GET", "/docs", docs)


def page(found: Mapping[str, Any]) -> str:
    """The HTML page of an OpenAPI document."""
    operations = [(path, method, told) for path, ways in found["paths"].items() for method, told in ways.items()]
    tags = list(dict.fromkeys(told["tags"][0] for _, _, told in operations))
    schemas = found["components"]["schemas"]
    parts = [f"<h1>tinyserve <small class=dim>{escape(found['info']['version'])}</small></h1>"]
    parts += [f"<p>{_inline(piece)}</p>" for piece in found["info"]["description"].split("\n\n")]
    parts.append(_pages(found["info"]["title"]))
    links = [f"<li><a href='#{_anchor(p, m)}'><code>{m.upper()} {escape(p)}</code></a>" for p, m, _ in operations]
    links += [f"<li><a href=#{name.lower()}>{name}</a>" for name in ("Refusals", "Options", "Metrics")]
    parts.append(f"<nav aria-label=Contents><ul>{''.join(links)}</ul></nav>")
    for tag in tags:
        parts.append(f"<h2>{escape(tag)}</h2>")
        parts += [_operation(p, m, told, schemas) for p, m, told in operations if told["tags"][0] == tag]
    parts.append(_refusals())
    parts.append(_options(flags()))
    parts.append(_metrics())
    title = "<!doctype html><html lang=en><meta charset=utf-8><title>tinyserve: reference</title>"
    view = "<meta name=viewport content='width=device-width, initial-scale=1'>"
    return f"{title}{view}<style>{_STYLE}</style><main>{''.join(parts)}</main></html>"


def _pages(title: str) -> str:
    """Routes that are for browsers, with links to them: relative ones, as a proxy may show the server below a path."""
    rows = [
        f"<li><a href='{path.removeprefix('/') or './'}'><code>GET {path}</code></a> {escape(told)}"
        for path, told in PAGES.items()
    ]
    return f"<p>Pages of {escape(title)}:</p><ul>{''.join(rows)}</ul>"


def _refusals() -> str:
    """What a status means, and how its body looks."""
    shapes = (
        '{"error": {"message": TEXT, "type": TEXT, "param": the field at fault or null, "code": status or word}}\n'
        '{"type": "error", "error": {"type": TEXT, "message": TEXT}}      below /v1/messages'
    )
    text = (
        "<p>The body of a refusal is JSON. A 503 has the header <code>Retry-After</code>, unless the engine is dead: "
        "after so many seconds the same may be sent again.</p>"
    )
    rows = [(str(status), meaning) for status, meaning in REFUSALS.items()]
    return f"<h2 id=refusals>Refusals</h2>{text}<pre>{escape(shapes)}</pre>{_table(('status', ''), rows)}"


def _operation(path: str, method: str, told: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    parts = [f"<h3 id='{_anchor(path, method)}'><code>{method.upper()} {escape(path)}</code> "]
    parts.append(f"{escape(told['summary'])}</h3><p>{_inline(told['description'])}</p>")
    if parameters := told.get("parameters"):
        parts.append(_table(("parameter", "type", ""), [
            (p["name"], _type(p["schema"]), p["description"] + _default(p["schema"])) for p in parameters
        ]))  # fmt: skip
    if body := told.get("requestBody"):
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        parts.append(_table(("field", "type", ""), _fields(schemas[name])))
    for media, content in told["responses"]["200"].get("content", {}).items():
        shape = content["schema"].get("description", "") if media == EVENTS else _shape(content["schema"])
        parts.append(
            f"<details><summary>200 <code>{escape(media)}</code></summary><pre>{escape(shape)}</pre></details>"
        )
    refusals = ", ".join(status for status in told["responses"] if status != "200")
    return "".join(parts) + f"<p class=dim><a href=#refusals>Refusals</a>: {refusals}.</p>"


def _fields(schema: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str, str]]:
    """A row for each field, with those of objects inside it behind."""
    needed, found = schema.get("required", ()), []
    for name, member in schema["properties"].items():
        help = member.get("description", "") + _default(member) + (" Needed." if name in needed else "")
        found.append((prefix + name, _type(member), help))
        if "properties" in member:
            found += _fields(member, f"{prefix}{name}.")
    return found


def _default(schema: Mapping[str, Any]) -> str:
    return f" Default: {orjson.dumps(schema['default']).decode()}." if "default" in schema else ""


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in a few words, e.g. "number 0 .. 2"."""
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"] if part.get("type") != "null")
    kinds = schema.get("type", "any")
    kind = kinds if isinstance(kinds, str) else "/".join(name for name in kinds if name != "null")
    if "enum" in schema:
        return ", ".join(map(str, (value for value in schema["enum"] if value is not None))) or "null"
    if kind == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list of {_type(schema.get('items', {}))}{most}"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if low is None and high is None:
        return kind
    return f"{kind} {'>' if 'exclusiveMinimum' in schema else ''}{_short(low)} .. {_short(high)}"


def _short(value: float | None) -> str:
    if value is None:
        return ""
    named = {2**31 - 1: "2^31-1", 2**63 - 1: "2^63-1", -(2**63): "-2^63"}
    return named.get(value, f"{value:g}")


def _shape(schema: Mapping[str, Any], indent: str = "") -> str:
    """An answer's schema as an outline."""
    if "anyOf" in schema:
        return _shape(schema["anyOf"][0], indent) + " or null"
    inner = indent + "  "
    if "properties" in schema:
        lines = [f"{inner}{name}: {_shape(member, inner)}" for name, member in schema["properties"].items()]
        return "{\n" + "\n".join(lines) + f"\n{indent}}}"
    if schema.get("type") == "array":
        return f"[{_shape(schema.get('items', {}), indent)} ...]"
    kinds = schema.get("type", "any")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)


def _options(known: Iterable[Flag]) -> str:
    rows, parsers = [], known_parsers()
    for flag in known:
        default = "" if flag.default in (None, "", (), {}) else f" Default: {flag.default}."
        names = f" Names: {', '.join(parsers[flag.name])}." if flag.name in parsers else ""
        rows.append((flag.cli, _kind(flag), flag.env, flag.help + names + default))
    text = (
        "<p>Each option is also a key of the YAML file that <code>--config</code> names. One that is true or false is "
        "turned off by <code>--no-</code> before its name; a list takes several words, or one with commas.</p>"
    )
    return f"<h2 id=options>Options</h2>{text}{_table(('option', 'type', 'environment', ''), rows)}"


def _kind(flag: Flag) -> str:
    """An option's type in a few words, e.g. "number > 0 .. 1"."""
    if flag.choices:
        return ", ".join(flag.choices)
    one = get_args(flag.type)[0] if flag.is_list else flag.type
    kind = {bool: "true or false", int: "integer", float: "number", dict: "JSON object"}.get(one, "text")
    low = f"> {_short(flag.above)}" if flag.above is not None else _short(flag.low)
    if low or flag.high is not None:
        kind += f" {low} .. {_short(flag.high)}"
    return ("list of " if flag.is_list else "") + " or ".join([kind, *(word for word in flag.words if word.isalpha())])


def _metrics() -> str:
    known = (*described(), METRIC)
    rows = [
        (name + "_total" * (kind == "counter"), kind, help + (f" By {label}." if label else ""))
        for name, kind, label, help in known
    ]
    text = (
        "<p>At <code>/metrics</code>, in Prometheus' text format; names begin with <code>--metrics-prefix</code>, "
        "except <code>http_</code>. Prometheus' library adds <code>process_</code> and <code>python_</code>, and with "
        "<code>_created</code> when a count began.</p>"
    )
    return f"<h2 id=metrics>Metrics</h2>{text}{_table(('metric', 'kind', ''), rows)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column as code, the last as text."""
    top = "".join(f"<th scope=col>{escape(name)}" for name in head)
    lines = (
        f"<tr><td><code>{escape(first)}</code>"
        + "".join(f"<td class=dim>{escape(one)}" for one in more)
        + f"<td>{_inline(last)}"
        for first, *more, last in rows
    )
    return f"<table><thead><tr>{top}</thead><tbody>{''.join(lines)}</tbody></table>"


def _anchor(path: str, method: str) -> str:
    return method + re.sub(r"[^a-z0-9]+", "-", path.lower())


def _inline(text: str) -> str:
    """Escaped text, with what stands in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
