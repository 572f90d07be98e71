"""Where one answer stands in its grammar, and so which tokens may come next.

The host has to know a token before it can say what may follow it. The forward of a step needs no mask, though: it runs
while the tokens of the step before come home and the masks are computed (mask.py); only the choice waits for them.

A matcher lives as long as its sequence: a preemption changes nothing here, since known tokens stay known.

Before: structured.py (what was asked), thought.py.
After: scheduling/scheduler.py (waits for it, advances it), mask.py (asks it).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from attrs import define, field, frozen

from ..errors import RequestError
from ..request import Request
from ..structured import Constraint as Wanted
from .bits import allow, forbid
from .digits import is_full, number_behind
from .sayings import explained
from .thought import Gate, Mode
from .words import Words

WITH_JSON = ("json", "json_object", "structural_tag")
SHORT = 16_384  # characters of what is asked for
USUAL_SECONDS = 0.005  # of one core, that a token may cost
SPARE_SECONDS = 1.0  # that all tokens of an answer may cost beyond that; an ambiguous grammar costs more with each one


class Constraint(Protocol):
    """The state of one sequence in its grammar."""

    @property
    def ready(self) -> bool:
        """Whether it is compiled; a request waits, and others pass it, until then."""

    @property
    def masks(self) -> bool:
        """Whether the choice of its tokens needs a mask."""

    @property
    def ended(self) -> bool:
        """Whether the grammar is complete and the end token came."""

    @property
    def error(self) -> Exception | None:
        """Why the answer cannot go on."""

    def advance(self, token: int) -> None:
        """Note that `token` was accepted as the next one."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""


class Unconstrained:
    """Every token may come next."""

    ready, masks, ended, error = True, False, False, None

    def advance(self, token: int) -> None:
        pass

    def rollback(self, count: int) -> None:
        pass


UNCONSTRAINED = Unconstrained()  # has no state, so all sequences share it


def unconstrained(request: Request) -> Constraint:
    """Return the constraint of a request that has none.

    Raises: RequestError: the request asks for structured output, which must not be ignored silently.
    """
    if request.constraint is not None:
        raise RequestError("Structured output is not available here.", param=request.constraint.param)
    return UNCONSTRAINED


@frozen
class _Ends:
    """How an answer ends besides its grammar. ids: its own stop tokens.   least: tokens before, if others may come."""

    ids: tuple[int, ...]
    least: int


@define
class _Patience:
    """What an answer costs.

    Args:
        short: its grammar has no long texts, which would have to be made tokens at once.
        spare: seconds that it may still cost.   slow: its last token took long, so the next one is timed.
        quick: its last mask did not take long.
    """

    short: bool
    spare: float = field(factory=lambda: SPARE_SECONDS)
    slow: bool = False
    quick: bool = False


