"""What the server needs of an engine, and what all its routes share.

The server never builds an engine. Until one is there every route that needs it answers 503, and the socket is open
from the first second, so that a load balancer can watch the start.

Before: engine/engine.py (which has this face), config.py.  After: app.py and every protocol file.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import define, field

from .. import __version__
from ..config import EngineConfig
from ..engine.adapters import NoDesk
from ..engine.intake import Call
from ..errors import Overloaded, UnknownModel
from ..request import BeamSearchParams, Output, SamplingParams
from ..telemetry import NoMetrics
from .responses_store import Store
from .spans import NoSpans, spans_of


class EngineFace(Protocol):
    """The part of Engine that routes call.

    Args: metrics: a telemetry.Metrics.   parsing: a parsers.registry.Parsing.   adapters: see engine/adapters.py.
    """

    tokenizer: Any
    parsing: Any
    max_model_len: int
    served_names: tuple[str, ...]
    default_sampling: Mapping[str, Any]
    metrics: NoMetrics
    adapters: NoDesk

    def generate(
        self, prompt: Sequence[int], sampling: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Output]:
        """Outputs of all n answers, interleaved. Errors of validation come before anything is queued."""
        ...

    def outputs(self, call: Call) -> AsyncIterator[Output]:
        """Outputs of a call with more than `generate` takes: one whose hidden state is wanted."""
        ...

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Render the chat template and tokenise, off the loop."""
        ...

    async def tokenize(self, prompt: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Tokenise a raw prompt as `generate` would, off the loop. limit: no more work once there are more tokens."""
        ...

    async def beam_search(self, prompt: Sequence[int], params: BeamSearchParams, **options: Any) -> Any:
        """The best beams, best first; each has tokens (with the prompt's), answer (text), logprobs, finish_reason."""
        ...

    def abort(self, request_id: str | Callable[[str], bool] | None) -> int:
        """End a request, or all of them, or those whose ids are meant; how many answers there were."""
        ...

    def progress(self, request_id: str) -> tuple[int, int, int] | None:
        """Prompt tokens computed, found in the cache, and all of them; None when the id is not known."""
        ...

    async def pause(self, mode: str = "abort") -> None: ...

    def resume(self) -> None: ...

    @property
    def is_paused(self) -> bool: ...

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget cached prefixes; whether all are forgotten."""
        ...

    def look(self, *, sequences: int, blocks: int) -> Any:
        """Who runs and waits, the blocks and the last steps; engine/look.py."""
        ...

    def stats(self) -> Any:
        """running, waiting, kv_usage ... of the moment."""
        ...

    @property
    def stalled_seconds(self) -> float:
        """Seconds since a step finished while requests wait for one."""
        ...

    def check_health(self) -> None:
        """Raises: EngineDead."""
        ...

    async def close(self, drain_seconds: float = 0.0) -> None: ...


@define
class Service:
    """One server: its engine, once there is one, its options, and what is going on.

    Args:
        engine: None while the model loads.
        draining: no new request is taken any more.
        inflight: HTTP requests that are being answered.
        receiving: bytes of the bodies of all requests that are being answered.
        responses: those that are kept; see responses.py.
    """

    config: EngineConfig
    engine: EngineFace | None = None
    draining: bool = False
    inflight: int = 0
    receiving: int = 0
    responses: Store = field(factory=Store)
    created: int = field(factory=lambda: int(time.time()))
    spans: NoSpans = field(init=False)
    fingerprint: str = field(init=False)

    @spans.default
    def _spans(self) -> NoSpans:
        return spans_of(self.config.log)

    @fingerprint.default
    def _fingerprint(self) -> str:
        """Equal for servers that give equal answers to a seed: version, and the options that change numbers."""
        config = self.config
        facts = repr((config.model, config.load, config.cache, config.scheduler, config.runner))
        return f"tinyserve-{__version__}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"

    def ready(self) -> EngineFace:
        """The engine, alive. Raises: Overloaded: loading or shutting down; EngineDead."""
        if self.draining:
            raise Overloaded("The server is shutting down.", retry_after=5)
        if self.engine is None:
            raise Overloaded("The model is still loading.", retry_after=5)
        self.engine.check_health()
        return self.engine

    def model_name(self, asked: str | None) -> str:
        """The name written in answers: the first served one, or the adapter's. Raises: UnknownModel."""
        adapter = self.adapter(asked)
        return self.ready().served_names[0] if adapter is None else adapter.name

    def adapter(self, asked: str | None) -> Any:
        """The adapter of this name, None for a name of the model itself. Raises: UnknownModel: it is neither."""
        engine = self.ready()
        if not asked or asked in engine.served_names:
            return None
        found = engine.adapters.find(asked)
        if found is None:
            raise UnknownModel(asked, (*engine.served_names, *(one.name for one in engine.adapters.loaded)))
        return found
