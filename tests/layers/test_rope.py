"""Frequencies of every kind of rotation, against transformers' formulas."""

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from tests import oracles
from tinyserve.errors import CheckpointError, UnsupportedModel
from tinyserve.layers.rope import Rope, RopeSpec, alibi_slopes, frequencies, table
from tinyserve.models.config import HF, rope_spec

KINDS = {
    "linear": {},
    "llama3": oracles.LLAMA3,
    "yarn": {"original_max_position_embeddings": 32},
    "yarn-mscale": {"original_max_position_embeddings": 32, "mscale": 1.2, "mscale_all_dim": 0.8, "beta_fast": 20},
    "longrope": oracles.longrope(20, 32)["rope_parameters"] | {"original_max_position_embeddings": 32},
    "longrope-factor": oracles.longrope(20, 32)["rope_parameters"]
    | {"original_max_position_embeddings": 32, "attention_factor": 1.4},
    "linear-partial": {"partial_rotary_factor": 0.5},
    "llama3-partial": oracles.LLAMA3 | {"partial_rotary_factor": 0.7},
    "proportional": {"partial_rotary_factor": 0.3},
    "yarn-smooth": {"original_max_position_embeddings": 32, "truncate": False, "attention_factor": 1.3},
}


@pytest.mark.parametrize("name", KINDS)
def test_frequencies_equal_transformers(name):
    """Relative difference of any frequency: 1e-6; the amplitude of yarn exactly."""
    kind = name.split("-")[0]
    config = oracles.llama(**oracles.rope(kind, **KINDS[name]))
    expected, amplitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    spec = rope_spec(HF(config.to_dict()), config.head_dim)

    assert spec.amplitude == pytest.approx(amplitude)
    torch.testing.assert_close(frequencies(spec), expected, rtol=1e-6, atol=0)


def test_a_plain_table_is_cosines_then_sines():
    rope = Rope(RopeSpec(dim=4, theta=100.0))
    rope.allocate(3, torch.device("cpu"))
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]])

    torch.testing.assert_close(rope.cos_sin, torch.cat((angles.cos(), angles.sin()), 1))


def test_dynamic_rotation_is_plain_inside_the_trained_length():
    """Rows below `original` are those of the default kind, bit for bit, however long the table is."""
    plain = table(RopeSpec(dim=8), 20)
    dynamic = table(RopeSpec(kind="dynamic", dim=8, factor=2.0, original=10), 20)

    assert torch.equal(dynamic[:10], plain[:10])
    assert not torch.equal(dynamic[10:], plain[10:])


@pytest.mark.parametrize("position", [32, 33, 60])
def test_dynamic_rotation_beyond_it_is_that_of_a_sequence_that_ends_there(position):
    """Row p has transformers' frequencies for a sequence of p + 1 tokens; trained length 32."""
    config = oracles.llama(max_position_embeddings=32, **oracles.rope("dynamic"))
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=position + 1)
    row = table(rope_spec(HF(config.to_dict()), config.head_dim), 64)[position]

    torch.testing.assert_close(row, torch.cat(((position * expected).cos(), (position * expected).sin())))


def test_an_unknown_kind_is_refused():
    with pytest.raises(UnsupportedModel, match="spiral"):
        table(RopeSpec(kind="spiral", dim=8), 4)


@pytest.mark.parametrize("positions", [32, 33])
def test_longrope_has_other_factors_when_longer_sequences_are_served(positions):
    """At most the original 32 positions: the short factors; one more: the long ones, three times as large."""
    spec = rope_spec(HF(oracles.llama(**oracles.longrope(20, 32)).to_dict()), 20)
    ratio = frequencies(spec, 32) / frequencies(spec, positions)

    torch.testing.assert_close(ratio, torch.full((10,), 1.0 if positions == 32 else 3.0))


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 40])
def test_slopes_equal_transformers(heads):
    """Also for a number of heads that is no power of two."""
    mask = torch.ones(1, 2)
    expected = build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1]

    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), expected)


@pytest.mark.parametrize("changes", [{"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 1.2}])
def test_a_part_that_no_pairs_fill_is_refused(changes):
    """A quarter of 12 numbers is 3; 1.2 times 12 are 14."""
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        rope_spec(HF(oracles.llama(head_dim=12).to_dict() | changes | {"rope_parameters": None}), 12)
