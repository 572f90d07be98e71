"""What is asked and what is answered: the words that every part of tinyserve shares.

This file knows the meaning and the legal range of every sampling field. It does not know tensors, tokens' text or
HTTP: the server builds these objects from JSON, the notebook builds them by hand, and both are validated in the
same place, when built. All of them are frozen; nobody downstream may change what was asked.

Names, defaults and ranges are vLLM's where the meaning is the same, so that a user's code moves over unchanged.

Before: errors.py.  After: step.py (what the runner gets to see), scheduling/sequence.py (what changes while it runs).
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import Converter, field, frozen

from . import checks
from .checks import INT64, as_logprobs, as_texts, as_tokens, integer, number, refuse, token_list
from .errors import RequestError, shown
from .structured import Constraint, StructuredOutputsParams

MIN_TEMPERATURE = 0.01  # below it fp32 logits / t overflow towards one-hot anyway; 0 itself means greedy
GREEDY_BELOW = 1e-5
MAX_N = 16384
MAX_STOP_STRINGS = 64
MAX_LOGPROB_IDS = 128
MAX_PATTERN = 1024  # tokens; a detector's work per token is at most this
FLOAT32_MAX = 3.4e38
INT32_MAX = 2**31 - 1


class FinishReason(enum.StrEnum):
    """Why a sequence ended, by OpenAI's names."""

    STOP = "stop"  # end token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context
    REPETITION = "repetition"  # SamplingParams.repetition_detection
    ABORT = "abort"  # the client went away, or the engine was told to
    ERROR = "error"  # see Output.error; becomes HTTP 500 or an error event, never a finish_reason


class RequestOutputKind(enum.Enum):
    """What each output of Engine.generate holds, by vLLM's names."""

    CUMULATIVE = 0  # the whole answer so far
    DELTA = 1  # what is new since the output before
    FINAL_ONLY = 2  # the whole answer, once, at its end


@frozen(kw_only=True)
class RepetitionDetectionParams:
    """End an answer that goes round in circles: its last tokens are one pattern, `min_count` times in a row.

    Args:
        max_pattern_size: longest pattern in tokens, 0 switches the detection off.
        min_pattern_size: shortest one; 0 counts as 1.
    """

    max_pattern_size: int = field(default=0, validator=integer(0, MAX_PATTERN))
    min_pattern_size: int = field(default=0, validator=integer(0, MAX_PATTERN))
    min_count: int = field(default=2, validator=integer(2, INT32_MAX))

    def __attrs_post_init__(self) -> None:
        if self.min_pattern_size > self.max_pattern_size:
            refuse(
                "min_pattern_size",
                f"min_pattern_size ({self.min_pattern_size}) must be <= max_pattern_size ({self.max_pattern_size}).",
            )

    @classmethod
    def of(cls, value: RepetitionDetectionParams | Mapping[str, Any] | None) -> RepetitionDetectionParams | None:
        """From a record or a mapping of its fields. Raises: RequestError: with param "repetition_detection"."""
        if value is None or isinstance(value, cls):
            return value
        name = "repetition_detection"
        if not isinstance(value, Mapping):
            refuse(name, f"{name} must have max_pattern_size, min_pattern_size and min_count, got {shown(value)}.")
        known = {"max_pattern_size", "min_pattern_size", "min_count"}
        if unknown := sorted(map(str, value.keys() - known)):
            refuse(name, f"{name} has no field {shown(unknown[0])}; its fields are {', '.join(sorted(known))}.")
        try:
            return cls(**value)
        except RequestError as error:
            refuse(name, f"{name}: {error}")


_ids_or_none = Converter(lambda value, attribute: as_tokens.converter(value, attribute) or (), takes_field=True)
_count = integer(-1, INT32_MAX, optional=True)


