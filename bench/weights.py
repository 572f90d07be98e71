"""How fast weights go from the page cache to a GPU: a checkpoint of random numbers is written, and loaded a few times.

    python bench/weights.py --models FOLDER                FOLDER/llama-3.1-8b/config.json says the shapes
    python bench/weights.py --models FOLDER --layers 6 --scratch /dev/shm

Loads are done with the lanes of checkpoint/lanes.py and without. The last one is compared with the file.
"""

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tinyserve.checkpoint import load
from tinyserve.checkpoint.source import resolve
from tinyserve.models.registry import load_model


def checkpoint(config: Path, layers: int, scratch: str) -> Path:
    """Write a Llama of so many layers; returns its folder."""
    shape = json.loads(config.read_text()) | {"num_hidden_layers": layers}
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    dim = shape.get("head_dim") or hidden // shape["num_attention_heads"]
    heads, kv = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    pool = torch.randn(2**24).to(torch.bfloat16)

    def noise(*size: int) -> torch.Tensor:
        count = torch.Size(size).numel()
        return pool.repeat(-(-count // len(pool)))[:count].view(size)

    tensors = {f"{name}.weight": noise(shape["vocab_size"], hidden) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = noise(hidden)
    for layer in range(layers):
        sizes = {
            "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        tensors |= {f"model.layers.{layer}.{name}.weight": noise(*size) for name, size in sizes.items()}
    folder = Path(tempfile.mkdtemp(dir=scratch))
    (folder / "config.json").write_text(json.dumps(shape))
    save_file(tensors, folder / "model.safetensors")
    return folder


def timed(folder: Path, lanes: type | None) -> tuple[torch.nn.Module, float, float]:
    """Load on the GPU. Returns: the model, seconds, GB."""
    before, load.Lanes = load.Lanes, lanes or (lambda device: None)
    source = resolve(str(folder), offline=True, progress=False)
    began = time.perf_counter()
    model = load_model(source, dtype="bfloat16", device="cuda")
    torch.cuda.synchronize()
    seconds, load.Lanes = time.perf_counter() - began, before
    return model, seconds, sum(one.nbytes for one in {id(p): p for p in model.parameters()}.values()) / 1e9


def same(model: torch.nn.Module, folder: Path) -> bool:
    """Whether the parameters hold what the file does."""
    file = load_file(folder / "model.safetensors")
    last = len(model.layers) - 1
    pairs = [
        (model.embed.weight, file["model.embed_tokens.weight"]),
        (model.head.weight, file["lm_head.weight"]),
        (model.layers[last].mlp.down.weight, file[f"model.layers.{last}.mlp.down_proj.weight"]),
    ]
    return all(torch.equal(one, other.to(one.device)) for one, other in pairs)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="folder with llama-3.1-8b/config.json")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--scratch", default=None, help="where the checkpoint is written [the system's place]")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    began = time.perf_counter()
    folder = checkpoint(options.models / "llama-3.1-8b" / "config.json", options.layers, options.scratch)
    print(f"written in {time.perf_counter() - began:.1f} s", flush=True)
    try:
        torch.empty(1, device="cuda")
        for name, lanes in (("without lanes", None), ("lanes", load.Lanes), ("lanes again", load.Lanes)):
            model, seconds, size = timed(folder, lanes)
            right = same(model, folder) if name == "lanes again" else "not compared"
            print(f"{name}: {size:.2f} GB in {seconds:.3f} s, {size / seconds:.1f} GB/s; as the file: {right}")
            del model
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
