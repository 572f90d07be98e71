"""The Jinja that model authors write their chat templates for, fenced in.

Templates come with models from strangers, some even with requests. They run in Jinja's sandbox with the helpers that
Hugging Face's renderer has, and no others; and each rendering has a budget: of loop steps, of macro calls, of output.

Before: jinja2.  After: template.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, ClassVar

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from ..errors import RequestError

MAX_STEPS = 500_000  # loop steps and macro calls, 5 us each; 1000 messages with 100 tools need about 20 thousand
MAX_SECONDS = 5.0
MAX_CHARACTERS = 64 * 2**20
MAX_REPEAT = 1 << 20
MAX_EXPONENT = 64
TICK = "_tinyserve_step"
NOW = "strftime_now"


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training; here it only groups."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, where multiplication cannot make a text of a gigabyte either."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self.filters["tojson"] = tojson
        self.globals["raise_exception"] = raise_exception

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for count, thing in ((left, right), (right, left)):
            size = len(thing) if isinstance(thing, (str, list, tuple)) else 0
            if isinstance(count, int) and size * count > MAX_REPEAT:
                raise SecurityError(f"{size} * {count} items are more than {MAX_REPEAT}")
        if operator == "**" and not (abs(left) <= MAX_REPEAT and abs(right) <= MAX_EXPONENT):
            raise SecurityError(f"{left} ** {right} is too large")
        return super().call_binop(context, operator, left, right)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes: the prompt is not a web page. Stock Jinja turns "<" into a six-letter escape."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """What templates call to refuse messages; it becomes the sender's 400."""
    raise RequestError(f"The chat template refuses these messages: {message}", param="messages")


class WentTooFar(RequestError):
    """A template used up what it may: steps, seconds or characters. The messages are to blame if it is the model's."""


class Budget:
    """Counts what one rendering does."""

    def __init__(self) -> None:
        self.steps = 0
        self.stop_at = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS or (self.steps % 1024 == 0 and time.monotonic() > self.stop_at):
            raise WentTooFar(f"The chat template does not end: stopped after {self.steps} steps.", param="messages")

    def collect(self, pieces: Iterator[str]) -> str:
        """The joined pieces, if they are not too many."""
        kept, size = [], 0
        for piece in pieces:
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise WentTooFar(f"The chat template writes more than {MAX_CHARACTERS} characters.", param="messages")
            kept.append(piece)
        return "".join(kept)


class Program:
    """One compiled template text.

    Args: text: the template.
    Attributes:
        variables: names that the text takes from outside (messages, tools, enable_thinking ...).
        tree: its syntax tree, as written.
    Raises: RequestError: it does not parse.
    """

    def __init__(self, text: str) -> None:
        environment = ChatEnvironment()
        try:
            self.tree = environment.parse(text)
            self.variables = frozenset(meta.find_undeclared_variables(self.tree) - environment.globals.keys() - {NOW})
            self._template = environment.from_string(_counted(environment.parse(text)))
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f" (line {line})" if line else ""
            raise RequestError(
                f"The chat template is not valid Jinja: {error}{where}.", param="chat_template"
            ) from error

    def render(self, values: Mapping[str, Any], now: datetime | None) -> str:
        """Run it. Raises: RequestError: whatever went wrong inside, a refusal or a mistake, with its text."""
        budget = Budget()

        def strftime_now(layout: str) -> str:
            return (now or datetime.now()).strftime(layout)

        try:
            return budget.collect(self._template.generate({**values, TICK: budget.step, NOW: strftime_now}))
        except RequestError:
            raise
        except Exception as error:  # a template is a program: it may fail in any way that a program can
            reason = str(error) or type(error).__name__
            raise RequestError(f"The chat template failed on these messages: {reason}", param="messages") from error


def _counted(tree: nodes.Template) -> nodes.Template:
    """The tree with a step of the budget in every loop body and macro."""
    for node in tree.find_all((nodes.For, nodes.Macro)):
        call = nodes.Call(nodes.Name(TICK, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno).set_environment(tree.environment))
    return tree.set_lineno(1, override=False).set_environment(tree.environment)
