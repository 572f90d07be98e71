"""The edits that logits go through before a token is chosen, in their order.

    grammar mask          sampler.py; on the raw logits, so that raw log-probabilities show it
    AllowedIds            everything but the listed ids is -inf
    TokenEdits            logit_bias is added; end ids are -inf until min_tokens; bad words lose their last token
    Penalties             repetition, then frequency, then presence
    (custom processors)   appended to the list
    temperature, min-p, top-k, top-p, draw      kernels/threshold.py and kernels/sample.py

Bad words stand before the penalties here, and not after them, because -inf stays -inf under every penalty: the result
is the same, and bias, min_tokens and bad words are one launch.

A transform is asked once, when a row is opened, whether that row needs it. Each step it gets the rows that do, and is
not called if there are none. Lists are packed for the device when the batch changes, not every step; whether an edit
applies now (min_tokens, the beginning of a bad word) is decided on the device from the row's own history.

Before: params.py, kernels/token_mask.py, kernels/penalties.py.  After: sampler.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from ..kernels.penalties import penalties
from ..kernels.token_mask import ANY, edit_tokens, token_mask
from ..step import RowParams
from .params import RowValues, upload

FOREVER = 2**31 - 1  # output tokens


@frozen(eq=False)
class Context:
    """What one step's logits [L, V] belong to.

    Args:
        slots: the request row of each logit row, for the host.   values: the rows' numbers on the device.
        positions: [L] int32, where each new token will stand.
        tokens: [slots, max_len] int32, all tokens of each request row; known up to the position.
    """

    slots: tuple[int, ...]
    values: RowValues
    positions: Tensor
    tokens: Tensor


class Transform(Protocol):
    """One edit of the logits."""

    def wants(self, params: RowParams) -> bool:
        """Whether a row with these parameters needs this transform."""
        ...

    def open(self, slot: int, params: RowParams) -> None:
        """A row that wants it starts."""
        ...

    def close(self, slot: int) -> None:
        """The row ended; also called for rows that were never opened here."""
        ...

    def apply(self, logits: Tensor, rows: tuple[int, ...], context: Context) -> None:
        """Change `logits` [L, V] float32 in place; `rows` are the logit rows that want it, at least one."""
        ...


class _Ragged:
    """Lists per slot on the host, and the last batch of them that was packed for the device."""

    def __init__(self) -> None:
        self._lists: dict[int, Any] = {}
        self._key: tuple | None = None
        self._packed: Any = None

    def __setitem__(self, slot: int, value: Any) -> None:
        self._lists[slot] = value
        self._key = None

    def discard(self, slot: int) -> None:
        if self._lists.pop(slot, None) is not None:
            self._key = None

    def packed(self, rows: tuple[int, ...], context: Context, pack: Callable[[list[Any]], Any]) -> Any:
        """`pack` of the lists of these logit rows; taken from the last step if nothing changed."""
        key = (rows, tuple(context.slots[row] for row in rows))
        if key != self._key:
            self._key, self._packed = key, pack([self._lists[slot] for slot in key[1]])
        return self._packed


class AllowedIds:
    """allowed_token_ids: a bit mask per row, made when the row is opened."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._masks = _Ragged()

    def wants(self, params: RowParams) -> bool:
        return params.allowed is not None

    def open(self, slot: int, params: RowParams) -> None:
        bits = np.zeros(-(-self._vocab_size // 32) * 32, dtype=bool)
        ids = np.array(params.allowed, dtype=np.int64)
        bits[ids[(ids >= 0) & (ids < self._vocab_size)]] = True
        self._masks[slot] = upload(np.packbits(bits, bitorder="little").view("<i4"), self._device)

    def close(self, slot: int) -> None:
        self._masks.discard(slot)

    def apply(self, logits: Tensor, rows: tuple[int, ...], context: Context) -> None:
        def pack(masks: list[Tensor]) -> tuple[Tensor, Tensor]:
            return torch.stack(masks), upload(rows, self._device)

        token_mask(logits, *self._masks.packed(rows, context, pack))


@frozen(eq=False)
class _Edits:
    """The edits of one row: ids, values, until [E] and suffix [E, P], as kernels/token_mask.py has them."""

    ids: np.ndarray
    values: np.ndarray
    until: np.ndarray
    suffix: np.ndarray

    @classmethod
    def of(cls, params: RowParams) -> _Edits:
        bias, masked, words = params.bias, params.masked if params.min_tokens else (), params.bad_words
        words = tuple(word for word in words if word)
        width = max((len(word) - 1 for word in words), default=0)
        suffix = np.full((len(bias) + len(masked) + len(words), width), ANY, dtype=np.int32)
        for row, word in enumerate(words, start=len(bias) + len(masked)):
            suffix[row, width - len(word) + 1 :] = word[:-1]
        forbidden = len(masked) + len(words)
        return cls(
            ids=np.array([token for token, _ in bias] + list(masked) + [word[-1] for word in words], dtype=np.int32),
            values=np.array([value for _, value in bias] + [-np.inf] * forbidden, dtype=np.float32),
            until=np.repeat([FOREVER, params.min_tokens, FOREVER], [len(bias), len(masked), len(words)]).astype("i4"),
            suffix=suffix,
        )


class TokenEdits:
    """logit_bias, min_tokens and bad words: values added to single tokens, some only while the history asks for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._edits = _Ragged()

    def wants(self, params: RowParams) -> bool:
        return bool(params.bias or params.bad_words or (params.min_tokens and params.masked))

    def open(self, slot: int, params: RowParams) -> None:
        self._edits[slot] = _Edits.of(params)

    def close(self, slot: int) -> None:
        self._edits.discard(slot)

    def apply(self, logits: Tensor, rows: tuple[int, ...], context: Context) -> None:
        def pack(parts: list[_Edits]) -> tuple[Tensor, ...]:
            width = max(part.suffix.shape[1] for part in parts)
            blocks = [self._block(row, part, width) for row, part in zip(rows, parts, strict=True)]
            # Padded to 16 bytes a row by edits that do nothing: a pointer's alignment must not follow the batch.
            nothing = np.full((4 + width, -sum(block.shape[1] for block in blocks) % 4), ANY, dtype=np.int32)
            nothing[0] = 0
            packed = np.concatenate([*blocks, nothing], axis=1)
            block = upload(packed, self._device)
            return block[0], block[1], block[2].view(torch.float32), block[3], block[4:].t().contiguous()

        edits = self._edits.packed(rows, context, pack)
        values = context.values
        edit_tokens(logits, *edits, context.tokens, values.slots, values.prompt_len, context.positions)

    @staticmethod
    def _block(row: int, part: _Edits, width: int) -> np.ndarray:
        """One row's edits as int32 [4 + width, E], so that all of a step travel in one copy."""
        block = np.full((4 + width, len(part.ids)), ANY, dtype=np.int32)
        block[0], block[1], block[2], block[3] = row, part.ids, part.values.view(np.int32), part.until
        block[4 + width - part.suffix.shape[1] :] = part.suffix.T
        return block


class Penalties:
    """Repetition, frequency and presence penalty, from the token table. Kept here: zeros that the kernel counts in."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    def wants(self, params: RowParams) -> bool:
        return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0

    def open(self, slot: int, params: RowParams) -> None:
        pass

    def close(self, slot: int) -> None:
        pass

    def apply(self, logits: Tensor, rows: tuple[int, ...], context: Context) -> None:
        values = context.values
        if not logits.is_cpu and (self._counts is None or len(self._counts) < len(logits)):
            self._counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
        penalties(
            logits,
            context.tokens,
            values.slots,
            values.prompt_len,
            context.positions,
            values.repetition_penalty,
            values.frequency_penalty,
            values.presence_penalty,
            self._counts,
        )


def standard(vocab_size: int, device: torch.device) -> list[Transform]:
    """The transforms of every sampler, in order."""
    return [AllowedIds(vocab_size, device), TokenEdits(device), Penalties()]
