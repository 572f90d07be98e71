"""What the modules of a layer have in common: calling one calls its `forward`, and nothing else.

nn.Module looks for hooks, tracing and compilation first, in Python. A layer has half a dozen modules, so on the CPU a
step of a small model spends 2 % of its time looking for what a server never has.

Before: torch.  After: linear.py, attention.py, mlp.py.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Part(nn.Module):
    """A module without hooks."""

    def __call__(self, *args: Any) -> Any:
        """`forward`."""
        return self.forward(*args)
