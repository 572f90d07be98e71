"""The line that `--enable-log-requests` writes for each request: who, how, and at DEBUG also what.

Before: request.py.  After: openai_chat.py, openai_completions.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from attrs import fields_dict

from ..config import LogOptions
from ..request import SamplingParams

logger = logging.getLogger("tinyserve.requests")
_DEFAULTS = SamplingParams()


def log_request(options: LogOptions, request_id: str, sampling: SamplingParams, ids: Sequence[int], text: str) -> None:
    """Log a request's id, prompt length and the parameters that differ from neutral ones.

    Args: text: what the user wrote, if it is at hand; shown at DEBUG only, cut to --max-log-len characters.
    """
    if not options.enable_log_requests:
        return
    named = fields_dict(SamplingParams).keys() - {"output_kind"}  # the route's choice, not the user's
    chosen = {name: getattr(sampling, name) for name in fields_dict(SamplingParams) if name in named}
    chosen = {name: value for name, value in chosen.items() if value != getattr(_DEFAULTS, name)}
    logger.info("received %s: %d prompt tokens, %s", request_id, len(ids), chosen)
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("prompt of %s: %r", request_id, text[: options.max_log_len])
