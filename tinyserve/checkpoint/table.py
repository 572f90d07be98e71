"""Which module of a checkpoint fills which module of the model.

A family's WEIGHTS maps module paths to checkpoint modules; `*` stands for the layer's number on both sides, and a tuple
fuses several checkpoint modules, in order, into the parts of one linear layer:

    "layers.*.attn.qkv": ("model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.k_proj", "...v_proj")

Modules are mapped, not tensors: weights, biases, scales and adapters of one module follow the same row.

Before: models/<family>.py declares.  After: load.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Weights = Mapping[str, str | tuple[str, ...]]


def sources(weights: Weights, path: str) -> tuple[str, ...]:
    """Return the checkpoint modules that fill the module at `path`, one per part; () when no row maps it.

    Args: path: a module path such as "layers.3.attn.qkv". Its number becomes the row's `*`, a second one its `#`.
    """
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", path)
    pattern = path
    for mark, number in zip("*#", numbers, strict=False):
        pattern = re.sub(rf"(?<=\.){number}(?=\.|$)", mark, pattern, count=1)
    row = weights.get(pattern, ())
    names = (row,) if isinstance(row, str) else row
    filled = []
    for name in names:
        for mark, number in zip("*#", numbers, strict=False):
            name = name.replace(mark, number, 1)
        filled.append(name)
    return tuple(filled)
