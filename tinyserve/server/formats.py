"""The form that an answer must have: response_format, structured_outputs and the older guided_* names, as one thing.

Before: fields.py, structured.py.  After: sampling.py (part of a request's SamplingParams).
"""

from __future__ import annotations

from typing import Any

from ..structured import StructuredOutputsParams
from .fields import Fields

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def read_format(fields: Fields) -> StructuredOutputsParams | None:
    """What the answer must be; None for free text. Raises: RequestError: several are asked for, or one is malformed."""
    names = ("response_format", "structured_outputs", *GUIDED)
    found = {name: form for name in names if (form := _one(fields, name)) is not None}
    if len(found) > 1:
        first, second, *_ = found
        fields.refuse(second, f"only one form can be asked for, and there is {first} already.")
    return next(iter(found.values()), None)


def _one(fields: Fields, name: str) -> StructuredOutputsParams | None:
    if not fields.holds(name):
        return None
    if name == "response_format":
        return of_format(fields.inner(name), fields.path + name)
    if name == "structured_outputs":
        return StructuredOutputsParams.of(fields.mapping(name))
    return StructuredOutputsParams(**{GUIDED[name]: fields.raw(name)}, source=name)


def of_format(form: Fields, source: str, *, flat: bool = False) -> StructuredOutputsParams | None:
    """A response_format; flat: the `format` of the responses API, whose schema stands one level higher."""
    kind = form.text("type")
    if kind is None:
        form.refuse("type", "a response_format needs a type.")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, source=source)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=dict(form.values), source=source)
    if kind != "json_schema":
        raise form.wrong("type", "text, json_object, json_schema or structural_tag")
    inner = form if flat else form.inner("json_schema")
    if inner is None:
        form.refuse("json_schema", "is needed for the type json_schema.")
    schema: Any = inner.raw("schema")
    if schema is None:
        inner.refuse("schema", "a json_schema needs a schema.")
    return StructuredOutputsParams(json=schema, source=source)
