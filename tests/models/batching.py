"""A model, its cache and its batches, built the slow and obvious way: the oracle of runner/batch.py, and a way to run
a model in a test without runner, scheduler or engine.

    paged = Paged(model)
    a, b = paged.add(prompt), paged.add(other)
    paged.step({a: 5, b: 3})        # the next 5 tokens of a and 3 of b, in one forward; logits of each: [5, V], [3, V]
"""

import random

import torch
from attrs import define, field, frozen
from torch import Tensor

from tests import oracles
from tests.kernels.harness import interpreting
from tinyserve.checkpoint.source import resolve
from tinyserve.kernels.coded import CodedCache
from tinyserve.kv.groups import group_layers
from tinyserve.kv.storage import allocate
from tinyserve.models.decoder import Decoder
from tinyserve.models.registry import load_model


@frozen(kw_only=True, eq=False)
class Batch:
    """The fields that layers read (layers/attention.py::Batch)."""

    tokens: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: tuple[Tensor, ...]
    slots_to_write: tuple[Tensor, ...]
    num_tokens: int
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    max_cached_len: int
    memo: dict = field(factory=dict)


@define
class Row:
    """One sequence: its tokens, how many of them are in the cache, and its blocks in each group."""

    tokens: list[int]
    computed: int
    tables: list[list[int]]


def fill_garbage(tensor: Tensor | CodedCache) -> None:
    """Write NaN everywhere; into codes those of it, and NaN for scales."""
    if isinstance(tensor, CodedCache):
        tensor.codes.fill_(0x7F)
        if tensor.each:
            tensor.scales.fill_(float("nan"))
    else:
        tensor.fill_(float("nan"))


class Paged:
    """Runs a model on a paged cache whose blocks are scattered.

    Args:
        model: loaded; its cache is bound here.
        block_size, num_blocks: of the cache.
        garbage: fill the cache with NaN first, so that reading a slot that nobody wrote shows.
        cache_dtype: of the cache; the model's own if None.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        block_size: int = 4,
        num_blocks: int = 128,
        garbage: bool = True,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.block_size = model, block_size
        self.weight = model.embed.weight
        layers = model.kv_layers()
        self.groups = group_layers(layers)
        dtype = cache_dtype or self.weight.dtype
        storage = allocate(self.groups, layers, num_blocks, block_size, dtype, self.weight.device)
        for pair in storage if garbage else ():
            for tensor in pair:
                fill_garbage(tensor)
        model.bind(self.groups, storage)
        self.free = list(range(1, num_blocks))
        random.Random(0).shuffle(self.free)
        self.rows: list[Row] = []

    def add(self, tokens: list[int]) -> int:
        """Open a row; nothing is computed yet."""
        self.rows.append(Row(list(tokens), 0, [[] for _ in self.groups]))
        return len(self.rows) - 1

    def step(self, counts: dict[int, int]) -> dict[int, Tensor]:
        """Compute the next tokens of some rows in one forward. Returns: logits after each of them, by row."""
        order = sorted(counts, key=lambda number: counts[number] > 1)
        batch = self.batch(order, counts)
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch))
        out = {}
        for index, number in enumerate(order):
            out[number] = logits[batch.query_start[index] : batch.query_start[index + 1]]
            self.rows[number].computed += counts[number]
        return out

    def batch(self, order: list[int], counts: dict[int, int]) -> Batch:
        """The batch of the next tokens of the rows, in this order."""
        tokens, positions, starts, lengths = [], [], [0], []
        writes = [[] for _ in self.groups]
        for number in order:
            row, count = self.rows[number], counts[number]
            for position in range(row.computed, row.computed + count):
                tokens.append(row.tokens[position])
                positions.append(position)
                for group in range(len(self.groups)):
                    writes[group].append(self.slot(row, group, position))
            starts.append(starts[-1] + count)
            lengths.append(row.computed + count)
        return Batch(
            tokens=self.ints(tokens),
            positions=self.ints(positions),
            query_start=self.ints(starts),
            seq_lens=self.ints(lengths),
            block_tables=tuple(self.tables(order, group) for group in range(len(self.groups))),
            slots_to_write=tuple(self.ints(slots, torch.int64) for slots in writes),
            num_tokens=len(tokens),
            num_seqs=len(order),
            num_decodes=sum(counts[number] == 1 for number in order),
            max_query_len=max(counts[number] for number in order),
            max_seq_len=max(lengths),
            max_cached_len=max([self.rows[number].computed for number in order if counts[number] > 1], default=0),
        )

    def slot(self, row: Row, group: int, position: int) -> int:
        """Where a position is written in a group's tensors; takes a block from the pool when it is the first of one."""
        table = row.tables[group]
        if position // self.block_size == len(table):
            table.append(self.free.pop())
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def tables(self, order: list[int], group: int) -> Tensor:
        """[S, B], short tables padded with the null block."""
        tables = [self.rows[number].tables[group] for number in order]
        width = max(map(len, tables))
        return self.ints([table + [0] * (width - len(table)) for table in tables])

    def ints(self, values: list, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.weight.device)


def check_invariance(folder) -> None:
    """The row of one prompt, prefilled and decoded alone and beside two others: 0 bits apart, and near the oracle."""
    prompts, found = [oracles.prompt(4, seed=seed) for seed in range(3)], []
    with interpreting():
        for number in (1, 3):
            model = load_model(resolve(str(folder)), dtype="float32")
            model.make_invariant()
            paged = Paged(model, block_size=16)
            rows = [paged.add(tokens) for tokens in prompts[:number]]
            first = paged.step(dict.fromkeys(rows, 3))[rows[0]]
            found.append(torch.cat([first, paged.step(dict.fromkeys(rows, 1))[rows[0]]]))

    assert torch.equal(*found)
    torch.testing.assert_close(found[0], oracles.reference_logits(folder, prompts[0]), atol=1e-4, rtol=0)
