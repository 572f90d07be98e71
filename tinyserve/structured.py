"""What an answer has to look like: the words for structured output, and for the thought that may stand before it.

Names are vLLM's. Whether a schema or a grammar is right is found out when it is compiled (grammar/); here is checked
that exactly one thing is asked for, and that it is of the right type.

Before: checks.py.  After: request.py, grammar/compile.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from attrs import field, frozen

from . import checks
from .checks import refuse
from .errors import RequestError, shown

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHOICES = 8192
MAX_CHARACTERS = 256 * 1024  # of what an answer is held to, as JSON


def outgrows(value: Any, most: int) -> bool:
    """Whether the JSON of a value surely has more than so many characters; found without writing it.

    Writing a body of 16 MB out would hold the interpreter for most of a second.
    """
    waiting = [value]
    while waiting and most >= 0:
        value = waiting.pop()
        if isinstance(value, str):
            most -= len(value) + 2
        elif isinstance(value, Mapping):
            most -= 6 * len(value) + sum(len(key) for key in value if isinstance(key, str))
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            most -= 2 * len(value)
            waiting += value
        else:
            most -= 1
    return most < 0


@frozen(kw_only=True)
class Thought:
    """How the thought before an answer is told from it.

    Args:
        begin: the mark that begins one, or "".   also: others that do.   ends: the marks that end it.
        opened: the prompt ends inside it.
        budget: tokens it may have; then its end is written for the model. None: no limit.
        force: what is written then, if it is not the first of the `ends`.
    """

    begin: str = ""
    also: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    opened: bool = False
    budget: int | None = None
    force: str = ""


@frozen(kw_only=True, eq=False)
class Constraint:
    """A grammar that the answer must satisfy.

    Args:
        kind: one of KINDS; "thought" for none, when only the thought is limited.   value: what that kind holds.
        param: the field to name when it is wrong.
        compact: JSON without blanks of the model's choice.   closed: no properties that the schema does not name.
        blanks: a pattern for blanks in JSON, instead of the default.
        thought: what may stand before.
    """

    kind: str
    value: Any = None
    param: str = "structured_outputs"
    compact: bool = False
    closed: bool = False
    blanks: str | None = None
    thought: Thought | None = None
    key: tuple[Any, ...] = field(init=False, repr=False)  # equal for equal grammars

    def __attrs_post_init__(self) -> None:
        if outgrows(self.value, MAX_CHARACTERS):
            self._refuse_length()
        try:
            text = self.value if isinstance(self.value, str) else json.dumps(self.value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{self.param}: it is not JSON: {error}", param=self.param) from error
        if len(text) > MAX_CHARACTERS:
            self._refuse_length()
        object.__setattr__(
            self, "key", (self.kind, type(self.value) is str, text, self.compact, self.closed, self.blanks)
        )

    @property
    def text(self) -> str:
        """What was asked for, as text or JSON."""
        return self.key[2]

    @classmethod
    def from_key(cls, key: Sequence[Any]) -> Constraint:
        """A constraint of its own with this key, in another process."""
        kind, is_text, text, compact, closed, blanks = key
        value = text if is_text else json.loads(text)
        return cls(kind=kind, value=value, compact=compact, closed=closed, blanks=blanks)

    def _refuse_length(self) -> NoReturn:
        raise RequestError(f"{self.param}: is longer than {MAX_CHARACTERS} characters.", param=self.param)


@frozen(kw_only=True)
class StructuredOutputsParams:
    """What an answer must be; exactly one of the first six.

    Args:
        json: a JSON schema, as an object or as text.   json_object: True for any JSON object.
        regex: a pattern that the whole answer matches.   choice: texts, of which it is one.
        grammar: Lark, or GBNF / EBNF.
        structural_tag: free text with constrained parts: {"structures": [...], "triggers": [...]} or {"format": ...}.
        disable_any_whitespace: JSON without blanks.   whitespace_pattern: which blanks JSON may have.
        disable_additional_properties: where the schema names properties, objects have no others, unless it says so.
        enable_in_reasoning: the whole answer is held to it, also what would be a thought.
        disable_fallback: accepted; there is one backend.
        source: the field that said so, to be named when it is wrong.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = field(default=False, validator=checks.flag)
    disable_additional_properties: bool = field(default=False, validator=checks.flag)
    whitespace_pattern: str | None = None
    enable_in_reasoning: bool = field(default=False, validator=checks.flag)
    disable_fallback: bool = field(default=False, validator=checks.flag)
    source: str = "structured_outputs"

    def __attrs_post_init__(self) -> None:
        name = self.source
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            refuse(name, f"{name} needs exactly one of {', '.join(KINDS)}; got {', '.join(given) or 'none'}.")
        if self.json_object is False:
            refuse(name, "json_object must be true, or left out.")
        (kind,) = given
        value = getattr(self, kind)
        wanted = {"regex": str, "grammar": str, "json_object": bool, "structural_tag": (str, Mapping)}.get(kind, object)
        if kind == "choice":
            self._check_choices()
        if kind == "json" and not (value is True or isinstance(value, (str, Mapping))):
            refuse(name, f"json must be a JSON schema, got {shown(value)}.")
        if not isinstance(value, wanted) or value == "":
            refuse(name, f"{kind} must be {'a text' if wanted is str else 'an object'}, got {shown(value)}.")
        if self.whitespace_pattern is not None and not isinstance(self.whitespace_pattern, str):
            refuse(name, f"whitespace_pattern must be a text, got {shown(self.whitespace_pattern)}.")

    def _check_choices(self) -> None:
        choices = self.choice
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not 0 < len(choices) <= MAX_CHOICES:
            refuse(self.source, f"choice must be a list of 1 to {MAX_CHOICES} texts, got {shown(choices)}.")
        if not all(isinstance(choice, str) and choice for choice in choices):
            refuse(self.source, "choice must hold texts, none of them empty.")

    @classmethod
    def of(cls, value: StructuredOutputsParams | Mapping[str, Any] | None) -> StructuredOutputsParams | None:
        """From a record or a mapping of its fields. Raises: RequestError: with param "structured_outputs"."""
        if value is None or isinstance(value, cls):
            return value
        if value == {}:
            return None
        name = "structured_outputs"
        if not isinstance(value, Mapping):
            refuse(name, f"{name} must be an object, got {shown(value)}.")
        fields = {key: item for key, item in value.items() if item is not None}
        known = {attribute.name for attribute in cls.__attrs_attrs__} - {"source"}
        if unknown := sorted(map(str, fields.keys() - known)):
            refuse(name, f"{name} has no field {shown(unknown[0])}; its fields are {', '.join(sorted(known))}.")
        return cls(**fields)

    def is_longer(self, characters: int) -> bool:
        """Whether its JSON surely has more than so many."""
        return outgrows([getattr(self, kind) for kind in KINDS], characters)

    def constraint(self) -> Constraint:
        """The grammar that this asks for."""
        kind = next(kind for kind in KINDS if getattr(self, kind) is not None)
        return Constraint(
            kind=kind,
            value=getattr(self, kind),
            param=self.source,
            compact=self.disable_any_whitespace,
            closed=self.disable_additional_properties,
            blanks=self.whitespace_pattern,
        )
