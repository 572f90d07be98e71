"""From what a caller wrote to requests that cannot go wrong later: tokenised, completed, checked.

Everything that can be refused is refused here, before anything is queued, with a message that names the field: ids
outside the vocabulary, a prompt without room for an answer, more logprobs than allowed. What the caller left open is
filled in: the rest of the context for `max_tokens=None`, a seed from the engine's generator, the end tokens.

Tokenising is the only slow part. Short texts are done at once; longer ones go to a few threads (the tokenizer lets
other Python threads run meanwhile), so that a 200k-token prompt does not hold up the streams of everybody else.

Before: request.py (what a request is), text/tokenizer.py.  After: fanout.py (n > 1), engine.py (queues them).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from attrs import evolve, field, frozen

from ..errors import COUNTED_CONTEXTS, ContextLengthExceeded, RequestError, shown
from ..request import PoolingParams, Request, SamplingParams
from ..runner.workers import Workers
from ..structured import Constraint
from ..text.parsers.registry import Parsing
from .fanout import Children

T = TypeVar("T")
INLINE_CHARACTERS = (
    2048  # encoding 2 KB takes about 1 ms; a hop to a thread and back costs 0.05 ms when idle, 5 when not
)
THREADS = 2
MAX_BAD_WORDS = 128  # token sequences; each is compared with the end of the output at every step
THOUGHT_TOKENS = 16  # of the prompt's end, in which the mark of an open thought stands
PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@frozen(kw_only=True)
class Call:
    """The arguments of one call of Engine.generate; see there. pooling: a hidden state is wanted."""

    prompt: str | Sequence[int] | Mapping[str, Any]
    sampling: SamplingParams | None = None
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    thinks: bool = False
    pooling: PoolingParams | None = None
    adapter: Any = None

    def __attrs_post_init__(self) -> None:
        """Raises: RequestError: an argument has another type."""
        if not isinstance(self.sampling, SamplingParams | None):
            message = f"Sampling parameters must be a SamplingParams, got {shown(self.sampling)}."
            raise RequestError(message, param="sampling_params")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise RequestError(f"priority must be an integer, got {shown(self.priority)}.", param="priority")


@frozen(kw_only=True)
class Rules:
    """What requests are held to.

    Args:
        vocab_size: rows of the model's embedding; every id must be below it.
        max_model_len: tokens of prompt and answer together.
        max_logprobs: cap for logprobs and prompt_logprobs; -1 for none.
        eos_ids, extra_eos_ids: see Request.
        default_sampling: fields of SamplingParams used when a call brings none at all.
        max_new_tokens: upper bound for max_tokens that the operator set, or None.
        parsing: how thoughts are told from answers.
    """

    vocab_size: int
    max_model_len: int
    max_logprobs: int = 20
    eos_ids: frozenset[int] = frozenset()
    extra_eos_ids: frozenset[int] = frozenset()
    default_sampling: Mapping[str, Any] = {}
    max_new_tokens: int | None = None
    parsing: Parsing = field(factory=Parsing)


@frozen
class Prepared:
    """A call that passed. name: the request id that the caller knows; requests: one per answer.

    begun: it is a step of something that runs already, and taken when new calls are refused.
    """

    name: str
    requests: Sequence[Request]
    begun: bool = False


class Intake:
    """Makes `Prepared` of `Call`, off the event loop where it takes long.

    Args: tokenizer: text/tokenizer.Tokenizer.   seed: of the generator that unseeded requests draw from.
    """

    def __init__(self, tokenizer: Any, rules: Rules, seed: int = 0) -> None:
        self.rules = rules
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._pool = Workers("tinyserve-text", THREADS)

    def close(self) -> None:
        """End the threads; work that has not begun is dropped."""
        self._pool.close(wait=False)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run `work` in one of the threads."""
        return await asyncio.wrap_future(self._pool.submit(work))

    async def prepare(self, call: Call) -> Prepared:
        """Check and complete a call. Raises: RequestError and its children; nothing was queued then."""
        seed = call.sampling.seed if call.sampling else None
        if seed is None:
            seed = self._random.getrandbits(63)
        number = next(self._numbers)
        text = call.prompt.get("prompt") if isinstance(call.prompt, Mapping) else call.prompt
        arrival = time.monotonic()
        words = call.sampling.bad_words if call.sampling else ()
        form = call.sampling.structured_outputs if call.sampling else None
        long = form is not None and form.is_longer(INLINE_CHARACTERS)
        if long or (len(text) if isinstance(text, str) else 0) + sum(map(len, words)) > INLINE_CHARACTERS:
            return await self.off_loop(lambda: self._prepare(call, number, seed, arrival))
        return self._prepare(call, number, seed, arrival)

    def beam_step(self, name: str, tokens: Sequence[int], sampling: SamplingParams, like: Request) -> Prepared:
        """A one-token continuation of a beam: known to be valid, so nothing is checked again. name: of the search."""
        seed = self._random.getrandbits(63)
        request = evolve(
            like,
            id=f"{like.id}-beam-{next(self._numbers)}",
            prompt_ids=tokens,
            answered=len(tokens) - len(like.prompt_ids),
            sampling=sampling,
            seed=seed,
            arrival=time.monotonic(),
            prompt=None,
        )
        return Prepared(name, (request,), begun=True)

    def encode_prompt(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a prompt that leaves room for an answer. Raises: ContextLengthExceeded."""
        limit = self.rules.max_model_len
        most = COUNTED_CONTEXTS * limit
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, limit=most)
        if len(ids) >= limit:
            raise ContextLengthExceeded(len(ids), limit, at_least=len(ids) > most)
        return ids

    def _prepare(self, call: Call, number: int, seed: int, arrival: float) -> Prepared:
        params = call.sampling if call.sampling is not None else SamplingParams(**self.rules.default_sampling)
        self._check(params)
        ids, text, salt = self._prompt(call)
        room = self.rules.max_model_len - len(ids)
        if room < 1:
            raise ContextLengthExceeded(len(ids), self.rules.max_model_len)
        name = call.request_id if call.request_id is not None else f"req-{number:x}"
        limits = (room, params.max_tokens, self.rules.max_new_tokens)
        tokens = min(limit for limit in limits if limit is not None)
        request = Request(
            id=f"{name}/{number:x}",
            prompt_ids=ids,
            sampling=_with(
                params,
                max_tokens=tokens,
                min_tokens=min(params.min_tokens, tokens),
                prompt_logprob_token_ids=self._scored_rows(params, len(ids)),
            ),
            eos_ids=self.rules.eos_ids,
            extra_eos_ids=self.rules.extra_eos_ids - self.rules.eos_ids,
            seed=seed,
            bad_words_ids=self._bad_words(params.bad_words),
            priority=call.priority,
            arrival=arrival,
            cache_salt=salt,
            adapter=call.adapter,
            constraint=self._constraint(params, ids, call.thinks),
            pooling=call.pooling,
            prompt=text,
        )
        return Prepared(name, Children(request))

    def _constraint(self, params: SamplingParams, ids: Sequence[int], thinks: bool) -> Constraint | None:
        """The grammar of an answer and the thought before it; None if neither is limited."""
        budget = params.thinking_token_budget
        budget = None if budget == -1 else budget
        wanted = params.structured_outputs
        if wanted is None and budget is None:
            return None
        thought, whole = None, wanted is not None and wanted.enable_in_reasoning
        if whole and budget is not None:
            what = "calls that are held to their schemas, in the format of this model"
            what = what if wanted.source == "tools" else "enable_in_reasoning"
            raise RequestError(
                f"thinking_token_budget cannot be kept with {what}: the grammar holds the thought, too. Leave one out.",
                param="thinking_token_budget",
            )
        if (thinks or budget is not None) and not whole:
            end = self._tokenizer.decode(ids[-THOUGHT_TOKENS:], skip_special_tokens=False)
            thought = self.rules.parsing.thought(end, budget)
        if budget is not None and not self.rules.parsing.reads_thoughts:
            raise RequestError(
                "thinking_token_budget needs a model whose thoughts are known (--reasoning-parser).",
                param="thinking_token_budget",
            )
        if wanted is None:
            return None if thought is None else Constraint(kind="thought", thought=thought)
        return evolve(wanted.constraint(), thought=thought)

    def _prompt(self, call: Call) -> tuple[Sequence[int], str | None, str | None]:
        """Ids, text (None when only ids were given) and cache salt of any of the prompt forms."""
        prompt, salt = call.prompt, call.cache_salt
        ids: Any = None
        if isinstance(prompt, Mapping):
            unknown = [key for key, value in prompt.items() if key not in PROMPT_KEYS and value is not None]
            if unknown:
                raise RequestError(f"This model's prompts have no part {shown(unknown[0])}.", param="prompt")
            salt = prompt.get("cache_salt", salt)
            ids, prompt = prompt.get("prompt_token_ids"), prompt.get("prompt")
        elif not isinstance(prompt, str):
            ids, prompt = prompt, None
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise RequestError(f"cache_salt must be a text that is not empty, got {shown(salt)}.", param="cache_salt")
        if prompt is not None and not isinstance(prompt, str):
            raise RequestError(f"The prompt must be a text or token ids, got {type(prompt).__name__}.", param="prompt")
        cut = self._cut(call.truncate_prompt_tokens)
        if ids is not None:
            ids = self._token_ids(ids)
        elif prompt is not None and cut is None:
            ids = self.encode_prompt(prompt, add_special_tokens=call.add_special_tokens)
        elif prompt is not None:
            ids = self._tokenizer.encode(prompt, add_special_tokens=call.add_special_tokens)
        else:
            raise RequestError("A prompt needs a text or token ids.", param="prompt")
        if prompt is not None:  # a tokenizer may know more tokens than the model has rows for
            self._in_vocabulary(ids, "prompt")
        return ids if cut is None else ids[len(ids) - min(cut, len(ids)) :], prompt, salt

    def _cut(self, asked: int | None) -> int | None:
        """How many of the prompt's last tokens to keep, or None for all. -1 asks for what leaves room for one token."""
        longest = self.rules.max_model_len
        if asked is None:
            return None
        if isinstance(asked, bool) or not isinstance(asked, int) or not -1 <= asked <= longest:
            raise RequestError(
                f"truncate_prompt_tokens must be an integer in [-1, {longest}], got {shown(asked)}.",
                param="truncate_prompt_tokens",
            )
        return longest - 1 if asked == -1 else asked

    def _token_ids(self, ids: Any) -> list[int]:
        try:
            if isinstance(ids, (bytes, bytearray)):
                raise TypeError("no list")  # although its elements are integers
            ids = list(ids)
        except TypeError:
            raise RequestError(f"Token ids must be a list of integers, got {shown(ids)}.", param="prompt") from None
        if not ids:
            raise RequestError("The prompt is empty: at least one token is needed.", param="prompt")
        if any(type(token) is not int for token in ids):
            ids = [_plain_int(token) for token in ids]
        self._in_vocabulary(ids, "prompt")
        return ids

    def _in_vocabulary(self, ids: Sequence[int], param: str) -> None:
        size = self.rules.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            wrong = next(token for token in ids if not 0 <= token < size)
            raise RequestError(f"{param}: token id {wrong} is outside the vocabulary of {size} tokens.", param=param)

    def _check(self, params: SamplingParams) -> None:
        """Hold parameters to what depends on the model: its vocabulary and the logprob cap."""
        self._in_vocabulary(tuple(params.logit_bias or ()), "logit_bias")
        self._in_vocabulary(params.allowed_token_ids or (), "allowed_token_ids")
        self._in_vocabulary(params.stop_token_ids, "stop_token_ids")
        self._in_vocabulary(params.logprob_token_ids or (), "logprob_token_ids")
        cap = self.rules.max_logprobs
        for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            wanted = self.rules.vocab_size if asked == -1 else asked or 0
            if cap != -1 and wanted > cap:
                raise RequestError(
                    f"{name} asks for {'all' if asked == -1 else asked} alternatives; at most {cap} are allowed "
                    f"(--max-logprobs).",
                    param=name,
                )

    def _scored_rows(self, params: SamplingParams, length: int) -> tuple[tuple[int, ...], ...] | None:
        """prompt_logprob_token_ids with one row for each position of this prompt that is scored."""
        rows, name = params.prompt_logprob_token_ids, "prompt_logprob_token_ids"
        if rows is None:
            return None
        start = params.prompt_logprob_start or 0
        count = length - 1 - start
        if count < 1:
            raise RequestError(
                f"prompt_logprob_start is {start}, but the prompt has {length} tokens: no token stands behind it.",
                param="prompt_logprob_start",
            )
        if not rows or isinstance(rows[0], int):
            rows = (rows,) * count
        if len(rows) != count:
            raise RequestError(
                f"{name} has {len(rows)} rows; this prompt of {length} tokens, scored from position {start}, needs "
                f"{count}.",
                param=name,
            )
        longest, cap = max(map(len, rows)), self.rules.max_logprobs
        if cap != -1 and longest > cap:
            raise RequestError(
                f"{name} has rows of {longest} ids; at most {cap} are allowed (--max-logprobs).", param=name
            )
        self._in_vocabulary([token for row in set(rows) for token in row if token != -1], name)
        return rows

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of words: as the word stands, and as it stands after a space if that is another token."""
        found: list[tuple[int, ...]] = []
        for word in words:
            bare = tuple(self._tokenizer.encode(word.lstrip() or word, add_special_tokens=False))
            spaced = tuple(self._tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
            found.append(bare)
            if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
                found.append(spaced)
        unique = tuple(dict.fromkeys(sequence for sequence in found if sequence))
        if len(unique) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words make {len(unique)} token sequences; at most {MAX_BAD_WORDS} are allowed.", param="bad_words"
            )
        for sequence in unique:
            self._in_vocabulary(sequence, "bad_words")
        return unique


def _plain_int(token: Any) -> int:
    """An id given as another integer type (numpy's, say). Raises: RequestError: it is none."""
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise RequestError(f"Token ids must be integers, got {shown(token)}.", param="prompt")
    return token.__index__()


def _with(params: SamplingParams, **values: Any) -> SamplingParams:
    """These parameters with other values; themselves where nothing changes, because checking 40 fields takes 0.1 ms."""
    changed = {name: value for name, value in values.items() if getattr(params, name) != value}
    return evolve(params, **changed) if changed else params
