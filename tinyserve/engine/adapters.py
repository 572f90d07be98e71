"""Adapters by name, loaded and unloaded while requests run.

Reading happens in a thread of its own, so streams go on; what is wrong with an adapter is its loader's error and
nobody else's. It is known under its name from the moment it is complete, and requests that came before get their 404.
One that is unloaded takes no new requests; those that have begun end with it (lora/adapters.py).

Before: lora/names.py, lora/adapters.py.  After: assemble.py makes the desk; engine.py, llm.py, server/adapters.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client.core import GaugeMetricFamily

from ..errors import CheckpointError, ConfigError, RequestError
from ..lora.adapters import Adapter, Adapters, LoadedAdapters, NoAdapters
from ..request import LoRARequest
from ..scheduling.update import SequenceFacts
from .thread import in_own_thread

_log = logging.getLogger(__name__)
OFF = "Adapters are off: start with --enable-lora, or LLM(enable_lora=True)."
Read = Callable[[str], tuple[int, Any]]
LABELS = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
METRIC = ("lora_requests_info", "gauge", ", ".join(LABELS), "The time; with --enable-lora: which adapters are in use.")


class NoDesk:
    """Adapters are off."""

    known: Adapters = NoAdapters()
    loaded: Sequence[Adapter] = ()

    def find(self, name: str) -> Adapter | None:
        """There is none."""
        return None

    async def load(self, name: str, path: str, *, replace: bool = False) -> Adapter:
        """Raises: RequestError: always."""
        raise RequestError(OFF)

    def unload(self, name: str) -> None:
        """Raises: RequestError: always."""
        raise RequestError(OFF)

    def publish(self, metrics: Any, prefix: str) -> None:
        """Nothing to tell."""

    def note(self, sequences: Callable[[], Iterable[SequenceFacts]]) -> None:
        """Nothing to tell."""

    async def of(self, asked: LoRARequest | None) -> Adapter | None:
        """The adapter of a LoRARequest. Raises: RequestError: it asks for one."""
        return None if asked is None else await self.load(asked.lora_name, asked.lora_path)


class Desk(NoDesk):
    """Adapters are on.

    Args:
        known: what the scheduler sees of them.
        read: gives the rank and the packed weights of a folder; takes seconds.
        served: names of the model itself, which no adapter may have.
        most: adapters that may be loaded; None: any number.
    """

    known: LoadedAdapters

    def __init__(self, known: LoadedAdapters, read: Read, served: Sequence[str], most: int | None = None) -> None:
        self.known = known
        self._read = read
        self._served = served
        self._most = most
        self._asked: dict[str, None] = {}  # names of those that `of` loaded, the one asked for last at the end
        self._usage = Usage(known.num_places)
        self._turn = asyncio.Lock()  # of who asks for an adapter that may have to be read

    @property
    def loaded(self) -> Sequence[Adapter]:
        """Those that requests can ask for."""
        return self.known.loaded

    def find(self, name: str) -> Adapter | None:
        """The adapter that requests of this name get."""
        return self.known.find(name)

    async def load(self, name: str, path: str, *, replace: bool = False) -> Adapter:
        """Read a folder and serve it under this name. replace: there may be one of this name, which goes then.

        Raises: RequestError: the name is taken, or the adapter cannot be used; nothing has changed then.
        """
        adapter = await self._load(name, path, replace, {})
        self._asked.pop(name, None)
        return adapter

    async def _load(self, name: str, path: str, replace: bool, spare: dict[str, None]) -> Adapter:
        """As `load`. spare: names to forget, from the first one on, if there is no room for what was read."""
        self._check(name, replace, spare)
        if not path:
            raise RequestError("lora_path must name a folder.", param="lora_path")
        try:
            rank, weights = await in_own_thread("adapter", self._read, path)
        except CheckpointError as error:
            raise RequestError(f"The adapter was not loaded. {error}", param="lora_path") from error
        self._check(name, replace, spare)  # another may have come meanwhile
        while self._is_full(name):
            self.unload(next(iter(spare)))
        return self._loaded(name, path, rank, weights)

    def load_now(self, module: str) -> Adapter:
        """Load one of --lora-modules, before anything is served. Raises: ConfigError."""
        name, path = module_of(module)
        try:
            self._check(name, False, {})
            return self._loaded(name, path, *self._read(path))
        except (CheckpointError, RequestError) as error:
            raise ConfigError(f"--lora-modules {name}: {error}") from error

    def unload(self, name: str) -> None:
        """Take no new requests of this name. Raises: RequestError: 404, there is none."""
        if self.find(name) is None:
            raise UnknownAdapter(f"There is no adapter {name[:200]!r}.", param="lora_name")
        self._asked.pop(name, None)
        self.known.unload(name)
        _log.info("adapter %s unloaded", name)

    async def of(self, asked: LoRARequest | None) -> Adapter | None:
        """The adapter of a LoRARequest: the one that was loaded for an equal one, else loaded now.

        Where there is no room, the one goes that LoRARequests asked for longest ago: they say the folder, so it can be
        read again. One that no LoRARequest loaded stays.
        """
        if asked is None:
            return None
        async with self._turn:  # of several that ask for the same one at once, the first reads it
            name, found = asked.lora_name, self.find(asked.lora_name)
            ours = found is None or name in self._asked
            if found is None or asked.load_inplace or found.path != asked.lora_path:
                found = await self._load(name, asked.lora_path, asked.load_inplace, self._asked)
            if ours:
                self._asked.pop(name, None)
                self._asked[name] = None
            return found

    def publish(self, metrics: Any, prefix: str) -> None:
        """Add the metric of adapters to those of the engine (telemetry.Metrics)."""
        self._usage.name = prefix + METRIC[0]
        metrics.registry.register(self._usage)

    def note(self, sequences: Callable[[], Iterable[SequenceFacts]]) -> None:
        """Remember which adapters are in use, for the metric."""
        found = list(sequences())
        self._usage.waiting, self._usage.running = (
            sorted({one.adapter for one in found if one.running is running} - {""}) for running in (False, True)
        )

    def _is_full(self, name: str) -> bool:
        """Whether there is no room for one of this name."""
        return self._most is not None and self.find(name) is None and len(self.loaded) >= self._most

    def _loaded(self, name: str, path: str, rank: int, weights: Any) -> Adapter:
        _log.info("adapter %s loaded from %r: rank %d", name, path, rank)
        return self.known.load(name, path, rank, weights)

    def _check(self, name: str, replace: bool, spare: dict[str, None]) -> None:
        _check_name(name, self._served)
        if self._is_full(name) and not spare:
            raise RequestError(
                f"{len(self.loaded)} adapters are loaded, as many as --max-cpu-loras allows. Unload one first.",
                param="lora_name",
            )
        if self.find(name) is not None and not replace:
            raise RequestError(
                f"The adapter {name!r} is loaded already. Unload it first, or set load_inplace.", param="lora_name"
            )


class Usage:
    """The metric: labels tell which adapters wait and run. Read by the thread that writes metrics."""

    def __init__(self, places: int) -> None:
        self.name = METRIC[0]
        self.waiting: Sequence[str] = ()
        self.running: Sequence[str] = ()
        self._places = places

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """As prometheus_client asks for it."""
        family = GaugeMetricFamily(self.name, METRIC[3], labels=LABELS)
        family.add_metric([str(self._places), ",".join(self.waiting), ",".join(self.running)], time.time())
        yield family


class UnknownAdapter(RequestError):
    """There is no adapter of this name to unload."""

    status = 404


def check_modules(modules: Sequence[str], served: Sequence[str], max_rank: int) -> None:
    """Refuse --lora-modules that will not do, before a model is loaded for minutes. Raises: ConfigError."""
    from ..lora.names import check_adapter

    seen = set()
    for module in modules:
        name, path = module_of(module)
        if name in seen:
            raise ConfigError(f"--lora-modules {name}: is there twice.")
        seen.add(name)
        try:
            _check_name(name, served)
            check_adapter(path, max_rank)
        except (CheckpointError, RequestError) as error:
            raise ConfigError(f"--lora-modules {name}: {error}") from error


def _check_name(name: str, served: Sequence[str]) -> None:
    if not name or len(name) > 256 or not name.isprintable() or "," in name:  # the metric joins names by commas
        raise RequestError("lora_name must have 1 to 256 printable characters, no commas.", param="lora_name")
    if name in served:
        raise RequestError(f"{name!r} is a name of the model itself.", param="lora_name")


def module_of(text: str) -> tuple[str, str]:
    """Name and folder of one of --lora-modules: name=folder, or a JSON object. Raises: ConfigError."""
    if text.lstrip().startswith("{"):
        try:
            values = json.loads(text)
            return str(values["name"]), str(values["path"])
        except (ValueError, KeyError) as error:
            raise ConfigError(f"--lora-modules {text}: must be JSON with name and path ({error!r}).") from None
    name, equals, path = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"--lora-modules {text}: must be name=folder, or JSON with name and path.")
    return name, path
