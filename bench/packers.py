"""Checkpoints of one model in the formats that other tools write, packed here from the published layouts.

Codes are rounded to the nearest, without looking at data, so a format is shown at its worst: GPTQ and AWQ are layouts
here, not methods. Only linear layers are packed; the table of tokens and the head stay as they are.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import pad

E4M3 = torch.float8_e4m3fn
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NF4 = torch.tensor([-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105004, 0.0,
                    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0])  # fmt: skip


def words(codes: torch.Tensor, order=range(8)) -> torch.Tensor:
    """Eight codes of four bits to an int32, along the last dimension."""
    wide = codes.long().unflatten(-1, (-1, 8))
    whole = sum(wide[..., own] << (4 * place) for place, own in enumerate(order))
    return torch.where(whole >= 2**31, whole - 2**32, whole).int()


def affine(weight: torch.Tensor, width: int):
    """Codes 0 .. 15 [N, K], zero points and scales [N, G]."""
    tiles = weight.unflatten(1, (-1, width))
    low, high = tiles.amin(-1).clamp(max=0), tiles.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round()
    return (tiles / scales[..., None] + zeros[..., None]).round().clamp(0, 15).flatten(1), zeros, scales


def gptq(weight, width=64):
    codes, zeros, scales = affine(weight, width)
    tensors = {"qweight": words(codes).T, "qzeros": words(zeros.T - 1 + 16 * (zeros.T < 1)), "scales": scales.T.half()}
    return tensors | {"g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // width}


def awq(weight, width=64):
    codes, zeros, scales = affine(weight, width)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words(codes.T, order), "qzeros": words(zeros.T, order), "scales": scales.T.half()}


def nf4(weight, width=64):
    """With quantised scales: codes of a table around their mean."""
    scales = weight.reshape(-1, width).abs().amax(1)
    codes = (weight.reshape(-1, width) / scales[:, None])[..., None].sub(NF4).abs().argmin(-1).reshape(-1)
    offset, table = float(scales.mean()), torch.linspace(-1, 1, 256)
    rest = pad(scales - offset, (0, -len(scales) % 256)).reshape(-1, 256)
    outer = rest.abs().amax(1)
    nested = ((rest / outer[:, None] + 1) * 127.5).round().reshape(-1)[: len(scales)].to(torch.uint8)
    state = {"blocksize": width, "shape": list(weight.shape), "quant_type": "nf4", "dtype": "bfloat16",
             "nested_blocksize": 256, "nested_offset": offset}  # fmt: skip
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {"weight": ((codes[::2] << 4) | codes[1::2]).to(torch.uint8)[:, None], "weight.absmax": nested,
            "weight.quant_map": NF4.clone(), "weight.nested_absmax": outer, "weight.nested_quant_map": table,
            "weight.quant_state.bitsandbytes__nf4": text}  # fmt: skip


def fp4_bytes(scaled: torch.Tensor) -> torch.Tensor:
    """Numbers up to 6 [N, K] as the nearest codes of fp4, two to a byte."""
    codes = scaled.abs()[..., None].sub(FP4).abs().argmin(-1) | (scaled < 0).long() << 3
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def mxfp4(weight):
    tiles = weight.unflatten(1, (-1, 32))
    powers = tiles.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
    codes = fp4_bytes((tiles / 2.0 ** powers[..., None]).clamp(-6, 6).flatten(1))
    return {"weight_packed": codes, "weight_scale": (powers + 127).to(torch.uint8)}


def nvfp4(weight):
    tiles, outer = weight.unflatten(1, (-1, 16)), weight.abs().max() / (6 * 448)
    scales = (tiles.abs().amax(-1) / 6 / outer).clamp(min=2**-9).to(E4M3)
    codes = fp4_bytes((tiles / (scales.float() * outer)[..., None]).clamp(-6, 6).flatten(1))
    return {"weight": codes, "weight_scale": scales, "weight_scale_2": outer}


def fp8_blocks(weight, width=128):
    rows, columns = weight.shape
    tiles = pad(weight, (0, -columns % width, 0, -rows % width)).unflatten(1, (-1, width)).unflatten(0, (-1, width))
    scales = tiles.abs().amax((1, 3)) / 448
    wide = scales.repeat_interleave(width, 0).repeat_interleave(width, 1)[:rows, :columns]
    return {"weight": (weight / wide).to(E4M3), "weight_scale_inv": scales}


def int8_rows(weight):
    reach = weight.abs().amax(1)
    return {"weight": (weight / reach[:, None] * 127).round().to(torch.int8), "SCB": reach}


MX = {"weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, "targets": ["Linear"]}
PACKERS = {
    "fp8-blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "bnb-int8": (int8_rows, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 64}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 64}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "mxfp4": (mxfp4, {"quant_method": "compressed-tensors", "config_groups": {"group_0": MX}}),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}


def write(source, name: str, folder: Path) -> Path:
    """Write a GGUF file's or a folder's model in a format. Args: source: of checkpoint/source.py."""
    from tinyserve.models.registry import build_model, open_tensors

    packer, described = PACKERS[name]
    config = {**source.config(), "quantization_config": described}
    found = {}
    for path, stored in open_tensors(source, "auto", build_model(source.config())).items():
        tensor = stored.read(torch.float32)
        module, _, kind = path.rpartition(".")
        packed = packer(tensor) if kind == "weight" and "_proj" in module else {kind: tensor}
        found |= {f"{module}.{own}": value.contiguous().clone() for own, value in packed.items()}
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
