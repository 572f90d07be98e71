"""One step in integers: what the scheduler tells the runner, and what the runner tells back.

The device keeps the state of every running request in a numbered *row* (its slot): tokens, block tables, sampling
parameters. A StepInput therefore holds differences only: rows opened and closed, blocks added, and which positions
of which rows to compute now. It packs to ONE int32 buffer, which goes to the device in one copy and to other ranks in
one broadcast.

    row 3:   t t t t t t t t t t t . . .        t: token known to the host, or written to the row by an earlier step
             |computed   |start     |start+count
    SeqSlice(slot=3, start=5, count=6, samples=True): compute positions 5..10, then choose the token of position 11

The last input token of a decode is usually not known to the host yet: the sampler of the step before writes it into
the row on the device, and the slice only names its position. That is all there is to asynchronous scheduling here.

Before: request.py.  After: scheduling/scheduler.py (makes a StepInput), runner/batch.py (turns it into tensors).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

from .request import Request

_NONE = -(2**31)  # stands for None in packed integers
_LEAST_PENALTY, _MOST_PENALTY = 1e-30, 1e30  # what is beyond overflows float32, and has no other effect than these


def _float_bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


def _bits_float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<i", bits))[0]


@frozen(kw_only=True)
class RowParams:
    """The sampling parameters of one row, free of text and Python objects.

    Args:
        seed: int64; with the position of the token it alone determines the row's random number.
        logprobs, prompt_logprobs: number of alternatives to report (-1 all), None when not asked.
        logprob_ids: tokens that are reported besides, for each new token.
        prompt_ids: the same for prompt positions: row i for position prompt_start + i; -1 for no token.
        bias: (token, value) pairs.   allowed: the only ids that may be chosen, None for all.
        masked: ids that are -inf while fewer than `min_tokens` output tokens exist.
        pooled: the hidden state of the last prompt token is wanted.
        adapter: place of the LoRA adapter's weights on the device, + 1; 0 for the base model.
        bad_words: token sequences whose last token is -inf when the output ends with the rest.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_ids: tuple[int, ...] = ()
    prompt_ids: tuple[tuple[int, ...], ...] = ()
    prompt_start: int = 0
    pooled: bool = False
    adapter: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    masked: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, request: Request, adapter: int = 0) -> RowParams:
        """The row parameters of a request; top-k and friends are off for greedy rows."""
        p = request.sampling
        random = not p.greedy
        return cls(
            temperature=p.effective_temperature,
            top_p=p.top_p if random else 1.0,
            top_k=max(p.top_k, 0) if random else 0,
            min_p=p.min_p if random else 0.0,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            repetition_penalty=min(max(p.repetition_penalty, _LEAST_PENALTY), _MOST_PENALTY),
            seed=request.seed,
            min_tokens=p.min_tokens,
            logprobs=p.logprobs,
            prompt_logprobs=p.prompt_logprobs,
            logprob_ids=p.logprob_token_ids or (),
            prompt_ids=p.prompt_logprob_token_ids or (),
            prompt_start=p.prompt_logprob_start or 0,
            pooled=request.pooling is not None,
            adapter=adapter,
            bias=tuple((p.logit_bias or {}).items()),
            allowed=p.allowed_token_ids,
            masked=tuple(sorted(request.end_ids)) if p.min_tokens and not request.has_grammar else (),
            bad_words=request.bad_words_ids,
        )

    def scores_from(self) -> int | None:
        """The first prompt position after which something is reported about the prompt; None: nothing is."""
        if self.prompt_logprobs is not None:
            return 0
        return self.prompt_start if self.prompt_ids else None


@frozen
class SlotOpening:
    """A row that starts now. tokens: all that are known (prompt, and output kept over a preemption)."""

    slot: int
    prompt_len: int
    tokens: tuple[int, ...] = field(repr=lambda t: f"<{len(t)} tokens>")
    params: RowParams = field(factory=RowParams)


@frozen
class TableEdit:
    """Row `slot`, KV group `group`: blocks from table index `start` on are now `blocks`."""

    slot: int
    group: int
    start: int
    blocks: tuple[int, ...]


@frozen
class SeqSlice:
    """Compute positions start .. start+count-1 of row `slot`; with `samples`, choose the token after them.

    drafts: speculative tokens that follow the last known one; they are the last len(drafts) of the `count` positions.
    """

    slot: int
    start: int
    count: int
    drafts: tuple[int, ...] = ()
    samples: bool = True

    @property
    def end(self) -> int:
        return self.start + self.count


