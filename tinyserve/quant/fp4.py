"""Numbers of four bits with an exponent (e2m1): NVFP4 and MXFP4.

    NVFP4   16 columns share an fp8 scale, all of a matrix one more in fp32 (by which it is multiplied: ModelOpt's
            weight_scale_2; or divided: compressed-tensors' weight_global_scale)
    MXFP4   32 columns share a power of two, one byte with a bias of 127

Two columns to a byte, the first in the low half. Activations stay as they are: rounding them to four bits needs the
products of Blackwell, and only adds error anywhere else.

Before: stored.py.  After: compressed.py, modelopt.py.

Source: OCP Microscaling Formats (MX) v1.0; NVFP4 as NVIDIA ModelOpt publishes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.grouped_gemm import unpack
from .codes import FP4, Codes, Scheme
from .stored import QuantizedTensor

NVFP4 = Scheme("nvfp4", 4, 16, table=FP4)
MXFP4 = Scheme("mxfp4", 4, 32, table=FP4)


def powers(exponents: Tensor) -> Tensor:
    """Return 2 ** (byte - 127) as float32; 255 stands for NaN."""
    numbers = torch.pow(2.0, exponents.double() - 127).float()
    return torch.where(exponents == 255, torch.nan, numbers)


def nvfp4(own: QuantizedTensor, packed: str, *, times: str = "", divided: str = "") -> Codes:
    """Read a matrix. Args: packed: name of the codes; times, divided: name of the scale of the matrix."""
    codes = unpack(own.tensor(packed, torch.uint8), 4, own.shape[1])
    whole = own.tensor(times or divided, torch.float32).reshape(1, 1)
    scales = own.tensor("weight_scale", torch.float32)
    return Codes(own.scheme, codes, scales * whole if times else scales / whole)


def mxfp4(own: QuantizedTensor, packed: str) -> Codes:
    """Read a matrix. Args: packed: name of the codes."""
    codes = unpack(own.tensor(packed, torch.uint8), 4, own.shape[1])
    return Codes(own.scheme, codes, powers(own.tensor("weight_scale", torch.uint8)))
