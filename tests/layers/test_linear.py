"""Fused parts, biases, shards and shared weights of a linear layer."""

import torch
from attrs import frozen

from tinyserve.layers.linear import Linear

CPU = torch.device("cpu")


@frozen(eq=False)
class Given:
    """A stored tensor that is already there."""

    numbers: torch.Tensor
    qtype = None

    @property
    def shape(self):
        return tuple(self.numbers.shape)

    def read(self, dtype):
        return self.numbers.to(dtype)


def filled(layer, numbers):
    layer.allocate(torch.float32, CPU)
    for (name, part), tensor in numbers.items():
        layer.load(name, part, Given(tensor))
    layer.finish()
    return layer


def test_parts_lie_on_top_of_each_other():
    """Three parts in reversed order of loading: the product equals three products side by side."""
    torch.manual_seed(0)
    weights = [torch.randn(rows, 5) for rows in (4, 2, 3)]
    biases = [torch.randn(rows) for rows in (4, 2, 3)]
    layer = Linear(5, (4, 2, 3), bias=True)
    numbers = {("weight", part): weights[part] for part in (2, 1, 0)}
    filled(layer, numbers | {("bias", part): biases[part] for part in (2, 1, 0)})
    x = torch.randn(7, 5)
    expected = torch.cat([x @ weight.T + bias for weight, bias in zip(weights, biases, strict=True)], dim=1)

    assert layer.names == ("weight", "bias")
    assert (layer.rows(1), layer.outputs) == (slice(4, 6), 9)
    assert layer.shape("weight", 2) == (3, 5)
    torch.testing.assert_close(layer(x), expected)


def test_a_shard_cuts_what_is_stored():
    """A layer that owns the second half of the rows of each part holds exactly those."""

    class SecondHalf:
        def take(self, name, part, stored):
            return Given(stored.numbers[stored.shape[0] // 2 :])

    whole = torch.arange(24.0).view(8, 3)
    layer = filled(Linear(3, (4, 4), shard=SecondHalf()), {("weight", 0): whole, ("weight", 1): whole + 100})

    assert torch.equal(layer.weight, torch.cat((whole[4:], whole[4:] + 100)))


def test_a_shared_weight_is_the_same_memory():
    table = torch.nn.Parameter(torch.randn(6, 3), requires_grad=False)
    layer = Linear(3, (6,))
    layer.share(table)

    assert layer.weight is table
    assert torch.equal(layer(torch.eye(3)), table.T)
