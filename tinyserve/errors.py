"""Every error that tinyserve raises on purpose, as one tree.

    TinyserveError
    ├── ConfigError            an option of the user is wrong; raised before anything is loaded
    ├── CheckpointError        the model's files are missing, damaged or not what they say
    │   └── UnsupportedModel   the files are fine, but this version cannot run them faithfully
    ├── RequestError           one request is wrong: its sender gets a 4xx, everybody else goes on
    │   ├── ContextLengthExceeded   prompt leaves no room for one output token
    │   └── UnknownModel            404: the name is not served here
    ├── Overloaded             503 with Retry-After: the queue is full, or the engine is paused
    └── EngineError            500: a request that was right could not be answered
        ├── NumericsError      the model produced NaN for this request
        └── EngineDead         the loop ended; no request can be answered any more

An error's text says what was wrong, with the numbers, and what to do about it.

Before: nothing (this is the first row).  After: every other file.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)
COUNTED_CONTEXTS = 4  # a prompt is counted exactly up to so many contexts; of a longer one the refusal says "at least"


class _Short(reprlib.Repr):
    """The library's, without sorting a million keys and without printing a million digits."""

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        if level <= 0:
            return "{...}"
        pieces = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in islice(x.items(), 4)]
        return "{" + ", ".join([*pieces, *(["..."] if len(x) > 4 else [])]) + "}"

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"an integer of {x.bit_length()} bits"


_short = _Short()
_short.maxlevel = 3


def shown(value: Any) -> str:
    """What a message says of a value that somebody sent: at most 80 characters, and no work that grows with it."""
    text = _short.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def retold(error: E) -> E:
    """The same error for somebody else. The one that is kept is never raised: what is raised takes along the frames of
    all whom it passes, and those would live for as long as it is kept."""
    kind = type(error)
    twin = kind.__new__(kind, *error.args)
    builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    builtin.__init__(twin, *error.args)  # not that of ours, whose arguments are others
    twin.__dict__.update(error.__dict__)
    twin.__cause__, twin.__suppress_context__ = error.__cause__, error.__suppress_context__
    return twin.with_traceback(error.__traceback__)


class TinyserveError(Exception):
    """Root of the tree: `except TinyserveError` catches all that is raised on purpose."""


class ConfigError(TinyserveError, ValueError):
    """An option has a value that cannot work. The message names the flag and a value that would."""


class CheckpointError(TinyserveError):
    """The model's files are missing, damaged, or do not match the model's code."""


class UnsupportedModel(CheckpointError):
    """The checkpoint asks for something that would change the numbers and is not implemented."""


class RequestError(TinyserveError, ValueError):
    """One request is wrong; the HTTP layer answers with `status` and OpenAI's error object.

    Args:
        message: what is wrong and what would be right; shown to the sender.
        param: dotted path of the field at fault, or None.
        code: OpenAI's machine-readable code, or None.
    """

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthExceeded(RequestError):
    """The prompt leaves no room for one output token."""

    def __init__(
        self, prompt_tokens: int, max_model_len: int, *, at_least: bool = False, param: str = "prompt"
    ) -> None:
        count = f"at least {prompt_tokens}" if at_least else f"{prompt_tokens}"
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has {count} tokens; "
            f"at most {max_model_len - 1} leave room for an answer. Shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )


class UnknownModel(RequestError):
    """The request names a model that is not served here."""

    status = 404

    def __init__(self, name: str, served: tuple[str, ...]) -> None:
        super().__init__(
            f"The model `{name[:200]}` does not exist. Served here: {', '.join(served)}.",
            param="model",
            code="model_not_found",
        )


class Overloaded(TinyserveError):
    """Too much waits already. Args: retry_after: seconds after which a retry makes sense."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(TinyserveError):
    """A request that was right could not be answered."""


class NumericsError(EngineError):
    """The model produced NaN (or only -inf) for this request; its cached blocks were discarded."""


class EngineDead(EngineError):
    """The engine's loop ended. The first cause is chained as `__cause__`."""
