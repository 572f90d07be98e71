"""An answer as blocks that follow one another: a thought, a text, a call of a tool, another text.

OpenAI's responses and Anthropic's messages both stream an answer block by block: one opens, grows, closes, then the
next opens. `Blocks` turns what is read from an answer into these steps; the two protocols only differ in how they write
them down.

    Part(TEXT, "Hel") Part(TEXT, "lo") Part(CALL, name="f") Part(CALL, "{}")
      -> open text, more "Hel", more "lo", close text, open call f, more "{}", close call

What reads the parts out of a model's text is a `Reader`; `plain` takes all of it as text.

Before: request.py (Output).  After: responses_writer.py, anthropic_writer.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from attrs import define, field, frozen

from ..request import Output

TEXT, THOUGHT, CALL = "text", "thought", "call"


@frozen
class Part:
    """A piece of an answer.

    Args:
        kind: text, thought, or call: text is then a piece of the arguments' JSON.
        name: of the called tool; set on the first part of each call and on no other.
    """

    kind: str
    text: str = ""
    name: str | None = None


Reader = Callable[[Output], Iterable[Part]]


def plain(output: Output) -> Iterable[Part]:
    """Everything is text."""
    return (Part(TEXT, output.text),) if output.text else ()


@define
class Block:
    """One block so far. index: its place in the answer.   id: unguessable, for protocols that name blocks."""

    kind: str
    index: int
    name: str = ""
    id: str = field(factory=lambda: uuid.uuid4().hex)
    pieces: list[str] = field(factory=list)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)


@frozen
class Step:
    """What happens to a block. text: what is added to it."""

    what: Literal["open", "more", "close"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one answer, in order."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def add(self, parts: Iterable[Part]) -> Iterator[Step]:
        """The steps that some parts amount to."""
        for part in parts:
            if self._open is None or part.kind != self._open.kind or part.name is not None:
                yield from self.end()
                self._open = Block(part.kind, len(self.all), part.name or "")
                self.all.append(self._open)
                yield Step("open", self._open)
            if part.text:
                self._open.pieces.append(part.text)
                yield Step("more", self._open, part.text)

    def end(self) -> Iterator[Step]:
        """Close what is open."""
        if self._open is not None:
            block, self._open = self._open, None
            yield Step("close", block)