@frozen(kw_only=True)
class SamplingParams:
    """How the next token is chosen, when generation ends, and what is reported beside the text.

    Every field is validated when the object is built; a bad one raises RequestError with `param` set to its name.
    `max_tokens=None` means the rest of the context. Order of application: reference in sampling/transforms.py.

    Args (those that their names do not explain):
        min_tokens: no end token before so many; a stop string counts if its last character comes after them.
        logprob_token_ids: ids whose log-probability is reported for every generated token, besides the `logprobs` best.
        prompt_logprob_token_ids: [rows, K] ids to score in the prompt, one row per position from
            `prompt_logprob_start` to the last but one: row i is what the model expected after that position, so it
            scores prompt token start + i + 1; -1 for no token. One flat list serves all rows.
        flat_logprobs: report logprobs in one FlatLogprobs instead of one dict per token.
        output_kind: None leaves it to the face: Engine.generate gives DELTA. LLM always gives whole answers.
        stream_interval: tokens per output; the server's --stream-interval if that is larger.
        structured_outputs: a StructuredOutputsParams, or a mapping of its fields.
        thinking_token_budget: tokens of the thought before an answer; -1 and None for no limit.
    """

    n: int = field(default=1, validator=integer(1, MAX_N))
    presence_penalty: float = field(default=0.0, validator=number(-2, 2))
    frequency_penalty: float = field(default=0.0, validator=number(-2, 2))
    repetition_penalty: float = field(default=1.0, validator=number(0, FLOAT32_MAX, open_low=True))
    temperature: float = field(default=1.0, validator=number(0, 2))
    top_p: float = field(default=1.0, validator=number(0, 1, open_low=True))
    top_k: int = field(default=0, validator=integer(-1, INT32_MAX))
    min_p: float = field(default=0.0, validator=number(0, 1))
    seed: int | None = field(
        default=None, converter=checks.as_seed, validator=integer(INT64[0], INT64[-1], optional=True)
    )
    stop: tuple[str, ...] = field(default=(), converter=as_texts, validator=checks.texts(MAX_STOP_STRINGS))
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_ids_or_none, validator=token_list)
    bad_words: tuple[str, ...] = field(default=(), converter=as_texts, validator=checks.texts(checks.MAX_TEXTS))
    include_stop_str_in_output: bool = field(default=False, validator=checks.flag)
    ignore_eos: bool = field(default=False, validator=checks.flag)
    max_tokens: int | None = field(default=16, validator=integer(0, INT32_MAX, optional=True))
    min_tokens: int = field(default=0, validator=integer(0, INT32_MAX))
    logprobs: int | None = field(default=None, converter=as_logprobs, validator=_count)
    prompt_logprobs: int | None = field(default=None, converter=as_logprobs, validator=_count)
    logprob_token_ids: tuple[int, ...] | None = field(default=None, converter=as_tokens, validator=token_list)
    prompt_logprob_token_ids: tuple[Any, ...] | None = field(default=None, converter=checks.as_token_rows)
    prompt_logprob_start: int | None = field(default=None, validator=integer(0, INT32_MAX, optional=True))
    flat_logprobs: bool = field(default=False, validator=checks.flag)
    detokenize: bool = field(default=True, validator=checks.flag)
    skip_special_tokens: bool = field(default=True, validator=checks.flag)
    spaces_between_special_tokens: bool = field(default=True, validator=checks.flag)
    output_kind: RequestOutputKind | None = None
    stream_interval: int | None = field(default=None, validator=integer(1, INT32_MAX, optional=True))
    logit_bias: Mapping[int, float] | None = field(default=None, converter=checks.as_bias)
    allowed_token_ids: tuple[int, ...] | None = field(default=None, converter=as_tokens, validator=token_list)
    repetition_detection: RepetitionDetectionParams | None = field(default=None, converter=RepetitionDetectionParams.of)
    skip_reading_prefix_cache: bool | None = field(default=None, validator=checks.optional_flag)
    extra_args: Mapping[str, Any] | None = field(default=None, validator=checks.extra_args)
    structured_outputs: StructuredOutputsParams | None = field(default=None, converter=StructuredOutputsParams.of)
    thinking_token_budget: int | None = field(default=None, validator=_count)
    trace_decode_token_ids: Any = field(default=None, validator=checks.later())
    routed_experts_prompt_start: int | None = field(default=None, validator=checks.later())
    watermarking: Any = field(default=None, validator=checks.later(False))

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", f"min_tokens ({self.min_tokens}) must be <= max_tokens ({self.max_tokens}).")
        if self.greedy and self.n > 1:
            refuse("n", f"n must be 1 with temperature 0: all {self.n} answers would be the same.")
        if self.stop and not self.detokenize:
            refuse("stop", "stop strings need text: set detokenize=True or use stop_token_ids.")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            refuse("allowed_token_ids", "allowed_token_ids must not be empty.")
        if self.output_kind is not None and not isinstance(self.output_kind, RequestOutputKind):
            refuse("output_kind", f"output_kind must be a RequestOutputKind, got {shown(self.output_kind)}.")
        self._check_reports()
        if GREEDY_BELOW <= self.temperature < MIN_TEMPERATURE:
            warnings.warn(f"temperature {self.temperature} is raised to {MIN_TEMPERATURE}", stacklevel=3)

    def _check_reports(self) -> None:
        ids = self.logprob_token_ids
        if ids and self.logprobs is None:
            refuse("logprob_token_ids", "logprob_token_ids need logprobs (0 reports no others).")
        if ids and len(ids) > MAX_LOGPROB_IDS:
            refuse("logprob_token_ids", f"logprob_token_ids has {len(ids)} ids; at most {MAX_LOGPROB_IDS} are allowed.")
        if self.prompt_logprob_start is not None and self.prompt_logprob_token_ids is None:
            refuse("prompt_logprob_start", "prompt_logprob_start has a meaning only with prompt_logprob_token_ids.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken: temperature 0, or as good as 0."""
        return self.temperature < GREEDY_BELOW

    @property
    def effective_temperature(self) -> float:
        """What logits are divided by: 0 for greedy, else at least MIN_TEMPERATURE."""
        return 0.0 if self.greedy else max(self.temperature, MIN_TEMPERATURE)


@frozen(kw_only=True)
class BeamSearchParams:
    """Beam search: keep `beam_width` best continuations each step, by cumulative log-probability.

    Score = cumulative logprob / generated tokens ** length_penalty, end token counted.
    """

    beam_width: int = field(validator=integer(1, 256))
    max_tokens: int = field(validator=integer(1, 2**31 - 1))
    ignore_eos: bool = False
    temperature: float = field(default=0.0, validator=number(0, 2))
    length_penalty: float = field(default=1.0, validator=number(-10, 10))
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] | None = field(default=None, converter=as_tokens, validator=token_list)
    structured_outputs: StructuredOutputsParams | None = field(default=None, converter=StructuredOutputsParams.of)

    def __attrs_post_init__(self) -> None:
        ids = self.allowed_token_ids or ()  # whose log-probability is asked for at each token of each beam
        if len(ids) > MAX_LOGPROB_IDS:
            refuse(
                "allowed_token_ids",
                f"allowed_token_ids has {len(ids)} ids; at most {MAX_LOGPROB_IDS} are allowed in a beam search.",
            )


