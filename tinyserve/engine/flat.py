"""Log-probabilities of many positions in a few flat lists, instead of a dict and its objects for each position.

    position      0           1     2                 start_indices  [0, 2, 3]
    token_ids  [ 97, 98 |    65 |  97, 98, 33 ]       end_indices    [2, 3, 6]

With 20 alternatives a dict per position is about 4 kB and 40 objects for the garbage collector to visit; here it is
four numbers' room in lists. It still reads like the list of dicts that it stands for: `flat[i]` builds the dict of one
position, a slice is a FlatLogprobs, and iteration gives the dicts in order. It grows at its end and changes nowhere.

Before: logprobs.py (makes the dicts).  After: answer.py, outputs.py (SamplingParams.flat_logprobs).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import overload

from attrs import define, field

from ..request import Logprob


@define
class FlatLogprobs(Sequence):
    """One entry per position. Position i owns the elements start_indices[i] .. end_indices[i] - 1 of the other lists.

    A position without numbers (the first prompt token) owns none, and reads as {}.
    """

    start_indices: list[int] = field(factory=list)
    end_indices: list[int] = field(factory=list)
    token_ids: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    ranks: list[int | None] = field(factory=list)
    decoded_tokens: list[str | None] = field(factory=list)

    @classmethod
    def of(cls, entries: Iterable[Mapping[int, Logprob] | None]) -> FlatLogprobs:
        """From one dict (or None) per position."""
        flat = cls()
        flat.extend(entries)
        return flat

    def append(self, entry: Mapping[int, Logprob] | None) -> None:
        """Add a position."""
        self.start_indices.append(len(self.token_ids))
        for token, found in (entry or {}).items():
            self.token_ids.append(token)
            self.logprobs.append(found.logprob)
            self.ranks.append(found.rank)
            self.decoded_tokens.append(found.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, entries: Iterable[Mapping[int, Logprob] | None]) -> None:
        """Add positions; another FlatLogprobs is copied list by list."""
        if not isinstance(entries, FlatLogprobs):
            for entry in entries:
                self.append(entry)
            return
        shift = len(self.token_ids)
        self.start_indices += [index + shift for index in entries.start_indices]
        self.end_indices += [index + shift for index in entries.end_indices]
        self.token_ids += entries.token_ids
        self.logprobs += entries.logprobs
        self.ranks += entries.ranks
        self.decoded_tokens += entries.decoded_tokens

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs:
        if isinstance(index, slice):
            return FlatLogprobs.of(self[i] for i in range(*index.indices(len(self))))
        own = slice(self.start_indices[index], self.end_indices[index])
        values = zip(self.logprobs[own], self.ranks[own], self.decoded_tokens[own], strict=True)
        return dict(zip(self.token_ids[own], (Logprob(*value) for value in values), strict=True))

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return (self[index] for index in range(len(self)))