class Decodes(Sequence[SeqSlice]):
    """The slices of a step in which every sequence computes one position and gets a token: two columns.

    Most steps are such, and 256 objects for 256 sequences would cost more than all the rest of planning. So would
    arithmetic with arrays in a processor that has just woken up, 15 us each, so positions are added up where needed.

    Args: slots: the rows.   first: [S] int32, changed by nobody.   further: the position of each is first + further.
    """

    __slots__ = ("first", "further", "slots")

    def __init__(self, slots: tuple[int, ...], first: np.ndarray, further: int = 0) -> None:
        self.slots = slots
        self.first = first
        self.further = further

    @property
    def starts(self) -> np.ndarray:
        """[S] int32: the position of each."""
        return self.first + self.further

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        return SeqSlice(self.slots[index], int(self.first[index]) + self.further, 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)


@frozen(kw_only=True)
class StepInput:
    """One step's work. Order of effect: closed, opened, edits, then the slices are computed together.

    masks: what grammars allow in this step, or None (grammar/mask.Masks); it is on its way, and not packed.
    moves: adapters that get a place on the device before the slices are computed (lora/adapters.Move); not packed.
    """

    step_id: int
    slices: tuple[SeqSlice, ...] | Decodes = ()
    opened: tuple[SlotOpening, ...] = ()
    closed: tuple[int, ...] = ()
    edits: tuple[TableEdit, ...] = ()
    masks: Any = field(default=None, eq=False, repr=False)
    moves: tuple[Any, ...] = field(default=(), eq=False, repr=False)

    @property
    def num_tokens(self) -> int:
        slices = self.slices
        return len(slices) if isinstance(slices, Decodes) else sum(piece.count for piece in slices)

    @property
    def prompt_tokens(self) -> int:
        """Positions that belong to prompts: slices of one position that sample are decodes."""
        slices = () if isinstance(self.slices, Decodes) else self.slices
        return sum(piece.count for piece in slices if piece.count > 1 or not piece.samples)

    def pack(self) -> array:
        """All of it as one array of int32 (`array('i')`); `unpack` is its inverse."""
        out = array(
            "i", (self.step_id & 0x7FFFFFFF, len(self.slices), len(self.opened), len(self.closed), len(self.edits))
        )
        for piece in self.slices:
            out.extend((piece.slot, piece.start, piece.count, int(piece.samples), len(piece.drafts), *piece.drafts))
        for opening in self.opened:
            _pack_opening(opening, out)
        out.extend(self.closed)
        for edit in self.edits:
            out.extend((edit.slot, edit.group, edit.start, len(edit.blocks), *edit.blocks))
        return out

    @classmethod
    def unpack(cls, packed: array) -> StepInput:
        """Rebuild the step from `pack`'s integers (on another rank, or in a test)."""
        ints = _Reader(packed)
        step_id, slices, opened, closed, edits = ints.take(5)
        return cls(
            step_id=step_id,
            slices=tuple(_unpack_slice(ints) for _ in range(slices)),
            opened=tuple(_unpack_opening(ints) for _ in range(opened)),
            closed=ints.take(closed),
            edits=tuple(TableEdit(*ints.take(3), ints.counted()) for _ in range(edits)),
        )


class _Reader:
    """Reads a packed array front to back."""

    def __init__(self, packed: array) -> None:
        self._ints: Iterator[int] = iter(packed)

    def take(self, count: int) -> tuple[int, ...]:
        return tuple(next(self._ints) for _ in range(count))

    def one(self) -> int:
        return next(self._ints)

    def counted(self) -> tuple[int, ...]:
        return self.take(self.one())


def _unpack_slice(ints: _Reader) -> SeqSlice:
    slot, start, count, samples = ints.take(4)
    return SeqSlice(slot, start, count, ints.counted(), bool(samples))