@frozen(kw_only=True)
class PoolingParams:
    """What to make of the hidden states of a prompt, instead of generating (embed, classify, score)."""

    task: str = "embed"
    use_activation: bool | None = None
    dimensions: int | None = field(default=None, validator=integer(1, 2**20, optional=True))


@frozen(kw_only=True)
class Media:
    """One image, clip or recording of a prompt. offset, length: the prompt positions that it fills."""

    kind: str
    hash: bytes
    offset: int
    length: int
    data: Any = field(default=None, repr=False, eq=False)


@frozen
class LoRARequest:
    """Which adapter shall answer, as `LLM` takes it: loaded when it is first used, and kept until the engine ends.

    Args:
        lora_name: requests of one name share an adapter.
        lora_int_id: kept for programs written for vLLM; the name says which one it is.
        lora_path: folder with adapter_config.json and adapter_model.safetensors.
        load_inplace: read it again, in place of the one that has this name.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = field(default="", converter=str)
    base_model_name: str | None = None
    load_inplace: bool = False


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
        adapter: the LoRA adapter that answers (lora/adapters.Adapter), or None.
        constraint: the grammar of the answer, and the thought before it, or None.
        answered: how many of the prompt's last tokens are the beginning of the answer: for its grammar, and as what
            goes on with an answer is not held to the limits of the queue.
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
    adapter: Any = None
    media: tuple[Media, ...] = ()
    constraint: Constraint | None = None
    answered: int = 0
    pooling: PoolingParams | None = None
    prompt: str | None = field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        if not self.prompt_ids:
            refuse("prompt", "The prompt is empty: at least one token is needed.")

    @property
    def reads_cache(self) -> bool:
        """Whether cached prefix blocks may stand in for computing them (prompt_logprobs need every position)."""
        if self.sampling.skip_reading_prefix_cache is not None:
            return not self.sampling.skip_reading_prefix_cache
        return not self.scores_prompt

    @property
    def has_grammar(self) -> bool:
        """Whether tokens of the answer are masked by a grammar, which also decides when it may end."""
        return self.constraint is not None and self.constraint.kind != "thought"

    @property
    def scores_prompt(self) -> bool:
        """Whether anything is reported about the prompt's tokens."""
        return self.sampling.prompt_logprobs is not None or self.sampling.prompt_logprob_token_ids is not None

    @property
    def end_ids(self) -> frozenset[int]:
        """Every id that is -inf until `min_tokens` exist; also those that ignore_eos made harmless."""
        return self.eos_ids | self.extra_eos_ids | frozenset(self.sampling.stop_token_ids)

    def stop_on(self, token: int) -> tuple[bool, int | None]:
        """Whether `token` ends the answer, and the stop_reason if so (None for the tokenizer's own end token)."""
        if not self.sampling.ignore_eos:
            if token in self.eos_ids:
                return True, None
            if token in self.extra_eos_ids:
                return True, token
        return (True, token) if token in self.sampling.stop_token_ids else (False, None)


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
        prompt_token_id_logprobs: once, too: [rows, K], in the shape of SamplingParams.prompt_logprob_token_ids.
        finish_reason, stop_reason: set on the last output; stop_reason is the stop string or stop id, None for EOS.
        error: what went wrong when finish_reason is ERROR.
        pooled: when asked: the hidden state [H] of the prompt's last token, after the final norm.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    prompt_token_id_logprobs: tuple[tuple[float, ...], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage
    error: Exception | None = None
    metrics: Any = None
    pooled: Sequence[float] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
