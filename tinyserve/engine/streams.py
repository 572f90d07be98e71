"""From the loop to the readers: one stream per caller, which never makes the loop wait and never loses a token.

A reader that keeps up gets one output per step, or one per few steps when the loop is behind (pace.py). For one that
does not, outputs of the same answer are joined until it comes back: it sees larger pieces, nothing is lost, and what
waits for it is at most the answer itself. This is all the back-pressure there is, because holding the whole batch up
for one slow socket would hurt everybody else.

    scheduler.commit -> Streams.push -> Answer.advance -> Stream.put ....... Stream.get -> Engine.generate -> reader
                               '-- stop string found: scheduler.finish(STOP)

Before: answer.py (ids to text).  After: engine.py (fills the streams), server/ and llm.py (read them).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, starmap

from attrs import define, evolve

from ..errors import EngineError, retold
from ..request import FinishReason, Output, RequestOutputKind
from ..scheduling.convoy import Convoy, Grown
from ..scheduling.scheduler import Update
from .answer import Answer, merged
from .backlog import Backlog
from .later import Later
from .meter import Meter
from .pace import MOST, Pace
from .searches import Meant, Searches

_log = logging.getLogger(__name__)
_WORK = 256  # units of 5 us or so between two turns of everybody else, in each of which 4 clients of a crowd are let in
_EVENT, _EDGE = 6, 32  # units of an event, and of an answer's first or last one: heads, ends, metrics
_JOIN_AT = 64  # outputs that may wait before they are made one; bounds the number of objects for a reader that is gone


class Stream:
    """The outputs of one call of `generate`, of all its answers, in order.

    Args:
        answers: those that feed it.
        interval: an answer's outputs are shown when they hold this many tokens; the first and the last at once.
        kind: what an output holds; FINAL_ONLY shows each answer once, whatever the interval.
    """

    def __init__(
        self,
        answers: Iterable[Answer],
        interval: int = 1,
        kind: RequestOutputKind = RequestOutputKind.DELTA,
    ) -> None:
        self.unfinished = {answer.request.id: answer for answer in answers}
        self.later: Later | None = None
        self.number = 0  # says when it is its turn
        self.longest = 0  # tokens of the longest answer that has ended
        self.interval = interval
        self.final_only = kind is RequestOutputKind.FINAL_ONLY
        self._shown: dict[int, Output] | None = {} if kind is RequestOutputKind.CUMULATIVE else None
        self._waiting: dict[int, list[Output]] = {}
        self._started: set[int] = set()
        self._due: dict[int, None] = {}  # answers with something to show, oldest first
        self._error: Exception | None = None
        self._let_go: list[Callable[[], None]] = []  # of what is held for it
        self._reader: asyncio.Future[None] | None = None  # who waits; one future a wait is cheaper than an Event

    @property
    def exhausted(self) -> bool:
        """Whether every answer has ended and all of it was read."""
        return not self.unfinished and not self._waiting and not self.later

    def holds(self, let_go: Callable[[], None]) -> None:
        """Have `let_go` called when it ends."""
        self._let_go.append(let_go)

    def end(self) -> None:
        """Nothing of it is computed any more."""
        while self._let_go:
            self._let_go.pop()()

    def put(self, output: Output, *, turn: bool = True) -> None:
        """Add an output; never blocks. turn: whether it may be shown now, if there is no reason to show it at once."""
        waiting = self._waiting.setdefault(output.index, [])
        waiting.append(output)
        if len(waiting) >= _JOIN_AT:
            waiting[:] = [merged(waiting)]
        if output.finished or self._enough(output.index, waiting, turn):
            self._due[output.index] = None
            self.wake()

    def _enough(self, index: int, waiting: list[Output], turn: bool) -> bool:
        """Whether what waits of an answer is to be shown now."""
        if self.final_only:
            return False
        if index not in self._started:
            self._started.add(index)
            return True
        return turn and (self.interval == 1 or sum(len(piece.token_ids) for piece in waiting) >= self.interval)

    def show(self) -> None:
        """Show what waits for its turn."""
        if not self.final_only and self._waiting:
            self._due.update(dict.fromkeys(self._waiting))
            self.wake()

    def fail(self, error: Exception) -> None:
        """End all of it: the reader gets `error` instead of anything that still waits."""
        self.unfinished.clear()
        self._waiting.clear()
        self.later = None
        self._error = error
        self.end()
        self.wake()

    def wake(self) -> None:
        """Let the reader look again."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Output:
        """The next output; waits for it. Raises: the error given to `fail`."""
        while not self._due and self._error is None:
            if self.later and self.later.aborted:
                await asyncio.sleep(0)  # there may be thousands
                return self.later.ended()
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._error is not None:
            raise retold(self._error)
        index = next(iter(self._due))
        del self._due[index]
        output = merged(self._waiting.pop(index))
        if self._shown is not None:
            before = self._shown.get(index)
            output = self._shown[index] = output if before is None else merged([before, output])
        return output


