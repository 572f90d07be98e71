"""How one declaration of an option becomes a command-line flag, an environment variable, a file key and an argument.

    max_num_seqs: int = option(256, "sequences that may run at the same time", low=1)

gives `--max-num-seqs 256`, `TINYSERVE_MAX_NUM_SEQS=256`, `max-num-seqs: 256` in a YAML file and
`LLM(max_num_seqs=256)`. All four go through the same converter, which reads text and native values alike, knows human
sizes, and answers a bad value with a ConfigError that names the option. This file knows how options are declared and
converted; which options exist is said in config.py.

Before: errors.py.  After: config.py (the declarations), cli/parse.py (the command line built from them).
"""

import difflib
import json
import math
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from attrs import Attribute, field, fields, frozen

from .errors import ConfigError, shown

_SIZE = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_WORDS = re.compile(r"[-_.\s]+")
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
MOST = 2**63 - 1  # of a whole number without a limit of its own
SIZES = 2**16  # what may be more is written with suffixes
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@frozen
class Flag:
    """One option as a user meets it.

    Args:
        name: attribute name, e.g. "max_model_len".
        type: bool, int, float, str, dict, a Literal, or tuple[int | str, ...].
        optional: whether None is a value; it then means "decide automatically" or "none".
        low, high: inclusive range of a number; `above`: exclusive lower bound.
        words: texts that stand for a number, e.g. {"auto": -1}.
        form: what a text must look like: a regular expression, and the same in words for whoever wrote another.
        secret: its value is shown nowhere.
        short: a second spelling on the command line, e.g. "-q".
        group: the attribute of EngineConfig that holds it.
    """

    name: str
    type: Any
    default: Any
    help: str
    optional: bool = False
    low: float | None = None
    high: float | None = None
    above: float | None = None
    words: Mapping[str, int] = field(factory=dict)
    form: tuple[str, str] | None = None
    secret: bool = False
    short: str | None = None
    group: str = ""

    @property
    def cli(self) -> str:
        """Spelling on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """Name of the environment variable."""
        return "TINYSERVE_" + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed texts of a Literal, else ()."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def is_list(self) -> bool:
        return get_origin(self.type) is tuple

    def convert(self, value: Any) -> Any:
        """Read `value` (text or native) as this option's type.

        Raises: ConfigError: it is not of this type or outside the range; the message names the flag.
        """
        try:
            return self._converted(value)
        except ConfigError:
            raise
        except (ValueError, TypeError, OverflowError) as error:
            told = error if not self.secret else f"must {self.form[1]}, or a list of such; its value is not shown"
            raise ConfigError(f"{self.cli}: {told}") from None
        except RecursionError:
            raise ConfigError(f"{self.cli}: brackets are nested too deeply.") from None

    def _converted(self, value: Any) -> Any:
        if isinstance(value, str) and value.strip().lower() in self.words:
            value = self.words[value.strip().lower()]
        if value is None or (self.optional and isinstance(value, str) and value.strip().lower() in ("none", "null")):
            if not self.optional:
                raise ValueError("a value is needed, got none")
            return None
        if self.is_list:
            element = get_args(self.type)[0]
            return tuple(self._in_range(self._formed(_one(element, item))) for item in _items(value))
        if self.choices:
            return _choice(self.choices, value)
        return self._in_range(self._formed(self._read(value)))

    def _read(self, value: Any) -> Any:
        try:
            return _one(self.type, value)
        except ValueError:
            if self.type is not int or self.low is None or (self.high or MOST) > SIZES:
                raise
            raise ValueError(f"must be a whole number from {self.low} to {self.high}, got {shown(value)}") from None

    def _formed(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if not value.strip() and self.default != "" and not self.is_list:
            raise ValueError("is empty; give a value, or leave the option out")
        if "\0" in value:
            raise ValueError("holds a zero character, which no name or path can")
        if self.form and value and not re.fullmatch(self.form[0], value):
            raise ValueError(f"must {self.form[1]}; got {shown(value)}")
        return value

    def _in_range(self, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value in self.words.values():
            return value
        if self.low is not None and value < self.low:
            raise ValueError(f"must be at least {self.low}, got {shown(value)}")
        if self.above is not None and value <= self.above:
            raise ValueError(f"must be above {self.above}, got {shown(value)}")
        high = MOST if self.high is None and isinstance(value, int) else self.high
        if high is not None and value > high:
            raise ValueError(f"must be at most {high}, got {shown(value)}")
        return value


def option(default: Any, help: str, **limits: Any) -> Any:
    """Declare one option inside an `options` class. limits: low, high, above, words, form, secret, short (see Flag)."""
    return field(default=default, metadata={"help": help, "limits": limits})


def options(cls: type) -> type:
    """Class decorator: frozen attrs record whose fields convert and check themselves."""
    return frozen(kw_only=True, field_transformer=_with_converters)(cls)


def flags_of(cls: type, group: str) -> list[Flag]:
    """The flags that an `options` class declares, in order."""
    return [_flag(attribute, group) for attribute in fields(cls)]


def parse_size(text: str) -> int:
    """Read an integer with a human suffix: '4k' = 4000, '4K' = 4096, '2GiB' = 2 * 1024**3, '2GB' = 2 * 1000**3.

    Raises: ValueError: no number, or not a whole one.
    """
    match = _SIZE.fullmatch(text.strip().replace("_", ""))
    if not match:
        raise ValueError(f"must be a whole number such as 4096, 4k or 2GiB, got {shown(text)}")
    if len(text) > 100:
        raise ValueError(f"has {len(text)} characters, which is no size of anything")
    number, letter, unit = match.groups()
    binary = unit.lower() == "ib" if unit else letter.isupper()
    value = float(number) * (1024 if binary else 1000) ** _POWER[letter.lower()] if "." in number else None
    if value is None:
        return int(number) * (1024 if binary else 1000) ** _POWER[letter.lower()]
    if not value.is_integer():
        raise ValueError(f"must be a whole number, got {shown(text)}")
    return int(value)


def format_bytes(count: float) -> str:
    """A byte count for people: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was most likely meant to be, or None: each of its words must be like one of it."""
    for close in difflib.get_close_matches(name, list(known), n=5, cutoff=0.6):
        theirs = _WORDS.split(close)
        if all(_like(word, theirs) for word in _WORDS.split(name) if word):
            return close
    return None


def _like(word: str, words: list[str]) -> bool:
    begins = len(word) > 2 and any(other.startswith(word) for other in words)
    return begins or bool(difflib.get_close_matches(word, words, n=1, cutoff=0.6))


def _flag(attribute: Attribute, group: str) -> Flag:
    kind, optional = attribute.type, False
    if get_origin(kind) in (Union, types.UnionType):
        inner = [part for part in get_args(kind) if part is not types.NoneType]
        optional, kind = len(inner) < len(get_args(kind)), inner[0]
    default = attribute.default
    return Flag(
        attribute.name, kind, default, attribute.metadata["help"], optional, group=group, **attribute.metadata["limits"]
    )


def _with_converters(_cls: type, attributes: list[Attribute]) -> list[Attribute]:
    return [attribute.evolve(converter=_flag(attribute, "").convert) for attribute in attributes]


def _one(kind: Any, value: Any) -> Any:
    if kind is bool:
        return _boolean(value)
    if kind is int:
        return _integer(value)
    if kind is float:
        return _number(value)
    if kind is dict:
        return _mapping(value)
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        raise ValueError(f"must be text, got {shown(value)}")
    return str(value)


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in TRUE + FALSE:
        return value.strip().lower() in TRUE
    raise ValueError(f"must be true or false, got {shown(value)}")


def _integer(value: Any) -> int:
    if isinstance(value, str):
        return parse_size(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be a whole number, got {shown(value)}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"must be a number, got {shown(value)}")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"must be a number, got {shown(value)}") from None
    if not math.isfinite(number):
        raise ValueError(f"must be a finite number, got {shown(value)}")
    return number


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"must be a JSON object, got {shown(value)} ({error})") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"must be an object of names and values, got {shown(value)}")
    if wrong := [key for key in value if not isinstance(key, str)]:
        raise ValueError(f"must have names as keys, got {shown(wrong[0])}")
    return dict(value)


def _items(value: Any) -> list[Any]:
    """The elements of a list option: a list, a JSON list as text, or texts separated by commas."""
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            return _json_list(value)
        if value.lstrip().startswith("{"):  # an object has commas of its own
            return [value]
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, (int, float)):
        return [value]
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"must be a list, got {shown(value)}")
    items = list(value)
    if len(items) == 1 and isinstance(items[0], str) and items[0].lstrip().startswith("["):
        return _json_list(items[0])
    return items


def _json_list(text: str) -> list[Any]:
    try:
        return list(json.loads(text))
    except ValueError as error:
        raise ValueError(f"begins like a JSON list, but is none: {shown(text)} ({error})") from None


def _choice(choices: tuple[str, ...], value: Any) -> str:
    if value in choices:
        return value
    close = nearest(value, choices) if isinstance(value, str) else None
    hint = f" Did you mean {close!r}?" if close else ""
    raise ValueError(f"must be one of {', '.join(choices)}; got {shown(value)}.{hint}")
