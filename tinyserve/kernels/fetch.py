"""A step's integers, read by the device itself from the host's memory.

    out[i] = mail[turn, i]     turn is a number on the device, so that a recorded launch reads another slot each time

A copy engine between two graphs costs their stream about 10 us each way, most of it waiting; a node of the graph that
reads the same few KB over the bus costs 2 us. The host writes slot after slot of the ring; `keep_tokens.py`, which ends
a step, moves `turn` on.

Before: the host, through runner/batch.py.  After: `step_inputs.py`.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, use_kernel

BLOCK = 128  # one number a thread: then all reads cross the bus at once, where eight in a row took 8 us


def fetch_reference(mail: torch.Tensor, turn: torch.Tensor, out: torch.Tensor) -> None:
    """The specification of `fetch`, with its arguments."""
    out.copy_(mail[int(turn), : len(out)])


@triton.jit(do_not_specialize=["count"])
def _fetch_kernel(
    mail_ptr,  # [R, width]; memory of the host
    turn_ptr,  # [1]
    out_ptr,  # [count]
    count,
    width,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = mail_ptr + tl.load(turn_ptr).to(tl.int64) * width
    tl.store(out_ptr + index, tl.load(slot + index, mask=index < count, volatile=True), mask=index < count)


def fetch(mail: torch.Tensor, turn: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the front of one slot.

    Args:
        mail: [R, width] int32, contiguous; on the CPU, or pinned memory of the host.
        turn: [1] int32, which slot.
        out: [count] int32, contiguous, count at most width; written.

    Raises:
        ValueError: shapes that do not fit.
    """
    if mail.dim() != 2 or len(out) > mail.shape[1] or turn.shape != (1,):
        raise ValueError(f"fetch: {len(out)} numbers from mail {list(mail.shape)}, turn {list(turn.shape)}")
    if not use_kernel(out):
        return fetch_reference(mail, turn, out)
    if len(out):
        _fetch_kernel[(cdiv(len(out), BLOCK),)](mail, turn, out, len(out), mail.stride(0), BLOCK=BLOCK, num_warps=4)
    return None
