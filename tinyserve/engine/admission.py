"""From a prepared call to requests in the scheduler's queue: all answers of the call, or none.

    Prepared --submit--> scheduler.add(answer 0 .. n-1), one Stream for all of them
                  '--> a long prompt and n > 1: answer 0 only; `follow` adds the others with its first token

Before: intake.py (prepares), fanout.py.  After: engine.py, which decides whether anything is taken at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config import EngineConfig
from ..errors import TinyserveError
from ..request import FinishReason
from .answer import Answer
from .assemble import Machine
from .fanout import Followers
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
        self._followers = Followers()

    def submit(self, prepared: Prepared, interval: int) -> Stream:
        """Queue a call; its outputs come through the stream.

        Raises: RequestError, Overloaded: nothing is queued then.
        """
        requests = prepared.requests
        answers = [
            Answer(request, prepared.name, index, self._tokenizer, siblings=len(requests))
            for index, request in enumerate(requests)
        ]
        added: list[str] = []
        try:
            for request in requests[:1] if self._shares(prepared) else requests:
                self._machine.scheduler.add(request)
                added.append(request.id)
        except BaseException as error:
            for request_id in added:
                self._finish(request_id, FinishReason.ABORT)
            self._meter.refused(error, self._config.scheduler, self._machine.scheduler.num_waiting)
            raise
        if len(added) < len(requests):
            self._followers.hold(requests)
        return self._streams.open(answers, interval)

    def follow(self, leader: str) -> None:
        """Queue the answers that waited for the first token of the request called `leader`."""
        for request in self._followers.take(leader):
            if request.id in self._streams:
                try:
                    self._machine.scheduler.add(request)
                except TinyserveError as error:
                    self._streams.refuse(request.id, error)

    def forget(self, leader: str) -> None:
        """The request called `leader` was ended; whoever waits for it is ended too."""
        self._followers.take(leader)

    def _shares(self, prepared: Prepared) -> bool:
        """Whether answers 1.. wait for answer 0: when there is a whole block to share, and no limit on the queue.

        Under a limit, a call must be taken or refused as a whole at once.
        """
        first, options = prepared.requests[0], self._config.scheduler
        limited = options.max_num_queued_reqs is not None or options.max_num_queued_tokens is not None
        long = len(first.prompt_ids) > self._machine.cache.block_size
        return long and first.reads_cache and self._config.cache.enable_prefix_caching and not limited
