"""Running a step's kernels: one by one, or replayed as a device graph.

`Graphs` is the seam: before a step the runner asks which shape to run it in (`fit`), then hands over the computation
(`run`). `Eager` runs every step in its own shape, kernel by kernel: right for the CPU and for large steps. `Recorded`
holds graphs of some shapes, each for all steps that fit in:

    decodes     1 2 4 8 16 24 32 48 ...           every sequence has one token; the next larger graph takes the step
    mixed       (0 | 16 | 64 ... decodes) + (32 .. 512 tokens of at most 8 prompts)
                of a small model also + (1024 | 2048 tokens of at most 32 prompts)
    adapted     all of these again, where there may be adapters, for steps in which some row wears one

A graph costs 5 to 35 us of host time where its kernels, launched one by one, cost 12 to 29 ms (28 to 36 layers,
measured on an H200), so all steps that take the device less than that are worth one. Graphs are recorded large to small
in one pool of memory: the small ones fit where the large ones have worked. A few are recorded at the start, the rest
while nothing is asked; until then the next larger one serves.

Before: runner/batch.py.  After: runner/runner.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from attrs import evolve, field, frozen

from ..device import Device, borrowed
from .batch import Shape, Views

_log = logging.getLogger(__name__)
MIXED_TOKENS = 512  # prompt tokens of the largest mixed graph of any model
MIXED_PROMPTS = 8  # sequences in it besides the decodes
# A device does 2048 tokens of a model with so many bytes sooner than a host launches the kernels one by one, 20 ms.
SMALL_BYTES = 4 << 30
CROWD_TOKENS = (1024, 2048)  # prompt tokens of the larger mixed graphs of such a model, for crowds that come at once
CROWD_PROMPTS = 32  # sequences in them besides the decodes
FITS = 4096  # steps whose fitting shape is remembered


@frozen(eq=False)
class Computed:
    """What the computation of a step leaves.

    Args: hidden: [T, H] or [S, H] after the final norm.   logits: [S, V], None if not asked.
        ended: tokens have been kept.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None
    ended: bool


class Graphs(Protocol):
    """Runs the computation of steps."""

    def fit(self, shape: Shape) -> Shape:
        """The shape in which to run a step of this one: its own, or that of a graph."""
        ...

    def holds(self, shape: Shape) -> bool:
        """Whether there is a graph for a step of this shape."""
        ...

    def run(self, views: Views, compute: Callable[[], Computed]) -> Computed:
        """Return compute(), or the result of a graph that does the same."""
        ...

    def replay(self, shape: Shape) -> Computed:
        """Replay the graph of this shape, which must be there."""
        ...

    def next(self, *, early: bool = False) -> Shape | None:
        """The shape to record next, None if there is none left; early: of those that a start waits for."""
        ...

    def record(
        self, shape: Shape, compute: Callable[[], Computed], choose: Callable[[Computed], None] | None = None
    ) -> None:
        """Make a graph of compute(), which works on this shape's buffers, and another one of choose(its result)."""
        ...

    def chooses(self, shape: Shape) -> bool:
        """Whether there is a graph of `choose` for this shape."""
        ...

    def choose(self, shape: Shape) -> None:
        """Replay it: nothing has been replayed since this shape's other graph."""
        ...

    def no_choices(self) -> bool:
        """Forget all graphs of `choose`, and make no more; returns whether there were any."""
        ...

    def shapes(self) -> list[Shape]:
        """All that are or will be recorded, in that order."""
        ...

    def reset(self) -> int:
        """Forget all graphs; returns how many will be recorded."""
        ...

    def give_up(self) -> None:
        """Keep what there is, and record no more."""
        ...

    def close(self) -> None:
        """Free graphs and their memory."""
        ...


class Eager:
    """Launches every kernel of every step. Holds nothing."""

    def fit(self, shape: Shape) -> Shape:
        """Return the step's own shape."""
        return shape

    def holds(self, shape: Shape) -> bool:
        """There is none."""
        return False

    def run(self, views: Views, compute: Callable[[], Computed]) -> Computed:
        """Return compute()."""
        return compute()

    def replay(self, shape: Shape) -> Computed:
        """There is none to replay."""
        raise KeyError(shape)

    def next(self, *, early: bool = False) -> Shape | None:
        """There is nothing to record."""
        return None

    def record(
        self, shape: Shape, compute: Callable[[], Computed], choose: Callable[[Computed], None] | None = None
    ) -> None:
        """Nothing: `next` names no shape to record."""

    def chooses(self, shape: Shape) -> bool:
        """There is none."""
        return False

    def choose(self, shape: Shape) -> None:
        """Nothing: none is recorded."""

    def no_choices(self) -> bool:
        """Nothing is recorded."""
        return False

    def shapes(self) -> list[Shape]:
        """Nothing is recorded."""
        return []

    def reset(self) -> int:
        """Nothing is recorded."""
        return 0

    def give_up(self) -> None:
        """Nothing is recorded."""

    def close(self) -> None:
        """Nothing to free."""


