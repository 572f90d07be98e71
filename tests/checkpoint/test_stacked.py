"""Stacked experts, seen as one tensor for each expert and part."""

import pytest
import torch
from safetensors.torch import save_file

from tinyserve.checkpoint.safetensors import open_safetensors
from tinyserve.checkpoint.stacked import Stack, mxfp4, unstack
from tinyserve.errors import CheckpointError

NAME = "model.layers.7.experts.both"
PARTS = ("layers.*.experts.#.gate", "layers.*.experts.#.up")


def opened(folder, **tensors):
    save_file(
        {name.replace("__", "."): tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return open_safetensors(folder)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_part_of_each_expert_is_a_tensor(tmp_path, transposed, interleaved):
    """3 experts of 2 x 4 rows of 5: expert 2's up rows are rows 4..7, or the odd ones."""
    whole = torch.randn(3, 8, 5)
    tensors = opened(tmp_path, **{NAME: whole.mT if transposed else whole, "other": torch.ones(2)})

    found = unstack(tensors, {"model.layers.*.experts.both": Stack(PARTS, transposed, interleaved)})

    assert len(found) == 7 and found["other"] is tensors["other"]
    up = found["layers.7.experts.2.up"]
    assert up.shape == (4, 5) and up.nbytes == 80
    assert torch.equal(up.read(torch.float32), whole[2, 1::2] if interleaved else whole[2, 4:])


def test_biases_are_stacked_too(tmp_path):
    tensors = opened(tmp_path, **{NAME: torch.arange(12.0).view(3, 4)})

    found = unstack(tensors, {"model.layers.*.experts.both": Stack(PARTS, transposed=True, interleaved=True)})

    assert found["layers.7.experts.1.up"].shape == (2,)
    assert found["layers.7.experts.1.up"].read(torch.float32).tolist() == [5, 7]


def test_mxfp4_by_hand():
    """Codes 1 and 15 are 0.5 and -6; exponent 129 is a factor of 4: 2 and -24. Exponent 255 is NaN."""
    blocks = torch.zeros(1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, 0] = 0xF1

    numbers = mxfp4(blocks, torch.tensor([[129, 255]], dtype=torch.uint8)).dense(torch.float32)

    assert numbers.shape == (1, 64)
    assert numbers[0, :3].tolist() == [2, -24, 0] and numbers[0, 32:].isnan().all()


def test_mxfp4_experts_are_cut_and_decoded(tmp_path):
    """2 experts of 4 rows of 64, rows of gate and up alternating; the tensor of exponents is used up."""
    blocks, scales = torch.randint(0, 255, (2, 4, 2, 16)).byte(), torch.randint(120, 130, (2, 4, 2)).byte()
    tensors = opened(tmp_path, **{f"{NAME}_blocks": blocks, f"{NAME}_scales": scales})
    stack = Stack(PARTS, interleaved=True, scales="model.layers.*.experts.both_scales")

    found = unstack(tensors, {"model.layers.*.experts.both_blocks": stack})

    assert sorted(found) == [f"layers.7.experts.{expert}.{part}" for expert in (0, 1) for part in ("gate", "up")]
    assert found["layers.7.experts.1.up"].shape == (2, 64)
    wanted = mxfp4(blocks[1], scales[1]).dense(torch.float32)[1::2]
    up = found["layers.7.experts.1.up"]
    assert torch.equal(up.read(torch.float32), wanted) and up.codes().scheme == up.scheme
    assert torch.equal(up.codes().dense(torch.float32), wanted)


def test_rows_that_do_not_divide_are_refused(tmp_path):
    tensors = opened(tmp_path, **{NAME: torch.zeros(2, 7, 5)})

    with pytest.raises(CheckpointError, match="7 rows an expert, which 2 parts cannot share"):
        unstack(tensors, {"model.layers.*.experts.both": Stack(PARTS)})
