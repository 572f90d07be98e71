"""The loop, and the object that everybody talks to.

    generate() --intake--> requests --scheduler.add--> plan -> launch -> (device) -> commit --streams--> outputs

`Engine.run` is the only loop in tinyserve. HTTP, scheduling and launches share one asyncio event loop and one thread;
`depth` steps are in flight, and depth 1 is the synchronous engine. The loop never waits for anything but the oldest
flight or, with nothing to do, for an arrival, so it never spins and every await lets sockets be served.

If the loop raises, nothing can be answered any more: each waiting reader gets EngineDead with the cause.

Before: scheduling/scheduler.py, runner/runner.py, intake.py, streams.py.  After: server/app.py, llm.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any

from attrs import evolve

from ..config import EngineConfig
from ..errors import EngineDead, Overloaded, RequestError
from ..request import BeamSearchParams, FinishReason, Output, RequestOutputKind, SamplingParams
from ..scheduling.update import SchedulerStats
from ..step import StepInput
from ..telemetry import Metrics, NoMetrics
from .adapters import NoDesk
from .admission import Admission
from .assemble import Machine, assemble, open_foundry
from .beam import search
from .chat import Chat
from .gate import Gate, State, either
from .intake import Call, Intake, Prepared, Rules
from .look import Look, look
from .meter import Meter
from .outputs import BeamSearchOutput
from .parts import Parts, Phases, check_names, load_parts
from .searches import Meant
from .streams import Streams
from .thread import in_own_thread

_log = logging.getLogger(__name__)
CLOSE_SECONDS = 60  # how long `close` waits for the steps under way; the largest CPU prefill takes a few


class Engine:
    """Generates text for any number of concurrent callers, on one event loop.

    Made by `await Engine.start(config)`; all methods must be called on the loop that it was started on. Several
    engines can live in one process and on one loop.
    """

    def __init__(self, config: EngineConfig, parts: Parts, machine: Machine, metrics: NoMetrics | None = None) -> None:
        self.config = config
        self.parts = parts
        self.machine = machine
        rules = Rules(
            vocab_size=machine.vocab_size,
            max_model_len=machine.max_model_len,
            max_logprobs=config.model.max_logprobs,
            eos_ids=parts.eos_ids,
            extra_eos_ids=parts.extra_eos_ids,
            default_sampling=parts.default_sampling,
            max_new_tokens=parts.max_new_tokens,
            parsing=parts.parsing,
        )
        self.intake = Intake(parts.tokenizer, rules, config.model.seed)
        self.meter = Meter(metrics or NoMetrics())
        self.chat = Chat(parts, self.intake, self.meter)
        self.streams = Streams(self._finish, self.meter)
        self.admission = Admission(config, machine, parts.tokenizer, self.streams, self.meter, self._finish, self._wake)
        self.arrivals = asyncio.Event()
        self._landed = asyncio.Event()  # set: no flight is under way, and none starts before the next arrival
        self.gate = Gate()
        self._cause: BaseException | None = None
        self._last_step = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        parts: Parts | None = None,
        machine: Machine | None = None,
        offline: bool = False,
    ) -> Engine:
        """Load the model in a worker thread and start the loop.

        Args: parts, machine: in place of those that `config` describes.   offline: see EngineConfig.resolve.
        Raises: ConfigError, CheckpointError. When cancelled, loading ends at the next tensor.
        """
        phases = Phases()
        try:
            if machine is None:
                if parts is None:
                    await in_own_thread("names", check_names, config)
                with contextlib.closing(await in_own_thread("foundry", open_foundry, config)) as foundry:
                    if parts is None:
                        parts = await in_own_thread("load", load_parts, config, phases)
                    machine = await in_own_thread("assemble", assemble, config, parts, phases, foundry, offline)
        except asyncio.CancelledError:
            phases.stop()  # the thread cannot be interrupted, but it looks now and then
            raise
        shown = {"prefix": config.server.metrics_prefix, "log": not config.log.disable_log_stats}
        metrics = Metrics(parts.served_names[0], max_model_len=machine.max_model_len, **shown)
        metrics.cache_config(machine.cache_facts(config.cache))
        machine.adapters.publish(metrics, config.server.metrics_prefix)
        engine = cls(config, parts, machine, metrics)
        engine._tasks.append(asyncio.create_task(engine._guard(), name="tinyserve-engine"))
        engine._tasks.append(asyncio.create_task(metrics.report(), name="tinyserve-report"))
        _log.info("engine ready: %s", phases.report())
        return engine

    # ---- the loop

    async def run(self) -> None:
        """Plan, launch, wait for the oldest, commit; until closed."""
        scheduler, runner = self.machine.scheduler, self.machine.runner
        flying: deque[Any] = deque()
        while True:
            while len(flying) < self.machine.depth and (step := self._plan(flying)):
                flying.append(runner.launch(step))
            if not flying:
                if self.gate.state is State.CLOSED:
                    return
                await self._rest()
                continue
            updates = scheduler.commit(await (flight := flying.popleft()))
            self.streams.pace.note(flight, flying, len(self.streams))
            # the device gets its next step before the readers get their tokens
            if flying and (step := self._plan(flying)):
                flying.append(runner.launch(step))
            await self.streams.deliver(updates)
            self.meter.landed(scheduler.stats())
            self._last_step = time.monotonic()

    def _plan(self, flying: Collection[Any]) -> StepInput | None:
        if not self.gate.plans:
            return None
        self.admission.feed()
        if flying and not self.streams.pace.enough(self.machine.scheduler.num_waiting):
            return None  # one step with all who come until the other lands is less work than two
        step = self.machine.scheduler.plan(self.machine.for_prompts(len(self.streams)))
        if step is not None:
            self.meter.launched(step)
        return step

    async def _rest(self) -> None:
        """Sleep until something has arrived; before that, let the runner prepare what makes later steps faster."""
        self._landed.set()
        self.meter.queues(self.machine.scheduler.stats())
        while not self.arrivals.is_set() and self.gate.state is not State.CLOSED and self.machine.runner.improve():
            await asyncio.sleep(0)
        await self.arrivals.wait()
        self.arrivals.clear()
        self._landed.clear()
        self._last_step = time.monotonic()

    def _wake(self) -> None:
        self._landed.clear()
        self.arrivals.set()

    async def _guard(self) -> None:
        try:
            await self.run()
        except Exception as error:
            _log.critical("the engine's loop ended", exc_info=error)
            self._cause = error
            traceback.clear_frames(error.__traceback__)  # they hold the scheduler and the runner
            self.streams.fail(self._death)
            self.metrics.queues(SchedulerStats())
        finally:
            self._landed.set()

    def _death(self) -> EngineDead:
        error = EngineDead(f"The engine's loop ended: {self._cause!r}. Restart the server.")
        error.__cause__ = self._cause
        return error

    # ---- requests

    def generate(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> AsyncGenerator[Output, None]:
        """Answer a prompt; yields pieces as they are made. Leaving the iterator early aborts the request.

        An output holds what is new since the one before (DELTA), unless `sampling.output_kind` asks for something else.

        Args:
            prompt: text, token ids, or a dict with `prompt` or `prompt_token_ids` and perhaps `cache_salt`.
            sampling: None takes the model's defaults (`default_sampling`).
            options: more of the Call:
                request_id: for `abort` and the log; made up when None.
                priority: lower runs first, under the priority policy.
                cache_salt: prefix blocks are shared only among requests with an equal one.
                add_special_tokens: whether a text gets the tokenizer's BOS (yes); templates bring their own.
                truncate_prompt_tokens: keep only so many of the prompt's last tokens; -1: as many as fit.
                thinks: the answer may begin with a thought, as in a chat: a grammar holds behind it only.
                adapter: who answers, of `adapters.find`; None: the model itself.
        Raises: RequestError: at the first step of the iteration, before anything is queued. Overloaded, EngineDead.
        """
        return self.outputs(Call(prompt=prompt, sampling=sampling, **options))

    async def outputs(
        self, call: Call | Prepared, kind: RequestOutputKind | None = None
    ) -> AsyncGenerator[Output, None]:
        """Prepare a call if it is not, queue it and yield its outputs; see `generate`. kind: overrides output_kind."""
        begun = isinstance(call, Prepared) and call.begun
        self.admit(begun)
        prepared = call if isinstance(call, Prepared) else await self.intake.prepare(call)
        self.admit(begun)  # much may have happened while a long text was tokenised
        stream = self.admission.submit(prepared, kind)
        self._wake()
        try:
            while not stream.exhausted:
                yield await stream.get()
        finally:
            self.streams.cancel(stream, tell=False)

    def admit(self, begun: bool = False) -> None:
        """Raises: Overloaded, EngineDead: nothing new is taken. begun: it is a step of what runs already."""
        self.check_health()
        try:
            self.gate.check(begun)
        except Overloaded:
            self.metrics.rejected("paused")
            raise

    def _finish(self, request_id: str, reason: FinishReason) -> None:
        if self._cause is None and self.machine.scheduler is not None:
            self.machine.scheduler.finish(request_id, reason)
            self._wake()

    async def beam_search(
        self, prompt: str | Sequence[int] | Mapping[str, Any], params: BeamSearchParams, **options: Any
    ) -> BeamSearchOutput:
        """The best `beam_width` answers by total log-probability, best first; see beam.py. options: as of generate."""
        return await search(self, Call(prompt=prompt, **options), params)

    def abort(self, request_id: str | Meant | None) -> int:
        """End the request with this id (None: all; or those whose ids a function says yes to), wherever it is; its
        reader gets what there is and ABORT. Returns: how many answers were running (0: unknown or already ended).
        """
        return self.streams.abort(request_id if callable(request_id) else lambda name: request_id in (None, name))

    def progress(self, request_id: str) -> tuple[int, int, int] | None:
        """How far a request's prompt is, see Scheduler.progress; None when it is not known (yet), as it is not while
        it may be refused."""
        return next(map(self.machine.scheduler.progress, self.streams.ids(request_id)), None)

    async def tokenize(self, text: str, **options: Any) -> list[int]:
        """Ids of a text of any length, made off the loop. options: of Tokenizer.encode."""
        return await self.intake.off_loop(lambda: self.tokenizer.encode(text, **options))

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Ids of a conversation: template, then tokenizer, off the loop; see Chat.render for the options.

        Raises: RequestError: the template refused the messages. ContextLengthExceeded.
        """
        return (await self.chat.encode(messages, **options))[1]

    # ---- life

    def check_health(self) -> None:
        """Raises: EngineDead: the loop ended by an error; the first one is its `__cause__`."""
        if self._cause is not None:
            raise self._death()

    @property
    def stalled_seconds(self) -> float:
        """Seconds since a step finished while requests wait for one; 0 when nothing waits."""
        return time.monotonic() - self._last_step if len(self.streams) and self.gate.plans else 0.0

    @property
    def is_paused(self) -> bool:
        return self.gate.is_paused

    async def pause(self, mode: str = "abort") -> None:
        """Stop computing; returns once no step is under way, or another call (`resume`) has changed its mind.

        Args: mode: "abort" ends what runs; "wait" lets it finish; "keep" freezes it, and new requests queue up. With
            the first two, new requests are refused (Overloaded) until `resume`. A pause may follow another one.
        Raises: Overloaded: the engine is being closed.
        """
        if mode not in ("abort", "wait", "keep"):
            raise RequestError(f"mode must be abort, wait or keep, got {mode!r}.", param="mode")
        self.check_health()
        if self.gate.is_ending:
            self.gate.check()
        undone = self.gate.move(State.HELD if mode == "keep" else State.SHUT)
        if mode == "abort":
            self.streams.abort()
        if mode == "wait":
            self._wake()  # of what an earlier pause keeps
            await either(self.streams.empty, undone)
        await either(self._landed, undone)
        self.check_health()
        self.streams.show()

    def resume(self) -> None:
        """Take requests again and go on with those that were kept."""
        if self.is_paused:
            self.gate.move(State.OPEN)
            self._wake()

    async def close(self, drain_seconds: float = 0.0) -> None:
        """End everything and give the memory back.

        Requests that run get `drain_seconds` to finish, then ABORT; those that have not begun get Overloaded.
        """
        if self.gate.state is State.CLOSED:
            return
        self.gate.move(State.DRAINING)
        self._wake()
        if drain_seconds > 0 and self._cause is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.streams.empty.wait(), drain_seconds)
        self.gate.move(State.CLOSED)
        self.streams.abort(error=lambda: Overloaded("The engine was shut down before this request began."))
        self._wake()
        if self._tasks:
            await asyncio.wait(self._tasks[:1], timeout=CLOSE_SECONDS)
            for task in self._tasks:
                task.cancel()
        self.intake.close()
        await self.chat.close()
        self.parts = evolve(self.parts, model=None)
        await in_own_thread("close", self.machine.close, daemon=True)

    async def wait_closed(self) -> None:
        """Return when the loop has ended. Raises: EngineDead: it ended by an error."""
        if self._tasks:
            await asyncio.wait(self._tasks[:1])
        self.check_health()

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget cached prefixes that no request uses now. Returns whether all are forgotten.

        preempt_running: put running requests back into the queue first; their blocks go once no step uses them.
        """
        return self.machine.scheduler.reset_prefix_cache(preempt_running=preempt_running)

    def look(self, *, sequences: int, blocks: int) -> Look:
        """Who runs and waits, what the cache's blocks hold, and the last steps; see look.py."""
        return look(self.machine, self.meter, sequences, blocks)

    def stats(self) -> Any:
        """Numbers of the moment; an answer runs until its reader is told of its end. Raises: EngineDead: closed."""
        if self.machine.scheduler is None:
            raise EngineDead("The engine was closed.")
        stats = self.machine.scheduler.stats()
        return evolve(stats, running=max(len(self.streams) - stats.waiting, 0))

    # ---- what callers ask about

    @property
    def metrics(self) -> NoMetrics:
        return self.meter.metrics

    @property
    def tokenizer(self) -> Any:
        return self.parts.tokenizer

    @property
    def template(self) -> Any:
        return self.parts.template

    @property
    def adapters(self) -> NoDesk:
        """Adapters by name: adapters.py."""
        return self.machine.adapters

    @property
    def parsing(self) -> Any:
        return self.parts.parsing

    @property
    def max_model_len(self) -> int:
        return self.machine.max_model_len

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.parts.served_names

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """Fields of SamplingParams that the model's generation config sets."""
        return self.parts.default_sampling
