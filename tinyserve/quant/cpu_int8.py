"""Eight-bit weights and inputs on the CPU, for a few rows of what is not in 4-bit blocks: the head, Q8_0, Q4_K, bf16.

    weight   W[n, k] ~ code[n, k] * step[n]          code in -127 .. 127, one step per output row
    input    x[t, k] = (high + low / 254) * step[t]  high = round(x / step), low = round of what is left, both int8

Both limbs of x go through one integer product as 2T rows, so x keeps 15 bits and only the weights are rounded: 0.4 %
of perplexity on SmolLM2. For a few rows the second limb is free, because such a product waits for the weights; for many
it takes half of the time. One limb costs 3.7 %, and 0.6 % if attention's inputs, whose columns differ most in size
(arXiv:2211.10438), keep two; but that is enough to change what the default model says of the capital of France. A
row's result depends on that row alone, whatever else is in the batch.

Before: quant/format.py.  After: quant/cpu.py chooses it, layers/linear.py calls it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .format import Fused, Stored

LIMB = 127.0  # the codes of one limb are -LIMB .. LIMB
SECOND = 2 * LIMB  # the first limb leaves at most half a step, which the second divides by LIMB
SMALLEST = torch.finfo(torch.float32).tiny  # a step that is not 0, for rows of zeros


def pack(codes: Tensor, steps: Tensor) -> torch.ScriptObject:
    """Return the weight in the layout of torch's integer product. Args: codes [N, K] int8; steps [N] fp32."""
    zeros = torch.zeros(len(steps), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch may drop these tensors one day; `available` will notice
        weight = torch._make_per_channel_quantized_tensor(codes, steps.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(weight, None)


def product(codes: Tensor, packed: torch.ScriptObject) -> Tensor:
    """Return round(codes) [T, K], fp32 between -127 and 127, times a packed weight: [T, N] fp32."""
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(codes, 1.0, 128, packed)


def available() -> bool:
    """Whether this torch on this CPU multiplies eight-bit integers exactly.

    Without VNNI instructions, sums of two products saturate at 16 bits; the largest numbers bring it to light.
    """
    rows, columns = 2, 64
    try:
        packed = pack(torch.full((rows, columns), 127, dtype=torch.int8), torch.ones(rows))
        return bool((product(torch.full((3, columns), LIMB), packed) == 127 * 127 * columns).all())
    except (RuntimeError, AttributeError):
        return False


class Int8:
    """Int8 weights, one step per output row."""

    names = ("weight",)

    def create(self, layer: Fused) -> None:
        """Register `codes` int8 [N, K] and `steps` fp32 [N]."""
        layer.register_buffer("codes", torch.empty(layer.outputs, layer.inputs, dtype=torch.int8))
        layer.register_buffer("steps", torch.empty(layer.outputs, dtype=torch.float32))

    def load(self, layer: Fused, name: str, part: int, stored: Stored) -> None:
        """Round the rows of one tensor."""
        rows = layer.rows(part)
        weight = stored.read(torch.float32)
        steps = weight.abs().amax(dim=1).div_(LIMB).clamp_(min=SMALLEST)
        layer.steps[rows] = steps
        layer.codes[rows] = (weight / steps[:, None]).round_().to(torch.int8)

    def finish(self, layer: Fused) -> None:
        """Pack the codes; the packed copy, an object of torch's, replaces them."""
        layer.packed = pack(layer.codes, layer.steps)
        layer.packed_bytes = layer.codes.nbytes
        layer.codes = None

    def matmul(self, x: Tensor, layer: Fused) -> Tensor:
        """Return x [T, inputs] @ weight.T + bias: [T, outputs] in x.dtype."""
        number = x if x.dtype == torch.float32 else x.float()
        y = compiled()(number, layer.packed)
        y = y if x.dtype == torch.float32 else y.to(x.dtype)
        return y if layer.bias is None else y.add_(layer.bias)


def two_limbs(
    x: Tensor,
    packed: torch.classes.quantized.LinearPackedParamsBase,
    limb: float = LIMB,
    second: float = SECOND,
    smallest: float = SMALLEST,
) -> Tensor:
    """Return x [T, K] fp32 times a packed weight, with 15 bits of x: [T, N] fp32. A row with NaN gives a row of NaN.

    The others are constants of this file, which TorchScript takes as defaults only.
    """
    step = x.abs().amax(dim=1, keepdim=True).mul_(1 / limb).clamp_(min=smallest)
    codes = x / step
    both = torch.cat((codes, (codes - codes.round()).mul_(second)))
    high, low = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(both, 1.0, 128, packed).chunk(2)
    return torch.add(high, low, alpha=1 / second).mul_(step)


@functools.cache
def compiled() -> Callable[[Tensor, torch.ScriptObject], Tensor]:
    """`two_limbs` by TorchScript, for the reason that layers/few.py has: 0.2 ms of a step that computes one head."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it will not be developed further
        return torch.jit.script(two_limbs)


def packed_bytes(model: nn.Module) -> int:
    """Return the bytes of weights that are packed objects, which `model.parameters()` and `buffers()` do not list."""
    return sum(getattr(module, "packed_bytes", 0) for module in model.modules())
