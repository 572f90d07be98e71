"""The fields that chat and completions share: sampling parameters and stream options.

Where a value comes from: the request, else the server's defaults (the model's generation_config), else neutral. Ranges
are checked in request.py, by SamplingParams itself; what is refused is declared in bodies.py.

Before: fields.py, bodies.py.  After: openai_chat.py, openai_completions.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from attrs import fields as fields_of
from attrs import frozen

from ..request import RequestOutputKind, SamplingParams
from .face import Service
from .fields import Fields
from .formats import read_format

_NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "n", "seed", "min_tokens", "prompt_logprobs", "stream_interval",
)  # fmt: skip
_PLAIN = {bool, int, float, str, type(None), RequestOutputKind}
_DEFAULTS = {attribute.name: attribute.default for attribute in fields_of(SamplingParams)}
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens")


@frozen(kw_only=True)
class StreamOptions:
    """How an answer is sent. continuous: usage in every chunk. progress: chunks while the prompt is computed."""

    stream: bool = False
    include_usage: bool = False
    continuous: bool = False
    progress: bool = False


def read_sampling(
    fields: Fields, defaults: Mapping[str, Any], *, stream: bool = True, **decided: Any
) -> SamplingParams:
    """Build the sampling parameters of a request.

    Args:
        stream: whether the answer is sent in pieces; else the engine is asked for whole answers only.
        defaults: the server's sampling defaults by field name.
        decided: fields that each protocol reads in its own way (max_tokens, logprobs ...); they win.
    Raises: RequestError: with `param` set to the field at fault.
    """
    values: dict[str, Any] = {name: value for name, value in defaults.items() if name != "max_tokens"}
    values |= {name: fields.raw(name) for name in _NUMBERS if fields.holds(name)}
    values |= {name: fields.flag(name) for name in _FLAGS if fields.holds(name)}
    values |= _lists(fields)
    if fields.holds("logit_bias"):
        values["logit_bias"] = fields.mapping("logit_bias")
    if fields.holds("repetition_detection"):
        values["repetition_detection"] = fields.mapping("repetition_detection")
    values["structured_outputs"] = read_format(fields)
    if fields.holds("thinking_token_budget"):
        values["thinking_token_budget"] = fields.integer("thinking_token_budget")
    values["output_kind"] = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    values |= decided
    if fields.holds("stop_token_ids") and "stop_token_ids" in defaults:
        values["stop_token_ids"] = [*defaults["stop_token_ids"], *values["stop_token_ids"]]
    values = {name: value for name, value in values.items() if value is not _DEFAULTS[name]}
    if all(type(value) in _PLAIN for value in values.values()):
        return _made(tuple((name, type(value), value) for name, value in values.items()))
    return SamplingParams(**values)


@lru_cache(256)
def _made(values: tuple[tuple[str, type, Any], ...]) -> SamplingParams:
    """Parameters that were asked for before: checking 40 fields takes 0.1 ms. Types tell 1 and True apart."""
    return SamplingParams(**{name: value for name, _, value in values})


def _lists(fields: Fields) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in ("stop", "bad_words"):
        if fields.holds(name):
            text = isinstance(fields.raw(name), str)
            values[name] = fields.raw(name) if text else fields.items(name, str, "a string or a list of strings")
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        if fields.holds(name):
            values[name] = fields.items(name, int, "a list of token ids")
    return values


def read_stream(fields: Fields, service: Service) -> StreamOptions:
    """Whether and how to stream. Raises: RequestError: stream_options without stream."""
    stream = fields.flag("stream")
    options = fields.inner("stream_options")
    if options is not None and not stream:
        fields.refuse("stream_options", "allowed only together with stream: true.")
    if stream and fields.holds("prompt_logprobs") and fields.raw("prompt_logprobs"):
        fields.refuse("prompt_logprobs", "not available when streaming.")
    force = service.config.server.enable_force_include_usage
    include = force or (options is not None and options.flag("include_usage"))
    continuous = force or (include and options is not None and options.flag("continuous_usage_stats"))
    progress = fields.holds("return_progress") and fields.flag("return_progress")
    if progress and not stream:
        fields.refuse("return_progress", "allowed only together with stream: true.")
    return StreamOptions(stream=stream, progress=progress, include_usage=include, continuous=continuous)


def cut_prompt(fields: Fields, ids: list[int], max_model_len: int) -> list[int]:
    """Apply truncate_prompt_tokens: -1 fits the context and leaves one token for the answer.

    truncation_side "left" drops the beginning (the default), "right" the end.
    """
    keep = fields.integer("truncate_prompt_tokens")
    side = fields.choice("truncation_side", ("left", "right"), "left")
    if keep is None:
        return ids
    if keep < -1 or keep > max_model_len:
        fields.refuse("truncate_prompt_tokens", f"must be -1, or 0 to the context of {max_model_len}, got {keep}.")
    keep = max_model_len - 1 if keep == -1 else keep
    if len(ids) <= keep:
        return ids
    return ids[:keep] if side == "right" else ids[len(ids) - keep :]


def request_options(fields: Fields, service: Service) -> dict[str, Any]:
    """What else goes with a request to the engine. Raises: UnknownModel."""
    options: dict[str, Any] = {"priority": fields.integer("priority", 0)}
    adapter = service.adapter(fields.text("model"))
    if adapter is not None:
        options["adapter"] = adapter
    salt = fields.text("cache_salt")
    if salt is not None:
        if not salt or len(salt) > 128 or set(salt) & set("@/\\\0"):
            fields.refuse("cache_salt", "must have 1 to 128 characters, none of @ / \\ or NUL.")
        options["cache_salt"] = salt
    return options
