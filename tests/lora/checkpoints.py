"""Adapters as PEFT saves them, written by hand, and transformers models that have one of them merged in."""

import json

import torch
from safetensors.torch import load_file, save_file

from tests import oracles

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder, base, *, targets=ALL, rank=4, alpha=8, seed=1, spread=0.3, prefix="base_model.model.", **more
):
    """An adapter for the checkpoint at `base`, with random matrices large enough to change the first token."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in oracles.open_reference(base).named_modules():
        weight = getattr(module, "weight", None)
        if name.rpartition(".")[2] in targets and weight is not None:
            rows, columns = weight.shape if isinstance(module, torch.nn.Linear) else weight.shape[::-1]
            size = more.get("rank_pattern", {}).get(name.rpartition(".")[2], rank)
            for half, shape in (("A", (size, columns)), ("B", (rows, size))):
                tensors[f"{prefix}{name}.lora_{half}.weight"] = torch.randn(*shape, generator=random) * spread
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | more))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(base, adapter):
    """The transformers model at `base` with W + factor * B A in the place of each adapted W."""
    model = oracles.open_reference(base)
    if adapter is None:
        return model
    config = json.loads((adapter / "adapter_config.json").read_text())
    halves = load_file(adapter / "adapter_model.safetensors")
    for key, b in halves.items():
        if ".lora_B." in key:
            a = halves[key.replace(".lora_B.", ".lora_A.")]
            name = key.partition(".lora_B.")[0].removeprefix("base_model.model.")
            alpha = config.get("alpha_pattern", {}).get(name.rpartition(".")[2], config["lora_alpha"])
            factor = alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
            module = model.get_submodule(name)
            change = factor * b @ a
            with torch.no_grad():
                module.weight += change if isinstance(module, torch.nn.Linear) else change.t()
    return model


@torch.inference_mode()
def logits(model, tokens):
    """[T, V]"""
    return model(torch.tensor([tokens])).logits[0]


def greedy(model, tokens, count):
    """The `count` most likely next tokens."""
    tokens, start = list(tokens), len(tokens)
    for _ in range(count):
        tokens.append(int(logits(model, tokens)[-1].argmax()))
    return tokens[start:]
