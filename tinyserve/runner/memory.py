"""How much memory there is for the KV cache, found by measuring and told in plain words.

    asked   = share of the device's memory (or, on the CPU, of the machine's) that the user allows
              on the CPU the KV cache gets a quarter of what is free at most: the machine has other work
    KV      = asked - weights - peak of the largest step - graphs, and never more than the requests could use
    blocks  = KV / bytes per block

Memory that other processes hold is not ours to count on: what is free now bounds all of it. If the context of the
model does not fit the blocks, the context is fitted, said, and shown in /v1/models.

Before: kv/groups.py (bytes of a block).  After: engine/assemble.py, which builds the cache from the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import evolve, frozen

from ..device import Device, Memory
from ..errors import ConfigError
from ..kv.groups import KVGroup

GIB = 1 << 30
CPU_KV_SHARE = 0.25  # of the free memory: a laptop also runs a browser
USUAL_SHARE = 0.92  # as of --gpu-memory-utilization
RESERVE_BYTES = 256 << 20  # left for the allocator's rounding and for libraries that allocate late


@frozen(kw_only=True)
class Needs:
    """Bytes that a run takes besides weights and cache, as measured: of the largest step, and of all graphs."""

    step: int = 0
    graphs: int = 0


@frozen(kw_only=True)
class CachePlan:
    """The decided sizes. All `_bytes` are of this device; `fitted` tells that the context was cut to the memory."""

    num_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int
    weight_bytes: int = 0
    needs: Needs = Needs()
    free_bytes: int = 0
    fitted: bool = False

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def report(self) -> str:
        """One line for the log: where the memory goes and what the cache holds."""
        tokens = (self.num_blocks - 1) * self.block_size
        left = max(self.free_bytes - self.cache_bytes - self.needs.step - self.needs.graphs, 0)
        sizes = (("largest step", self.needs.step), ("graphs", self.needs.graphs))
        measured = "".join(f"{name} {size / GIB:.2f} GiB, " for name, size in sizes if size)  # not on a CPU
        text = (
            f"memory: weights {self.weight_bytes / GIB:.2f} GiB, {measured}"
            f"KV cache {self.cache_bytes / GIB:.2f} GiB ({self.num_blocks} blocks of {self.block_size} tokens, "
            f"{tokens} in all), left {left / GIB:.2f} GiB; context {self.max_model_len} tokens"
        )
        return f"{text} (cut to what the cache holds)" if self.fitted else text


@frozen(kw_only=True)
class CacheRequest:
    """What the user and the model ask of the cache; see the flags of the same names.

    Args:
        block_bytes: of one block id, all layers of a group together (kv.groups.bytes_per_block).
        max_step_tokens: the token budget, which is also what a sliding-window row may hold beyond its window.
        fit: whether a context that does not fit is cut (else refused).
        cpu: the device is the machine itself.
    """

    groups: Sequence[KVGroup]
    block_size: int
    block_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_step_tokens: int
    utilization: float = USUAL_SHARE
    cache_bytes: int | None = None
    num_blocks: int | None = None
    fit: bool = True
    cpu: bool = False

    @property
    def cure(self) -> str:
        """Which options give the cache more."""
        quarter = self.cpu and self.utilization >= USUAL_SHARE  # which no share makes more
        return "--kv-cache-memory-bytes" if quarter else "--gpu-memory-utilization or --kv-cache-memory-bytes"


def blocks_per_sequence(request: CacheRequest, length: int) -> int:
    """Most blocks that one sequence of `length` tokens holds at any moment, over all groups."""
    total = 0
    for group in request.groups:
        kept = length if group.reach is None else min(length, group.reach + request.max_step_tokens)
        extra = 0 if group.reach is None or kept == length else 1  # a window may begin inside a block
        total += -(-kept // request.block_size) + extra
    return total


def longest_context(request: CacheRequest, num_blocks: int) -> int:
    """The largest context, in tokens, whose blocks one sequence can hold in a pool of `num_blocks`."""
    low, high = 0, request.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_per_sequence(request, middle) <= num_blocks - 1:
            low = middle
        else:
            high = middle - 1
    return low


def plan_cache(request: CacheRequest, available_bytes: int) -> CachePlan:
    """Decide the number of blocks, and the context, from the bytes that the cache may take.

    Raises: ConfigError: not even a context of one block fits, or `fit` is off and the context does not.
    """
    useful = request.max_num_seqs * blocks_per_sequence(request, request.max_model_len) + 1
    if request.num_blocks is not None:
        num_blocks = request.num_blocks
    else:
        num_blocks = min(available_bytes // request.block_bytes, useful if request.cache_bytes is None else 2**31 - 1)
    context = longest_context(request, num_blocks)
    if context < min(request.block_size, request.max_model_len):
        need = (blocks_per_sequence(request, request.block_size) + 1) * request.block_bytes
        raise ConfigError(
            f"The KV cache gets {max(num_blocks, 0)} blocks of {request.block_bytes / 2**20:.1f} MiB, too few for one "
            f"sequence of {request.block_size} tokens ({need / 2**20:.1f} MiB). Raise {request.cure}, or free memory "
            f"on the device."
        )
    if context < request.max_model_len and not request.fit:
        need = (blocks_per_sequence(request, request.max_model_len) + 1) * request.block_bytes
        raise ConfigError(
            f"--max-model-len {request.max_model_len} needs {need / GIB:.2f} GiB of KV cache, but there are "
            f"{num_blocks * request.block_bytes / GIB:.2f} GiB: at most {context} tokens fit. Lower it, or "
            f"raise {request.cure}."
        )
    return CachePlan(
        num_blocks=num_blocks,
        block_size=request.block_size,
        block_bytes=request.block_bytes,
        max_model_len=context,
        fitted=context < request.max_model_len,
    )


def step_bytes(device: Device, largest_step: Callable[[], None]) -> int:
    """Most bytes that `largest_step` held at once, measured; it leaves none of them taken."""
    device.reset_peak()
    before = device.allocated_bytes()
    largest_step()
    device.synchronize()
    peak = device.peak_bytes() - before
    device.release_unused()
    return peak


def room(request: CacheRequest, memory: Memory, held: int, to_come: int) -> int:
    """Bytes that the cache may take, unless its blocks are counted; below 0 if there is not even room for the rest.

    Args: held: bytes of weights that are loaded.   to_come: of what is not taken yet, and must stay free.
    """
    if request.cache_bytes is not None:
        return request.cache_bytes
    share, free = int(memory.total_bytes * request.utilization), memory.free_bytes - to_come
    if request.cpu:
        return min(int(free * CPU_KV_SHARE), share - held - to_come)
    return free - (memory.total_bytes - share) - RESERVE_BYTES


def size_cache(request: CacheRequest, device: Device, weight_bytes: int, needs: Needs) -> CachePlan:
    """Give the rest of the allowed memory to the cache.

    Args:
        weight_bytes: what the loaded model holds.
        needs: what is not taken yet, and must stay free.
    Raises: ConfigError: more blocks are asked for than the device could ever hold.
    """
    memory = device.memory()
    plan = plan_cache(request, room(request, memory, weight_bytes, needs.step + needs.graphs))
    if plan.cache_bytes > memory.total_bytes:
        raise ConfigError(
            f"The KV cache would take {plan.cache_bytes / GIB:.1f} GiB, but the device has "
            f"{memory.total_bytes / GIB:.1f} GiB. Lower --kv-cache-memory-bytes or --num-gpu-blocks-override."
        )
    return evolve(plan, weight_bytes=weight_bytes, needs=needs, free_bytes=memory.free_bytes)