_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def _pack_opening(opening: SlotOpening, out: array) -> None:
    p = opening.params
    out.extend((opening.slot, opening.prompt_len, len(opening.tokens), *opening.tokens))
    out.extend(_float_bits(getattr(p, name)) for name in _FLOATS)
    out.extend((p.top_k, *struct.unpack("<ii", struct.pack("<q", p.seed)), p.min_tokens))
    out.extend(_NONE if n is None else n for n in (p.logprobs, p.prompt_logprobs))
    out.extend((len(p.logprob_ids), *p.logprob_ids, p.prompt_start, int(p.pooled), p.adapter))
    _pack_lists(p.prompt_ids, out)
    out.extend((len(p.bias), *(token for token, _ in p.bias), *(_float_bits(value) for _, value in p.bias)))
    out.extend((_NONE,) if p.allowed is None else (len(p.allowed), *p.allowed))
    out.extend((len(p.masked), *p.masked))
    _pack_lists(p.bad_words, out)


def _pack_lists(lists: tuple[tuple[int, ...], ...], out: array) -> None:
    out.append(len(lists))
    for ints in lists:
        out.extend((len(ints), *ints))


def _unpack_lists(ints: _Reader) -> tuple[tuple[int, ...], ...]:
    return tuple(ints.counted() for _ in range(ints.one()))


def _unpack_opening(ints: _Reader) -> SlotOpening:
    slot, prompt_len = ints.take(2)
    tokens = ints.counted()
    floats = {name: _bits_float(bits) for name, bits in zip(_FLOATS, ints.take(len(_FLOATS)), strict=True)}
    top_k, low, high, min_tokens = ints.take(4)
    logprobs, prompt_logprobs = (None if n == _NONE else n for n in ints.take(2))
    logprob_ids, (prompt_start, pooled, adapter) = ints.counted(), ints.take(3)
    prompt_ids = _unpack_lists(ints)
    count = ints.one()
    bias = tuple(zip(ints.take(count), map(_bits_float, ints.take(count)), strict=True))
    count = ints.one()
    params = RowParams(
        **floats,
        top_k=top_k,
        seed=struct.unpack("<q", struct.pack("<ii", low, high))[0],
        min_tokens=min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_ids=logprob_ids,
        prompt_ids=prompt_ids,
        prompt_start=prompt_start,
        pooled=bool(pooled),
        adapter=adapter,
        bias=bias,
        allowed=None if count == _NONE else ints.take(count),
        masked=ints.counted(),
        bad_words=_unpack_lists(ints),
    )
    return SlotOpening(slot, prompt_len, tokens, params)


@frozen
class TokenLogprobs:
    """Log-probabilities at one position: of the token that stands there, and of the most likely ones, best first.

    asked_logprobs: of the tokens that the row named (RowParams.logprob_ids, or prompt_ids), in its order.
    """

    token: int
    logprob: float
    rank: int
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    asked_logprobs: tuple[float, ...] = ()


@frozen
class SliceOutput:
    """What one slice gave, in the order of StepInput.slices.

    Args:
        slot: the row.
        tokens: accepted tokens: () when the slice did not sample, else 1, or more with accepted drafts.
        logprobs: one per token, when the row asked for them.
        prompt_logprobs: when the row asked, one per computed position p that has a next prompt token, of the token at
            p + 1; without those before RowParams.scores_from().
        pooled: when the row asked, once its prompt is complete: the hidden state [H] of the prompt's last token.
        bad: the logits held NaN, +inf or nothing above -inf: `tokens` must not be used.
    """

    slot: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    pooled: tuple[float, ...] | None = None
    bad: bool = False


class Tokens(Sequence[SliceOutput]):
    """What the slices of a step gave where each gave one good token and nothing else: two columns."""

    __slots__ = ("slots", "tokens")

    def __init__(self, slots: tuple[int, ...], tokens: list[int]) -> None:
        self.slots = slots
        self.tokens = tokens

    @classmethod
    def of(cls, slices: Sequence[SliceOutput]) -> Tokens | None:
        """The same as columns, without log-probabilities; None if some slice gave no token, several or a bad one."""
        if isinstance(slices, cls):
            return slices
        for given in slices:
            if given.bad or len(given.tokens) != 1 or given.pooled is not None:
                return None
        return cls(tuple([given.slot for given in slices]), [given.tokens[0] for given in slices])

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        return SliceOutput(self.slots[index], (self.tokens[index],))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)


@frozen
class StepOutput:
    """What a step gave. seconds: from launch to completion, as seen by the runner."""

    step_id: int
    slices: tuple[SliceOutput, ...] | Tokens
    seconds: float = 0.0
