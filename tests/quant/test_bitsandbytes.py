"""bitsandbytes checkpoints: 4 bits from an independent packer, and a matrix that the library itself packed."""

import json

import pytest
import torch

from tests.quant.quantised import SIZES, assert_same, save
from tinyserve.errors import UnsupportedModel

NF4 = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105004, 0.0,
       0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]  # fmt: skip
BLOCK, OUTER = 32, 8


def packed(module, weight, *, double=True, block=BLOCK):
    """One scale for each `block` numbers; with `double`, scales are codes of a table around their mean."""
    scales = weight.reshape(-1, block).abs().amax(1)
    state = {"blocksize": block, "shape": list(weight.shape), "dtype": "float32", "quant_type": "nf4"}
    tensors = {"weight.quant_map": torch.tensor(NF4)}
    if double:
        offset = float(scales.mean())
        rest = torch.nn.functional.pad(scales - offset, (0, -len(scales) % OUTER)).reshape(-1, OUTER)
        outer, table = rest.abs().amax(1), torch.linspace(-1, 1, 256)
        codes = (rest / outer[:, None].clamp(min=1e-9))[..., None].sub(table).abs().argmin(-1)
        scales = (table[codes] * outer[:, None]).reshape(-1)[: len(scales)] + offset
        tensors |= {"weight.absmax": codes.reshape(-1)[: len(scales)].to(torch.uint8), "weight.nested_absmax": outer,
                    "weight.nested_quant_map": table}  # fmt: skip
        state |= {"nested_blocksize": OUTER, "nested_offset": offset}
    else:
        tensors["weight.absmax"] = scales
    codes = (weight.reshape(-1, block) / scales[:, None])[..., None].sub(torch.tensor(NF4)).abs().argmin(-1)
    numbers = (torch.tensor(NF4)[codes] * scales[:, None]).reshape(weight.shape)
    flat = codes.reshape(-1).to(torch.uint8)
    tensors["weight"] = ((flat[::2] << 4) | flat[1::2])[:, None]
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors, numbers


CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize("double", [True, False])
def test_nf4(double, tmp_path):
    """Logits within 1e-3 of the numbers'; breaks if the halves of a byte change places."""
    assert_same(save(tmp_path, lambda *given: packed(*given, double=double), CONFIG))


def test_int8(tmp_path):
    def packer(module, weight):
        reach = weight.abs().amax(1)
        codes = (weight / reach[:, None] * 127).round().to(torch.int8)
        tensors = {"weight": codes, "SCB": reach, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, codes * reach[:, None] / 127

    assert_same(save(tmp_path, packer, {"quant_method": "bitsandbytes", "load_in_8bit": True}))


def test_blocks_across_rows_are_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedModel, match="cross rows"):
        assert_same(save(tmp_path, lambda *given: packed(*given, block=128), CONFIG))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_what_the_library_writes(kind, tmp_path):
    """Packed by bitsandbytes with double quantisation: its own numbers within 1e-3."""
    functional = pytest.importorskip("bitsandbytes.functional")

    def packer(module, weight):
        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=True)
        tensors = {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
        return {"weight": codes, **tensors}, functional.dequantize_4bit(codes, state)

    assert_same(save(tmp_path, packer, CONFIG, sizes=SIZES | {"intermediate_size": 128}))