def decode_sizes(most: int) -> list[int]:
    """Numbers of sequences that get a decode graph, ascending, up to `most`: steps of an eighth to a quarter."""
    sizes = [
        1,
        2,
        4,
        8,
        16,
        24,
        *range(32, 128, 16),
        *range(128, 257, 32),
        *range(320, 513, 64),
        *range(640, 2**16, 128),
    ]
    return [size for size in sizes if size < most] + [most]


def first_sizes(sizes: Iterable[int]) -> list[int]:
    """Those of them that are recorded before anything is served: powers of two up to 256."""
    return [size for size in sizes if size <= 256 and size.bit_count() == 1]


@frozen(kw_only=True)
class Wanted:
    """Which shapes get graphs.

    Args:
        decodes: numbers of sequences of decode steps, ascending.
        mixed: (decodes, prompt tokens) of mixed steps; those with up to MIXED_TOKENS come first, ascending.
        adapted: whether there are adapters; all shapes are wanted without and with them then.
    """

    decodes: Sequence[int]
    mixed: Sequence[tuple[int, int]] = field(factory=tuple)
    adapted: bool = False

    @classmethod
    def usual(
        cls,
        max_seqs: int,
        max_tokens: int,
        decodes: Sequence[int] | None = None,
        *,
        adapted: bool = False,
        small: bool = False,
    ) -> Wanted:
        """For a runner of so many sequences and tokens.

        Args: decodes: other sizes than the usual ones.   small: whether the model has at most SMALL_BYTES.
        """
        sizes = sorted({size for size in decodes if size <= max_seqs}) if decodes else decode_sizes(max_seqs)
        prompts = [size for size in (32, 64, 128, 256, MIXED_TOKENS) if size <= max_tokens]
        beside = [0, *(size for size in (16, 64, 256) if size in sizes)]
        mixed = [(some, size) for some in beside for size in prompts]
        if small:
            beside += [size for size in sizes[-1:] if size > 256]
            mixed += [(some, size) for some in beside for size in CROWD_TOKENS if size <= max_tokens]
        return cls(decodes=sizes, mixed=mixed, adapted=adapted)

    def shapes(self) -> list[Shape]:
        """All of them, in the order in which they are recorded: the first ones, large to small, then the others."""
        first = set(first_sizes(self.decodes))
        decodes = [Shape(size, size, size) for size in reversed(self.decodes)]
        mixed = [mixed_shape(*pair) for pair in sorted(self.mixed, key=lambda pair: (-pair[1], -pair[0]))]
        early = [mixed_shape(*pair) for pair in self._early_mixed()] + [s for s in decodes if s.seqs in first]
        late = [shape for shape in (*mixed, *decodes) if shape not in early]
        if self.adapted:
            early, late = (shapes + [evolve(shape, adapted=True) for shape in shapes] for shapes in (early, late))
        return early + late

    def early(self) -> int:
        """How many of `shapes` are recorded before anything is served."""
        return (len(self._early_mixed()) + len(first_sizes(self.decodes))) * (1 + self.adapted)

    def _early_mixed(self) -> list[tuple[int, int]]:
        """Prompts alone, the longest first."""
        return sorted(((some, size) for some, size in self.mixed if not some and size <= MIXED_TOKENS), reverse=True)


def mixed_shape(decodes: int, tokens: int) -> Shape:
    """So many decodes beside so many prompt tokens."""
    prompts = MIXED_PROMPTS if tokens <= MIXED_TOKENS else CROWD_PROMPTS
    return Shape(decodes + tokens, decodes + prompts, decodes)


