"""What is asked and what is answered: the words that every part of tinyserve shares.

This file knows the meaning and the legal range of every sampling field. It does not know tensors, tokens' text or
HTTP: the server builds these objects from JSON, the notebook builds them by hand, and both are validated in the
same place, when built. All of them are frozen; nobody downstream may change what was asked.

Names, defaults and ranges are vLLM's where the meaning is the same, so that a user's code moves over unchanged.

Before: errors.py.  After: step.py (what the runner gets to see), scheduling/sequence.py (what changes while it runs).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from .errors import RequestError

MIN_TEMPERATURE = 0.01  # below it fp32 logits / t overflow towards one-hot anyway; 0 itself means greedy
MAX_N = 16384
MAX_STOP_STRINGS = 64
MAX_TOKEN_LIST = 16384  # entries of logit_bias / allowed_token_ids; more is a mistake or an attack
INT64 = range(-(2**63), 2**63)


class FinishReason(enum.StrEnum):
    """Why a sequence ended, by OpenAI's names."""

    STOP = "stop"  # end token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context
    ABORT = "abort"  # the client went away, or the engine was told to
    ERROR = "error"  # see Output.error; becomes HTTP 500 or an error event, never a finish_reason


def _refuse(param: str, message: str) -> None:
    raise RequestError(message, param=param)


def _number(low: float, high: float, *, open_low: bool = False):
    """A validator: a finite real number in [low, high], or in (low, high] when `open_low`."""

    def check(_instance: object, attribute: Any, value: object) -> None:
        name = attribute.name
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            _refuse(name, f"{name} must be a number, got {value!r}.")
        if not math.isfinite(value) or not (low < value <= high if open_low else low <= value <= high):
            bracket = "(" if open_low else "["
            _refuse(name, f"{name} must be in {bracket}{low:g}, {high:g}], got {value}.")

    return check


def _integer(low: int, high: int, *, optional: bool = False):
    """A validator: an int (not a bool) in [low, high], or None when `optional`."""

    def check(_instance: object, attribute: Any, value: object) -> None:
        name = attribute.name
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            _refuse(name, f"{name} must be an integer, got {value!r}.")
        if not low <= value <= high:
            _refuse(name, f"{name} must be in [{low}, {high}], got {value}.")

    return check


def _token_list(_instance: object, attribute: Any, value: tuple[int, ...] | None) -> None:
    name = attribute.name
    if value is None:
        return
    if len(value) > MAX_TOKEN_LIST:
        _refuse(name, f"{name} has {len(value)} entries; at most {MAX_TOKEN_LIST} are allowed.")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            _refuse(name, f"{name} must hold token ids (integers >= 0), got {token!r}.")


def _texts(_instance: object, attribute: Any, value: tuple[str, ...]) -> None:
    name = attribute.name
    if len(value) > MAX_STOP_STRINGS:
        _refuse(name, f"{name} has {len(value)} entries; at most {MAX_STOP_STRINGS} are allowed.")
    for text in value:
        if not isinstance(text, str):
            _refuse(name, f"{name} must hold strings, got {text!r}.")
        if not text:
            _refuse(name, f"{name} must not contain an empty string.")


