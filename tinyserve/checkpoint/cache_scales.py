"""Scales of cached keys and values that a checkpoint was calibrated with, for `--kv-cache-dtype fp8`.

    model.layers.3.self_attn.k_scale            compressed-tensors       number = fp8 code * scale
    model.layers.3.self_attn.k_proj.k_scale     ModelOpt; v_scale likewise
    model.layers.3.self_attn.kv_scale           older ones: of both

They belong to no product, so no family's table names them: they are found beside the modules that fill `attn.qkv`.
Nothing is lost without them: fp8 has its own exponents, and the scale only moves the range that they cover.

Before: quant/detect.py, table.py.  After: models/registry.py; layers/attention.py keeps them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch
from torch import nn

from ..layers.attention import Attention
from ..quant.format import Stored
from .table import Weights, sources

log = logging.getLogger(__name__)
USED = ("k_scale", "v_scale", "kv_scale")
NAMES = (*USED, "q_scale", "prob_scale", "k_zero_point", "v_zero_point")


def split(tensors: Mapping[str, Stored]) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """Return the scales of caches, and all other tensors."""
    found = {name: stored for name, stored in tensors.items() if name.rpartition(".")[2] in NAMES}
    return found, {name: stored for name, stored in tensors.items() if name not in found}


def load(model: nn.Module, weights: Weights, scales: Mapping[str, Stored]) -> None:
    """Give each attention layer its scales.

    Args: weights: the family's table.   scales: what `split` found.
    """
    taken = 0
    for path, module in model.named_modules() if scales else ():
        if isinstance(module, Attention):
            names = sources(weights, f"{path}.qkv", 3)
            k, v = (_find(scales, names[min(part, len(names) - 1)], letter) for part, letter in ((1, "k"), (2, "v")))
            if k is not None and v is not None:
                module.kv_scales = k, v
                taken += 1
    if taken:
        log.info("%d layers have scales of cached keys and values, which --kv-cache-dtype fp8 uses", taken)
    if unused := [name for name in scales if not taken or name.rpartition(".")[2] not in USED]:
        log.warning("%d scales of cached keys and values are not used: %s ...", len(unused), unused[0])


def _find(scales: Mapping[str, Stored], module: str, letter: str) -> float | None:
    """Return the scale of a layer's keys ("k") or values, None if there is none. module: that computes them."""
    parent = module.rpartition(".")[0]
    places = [f"{place}.{letter}_scale" for place in (module, parent, f"{parent}.attn")]
    name = next((name for name in (*places, f"{parent}.kv_scale") if name in scales), None)
    if name is None or math.prod(scales[name].shape) != 1:  # one for each head, or none
        return None
    scale = scales[name].read(torch.float32).item()
    return scale if 0 < scale < math.inf else None  # checkpoints write -1 for "not calibrated"
