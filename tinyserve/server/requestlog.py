"""The line that `--enable-log-requests` writes for each request: who, how, and at DEBUG also what.

Before: request.py.  After: openai_chat.py, openai_completions.py.
"""

from __future__ import annotations

import logging
from typing import Any

from attrs import fields_dict

from ..config import LogOptions
from ..request import SamplingParams

logger = logging.getLogger("tinyserve.requests")
_DEFAULTS = SamplingParams()


def log_request(options: LogOptions, request_id: str, sampling: SamplingParams, tokens: int, prompt: Any) -> None:
    """Log a request's id, prompt length and the parameters that differ from neutral ones.

    Args: prompt: what the user sent; shown at DEBUG only, cut to --max-log-len characters.
    """
    if not options.enable_log_requests:
        return
    named = fields_dict(SamplingParams).keys() - {"output_kind"}  # the route's choice, not the user's
    chosen = {name: getattr(sampling, name) for name in fields_dict(SamplingParams) if name in named}
    chosen = {name: value for name, value in chosen.items() if value != getattr(_DEFAULTS, name)}
    logger.info("received %s: %d prompt tokens, %s", request_id, tokens, chosen)
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("prompt of %s: %s", request_id, repr(prompt)[: options.max_log_len])
