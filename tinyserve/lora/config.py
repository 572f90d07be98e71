"""What adapter_config.json says of single modules: how much they count, of which rank they are, which there are.

The tensors say that too, except for the factor; where the two contradict each other, one of them belongs to another
adapter. PEFT fails there, or leaves tensors out with a warning; here it is refused by name. A pattern for
`target_modules`, or "all-linear", only says what training chose.

Before: checkpoint/table.py.  After: names.py.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from ..errors import CheckpointError, shown

# Keys of alpha_pattern and rank_pattern are regular expressions, of which some would hold the interpreter for years:
# none may repeat a group or look back, and repeats and alternatives are few. A name is matched in milliseconds then.
PATTERN_COST, PATTERN_LETTERS, PATTERN_SECONDS = 30_000, 200, 1.0
_NESTED = re.compile(r"\)[*+?{]|\\[1-9]|\(\?(?!:)")
_REPEAT = re.compile(r"[*+?]|\{\d*,\d*\}")
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
# The types of keys that are read here or in names.py, and what to say they must be.
_KINDS = {
    "use_rslora": (bool, "true or false"),
    "fan_in_fan_out": (bool, "true or false"),
    "target_modules": ((list, str), "a list of names, or a regular expression"),
    "layers_to_transform": ((list, int), "numbers of layers"),
}
T = TypeVar("T")


class Patterns(Generic[T]):
    """Values that single modules have of their own: {the end of a module's name, or a regular expression of it: value}.

    Args: name: the key of the config.   read: makes a value of what stands there; gets its name, too.
    """

    def __init__(self, config: Mapping[str, Any], name: str, read: Callable[[str, Any], T], path: str) -> None:
        self._name, self._path = name, path
        patterns = config.get(name) or {}
        if not isinstance(patterns, Mapping):
            raise CheckpointError(f"{path}: {name} must be an object, is {shown(patterns)}.")
        self._patterns = [(self._pattern(key), read(f"{name} {shown(key)}", own)) for key, own in patterns.items()]
        self._spent = 0.0

    def of(self, module: str) -> T | None:
        """What a module has of its own. Raises: CheckpointError: the patterns take too long."""
        begin = time.thread_time()
        found = next((own for pattern, own in self._patterns if pattern.fullmatch(module)), None)
        self._spent += time.thread_time() - begin
        if self._spent > PATTERN_SECONDS:
            raise CheckpointError(f"{self._path}: {self._name} takes too long; name the modules.")
        return found

    def _pattern(self, key: str) -> re.Pattern[str]:
        cost = 30 ** len(_REPEAT.findall(key)) * 2 ** key.count("|")
        if len(key) > PATTERN_LETTERS or cost > PATTERN_COST or _NESTED.search(key):
            raise CheckpointError(
                f"{self._path}: {shown(key)} in {self._name} is too complex a regular expression; name the modules."
            )
        try:
            return re.compile(rf"(.*\.)?({key})")
        except (re.error, OverflowError) as error:
            raise CheckpointError(
                f"{self._path}: {shown(key)} in {self._name} is no regular expression: {error}."
            ) from None


class Alphas:
    """What B A is multiplied by: alpha / r, or alpha / sqrt(r); alpha may have a pattern of its own for a module."""

    def __init__(self, config: Mapping[str, Any], path: str) -> None:
        self._path = path
        self._usual = self._number("lora_alpha", config.get("lora_alpha", 8))
        self._root = bool(config.get("use_rslora"))
        self._own = Patterns(config, "alpha_pattern", self._number, path)

    def factor(self, module: str, rank: int) -> float:
        """Of one module. Raises: CheckpointError: its patterns take too long."""
        found = self._own.of(module)
        alpha = self._usual if found is None else found
        return alpha / (rank**0.5 if self._root else rank)

    def _number(self, name: str, value: Any) -> float:
        try:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise OverflowError
            return float(value)
        except OverflowError:
            raise CheckpointError(f"{self._path}: {name} must be a finite number, is {shown(value)}.") from None


def check_agrees(config: Mapping[str, Any], ranks: Mapping[str, int], path: str) -> None:
    """Refuse an adapter whose tensors are not those that its config tells of.

    Args: ranks: of the modules in the file, by their names.
    """
    _check_kinds(config, path)
    usual = rank_of(path, "r", config["r"]) if config.get("r") is not None else None
    own = Patterns(config, "rank_pattern", lambda name, value: rank_of(path, name, value), path)
    targets, layers = config.get("target_modules"), _layers(config, path)
    for module, rank in ranks.items():
        told, name = (special, "rank_pattern") if (special := own.of(module)) is not None else (usual, "r")
        if told is not None and told != rank:
            raise CheckpointError(f"{path}: {module} is of rank {rank} in the file, but {name} says {shown(told)}.")
        if isinstance(targets, list) and targets and not _is_among(module, targets):
            raise CheckpointError(
                f"{path}: the file holds {module}, which target_modules {shown(targets)} do not name."
            )
        found = _LAYER.search(module)
        if layers and found and int(found[1]) not in layers:
            raise CheckpointError(
                f"{path}: the file holds {module}, but layers_to_transform {shown(layers)} leave that layer out."
            )


def _check_kinds(config: Mapping[str, Any], path: str) -> None:
    for name, (kinds, what) in _KINDS.items():
        if config.get(name) is not None and not isinstance(config[name], kinds):
            raise CheckpointError(f"{path}: {name} must be {what}, is {shown(config[name])}.")


def _layers(config: Mapping[str, Any], path: str) -> list[int]:
    """The numbers of the layers that are adapted; none: all may be."""
    given = config.get("layers_to_transform")
    layers = [given] if isinstance(given, int) else given or []
    if any(type(layer) is not int for layer in layers):
        raise CheckpointError(f"{path}: layers_to_transform must be numbers of layers, is {shown(given)}.")
    return layers


def rank_of(path: str, name: str, value: Any) -> int:
    """A rank as the config has it. Raises: CheckpointError: it is none."""
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{path}: {name} must be a positive integer, is {shown(value)}.")
    return value


def _is_among(module: str, targets: list[Any]) -> bool:
    """Whether one of these is the end of a module's name."""
    ends = (str(target).replace("language_model.", "", 1) for target in targets)
    return any(module == end or module.endswith(f".{end}") for end in ends)
