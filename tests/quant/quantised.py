"""Tiny quantised checkpoints, packed here bit by bit from the published layouts, beside the same weights as numbers.

`save` takes a random Llama, hands each matrix of its layers to a packer, and writes two folders: one with what the
packer stored, one with the numbers that this stands for. Packers work on Python integers, one word at a time, so that
they share no idea with what they test.
"""

import functools
import json

import torch
from safetensors.torch import load_file, save_file

from tests import oracles
from tests.models.batching import Paged
from tinyserve.checkpoint.source import resolve
from tinyserve.models.registry import load_model
from tinyserve.quant.grouped import ByPart, Grouped

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
TOKENS = oracles.prompt(9)
FAMILIES = {
    "llama": oracles.llama,
    "qwen2": oracles.qwen2,
    "phi3": functools.partial(oracles.make, "Phi3"),
    "qwen3_moe": functools.partial(oracles.make, "Qwen3Moe"),
}


def save(folder, packer, config, *, sizes=SIZES, family="llama", notes=None):
    """Return the folders of the quantised checkpoint and of its numbers.

    Args: packer: (module, weight [N, K]) -> ({name: tensor}, numbers [N, K]), or None to leave the module alone.
        notes: {name: text} for the file's header, filled by the packer.
    """
    numbers = oracles.save_config(FAMILIES[family](**sizes), folder / "numbers")
    tensors = {name: tensor.float() for name, tensor in load_file(numbers / "model.safetensors").items()}
    packed = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        made = packer(module, tensor) if kind == "weight" and tensor.dim() == 2 and "proj" in module else None
        if made is None:
            packed[name] = tensor
            continue
        tensors[name] = made[1].float()
        packed |= {f"{module}.{own}": value.contiguous() for own, value in made[0].items()}
    quantised = folder / "quantised"
    quantised.mkdir()
    save_file(packed, quantised / "model.safetensors", metadata=notes)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, numbers / "model.safetensors")
    written = json.loads((numbers / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(written | {"quantization_config": config}))
    return quantised, numbers


def open_model(folder, **options):
    return load_model(resolve(str(folder)), **{"dtype": "float32"} | options)


def logits(model, steps=1):
    """After the prompt; with two steps, after one more token, which a step computes alone."""
    paged = Paged(model)
    row = paged.add(TOKENS)
    if steps == 2:
        paged.step({row: len(TOKENS) - 1})
    return paged.step({row: 1 if steps == 2 else len(TOKENS)})[row]


def kept(model):
    """The quantised layers, by path."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(getattr(module, "format", None), (Grouped, ByPart)):
            found[path] = module
    return found


def assert_same(folders, layers=8, within=1e-3):
    """Logits of both checkpoints agree to `within` of their size, and `layers` products keep their codes."""
    quantised, numbers = map(open_model, folders)
    expected = logits(numbers)

    assert len(kept(quantised)) == layers
    torch.testing.assert_close(logits(quantised), expected, rtol=0, atol=within * float(expected.abs().max()))
    return quantised


def words(codes, bits):
    """Pack a list of lists of small integers, each list into int32 words, lowest bits first."""
    rows = []
    for row in codes.tolist():
        number = sum(code << (bits * place) for place, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([int.from_bytes(number.to_bytes(4 * count, "little")[4 * i : 4 * i + 4], "little", signed=True)
                     for i in range(count)])  # fmt: skip
    return torch.tensor(rows, dtype=torch.int32)


def affine(weight, bits, groups, *, symmetric):
    """Round to the nearest of 2**bits codes. Args: groups: [K] group of each column.

    Returns: codes [N, K], zeros [N, G], scales [N, G] (exact in fp16), numbers.
    """
    count = int(groups.max()) + 1
    scales, zeros = torch.empty(len(weight), count), torch.empty(len(weight), count)
    for group in range(count):
        own = weight[:, groups == group]
        if symmetric:
            scales[:, group] = own.abs().amax(1) * 2 / (2**bits - 1)
            zeros[:, group] = 2 ** (bits - 1)
        else:
            low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
            scales[:, group] = (high - low) / (2**bits - 1)
            zeros[:, group] = (-low / scales[:, group]).round()
    scales = scales.half().float()
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, 2**bits - 1)
    return codes.int(), zeros.int(), scales, (codes - zeros[:, groups]) * scales[:, groups]