@define(eq=False)
class Choir:
    """The answers of a convoy, by their place in it.

    Args:
        quiet: those of whose tokens nothing but text is asked; they share the backlog.   loud: the others.
        speaking: the quiet ones whose readers get tokens as they come; by their turn (Pace.turns).
        before: when the last token of each quiet one came, until all have the same time.
    """

    convoy: Convoy
    backlog: Backlog
    quiet: dict[int, Answer]
    speaking: list[dict[int, tuple[Answer, Stream]]]
    loud: list[int]
    before: list[float]

    @classmethod
    def of(cls, convoy: Convoy, answers: Mapping[str, tuple[Answer, Stream]]) -> Choir:
        """Find out who is quiet; these find new tokens in a backlog from now on."""
        backlog, loud, quiet, speaking = Backlog(), [], {}, [{} for _ in range(MOST)]
        for place, seq in enumerate(convoy.sequences):
            found = answers.get(seq.request.id)
            if found is None or not found[0].quiet:
                loud.append(place)
                continue
            quiet[place] = found[0]
            if not found[1].final_only:
                speaking[found[1].number % MOST][place] = found
        before = [answer.share(backlog, place) for place, answer in quiet.items()]
        return cls(convoy, backlog, quiet, speaking, loud, before)

    def speakers(self, pace: Pace) -> list[tuple[Answer, Stream]]:
        """Those whose turn it is after this step."""
        return [one for turn in pace.turns() for one in self.speaking[turn].values()]

    def take(self, grown: Grown, meter: Meter) -> list[Update]:
        """Put a step's tokens where quiet answers find them; the updates of the others, and of those that end."""
        updates = [grown.at(place) for place in self.loud]
        for place, update in grown.others.items():
            if place in self.quiet:
                self.quiet.pop(place).leave()
                for some in self.speaking:
                    some.pop(place, None)
                updates.append(update)
        now = time.monotonic()
        if self.before:
            meter.grew([now - before for before in self.before[: len(self.quiet)]])
            self.before = []
        elif self.quiet:
            meter.grew_alike(len(self.quiet), now - self.backlog.last)
        self.backlog.add(grown.tokens, now)
        return [update for update in updates if update is not None]