def _as_texts(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _as_tokens(value: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(dict.fromkeys(value))


def _as_logprobs(value: int | bool | None) -> int | None:
    return int(value) if isinstance(value, bool) and value else (None if value is False else value)


def _as_bias(value: Mapping[int | str, float] | None) -> dict[int, float] | None:
    """Token id -> bias, with ids given as text made ints and values clamped to OpenAI's [-100, 100]."""
    if value is None:
        return None
    if len(value) > MAX_TOKEN_LIST:
        _refuse("logit_bias", f"logit_bias has {len(value)} entries; at most {MAX_TOKEN_LIST} are allowed.")
    bias: dict[int, float] = {}
    for key, number in value.items():
        try:
            token = int(key)
        except (TypeError, ValueError):
            _refuse("logit_bias", f"logit_bias keys must be token ids, got {key!r}.")
        if token < 0 or isinstance(number, bool) or not isinstance(number, (int, float)):
            _refuse("logit_bias", f"logit_bias must map token ids to numbers, got {key!r}: {number!r}.")
        if not math.isfinite(number) or abs(number) > 100:
            _refuse("logit_bias", f"logit_bias values must be in [-100, 100], got {number} for token {token}.")
        bias[token] = float(number)
    return bias


@frozen(kw_only=True)
class SamplingParams:
    """How the next token is chosen, when generation ends, and what is reported beside the text.

    Every field is validated when the object is built; a bad one raises RequestError with `param` set to its name.
    `max_tokens=None` means the rest of the context. Order of application: reference in sampling/transforms.py.
    """

    n: int = field(default=1, validator=_integer(1, MAX_N))
    presence_penalty: float = field(default=0.0, validator=_number(-2, 2))
    frequency_penalty: float = field(default=0.0, validator=_number(-2, 2))
    repetition_penalty: float = field(default=1.0, validator=_number(0, 1e4, open_low=True))
    temperature: float = field(default=1.0, validator=_number(0, 2))
    top_p: float = field(default=1.0, validator=_number(0, 1, open_low=True))
    top_k: int = field(default=0, validator=_integer(-1, 2**31 - 1))
    min_p: float = field(default=0.0, validator=_number(0, 1))
    seed: int | None = field(default=None, validator=_integer(INT64[0], INT64[-1], optional=True))
    stop: tuple[str, ...] = field(default=(), converter=_as_texts, validator=_texts)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=lambda v: _as_tokens(v) or (), validator=_token_list)
    bad_words: tuple[str, ...] = field(default=(), converter=_as_texts, validator=_texts)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = field(default=16, validator=_integer(0, 2**31 - 1, optional=True))
    min_tokens: int = field(default=0, validator=_integer(0, 2**31 - 1))
    logprobs: int | None = field(default=None, converter=_as_logprobs, validator=_integer(-1, 2**31 - 1, optional=True))
    prompt_logprobs: int | None = field(
        default=None, converter=_as_logprobs, validator=_integer(-1, 2**31 - 1, optional=True)
    )
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = field(default=None, converter=_as_bias)
    allowed_token_ids: tuple[int, ...] | None = field(default=None, converter=_as_tokens, validator=_token_list)
    skip_reading_prefix_cache: bool | None = None
    extra_args: Mapping[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"min_tokens ({self.min_tokens}) must be <= max_tokens ({self.max_tokens}).")
        if self.greedy and self.n > 1:
            _refuse("n", f"n must be 1 with temperature 0: all {self.n} answers would be the same.")
        if self.stop and not self.detokenize:
            _refuse("stop", "stop strings need text: set detokenize=True or use stop_token_ids.")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _refuse("allowed_token_ids", "allowed_token_ids must not be empty.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken: temperature exactly 0."""
        return self.temperature == 0

    @property
    def effective_temperature(self) -> float:
        """What logits are divided by: 0 for greedy, else at least MIN_TEMPERATURE."""
        return 0.0 if self.greedy else max(self.temperature, MIN_TEMPERATURE)

    def child(self, index: int) -> SamplingParams:
        """The parameters of answer `index` of n: one answer, and seed + index so that answers differ."""
        seed = None if self.seed is None else self.seed + index
        return evolve(self, n=1, seed=seed)


@frozen(kw_only=True)
class BeamSearchParams:
    """Beam search: keep `beam_width` best continuations each step, by cumulative log-probability.

    Score = cumulative logprob / generated tokens ** length_penalty, end token counted.
    """

    beam_width: int = field(validator=_integer(1, 256))
    max_tokens: int = field(validator=_integer(1, 2**31 - 1))
    ignore_eos: bool = False
    temperature: float = field(default=0.0, validator=_number(0, 2))
    length_penalty: float = field(default=1.0, validator=_number(-10, 10))
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] | None = field(default=None, converter=_as_tokens, validator=_token_list)


@frozen(kw_only=True)
class PoolingParams:
    """What to make of the hidden states of a prompt, instead of generating (embed, classify, score)."""

    task: str = "embed"
    use_activation: bool | None = None
    dimensions: int | None = field(default=None, validator=_integer(1, 2**20, optional=True))


@frozen(kw_only=True)
class Constraint:
    """A grammar that the answer must satisfy. kind: json, regex, choice, grammar, json_object, structural_tag."""

    kind: str
    value: Any


@frozen(kw_only=True)
class Media:
    """One image, clip or recording of a prompt. offset, length: the prompt positions that it fills."""

    kind: str
    hash: bytes
    offset: int
    length: int
    data: Any = field(default=None, repr=False, eq=False)


@frozen(kw_only=True)
class Request:
    """One prompt for one answer: n > 1 and beam search were already split up (engine/fanout.py).

    Args:
        id: unique in the engine.
        prompt_ids: token ids, at least one, all inside the vocabulary.
        sampling: with `max_tokens` already clamped to the room left in the context.
        eos_ids: end tokens of the tokenizer: they end the answer with stop_reason None, unless `sampling.ignore_eos`.
        extra_eos_ids: generation_config's other end tokens: likewise, but stop_reason is the id.
        seed: what the row's random numbers are drawn from; the caller's, else one drawn by the engine.
        bad_words_ids: token sequences that must not appear in the output; made from `sampling.bad_words` by the front.
        priority: lower runs first under the priority policy; then arrival.
        arrival: time.monotonic() when the front took it.
        cache_salt: requests share cached prefixes only with an equal salt.
        adapter: name of the LoRA adapter, or None.
    """

    id: str
    prompt_ids: tuple[int, ...] = field(converter=tuple)
    sampling: SamplingParams = field(factory=SamplingParams)
    eos_ids: frozenset[int] = field(default=frozenset(), converter=frozenset)
    extra_eos_ids: frozenset[int] = field(default=frozenset(), converter=frozenset)
    seed: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    arrival: float = 0.0
    cache_salt: str | None = None
    adapter: str | None = None
    media: tuple[Media, ...] = ()
    constraint: Constraint | None = None
    pooling: PoolingParams | None = None
    prompt: str | None = field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        if not self.prompt_ids:
            _refuse("prompt", "The prompt is empty: at least one token is needed.")

    @property
    def reads_cache(self) -> bool:
        """Whether cached prefix blocks may stand in for computing them (prompt_logprobs need every position)."""
        if self.sampling.skip_reading_prefix_cache is not None:
            return not self.sampling.skip_reading_prefix_cache
        return self.sampling.prompt_logprobs is None

    @property
    def end_ids(self) -> frozenset[int]:
        """Every id that is -inf until `min_tokens` exist; also those that ignore_eos made harmless."""
        return self.eos_ids | self.extra_eos_ids | frozenset(self.sampling.stop_token_ids)

    def stop_on(self, token: int) -> tuple[bool, int | None]:
        """Whether `token` ends the answer, and the stop_reason if so (None for the tokenizer's own end token)."""
        if token in self.sampling.stop_token_ids:
            return True, token
        if self.sampling.ignore_eos or token not in self.eos_ids | self.extra_eos_ids:
            return False, None
        return True, None if token in self.eos_ids else token


@frozen
class Logprob:
    """One token's log-probability at one position. rank: 1 = most likely; ties count as better."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@frozen(kw_only=True)
class Usage:
    """Token counts of one sequence so far; the end token counts as a completion token."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0


@frozen(kw_only=True)
class Output:
    """What one step (or several, when the reader is slow) added to one answer.

    Args:
        request_id: the id the caller knows; for n > 1 the same for all answers.
        index: which answer of n.
        text: new text; may be empty while a character or a possible stop string is incomplete.
        token_ids: new ids, the end token included.
        logprobs: one dict (token id -> Logprob, sampled token first) per new id, or None when not asked.
        prompt_logprobs: once, with the first output: one entry per prompt token, the first None.
        finish_reason, stop_reason: set on the last output; stop_reason is the stop string or stop id, None for EOS.
        error: what went wrong when finish_reason is ERROR.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Mapping[int, Logprob], ...] | None = None
    prompt_logprobs: tuple[Mapping[int, Logprob] | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage
    error: Exception | None = None
    metrics: Any = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
