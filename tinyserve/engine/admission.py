"""From a prepared call to requests in the scheduler's queue: all answers of the call, or none.

    Prepared --submit--> scheduler.add(answer 0 .. n-1), one Stream for all of them

Before: intake.py (prepares), fanout.py.  After: engine.py, which decides whether anything is taken at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config import EngineConfig
from ..request import FinishReason, RequestOutputKind
from .answer import Answer
from .assemble import Machine
from .intake import Prepared
from .meter import Meter
from .streams import Stream, Streams


class Admission:
    """Queues calls.

    Args:
        finish: ends a queued request; scheduler.finish, and whatever else has to know.
    """

    def __init__(
        self,
        config: EngineConfig,
        machine: Machine,
        tokenizer: Any,
        streams: Streams,
        meter: Meter,
        finish: Callable[[str, FinishReason], None],
    ) -> None:
        self._config = config
        self._machine = machine
        self._tokenizer = tokenizer
        self._streams = streams
        self._meter = meter
        self._finish = finish

    def submit(self, prepared: Prepared, kind: RequestOutputKind | None = None) -> Stream:
        """Queue a call; its outputs come through the stream.

        kind: what the outputs hold, instead of what the call says.

        Raises: RequestError, Overloaded: nothing is queued then.
        """
        requests = prepared.requests
        answers = [
            Answer(request, prepared.name, index, self._tokenizer, siblings=len(requests))
            for index, request in enumerate(requests)
        ]
        added: list[str] = []
        try:
            for request in requests:
                self._machine.scheduler.add(request)
                added.append(request.id)
        except BaseException as error:
            for request_id in added:
                self._finish(request_id, FinishReason.ABORT)
            self._meter.refused(error, self._config.scheduler, self._machine.scheduler.num_waiting)
            raise
        params = requests[0].sampling
        interval = max(params.stream_interval or 1, self._config.scheduler.stream_interval)
        return self._streams.open(answers, interval, kind or params.output_kind or RequestOutputKind.DELTA)
