"""One uniform number per row from (seed, position): Philox-4x32-10, a random generator without state.

Philox scrambles a 128-bit counter with a 64-bit key by ten rounds of multiply and xor; neighbouring counters give
unrelated numbers. Key = the request's seed, counter = (position, 0, 0, 0), and the first of the four 32-bit words is
used. Nothing is kept between steps, so preemption, batch order and the other rows cannot move a request's random
stream. The reference does the same 32-bit arithmetic in int64, and the numbers are equal to the bit.

Only 24 bits become the uniform number, `(word >> 8) * 2**-24`: all of them are exact in float32, and 1.0 never occurs.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 4.3.

Before: `launch.py`.  After: `sample.py`, which calls `uniform_of` inside its kernel.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from .launch import cdiv, use_kernel

ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57  # multipliers
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85  # golden ratio and sqrt(3) - 1, added to the key after each round
LOW = 0xFFFFFFFF
BLOCK = 128


@cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The multipliers [2, 1], and what each of the ten rounds adds to the key [10, 2, 1]."""
    factors = torch.tensor([[ROUND_A], [ROUND_B]], device=device)
    steps = torch.tensor([[[KEY_A * i], [KEY_B * i]] for i in range(10)], device=device)
    return factors, steps


def philox_reference(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Ten rounds over counter words [4, L] with key words [2, L], both int64 below 2**32; gives words [4, L].

    A product of two words needs 64 unsigned bits: int64 wraps to the same bits, and masks undo the sign. Only what is
    multiplied next must be masked, so `odd` keeps the whole product until the end.
    """
    even, odd = counter[0::2], counter[1::2]
    factors, steps = _constants(counter.device)
    for round_key in (key + steps).unbind():
        product = (even * factors).flip(0)
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(round_key).bitwise_and_(LOW)
        odd = product
    return torch.stack([even[0], odd[0] & LOW, even[1], odd[1] & LOW])


def uniform_reference(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The specification of `uniform`, with its arguments."""
    seeds, positions = seeds.long(), positions.long()
    counter = seeds.new_zeros(4, *seeds.shape)
    counter[0] = positions & LOW
    word = philox_reference(counter, torch.stack([seeds & LOW, (seeds >> 32) & LOW]))[0]
    return (word >> 8).float() * 2**-24


@triton.jit
def uniform_of(seed, position):
    """The uniform number in [0, 1) of one row or of a block of rows. seed: int64; position: any integer type."""
    counter = position.to(tl.uint32)
    zero = counter ^ counter
    word, _, _, _ = tl.philox(seed, counter, zero, zero, zero)
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2**-24


@triton.jit
def _uniform_kernel(
    seeds_ptr,  # [L] int64
    positions_ptr,  # [L]
    out_ptr,  # [L] float32
    L,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < L
    seed = tl.load(seeds_ptr + row, mask=inside, other=0)
    position = tl.load(positions_ptr + row, mask=inside, other=0)
    tl.store(out_ptr + row, uniform_of(seed, position), mask=inside)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw one uniform number per row.

    Args:
        seeds: [L] int64, contiguous.
        positions: [L] int32 or int64, contiguous, of the token that the number will choose.

    Returns:
        [L] float32 in [0, 1), multiples of 2**-24.

    Raises:
        ValueError: the two differ in shape, or the seeds are not int64.
    """
    if seeds.shape != positions.shape or seeds.dtype != torch.int64:
        raise ValueError(f"uniform: seeds {list(seeds.shape)} {seeds.dtype}, positions {list(positions.shape)}")
    if not use_kernel(seeds):
        return uniform_reference(seeds, positions)
    out = torch.empty(seeds.shape, dtype=torch.float32, device=seeds.device)
    if seeds.numel():
        _uniform_kernel[(cdiv(seeds.numel(), BLOCK),)](seeds, positions, out, seeds.numel(), BLOCK=BLOCK)
    return out