class Streams:
    """All open streams, and which answer feeds which.

    Args:
        finish: scheduler.finish; called when an answer ends for a reason that the scheduler cannot see.
        meter: told of every output.
    """

    def __init__(self, finish: Callable[[str, FinishReason], None], meter: Meter) -> None:
        self._finish = finish
        self._meter = meter
        self._answers: dict[str, tuple[Answer, Stream]] = {}
        self._expecting: dict[Stream, None] = {}
        self._opened = 0
        self.pace = Pace()
        self._choir: Choir | None = None
        self.empty = asyncio.Event()
        self.empty.set()
        self.searches = Searches(self.empty.clear, self._note_empty)

    def __len__(self) -> int:
        return len(self._answers)

    def open(self, stream: Stream, answers: Iterable[Answer]) -> None:
        """Let these queued answers feed a stream."""
        count = len(self._answers)
        for answer in answers:
            self._answers[answer.request.id] = answer, stream
        self._opened += 1
        self.pace.came += 1
        stream.number = self._opened
        self._meter.started(len(self._answers) - count)
        self.empty.clear()

    def expect(self, stream: Stream, later: Later) -> None:
        """Note that more answers of a stream are to be queued."""
        stream.later = later
        self._expecting[stream] = None

    def expecting(self) -> list[Stream]:
        """Streams with answers to be queued; another one is the first each time."""
        if len(self._expecting) > 1:
            first = next(iter(self._expecting))
            self._expecting[first] = self._expecting.pop(first)
        return list(self._expecting)

    def join(self, stream: Stream, answer: Answer) -> None:
        """Note that the next expected answer of a stream has been queued."""
        stream.unfinished[answer.request.id] = answer
        self.open(stream, [answer])
        stream.later.next += 1
        if not stream.later:
            del self._expecting[stream]

    async def deliver(self, updates: Iterable[Update]) -> None:
        """Push a step's updates; sockets and readers have a turn in between, for there may be a thousand."""
        speakers: list[tuple[Answer, Stream]] = []
        known = isinstance(updates, Grown) and self._choir is not None and self._choir.convoy is updates.convoy
        if not known and len(self._answers) > _WORK:
            await asyncio.sleep(0)  # planning and booking a step sequence by sequence took as long as a turn may
        if isinstance(updates, Grown):
            if not known:
                self._choir = Choir.of(updates.convoy, self._answers)
            updates = self._choir.take(updates, self._meter)
            speakers = self._choir.speakers(self.pace)
        work = 0
        for done in chain(map(self.push, updates), starmap(self._speak, speakers)):
            work += done
            if work >= _WORK:
                work = 0
                await asyncio.sleep(0)

    def push(self, update: Update) -> int:
        """Hand an update of the scheduler to the reader of its answer. Updates of closed answers are dropped.

        Returns: how much it is to do, its reader included: 1 for a token that is kept, more if it is shown.
        """
        found = self._answers.get(update.request_id)
        if found is None:
            return 1
        answer, stream = found
        before, count = answer.timing.last_token_ts, len(update.token_ids)
        turn = self.pace.turn(stream.number)
        waits = stream.final_only or not turn or (count < stream.interval > answer.held + count)
        held = 0
        try:
            if waits and answer.hold(update):
                self._meter.more(answer, count, before)
                return 1
            held = answer.held
            output = answer.advance(update)
        except Exception as error:
            output = _failed(answer, error)
        if output.finished:
            self._forget(answer, output)
            if update.finish_reason is None:
                self._finish(answer.request.id, FinishReason.STOP if output.error is None else FinishReason.ABORT)
        self._meter.output(answer, output, before, held)
        stream.put(output, turn=turn)
        return _EVENT if before is not None and not output.finished else _EDGE

    def _speak(self, answer: Answer, stream: Stream, least: int = 0) -> int:
        """Show what an answer holds, if that is so much; nothing if it has ended meanwhile. Returns: as `push`."""
        if answer.request.id not in self._answers or not answer.has(least or stream.interval):
            return 1
        try:
            output = answer.shown()
        except Exception as error:
            output = _failed(answer, error)
            self._forget(answer, output)
            self._finish(answer.request.id, FinishReason.ABORT)
            self._meter.ended(answer, output)
        stream.put(output)
        return _EVENT

    def show(self) -> None:
        """Show what readers would get with later tokens: there will be none for a while."""
        for answer, stream in list(self._answers.values()):
            if not stream.final_only:
                self._speak(answer, stream, least=1)
            stream.show()

    def cancel(self, stream: Stream, *, tell: bool, error: Callable[[], Exception] | None = None) -> None:
        """End what is unfinished of a stream.

        tell: give the reader a last output with finish_reason ABORT.   error: told of answers that had not begun.
        """
        if stream in self._expecting:
            del self._expecting[stream]
            stream.later.aborted, stream.later.error = True, error() if error else None
            stream.wake()
        for answer in list(stream.unfinished.values()):
            last = answer.ended(FinishReason.ABORT)
            self._forget(answer, last)
            self._finish(answer.request.id, FinishReason.ABORT)
            self._meter.ended(answer, last)
            if tell:
                begun = last.usage.completion_tokens or error is None
                stream.put(last if begun else evolve(last, error=error()))
        stream.end()
        self._note_empty()

    def abort(self, meant: Meant = lambda name: True, error: Callable[[], Exception] | None = None) -> int:
        """End every answer of the requests whose names are `meant`. Returns how many there were; of a beam search, its
        beams.

        error: what those are told that had not begun, beside that they were aborted.
        """
        streams = {stream: answer.name for answer, stream in self._answers.values() if meant(answer.name)}
        streams |= {stream: "" for stream in self._expecting if meant(stream.later.prepared.name)}
        searches = self.searches.abort(meant, error)
        count, steps = sum(search.width for search in searches), {search.name for search in searches}
        count += sum(len(one.unfinished) + len(one.later or ()) for one, of in streams.items() if of not in steps)
        for stream in streams:
            self.cancel(stream, tell=True, error=error)
        return count

    def ids(self, name: str) -> list[str]:
        """The ids of a request's answers that have not ended."""
        return [answer.request.id for answer, _ in self._answers.values() if answer.name == name]

    def fail(self, error: Callable[[], Exception]) -> None:
        """End every stream with an error: nobody will feed them any more. Each reader gets an error of its own."""
        for answer, _ in self._answers.values():
            self._meter.ended(answer, answer.ended(FinishReason.ERROR, error()))
        for stream in {stream: None for _, stream in self._answers.values()} | self._expecting:
            stream.fail(error())
        self._answers.clear()
        self._expecting.clear()
        self._choir = None
        self.empty.set()

    def _forget(self, answer: Answer, last: Output) -> None:
        _, stream = self._answers.pop(answer.request.id)
        stream.unfinished.pop(answer.request.id, None)
        stream.longest = max(stream.longest, last.usage.completion_tokens)
        if not stream.unfinished and not stream.later:
            self._meter.call_ended(answer, stream.longest)
            stream.end()
        self._note_empty()

    def _note_empty(self) -> None:
        if not self._answers and not self._expecting and not self.searches:
            self._choir = None
            self.empty.set()


def _failed(answer: Answer, error: Exception) -> Output:
    """The last output of an answer whose tokens give no text: one request must not end the loop of all."""
    _log.error("request %s: its tokens could not be turned into text", answer.name, exc_info=error)
    failure = EngineError(f"The answer could not be turned into text: {error!r}")
    failure.__cause__ = error
    return answer.ended(FinishReason.ERROR, failure)
