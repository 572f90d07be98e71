"""From a prepared call to requests in the scheduler's queue: its first answers all together, or none.

    Prepared --submit--> scheduler.add(answers 0 .. 63), one Stream for all of them
                 '---feed--> scheduler.add(the next ones), a few per turn of the loop, as the ones before end

A call may ask for 16384 answers. Queueing them at once would hold the loop for a second, copy the prompt as many
times, and make everybody who comes later wait for all of them; so no more of a call are queued than can run.

Before: intake.py (prepares), fanout.py.  After: engine.py, which decides whether anything is taken at all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from ..config import EngineConfig
from ..errors import Overloaded, RequestError
from ..grammar.line import WAIT_SECONDS, Compiled
from ..request import FinishReason, RequestOutputKind
from ..structured import Constraint
from .answer import Answer
from .assemble import Machine
from .intake import Prepared
from .later import Later
from .meter import Meter
from .streams import Stream, Streams

AT_ONCE = 64  # answers that are queued in one turn of the loop; 3 ms


class Admission:
    """Queues calls.

    Args:
        finish: ends a queued request; scheduler.finish, and whatever else has to know.
        wake: lets the loop look again at what waits.
    """

    def __init__(
        self,
        config: EngineConfig,
        machine: Machine,
        tokenizer: Any,
        streams: Streams,
        meter: Meter,
        finish: Callable[[str, FinishReason], None],
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._machine = machine
        self._tokenizer = tokenizer
        self._streams = streams
        self._meter = meter
        self._finish = finish
        self._wake = wake
        self._most = max(AT_ONCE, machine.max_running)  # answers of one call in the scheduler

    def submit(self, prepared: Prepared, kind: RequestOutputKind | None = None) -> Stream:
        """Queue a call; its outputs come through the stream. Of many answers, `feed` queues the later ones.

        kind: what the outputs hold, instead of what the call says.

        Raises: RequestError, Overloaded: nothing is queued then.
        """
        requests, grammar, grammars = prepared.requests, None, self._machine.grammars
        answers: list[Answer] = []
        try:
            if requests[0].constraint is not None and grammars is not None:  # else the scheduler refuses it
                grammar = grammars.hold(requests[0].constraint)
            for index in range(min(len(requests), AT_ONCE)):
                answers.append(self._queued(prepared, index))
        except BaseException as error:
            for answer in answers:
                self._finish(answer.request.id, FinishReason.ABORT)
            if grammar is not None:
                grammars.release(grammar)
            self._meter.refused(error, self._config.scheduler, self._machine.scheduler.num_waiting)
            raise
        params = requests[0].sampling
        interval = max(params.stream_interval or 1, self._config.scheduler.stream_interval)
        stream = Stream(answers, interval, kind or params.output_kind or RequestOutputKind.DELTA)
        self._streams.open(stream, answers)
        if grammar is not None:
            stream.holds(partial(grammars.release, grammar))
            self._await_grammar(stream, requests[0].constraint, grammar)
        if len(answers) < len(requests):
            self._streams.expect(stream, Later(prepared, len(answers), len(requests)))
        return stream

    def feed(self) -> None:
        """Queue a few more answers of calls with many, one call after the other. Called once per turn of the loop."""
        left = AT_ONCE
        for stream in self._streams.expecting():
            while left and len(stream.unfinished) < self._most:
                later = stream.later
                try:
                    answer = self._queued(later.prepared, later.next)
                except Overloaded:
                    break  # others fill the queue; there is another turn
                except RequestError as error:
                    self._streams.cancel(stream, tell=False)
                    stream.fail(error)
                    break
                left -= 1
                self._streams.join(stream, answer)
                if later.next == later.end:
                    break

    def _await_grammar(self, stream: Stream, wanted: Constraint, compiled: Compiled) -> None:
        """Queued requests wait until their grammar is compiled; they end if it is wrong or takes too long."""
        if compiled.done() and (compiled.cancelled() or compiled.exception() is None):
            return  # one that has failed since the answers were queued is told like any other
        loop = asyncio.get_running_loop()

        def settle() -> None:
            error = None if compiled is None or compiled.cancelled() else compiled.exception()
            if error is not None:
                fail(error)
            elif compiled is not None:
                leave()
                self._wake()

        def late() -> None:
            fail(compiled.late(wanted))

        def fail(error: BaseException) -> None:
            self._streams.cancel(failed := stream, tell=False)
            failed.fail(error)

        def leave() -> None:
            nonlocal compiled, stream
            if timer is not None:
                timer.cancel()
            compiled = stream = None  # a future keeps its callbacks, and would be kept by them for good

        def landed(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(settle)

        timer = None if self._machine.grammars.patient else loop.call_later(WAIT_SECONDS, late)
        stream.holds(leave)
        compiled.add_done_callback(landed)

    def _queued(self, prepared: Prepared, index: int) -> Answer:
        request = prepared.requests[index]
        answer = Answer(request, prepared.name, index, self._tokenizer, siblings=len(prepared.requests))
        self._machine.scheduler.add(request)
        return answer