class Recorded:
    """Graphs of some shapes on one device.

    Args:
        device: that can record.   wanted: which shapes.
    """

    def __init__(self, device: Device, wanted: Wanted) -> None:
        self._device = device
        self._wanted = wanted
        self._missing = wanted.shapes()
        self._early = len(self._missing) - wanted.early()  # left when a start may end
        self._pool = device.graph_pool()
        self._graphs: dict[Shape, tuple[Any, Computed]] = {}
        self._choices: dict[Shape, Any] = {}
        self._gave_up = self._chooseless = False
        self._fits: dict[Shape, Shape] = {}  # what `fit` found since the last recording

    def fit(self, shape: Shape) -> Shape:
        """The smallest recorded shape that holds the step, else its own."""
        found = self._fits.get(shape)
        if found is None:
            if len(self._fits) >= FITS:
                self._fits.clear()
            found = self._fits[shape] = self._search(shape)
        return found

    def holds(self, shape: Shape) -> bool:
        """Whether one that was recorded holds the step."""
        return self.fit(shape) in self._graphs

    def _search(self, shape: Shape) -> Shape:
        if shape.is_decode:
            sizes = [size for size in self._wanted.decodes if size >= shape.seqs]
            options = [Shape(size, size, size, shape.adapted) for size in sizes]
        else:
            prompts, tokens = shape.seqs - shape.decodes, shape.tokens - shape.decodes
            every = (evolve(mixed_shape(*pair), adapted=shape.adapted) for pair in self._wanted.mixed)
            options = [
                one
                for one in every
                if one.decodes >= shape.decodes
                and one.tokens - one.decodes >= tokens
                and one.seqs - one.decodes >= prompts
            ]
        return next((option for option in options if option in self._graphs), shape)

    def run(self, views: Views, compute: Callable[[], Computed]) -> Computed:
        """Replay the graph of this shape; without one, compute."""
        return self.replay(views.shape) if views.shape in self._graphs else compute()

    def replay(self, shape: Shape) -> Computed:
        """Replay it; KeyError if there is none."""
        graph, computed = self._graphs[shape]
        graph.replay()
        return computed

    def shapes(self) -> list[Shape]:
        """All wanted ones."""
        return self._wanted.shapes()

    def reset(self) -> int:
        """Free the graphs, and their memory; all shapes are to be recorded again, unless that was given up."""
        gave_up = self._gave_up
        self.close()
        self._missing = [] if gave_up else self._wanted.shapes()
        self._pool = self._device.graph_pool()
        return len(self._missing)

    def give_up(self) -> None:
        """Record no more."""
        self._gave_up = True
        self._missing.clear()

    def next(self, *, early: bool = False) -> Shape | None:
        """The next shape of the list."""
        return self._missing[0] if len(self._missing) > (self._early if early else 0) else None

    def record(
        self, shape: Shape, compute: Callable[[], Computed], choose: Callable[[Computed], None] | None = None
    ) -> None:
        """Record compute() and choose(), which work on this shape's buffers. They run once before, to load their needs.

        What compute() leaves is held while choose() is recorded, so that it gets other memory.
        """
        if shape in self._missing:
            self._missing.remove(shape)
        first = compute()
        if choose is not None and not self._chooseless:
            with self._or_no_choices():
                choose(first)
        del first
        graph, computed = self._device.record(compute, self._pool)
        if choose is not None and not self._chooseless:
            with self._or_no_choices():
                self._choices[shape], _ = self._device.record(lambda: choose(computed), self._pool)
        logits = None if computed.logits is None else borrowed(computed.logits)
        self._fits.clear()
        self._graphs[shape] = graph, Computed(borrowed(computed.hidden), logits, computed.ended)

    @contextlib.contextmanager
    def _or_no_choices(self) -> Iterator[None]:
        """Where a choice cannot be recorded, do without all of them."""
        try:
            yield
        except RuntimeError as error:
            _log.warning("choices held to grammars are launched one by one, which is slower: %s", error)
            self.no_choices()

    def chooses(self, shape: Shape) -> bool:
        """Whether its choice was recorded."""
        return shape in self._choices

    def choose(self, shape: Shape) -> None:
        """Replay its choice."""
        self._choices[shape].replay()

    def no_choices(self) -> bool:
        """Do without them."""
        self._chooseless, any_there = True, bool(self._choices)
        self._choices.clear()
        return any_there

    def close(self) -> None:
        """Free the graphs; their pool goes with the last one."""
        self._choices.clear()
        self._graphs.clear()
        self._fits.clear()
        self._missing.clear()
