"""Rounding that looks at data: the error of each column is made up for by the columns that come after it (GPTQ).

    H = sum of x xᵀ over the inputs x of a product         U = the upper Cholesky factor of H⁻¹
    for each column k:   error = (W[:, k] - Q[:, k]) / U[k, k]        W[:, j] -= error * U[k, j]     for all j > k

What is made small is the error of the products with such inputs, not that of the numbers. Scales of a group are found
when its first column comes, from the numbers as they are then. Columns keep their order.

Before: codes.py.  After: encode.py; cli/calibrate.py gathers H.

Source: Frantar et al., "GPTQ", arXiv:2210.17323, algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CheckpointError
from .codes import Codes, Scheme, fitting_scales

# Of H's mean diagonal, added to it. GPTQ's 0.01 is for 260,000 tokens: after 4000 of another kind of text, products of
# SmolLM2 were wrong by 0.083 (some more than by rounding to the nearest, whose mean is 0.092), with 0.5 by 0.073.
DAMPING = 0.5


def compensated(weight: Tensor, inputs: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> Codes:
    """Round a matrix [N, K] to integers of fewer than 8 bits in groups of columns.

    Args: inputs: H, [K, K] float32.   scale_dtype: scales are rounded to it before they are used.
    """
    columns, width, middle = weight.shape[1], scheme.width, 2 ** (scheme.bits - 1)
    left, factor = weight.float().clone(), inverse_factor(inputs)
    codes, scales = torch.empty(left.shape, dtype=torch.uint8, device=left.device), []
    for start in range(0, columns, width):
        end = min(start + width, columns)
        scale = fitting_scales(left[:, start:end], middle, scale_dtype)
        errors = torch.empty(len(left), end - start, device=left.device)
        for column in range(start, end):
            code = (left[:, column] / scale).round().clamp(-middle, middle - 1)
            codes[:, column] = (code + middle).to(torch.uint8)
            error = (left[:, column] - code * scale) / factor[column, column]
            left[:, column + 1 : end] -= error[:, None] * factor[column, column + 1 : end]
            errors[:, column - start] = error
        left[:, end:] -= errors @ factor[start:end, end:]
        scales.append(scale)
    scales = torch.stack(scales, dim=1)
    return Codes(scheme, codes, scales, torch.full_like(scales, middle, dtype=torch.uint8))


def inverse_factor(inputs: Tensor) -> Tensor:
    """The upper Cholesky factor of H⁻¹; more damping where H is too close to singular. Args: inputs: H, [K, K]."""
    damped = inputs.double()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0  # of inputs that are always 0: whatever they are multiplied by
    mean, damping = float(diagonal.mean()), DAMPING
    while damping < 1e6:
        lower, failed = torch.linalg.cholesky_ex(damped + torch.eye(len(damped), device=damped.device) * damping * mean)
        if not failed:
            return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float()
        damping *= 10
    raise CheckpointError("The text to calibrate with gave numbers that are not finite.")


def output_error(weight: Tensor, dense: Tensor, inputs: Tensor) -> float:
    """|x Wᵀ - x Qᵀ| / |x Wᵀ| over the inputs that H sums up."""
    apart, whole = (float(((one @ inputs) * one).sum().clamp(min=0)) for one in (weight - dense, weight))
    return (apart / max(whole, 1e-30)) ** 0.5