class Matcher:
    """One answer in its grammar.

    Args:
        grammar: compiled, or on its way; its result is copied, or None if only the thought is limited.
        words: gives the vocabulary; called once the grammar is ready.
        stop_ids: the request's own stop tokens; they may come where the grammar may end.
        min_tokens: no end token before so many, unless nothing else may come.
        begun: tokens that the answer has already, from another request.
    Attributes: replica: a replicas.Replica, told of each token; None: there is none.
    """

    masks = True

    def __init__(
        self,
        grammar: Future[Any],
        words: Callable[[], Words],
        wanted: Wanted,
        stop_ids: tuple[int, ...],
        min_tokens: int,
        begun: Sequence[int] = (),
    ) -> None:
        self._begun = begun
        self._grammar = grammar
        self._wanted = wanted
        self._ends = _Ends(stop_ids, min_tokens)
        self._make_words = words
        self._words: Words | None = None  # None until the grammar is looked at first
        self._match: Any = None
        self._gate: Gate | None = None
        self._number = b""  # at the end of the answer so far
        self._only: deque[int] = deque()  # tokens that have to come now, one after the other
        # Of each token: gate and number before it, itself, whether the grammar took it.
        self._log: list[tuple[Any, bytes, int, bool]] = []
        self._patience = _Patience(len(repr(wanted.key)) <= SHORT)
        self.ended = False
        self.error: Exception | None = None
        self.replica: Any = None

    @property
    def ready(self) -> bool:
        """Whether the grammar is there; one that failed never is."""
        return self._grammar.done() and not self._grammar.cancelled() and self._grammar.exception() is None

    @property
    def lexer(self) -> int:
        """A number of those that share a lexer: masks of these are computed one after the other."""
        return id(self._grammar)

    @property
    def width(self) -> int:
        """Words of 32 bits in a mask."""
        return self._start().width

    @property
    def complete(self) -> bool:
        """Whether what the answer has already is all of it; once the grammar is there."""
        self._start()
        return self.ended

    def _start(self) -> Words:
        if self._words is None:
            self._words = self._make_words()
            compiled = self._grammar.result()
            self._match = compiled.deep_copy() if compiled is not None else None
            if self._wanted.thought is not None:
                self._gate = Gate(self._wanted.thought, self._words.encode)
            for token in self._begun:
                self.advance(token)
        return self._words

    def described(self, tokens: int, size: int, characters: int) -> tuple[Any, ...] | None:
        """The grammar's text, and the last four arguments of a matcher that stands where this one does.

        None: it has more tokens, or its grammar more bytes, or its text more characters."""
        usual = self._words is not None and self._patience.short and self._grammar.bytes <= size
        usual = usual and len(self._grammar.text) <= characters
        if not usual or len(self._log) > tokens or self.error is not None:
            return None
        return self._grammar.text, (self._wanted, self._ends.ids, self._ends.least, [entry[2] for entry in self._log])

    # ---- what came

    def advance(self, token: int) -> None:
        """Note the next token. One that the grammar cannot take sets `error`."""
        words = self._words or self._start()
        if self.replica is not None:
            self.replica.tell(token)
        data = words.bytes[token] if token < len(words.bytes) else b""
        gate, number = self._gate, self._number
        if gate is None:
            early = len(self._log) < self._ends.least
            self._log.append((None, number, token, self._match is not None and self._take(token, early)))
        else:
            self._log.append((gate.state, number, token, False))
            self._gated(token, data, gate)
        if self._only:
            if token == self._only[0] and self._log[-1][3]:
                self._only.popleft()
            else:
                self._only.clear()
        self._number = number_behind(number, data)

    def _gated(self, token: int, data: bytes, gate: Gate) -> None:
        """A token that may belong to a thought; while that is not known, it goes to the grammar, if it can."""
        undecided = gate.mode is Mode.UNDECIDED
        behind = undecided and len(self._log) > 1 and not self._log[-2][3]
        if gate.mode is not Mode.ANSWER and gate.takes(data):
            if undecided and (taken := sum(entry[3] for entry in self._log)):
                self._match.rollback(taken)
                self._log = [(*entry[:3], False) for entry in self._log]
        elif self._match is None:
            pass
        elif gate.mode is Mode.ANSWER and behind:
            self._fail()
        elif gate.mode is Mode.ANSWER or (not behind and self._match.validate_tokens([token]) == 1):
            self._log[-1] = (*self._log[-1][:3], self._take(token, len(self._log) <= self._ends.least))

    @property
    def _behind(self) -> bool:
        """Whether the grammar could not take all that came: it can only begin a thought."""
        undecided = self._gate is not None and self._gate.mode is Mode.UNDECIDED
        return undecided and bool(self._log) and not self._log[-1][3]

    def _take(self, token: int, early: bool) -> bool:
        """Give a token to the grammar. False: it ends the answer, which the grammar does not count.

        early: before min_tokens, where a stop token ends nothing: it came because the grammar has no other way on.
        """
        if self._ends.ids and not early and token in self._ends.ids and token not in self._words.end_ids:
            self.ended = self._match.is_accepting()
            return False
        slow = self._patience.slow
        begin = time.thread_time() if slow else 0.0  # asking costs more than a usual token
        start = time.perf_counter()
        taken = self._match.consume_token(token)
        late = time.perf_counter() - start > USUAL_SECONDS
        if slow:
            self.spend(time.thread_time() - begin)
        if slow or late:
            self._patience.slow = late
        if not taken:
            self._fail()
        elif not self._words.end_ids or token in self._words.end_ids:
            self.ended = self._match.is_stopped()  # without an end token as soon as nothing may follow
            return not (self.ended and self._words.end_ids)  # an end is none of those that `rollback` counts
        return True

    def spend(self, seconds: float) -> None:
        """Note what the library computed for a token. What costs too much ends with an error: all wait for it."""
        self._patience.spare -= max(0.0, seconds - USUAL_SECONDS)
        if self._patience.spare < 0 and self.error is None:
            self.error = RequestError(
                f"{self._wanted.param}: to follow it takes too long; make it less ambiguous.", param=self._wanted.param
            )

    @property
    def usual(self) -> bool:
        """Whether its next mask will hardly take long: the last one did not."""
        return self._patience.quick and self._patience.short

    def note(self, *, quick: bool) -> None:
        """Remember whether its mask took long."""
        self._patience.quick = quick

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""
        self._only.clear()
        if self.replica is not None:
            self.replica.drop()
            self.replica = None
        if count and self._gate and self._log[-count][0][0] is Mode.UNDECIDED:
            return self._again([entry[2] for entry in self._log[:-count]])
        taken = 0
        for _ in range(count):
            gate, self._number, _, to_grammar = self._log.pop()
            if self._gate:
                self._gate.state = gate
            taken += to_grammar
        if taken:
            self._match.rollback(taken)
        self.ended, self.error = False, None

    def _again(self, tokens: list[int]) -> None:
        """Begin again with these tokens: it has to be found out once more whether they are a thought."""
        if taken := sum(entry[3] for entry in self._log):
            self._match.rollback(taken)
        self._gate.state, self._number, *_ = self._log[0]
        self._log = []
        self.ended, self.error = False, None
        for token in tokens:
            self.advance(token)

    # ---- what may come

    def compiled(self) -> Any:
        """The library's matcher, when its mask is needed; None when `finish` makes the mask alone.

        The library's own mask has one token wherever it says that some have to come: a third of an answer in JSON. It
        asks for their ids in Python, which the threads that compute masks would wait for. Finding out what has to come
        holds the interpreter, for 0.1 s where that is a text of 100 KB; so what is long is first followed by a mask,
        which holds nobody, and remembered.
        """
        if self._words is None:
            self._start()
        if self._only or self._match is None or (self._gate is not None and not self._follows()):
            return None
        if not self._patience.short:
            self._match.compute_bitmask()
        if only := self._match.compute_ff_tokens():
            self._only.extend(only)
            return None
        return self._match

    def _follows(self) -> bool:
        """Whether the grammar stands where the answer does."""
        return self._gate.mode not in (Mode.THINKING, Mode.FORCING) and not self._behind

    @property
    def plain(self) -> bool:
        """Whether the library's mask, where there is one, is the mask: `finish` would change nothing."""
        free = self._gate is None and not self._only and not self._ends.ids and len(self._log) >= self._ends.least
        if not free or self._match is None or not self._words.end_ids:
            return False
        return not self._match.is_error() and not self._too_long()

    def finish(self, row: np.ndarray) -> None:
        """Make the mask of the next token: `row` [width] int32 holds the library's, if there is one."""
        gate = self._gate
        if gate is not None and gate.mode is Mode.FORCING:
            row[:] = 0
            allow(row, gate.forced)
            return
        if self._match is None or (gate is not None and gate.mode is Mode.THINKING):
            row[:] = -1
            return
        if self._match.is_error():
            self._fail()
            row[:] = -1  # any token: the answer ends with the error
            return
        if self._only:
            row.fill(0)
            allow(row, self._only[0])
        if gate is not None and self._behind:
            row.fill(0)
        else:
            self._trim(row)
        if gate is not None and gate.mode is Mode.UNDECIDED:
            token, rest = gate.opening
            if 0 <= token < len(self._words.bytes) and rest.startswith(self._words.bytes[token]):
                allow(row, token)
            if not row.any():
                self._fail()
                row[:] = -1

    def _trim(self, row: np.ndarray) -> None:
        words = self._words
        if words.no_end is not None:
            forbid(row, words.no_end)
        if self._too_long() and not (row & words.letters).any():
            others = row & ~words.digits  # no letter may come either: this is a number and not a text
            row[:] = others if others.any() else row
        if len(self._log) < self._ends.least:
            without = row.copy()
            for token in words.end_ids + self._ends.ids:
                forbid(without, token)
            if without.any():
                row[:] = without
        elif self._ends.ids and self._match.is_accepting():
            for token in self._ends.ids:
                allow(row, token)

    def _too_long(self) -> bool:
        """Whether the answer ends with as many digits as a number in JSON may have."""
        return bool(self._number) and self._wanted.kind in WITH_JSON and is_full(self._number)

    def _fail(self) -> None:
        self.error = RequestError(
            f"{self._wanted.param}: the answer cannot go on within it: {explained(self._match.get_error())}",
            param=self._wanted.param,
        )
