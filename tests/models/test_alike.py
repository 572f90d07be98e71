"""models/alike.py: which layers a start must run to meet every kernel."""

import pytest
import torch
from torch import nn

from tinyserve.models.alike import kind, needed


def layers(pattern):
    """A linear layer for each letter, as wide as the letter says."""
    return [nn.Linear(8, ord(letter) - 64, bias=False) for letter in pattern]


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [("A", [0]), ("AAAAA", [0, 1, 4]), ("AAABAAAB", [0, 1, 2, 3, 4, 7]), ("ABBB", [0, 1, 2, 3]), ("ABC", [0, 1, 2])],
)
def test_every_pair_of_kinds_is_kept(pattern, kept):
    found = needed(layers(pattern))
    pairs = {(left, right) for left, right in zip(pattern, pattern[1:] + "$", strict=True)}
    few = "".join(pattern[index] for index in found)

    assert found == kept
    assert pairs <= set(zip(few, few[1:] + "$", strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "scale", 2),
        lambda layer: setattr(layer, "scale", torch.ones(1)),
        lambda layer: layer.to(torch.float16),
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.empty(8, 9)[:, :8], False)),
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.empty(65)[1:].view(8, 8), False)),
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.empty(8, 8, device="meta"), False)),
        lambda layer: setattr(layer, "inner", nn.ReLU()),
        lambda layer: setattr(layer, "call", lambda: 0),
    ],
)
def test_what_may_choose_another_kernel_makes_another_kind(change):
    """A number, a type, strides, alignment (4 bytes off 16), the device, a module, and what nobody understands."""
    one, other = (nn.Linear(8, 8, bias=False) for _ in range(2))
    for layer in (one, other):
        layer.scale = 1
    assert kind(one) == kind(other)

    change(other)

    assert kind(one) != kind(other)
