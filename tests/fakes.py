"""Stand-ins for the expensive parts, strict enough that what works with them works with the real ones.

FakeRunner has the face of runner.Runner and simulates the device in integers: rows with their tokens and block tables,
and in every cache block, for each position, *which prefix* was written there, and by which step. The next token is a
hash of the prefix as read through the block table, so a wrong, stale, missing or foreign block gives another token than
`next_token`, the answer without any cache.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import ClassVar

from attrs import define, field

from tinyserve.kv.groups import KVGroup
from tinyserve.step import SeqSlice, SliceOutput, StepInput, StepOutput, TableEdit, TokenLogprobs

EMPTY = 0x9E3779B9


def mix(prefix: int, token: int) -> int:
    """The value of a prefix that continues with `token`."""
    return (prefix * 6364136223846793005 + token * 1442695040888963407 + 0x1234567) & 0xFFFFFFFFFFFF


def prefix_values(tokens: Sequence[int]) -> list[int]:
    """values[p]: of tokens[: p + 1]."""
    values, value = [], EMPTY
    for token in tokens:
        value = mix(value, token)
        values.append(value)
    return values


def hashed_token(prefix: int, vocab: int) -> int:
    return (prefix >> 17) % vocab


@define(eq=False)
class FakeRow:
    """One open row of the fake device."""

    prompt_len: int
    tokens: list[int]
    tables: list[list[int]]
    next: int = 0  # first position that no launched step has computed
    landed: int = 0  # first position that no landed step has computed
    hit: int = -1  # positions below it came from the prefix cache; -1 before the first slice


@define(eq=False)
class FakeFlight:
    """A launched step, awaitable like runner.Flight; it lands when its output is first looked at."""

    waited: ClassVar[bool] = True  # for what the loop is not hurried
    watched: ClassVar[float] = 0.0

    step_id: int
    _output: StepOutput
    _land: Callable[[], None]

    @property
    def output(self) -> StepOutput:
        self._land()
        return self._output

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        return self.output


def first_visible(group: KVGroup, position: int) -> int:
    """The first position that a query at `position` sees, in the words of the kinds of groups."""
    if group.window is not None:
        return max(0, position - group.window + 1)
    return position - position % group.chunk if group.chunk is not None else 0


@define(eq=False)
class FakeRunner:
    """A device without a model; every step is checked before it is "computed".

    Args:
        groups, num_blocks, block_size: as given to the KVCache.
        slots: number of rows.
        vocab: tokens are 0 .. vocab-1.
        choose: all tokens of the row so far (prompt too), and the hashed token -> the token to give; for scripted ends.
        bad: all tokens of the row so far -> whether its logits are NaN.
        max_tokens, max_seqs: what a step may hold.
    """

    groups: Sequence[KVGroup]
    num_blocks: int
    block_size: int
    slots: int = 256
    vocab: int = 50
    choose: Callable[[tuple[int, ...], int], int] = lambda tokens, hashed: hashed
    bad: Callable[[tuple[int, ...]], bool] = lambda tokens: False
    max_tokens: int = 2**31
    max_seqs: int = 2**31
    rows: dict[int, FakeRow] = field(factory=dict)
    memory: list[dict] = field(init=False)
    steps: list[StepInput] = field(factory=list)
    landed: int = 0  # id of the last landed step

    def __attrs_post_init__(self):
        self.memory = [{} for _ in range(self.num_blocks)]  # per block: offset -> (group, prefix value, step)

    def next_token(self, tokens: Sequence[int]) -> int:
        """The right next token of a prompt or partial answer, by definition."""
        return self.choose(tuple(tokens), hashed_token(prefix_values(tokens)[-1], self.vocab))

    def answer(self, prompt: Sequence[int], count: int, ends: Sequence[int] = ()) -> list[int]:
        """The right answer of at most `count` tokens, up to and with the first of `ends`."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            tokens.append(self.next_token(tokens))
            if tokens[-1] in ends:
                break
        return tokens[len(prompt) :]

    def improve(self) -> bool:
        """There is nothing to prepare while idle."""
        return False

    def launch(self, step: StepInput) -> FakeFlight:
        """Check and compute one step; the steps of a device run in launch order, so it may happen at once."""
        assert StepInput.unpack(step.pack()) == step
        assert not self.steps or step.step_id > self.steps[-1].step_id
        self.steps.append(step)
        self._apply_differences(step)
        assert step.slices, "an empty step was launched"
        assert step.num_tokens <= self.max_tokens and len(step.slices) <= self.max_seqs
        assert len({piece.slot for piece in step.slices}) == len(step.slices), "a row has two slices"
        for piece in step.slices:
            self._write(piece)
        output = StepOutput(step.step_id, tuple(self._read(piece) for piece in step.slices))
        ends = [(self.rows[piece.slot], self.rows[piece.slot].next) for piece in step.slices]
        return FakeFlight(step.step_id, output, lambda: self._land(step.step_id, ends))

    def close(self) -> None:
        self.rows.clear()

    def _land(self, step_id: int, ends: list[tuple[FakeRow, int]]) -> None:
        assert step_id >= self.landed, f"step {step_id} lands after step {self.landed}"
        self.landed = step_id
        for row, end in ends:
            row.landed = max(row.landed, end)

    def _apply_differences(self, step: StepInput) -> None:
        for slot in step.closed:
            assert slot in self.rows, f"row {slot} was closed but is not open"
            del self.rows[slot]
        for opening in step.opened:
            assert 0 <= opening.slot < self.slots and opening.slot not in self.rows, f"row {opening.slot} is in use"
            assert 1 <= opening.prompt_len <= len(opening.tokens)
            self.rows[opening.slot] = FakeRow(opening.prompt_len, list(opening.tokens), [[] for _ in self.groups])
        used = {piece.slot: piece for piece in step.slices}
        assert {opening.slot for opening in step.opened} <= set(used)
        seen = set()
        for edit in step.edits:
            assert edit.slot in used, f"the table of row {edit.slot}, which does nothing, changes"
            table = self.rows[edit.slot].tables[edit.group]
            assert edit.start <= len(table) and edit.blocks and all(0 <= b < self.num_blocks for b in edit.blocks)
            places = {(edit.slot, edit.group, edit.start + i) for i in range(len(edit.blocks))}
            assert not places & seen, "two edits of one place: their order on the device is not defined"
            seen |= places
            self._check_nulls(
                edit, used[edit.slot].start if self.rows[edit.slot].hit < 0 else self.rows[edit.slot].landed
            )
            table[edit.start : edit.start + len(edit.blocks)] = edit.blocks

    def _check_nulls(self, edit: TableEdit, landed: int) -> None:
        """Only what a window has passed, counted from landed positions, may be taken from a table."""
        group = self.groups[edit.group]
        for index, block in enumerate(edit.blocks, edit.start):
            if block == 0:
                assert group.window or group.chunk, f"{edit} takes a block from a full group"
                last = (index + 1) * self.block_size - 1
                assert last < first_visible(group, landed), f"{edit}: position {last} is still seen from {landed}"

    def _live(self, row: FakeRow, group: KVGroup) -> list[int]:
        """Blocks that this row may still read or write."""
        first = first_visible(group, row.next) // self.block_size
        return [block for block in row.tables[group.index][first:] if block]

    def _write(self, piece: SeqSlice) -> None:
        """Put the prefix value of each computed position where the tables say."""
        row = self.rows[piece.slot]
        if row.hit < 0:
            row.hit = row.next = row.landed = piece.start  # positions of a prefix hit are not computed
        assert piece.count >= 1 and piece.start <= row.next, f"{piece} leaves a gap after position {row.next}"
        known = piece.end - len(piece.drafts)
        assert known <= len(row.tokens), f"{piece} needs tokens that nobody has sampled ({len(row.tokens)} exist)"
        assert piece.samples == (known == len(row.tokens)), f"{piece} samples before its last token, or does not after"
        row.next = max(row.next, piece.start)
        values = prefix_values([*row.tokens[:known], *piece.drafts])
        others = {
            b for slot, r in self.rows.items() if slot != piece.slot for g in self.groups for b in self._live(r, g)
        }
        for group in self.groups:
            table = row.tables[group.index]
            for position in range(piece.start, piece.end):
                assert position // self.block_size < len(table), f"{piece}: no block for {position} in {group}"
                block = table[position // self.block_size]
                assert block != 0, f"{piece} writes to the null block"
                assert block not in others, f"{piece} writes to block {block}, which another row uses"
                self.memory[block][position % self.block_size] = (group.index, values[position], len(self.steps))

    def _read(self, piece: SeqSlice) -> SliceOutput:
        """Check all that the slice's queries see, then choose the next tokens from what stands in the cache."""
        row = self.rows[piece.slot]
        tokens = [*row.tokens[: piece.end - len(piece.drafts)], *piece.drafts]
        values = prefix_values(tokens)
        for group in self.groups:
            for position in range(first_visible(group, piece.start), piece.end):
                found = self._at(row, group, position)
                assert found and found[:2] == (group.index, values[position]), f"{piece} reads {found} at {position}"
                written = self.steps[found[2] - 1].step_id
                assert position >= row.hit or written <= self.landed, f"{piece} hits what step {written} has not landed"
        row.next = piece.end - len(piece.drafts)
        prompt_logprobs = tuple(
            TokenLogprobs(row.tokens[p + 1], -float(p + 1), 1)
            for p in range(piece.start, min(piece.end, row.prompt_len - 1))
        )
        if not piece.samples:
            return SliceOutput(piece.slot, prompt_logprobs=prompt_logprobs)
        if self.bad(tuple(row.tokens)):
            row.tokens.append(0)  # a real sampler writes something, too
            return SliceOutput(piece.slot, (0,), bad=True)
        accepted = self._sample(row, piece)
        logprobs = tuple(TokenLogprobs(token, -1.0, 1) for token in accepted)
        return SliceOutput(piece.slot, accepted, logprobs, prompt_logprobs)

    def _at(self, row: FakeRow, group: KVGroup, position: int) -> tuple[int, int, int] | None:
        """(group, prefix value, number of the step) that stands in the cache for `position` of a row."""
        block = row.tables[group.index][position // self.block_size]
        return self.memory[block].get(position % self.block_size)

    def _sample(self, row: FakeRow, piece: SeqSlice) -> tuple[int, ...]:
        """The token after the last known one, and after each draft that proves right."""
        last = piece.end - len(piece.drafts) - 1
        accepted = []
        for draft in (*piece.drafts, None):
            values = [self._at(row, group, last + len(accepted))[1] for group in self.groups]
            token = self.choose(tuple(row.tokens), hashed_token(values[0], self.vocab))
            accepted.append(token)
            row.tokens.append(token)
            if token != draft:
                break
        row.next = piece.end - len(piece.drafts) + len(accepted) - 1
        return tuple(accepted)
