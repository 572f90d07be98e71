"""Checks and conversions of single fields, for the records of request.py: each refusal names its field.

A validator has attrs' signature (instance, attribute, value) and raises RequestError; a converter makes one type of the
several that users write (one stop string or a list, ids as text, True for 1). A validator of numbers tells its range as
JSON Schema in its attribute `schema`, for the document that describes the API. What a field means, and which fields
exclude each other, is said in request.py.

Before: errors.py.  After: request.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import Converter

from .errors import RequestError, shown

MAX_TEXTS = 128  # bad words of one request
MAX_TEXT = 8192  # characters of a stop string or a bad word; their tables are made while everybody waits
MAX_TEXT_TOKENS = 2**18  # of a text that no context limits, as it is cut or only counted; a megabyte of prose
MAX_TOKEN_LIST = 16384  # entries of logit_bias / allowed_token_ids; more is a mistake or an attack
INT64 = range(-(2**63), 2**63)


def refuse(param: str, message: str) -> None:
    """Raises: RequestError with this `param`."""
    raise RequestError(message, param=param)


def number(low: float, high: float, *, open_low: bool = False) -> Callable[[object, Any, Any], None]:
    """A validator: a real number in [low, high], or in (low, high] when `open_low`."""

    def check(_instance: object, attribute: Any, value: object) -> None:
        name = attribute.name
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            refuse(name, f"{name} must be a number, got {shown(value)}.")
        if not (low < value <= high if open_low else low <= value <= high):  # NaN is not
            bracket = "(" if open_low else "["
            refuse(name, f"{name} must be in {bracket}{low:g}, {high:g}], got {shown(value)}.")

    check.schema = {"type": "number", "exclusiveMinimum" if open_low else "minimum": low, "maximum": high}
    return check


def integer(low: int, high: int, *, optional: bool = False) -> Callable[[object, Any, Any], None]:
    """A validator: an int (not a bool) in [low, high], or None when `optional`."""

    def check(_instance: object, attribute: Any, value: object) -> None:
        name = attribute.name
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(name, f"{name} must be an integer, got {shown(value)}.")
        if not low <= value <= high:
            refuse(name, f"{name} must be in [{low}, {high}], got {shown(value)}.")

    check.schema = {"type": "integer", "minimum": low, "maximum": high}
    return check


def flag(_instance: object, attribute: Any, value: object) -> None:
    """A validator: True or False, and nothing that only looks like it."""
    if not isinstance(value, bool):
        refuse(attribute.name, f"{attribute.name} must be True or False, got {shown(value)}.")


def optional_flag(_instance: object, attribute: Any, value: object) -> None:
    """A validator: True, False or None."""
    if value is not None:
        flag(_instance, attribute, value)


def later(*harmless: Any) -> Callable[[object, Any, Any], None]:
    """A validator for a feature that does not exist yet: None and the values that mean "off" pass."""

    def check(_instance: object, attribute: Any, value: object) -> None:
        if value is not None and not any(value is off or value == off for off in harmless):
            refuse(attribute.name, f"{attribute.name}: tinyserve does not support this field yet.")

    return check


def token_list(_instance: object, attribute: Any, value: tuple[int, ...] | None) -> None:
    """A validator: token ids, not too many of them. The vocabulary is known only later."""
    name = attribute.name
    if value is None:
        return
    if len(value) > MAX_TOKEN_LIST:
        refuse(name, f"{name} has {len(value)} entries; at most {MAX_TOKEN_LIST} are allowed.")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            refuse(name, f"{name} must hold token ids (integers >= 0), got {shown(token)}.")


def texts(most: int) -> Callable[[object, Any, Any], None]:
    """A validator: at most `most` texts, none of them empty or endless."""

    def check(_instance: object, attribute: Any, value: tuple[str, ...]) -> None:
        name = attribute.name
        if len(value) > most:
            refuse(name, f"{name} has {len(value)} entries; at most {most} are allowed.")
        for text in value:
            if not isinstance(text, str):
                refuse(name, f"{name} must hold strings, got {shown(text)}.")
            if not text:
                refuse(name, f"{name} must not contain an empty string.")
            if len(text) > MAX_TEXT:
                refuse(name, f"{name} has a text of {len(text)} characters; at most {MAX_TEXT} are allowed.")

    return check


def extra_args(_instance: object, attribute: Any, value: object) -> None:
    """A validator: a mapping with text keys, whose integers fit in 64 bits at any depth."""
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        refuse(attribute.name, f"{attribute.name} must map names to values, got {shown(value)}.")
    waiting: list[Any] = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, int) and item not in INT64:
            refuse(attribute.name, f"{attribute.name}: {shown(item)} does not fit in 64 bits.")
        if isinstance(item, Mapping):
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple)):
            waiting.extend(item)


def _listed(name: str, value: Any, what: str) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        refuse(name, f"{name} must be a list of {what}, got {shown(value)}.")
    return list(value)


def _as_texts(value: str | Sequence[str] | None, attribute: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(_listed(attribute.name, value, "strings"))


def _as_tokens(value: Sequence[int] | None, attribute: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = _listed(attribute.name, value, "token ids")
    for token in ids:
        if type(token) is not int:
            refuse(attribute.name, f"{attribute.name} must hold token ids (integers >= 0), got {shown(token)}.")
    return tuple(dict.fromkeys(ids))


def _as_token_rows(value: Any, attribute: Any) -> tuple[Any, ...] | None:
    if value is None:
        return None
    name = attribute.name
    rows = _listed(name, value.tolist() if hasattr(value, "tolist") else value, "lists of token ids")
    shared = bool(rows) and all(type(token) is int for token in rows)
    checked = [rows] if shared else [_listed(name, row, "token ids") for row in rows]
    for row in checked:
        for token in row:
            if type(token) is not int or token < -1:
                refuse(name, f"{name} must hold token ids (or -1 for none), got {shown(token)}.")
    return tuple(rows) if shared else tuple(tuple(row) for row in checked)


as_texts = Converter(_as_texts, takes_field=True)  # one text or several -> a tuple
as_tokens = Converter(_as_tokens, takes_field=True)  # ids without repetitions, in their order
# Rows of ids ([rows, K], a numpy array too), -1 for no token; or one list of ids that every row shares.
as_token_rows = Converter(_as_token_rows, takes_field=True)


def as_seed(value: int | None) -> int | None:
    """-1 is another way to write None: draw a seed for me."""
    return None if type(value) is int and value == -1 else value


def as_logprobs(value: int | bool | None) -> int | None:
    """How many alternatives: True is 1 and False is none at all."""
    return int(value) if isinstance(value, bool) and value else (None if value is False else value)


def as_bias(value: Mapping[int | str, float] | None) -> dict[int, float] | None:
    """Token id -> bias, with ids given as text made ints. OpenAI's range [-100, 100] is kept by refusing the rest."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        refuse("logit_bias", f"logit_bias must map token ids to numbers, got {shown(value)}.")
    if len(value) > MAX_TOKEN_LIST:
        refuse("logit_bias", f"logit_bias has {len(value)} entries; at most {MAX_TOKEN_LIST} are allowed.")
    bias: dict[int, float] = {}
    for key, added in value.items():
        whole = key.isascii() and key.lstrip("-").isdecimal() if isinstance(key, str) else hasattr(key, "__index__")
        if not whole or isinstance(key, bool):
            refuse("logit_bias", f"logit_bias keys must be token ids, got {shown(key)}.")
        try:
            token = int(key)
        except ValueError:  # 5000 digits, or "--5"
            refuse("logit_bias", f"logit_bias keys must be token ids, got {shown(key)}.")
        if token in bias:
            refuse("logit_bias", f"logit_bias names token {token} twice.")
        if token < 0 or isinstance(added, bool) or not isinstance(added, (int, float)):
            refuse("logit_bias", f"logit_bias must map token ids to numbers, got {shown(key)}: {shown(added)}.")
        if not abs(added) <= 100:  # NaN is not
            refuse("logit_bias", f"logit_bias values must be in [-100, 100], got {shown(added)} for token {token}.")
        bias[token] = float(added)
    return bias
