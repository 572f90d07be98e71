"""What the model's authors recommend: when an answer ends, and how it is sampled if the request does not say.

End ids are a union, because files disagree: chat models end turns with another token than the base model's end, and
some name it only in generation_config.json, some only in config.json, some only in the GGUF metadata.

Before: checkpoint/source.py, tokenizer.py.  After: engine/intake.py (fills requests).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from ..checkpoint.source import Source
from ..errors import CheckpointError, ConfigError, RequestError
from ..request import SamplingParams
from .tokenizer import Tokenizer

# Keys of generation_config.json that are defaults of a SamplingParams field of the same name.
SAMPLING_KEYS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "skip_special_tokens"),
)
OVERRIDES = {*SAMPLING_KEYS, "max_new_tokens", "eos_token_id"}
GGUF_END_KEYS = ("eos", "eot", "eom")
# GGUF files made before eot_token_id existed: these control tokens end a turn if the chat template writes them.
ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>")


@frozen(kw_only=True)
class GenerationDefaults:
    """Defaults of one model.

    Args:
        eos_ids: the tokenizer's own end token: ends an answer without a stop_reason.
        extra_eos_ids: other end ids; the stop_reason is the id.
        sampling: field name of SamplingParams -> value.
        max_new_tokens: the authors' limit for an answer, or None.
        bounds_answers: max_new_tokens holds for requests that ask for more, too: the operator chose it (by a path or
            an override), it is not just what the model's authors suggest.
    """

    eos_ids: frozenset[int] = frozenset()
    extra_eos_ids: frozenset[int] = frozenset()
    sampling: Mapping[str, Any] = {}
    max_new_tokens: int | None = None
    bounds_answers: bool = False

    @classmethod
    def load(
        cls,
        source: Source,
        tokenizer: Tokenizer,
        *,
        generation_config: str = "auto",
        overrides: Mapping[str, Any] | None = None,
    ) -> GenerationDefaults:
        """Read them from the model's files.

        Args:
            generation_config: "auto" (the model's file), "vllm" (neutral sampling; end ids stay), or a folder or file.
            overrides: keys of OVERRIDES, stronger than the file.
        Raises: ConfigError: unknown or wrong override, or no such file; CheckpointError: a value out of range.
        """
        overrides = dict(overrides or {})
        if unknown := sorted(overrides.keys() - OVERRIDES):
            raise ConfigError(
                f"--override-generation-config: unknown key {unknown[0]!r}; known: {', '.join(sorted(OVERRIDES))}."
            )
        named = source.json("generation_config.json") or {}
        values = {"auto": named, "vllm": {}}.get(generation_config)
        if values is None:
            values = named = _read(generation_config)
        values = {**values, **overrides}
        ends = {tokenizer.eos_id} - {None}
        if "eos_token_id" in overrides:
            extra = _ids(overrides["eos_token_id"])
            if not extra:
                raise ConfigError("--override-generation-config: eos_token_id must be a token id, or a list of them.")
        else:
            extra = _ids(named.get("eos_token_id")) | _config_ends(source) | _gguf_ends(source, tokenizer)
        if not ends:  # the tokenizer names no end token: all the others are plain ends, without a stop_reason
            ends, extra = extra, set()
        sampling = {key: values[key] for key in SAMPLING_KEYS if values.get(key) is not None}
        defaults = cls(
            eos_ids=frozenset(ends),
            extra_eos_ids=frozenset(extra - ends),
            sampling=sampling,
            max_new_tokens=values.get("max_new_tokens"),
            bounds_answers=generation_config not in ("auto", "vllm") or "max_new_tokens" in overrides,
        )
        try:
            defaults.fill({})
        except RequestError as error:
            if {"max_tokens": "max_new_tokens"}.get(error.param, error.param) in overrides:
                raise ConfigError(f"--override-generation-config: {error}") from error
            raise CheckpointError(f"The model's generation defaults are out of range: {error}") from error
        return defaults

    @property
    def end_ids(self) -> frozenset[int]:
        """Every id that ends an answer."""
        return self.eos_ids | self.extra_eos_ids

    def fill(self, given: Mapping[str, Any], *, max_tokens: int | None = None) -> SamplingParams:
        """The sampling parameters of a request.

        Args:
            given: fields that the request sets; a value of None counts as not set.
            max_tokens: where neither the request nor the model limits the answer (None: the rest of the context).
        Raises: RequestError: a given value is out of range.
        """
        explicit = {key: value for key, value in given.items() if value is not None}
        limit = self.max_new_tokens if self.max_new_tokens is not None else max_tokens
        return SamplingParams(**{"max_tokens": limit, **self.sampling, **explicit})

    @property
    def default_sampling(self) -> SamplingParams:
        """SamplingParams of a request that sets nothing."""
        return self.fill({})

    def as_fields(self) -> dict[str, Any]:
        """The fields of SamplingParams that the model sets, its limit among them."""
        limit = {} if self.max_new_tokens is None else {"max_tokens": self.max_new_tokens}
        return {**self.sampling, **limit}

    def neutral(self) -> GenerationDefaults:
        """The same end ids without recommended sampling."""
        return evolve(self, sampling={}, max_new_tokens=None)


def _read(path: str) -> dict[str, Any]:
    file = Path(path).expanduser()
    file = file / "generation_config.json" if file.is_dir() else file
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--generation-config {path}: not 'auto', 'vllm' or a readable JSON file: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--generation-config {path}: holds a {type(value).__name__} instead of an object.")
    return value


def _ids(value: Any) -> set[int]:
    """End ids from a JSON value: one id, a list, or nothing."""
    values: Iterable[Any] = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0}


def _config_ends(source: Source) -> set[int]:
    config = source.json("config.json") or {}
    text_config = config.get("text_config")
    return _ids(config.get("eos_token_id")) | _ids(
        (text_config if isinstance(text_config, dict) else {}).get("eos_token_id")
    )


def _gguf_ends(source: Source, tokenizer: Tokenizer) -> set[int]:
    if source.gguf_file is None:
        return set()
    metadata = source.gguf_file.metadata
    found = _ids([metadata.get(f"tokenizer.ggml.{name}_token_id") for name in GGUF_END_KEYS])
    template = str(metadata.get("tokenizer.chat_template", ""))
    for text in ENDS_OF_TURN:
        index = tokenizer.backend.token_to_id(text) if text in template else None
        if index is not None and index in tokenizer.special_ids:
            found.add(index)
    return found
