"""The line that `--enable-log-requests` writes for each request: who, how, and at DEBUG also what.

Before: request.py.  After: openai_chat.py, openai_completions.py.
"""

from __future__ import annotations

import logging
import reprlib
from typing import Any

from attrs import asdict, fields_dict, has

from ..config import LogOptions
from ..request import SamplingParams

logger = logging.getLogger("tinyserve.requests")
_DEFAULTS = SamplingParams()
_BRIEF = reprlib.Repr()  # of a list with 100,000 numbers, or a schema as long, the beginning
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 100
_BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxset = _BRIEF.maxfrozenset = _BRIEF.maxdict = 10
_BRIEF.maxlevel = 4


def log_request(options: LogOptions, request_id: str, sampling: SamplingParams, tokens: int, prompt: Any) -> None:
    """Log a request's id, prompt length and the parameters that differ from neutral ones.

    Args: prompt: what the user sent; shown at DEBUG only, cut to --max-log-len characters.
    """
    if not options.enable_log_requests:
        return
    named = fields_dict(SamplingParams).keys() - {"output_kind"}  # the route's choice, not the user's
    chosen = {name: getattr(sampling, name) for name in fields_dict(SamplingParams) if name in named}
    chosen = {name: value for name, value in chosen.items() if value != getattr(_DEFAULTS, name)}
    shown = ", ".join(f"{name}={_brief(value)}" for name, value in chosen.items())
    logger.info("received %s: %d prompt tokens, %s", request_id, tokens, shown or "defaults")
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("prompt of %s: %s", request_id, repr(prompt)[: options.max_log_len])


def _brief(value: Any) -> str:
    """The beginning of a value: what clients send may be as long as a body."""
    if has(type(value)):
        value = {name: part for name, part in asdict(value, recurse=False).items() if part}
    return _BRIEF.repr(value)
