"""A GGUF file's tensors under their Hugging Face names, with what its converter did to the numbers undone.

Three things are done to weights on the way into GGUF: names are shortened (`NAMES`), the rows of Llama's q and k are
reordered for a rotation of neighbouring pairs, and Gemma's norms get their 1 added. Undoing is exact, also on
quantised blocks: rows are whole blocks, and norms are fp32.

Before: gguf.py, dequantize.py.  After: load.py.
"""

from __future__ import annotations

import re

import torch
from attrs import frozen
from torch import Tensor

from ..errors import CheckpointError
from ..quant.codes import Codes, Scheme
from .dequantize import PLAIN, decode
from .gguf import GGUFFile, GGUFTensor
from .gguf_codes import KEPT, codes_of

# GGUF module -> module of a Hugging Face checkpoint; {} is the layer, # an expert of a tensor that holds all of them.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
    "blk.{}.ffn_gate_inp": "model.layers.{}.mlp.gate",
    "blk.{}.ffn_gate_exps": "model.layers.{}.mlp.experts.#.gate_proj",
    "blk.{}.ffn_up_exps": "model.layers.{}.mlp.experts.#.up_proj",
    "blk.{}.ffn_down_exps": "model.layers.{}.mlp.experts.#.down_proj",
}
_LAYER = "model.layers.{}."
_GEMMA = {
    "blk.{}.post_attention_norm": _LAYER + "post_attention_layernorm",
    "blk.{}.ffn_norm": _LAYER + "pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": _LAYER + "post_feedforward_layernorm",
}
# Where an architecture uses a name for something else.
OWN_NAMES = {
    "llama": {  # Mixtral
        "blk.{}.ffn_gate_inp": _LAYER + "block_sparse_moe.gate",
        "blk.{}.ffn_gate_exps": _LAYER + "block_sparse_moe.experts.#.w1",
        "blk.{}.ffn_up_exps": _LAYER + "block_sparse_moe.experts.#.w3",
        "blk.{}.ffn_down_exps": _LAYER + "block_sparse_moe.experts.#.w2",
    },
    "deepseek2": {
        "blk.{}.attn_q_a": _LAYER + "self_attn.q_a_proj",
        "blk.{}.attn_q_a_norm": _LAYER + "self_attn.q_a_layernorm",
        "blk.{}.attn_q_b": _LAYER + "self_attn.q_b_proj",
        "blk.{}.attn_kv_a_mqa": _LAYER + "self_attn.kv_a_proj_with_mqa",
        "blk.{}.attn_kv_a_norm": _LAYER + "self_attn.kv_a_layernorm",
        "blk.{}.attn_kv_b": _LAYER + "self_attn.kv_b_proj",
        "blk.{}.attn_k_b": _LAYER + "self_attn.kv_b_proj",
        "blk.{}.attn_v_b": _LAYER + "self_attn.kv_b_proj",
        "blk.{}.ffn_gate_shexp": _LAYER + "mlp.shared_experts.gate_proj",
        "blk.{}.ffn_up_shexp": _LAYER + "mlp.shared_experts.up_proj",
        "blk.{}.ffn_down_shexp": _LAYER + "mlp.shared_experts.down_proj",
        "blk.{}.exp_probs_b": _LAYER + "mlp.gate.e_score_correction_bias",
    },
    "gpt-oss": {
        "blk.{}.post_attention_norm": _LAYER + "post_attention_layernorm",
        "blk.{}.ffn_gate_inp": _LAYER + "mlp.router",
        "blk.{}.attn_sinks": _LAYER + "self_attn.sinks",
    },
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "olmo2": {
        "blk.{}.post_attention_norm": _LAYER + "post_attention_layernorm",
        "blk.{}.post_ffw_norm": _LAYER + "post_feedforward_layernorm",
    },
    "exaone4": {
        "blk.{}.post_attention_norm": _LAYER + "post_attention_layernorm",
        "blk.{}.post_ffw_norm": _LAYER + "post_feedforward_layernorm",
    },
    "seed_oss": {"blk.{}.post_attention_norm": _LAYER + "post_attention_layernorm"},
    "glm4": {
        "blk.{}.post_attention_norm": _LAYER + "post_self_attn_layernorm",
        "blk.{}.post_ffw_norm": _LAYER + "post_mlp_layernorm",
        "blk.{}.ffn_up": _LAYER + "mlp.gate_up_proj",
    },
    "phi3": {
        "blk.{}.attn_qkv": _LAYER + "self_attn.qkv_proj",
        "blk.{}.ffn_up": _LAYER + "mlp.gate_up_proj",
    },
    "starcoder2": {
        "blk.{}.ffn_up": _LAYER + "mlp.c_fc",
        "blk.{}.ffn_down": _LAYER + "mlp.c_proj",
    },
}
BARE = {"blk.{}.attn_sinks", "blk.{}.exp_probs_b"}  # the Hugging Face name of the only tensor, without ".weight"
PAIRED_ROTARY = {"llama", "granite", "smollm3", "arcee"}  # q and k rows are stored for a rotation of neighbouring pairs
NORM_PLUS_ONE = {"gemma", "gemma2", "gemma3", "nemotron"}
# Read with the metadata (gguf_config.py).
ELSEWHERE = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


@frozen(eq=False)
class GGUFStored:
    """One tensor of the file (a `Stored` of quant/format.py).

    Args:
        tensor: where its bytes are.
        order: int64 [rows], which stored row each row of the model is; None for the stored order.
        minus: to subtract from the numbers.
    """

    tensor: GGUFTensor
    order: Tensor | None = None
    minus: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def qtype(self) -> str | None:
        return None if self.tensor.type in PLAIN else self.tensor.type

    @property
    def nbytes(self) -> int:
        return self.tensor.data.nbytes

    @property
    def scheme(self) -> Scheme | None:
        """How the blocks can be kept as codes (quant/grouped.py), or None if they cannot."""
        kept = len(self.shape) == 2 and not self.minus and self.qtype in KEPT
        return KEPT[self.qtype][0] if kept else None

    def codes(self) -> Codes:
        """Return the blocks as codes and scales; only when `scheme` is set."""
        return codes_of(self._rows(), self.qtype)

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers; see Stored."""
        if self.minus:
            return (self._numbers(torch.float32) - self.minus).to(dtype)
        return self._numbers(dtype)

    def _numbers(self, dtype: torch.dtype) -> Tensor:
        if len(self.shape) == 1:
            numbers = decode(torch.from_numpy(self.tensor.data)[None], self.tensor.type, dtype)[0]
            return numbers if self.order is None else numbers[self.order]
        return decode(self._rows(), self.tensor.type, dtype)

    def blocks(self) -> Tensor:
        """Return the raw blocks, uint8 [rows, bytes of a row]."""
        if self.qtype is None:
            raise CheckpointError(f"{self.tensor.name}: {self.tensor.type} has no blocks.")
        return self._rows()

    def _rows(self) -> Tensor:
        rows = torch.from_numpy(self.tensor.data)
        return rows if self.order is None else rows[self.order]


@frozen(eq=False)
class JoinedHeads:
    """The matrix that makes keys and values from a latent, of its two halves (a `Stored` of quant/format.py).

    Args: keys: [heads, C, N], transposed.  values: [heads, V, C].
    """

    keys: GGUFTensor
    values: GGUFTensor
    qtype: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        heads, latent, size = self.keys.shape
        return (heads * (size + self.values.shape[1]), latent)

    @property
    def nbytes(self) -> int:
        return self.keys.data.nbytes + self.values.data.nbytes

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers; see Stored."""
        keys, values = (
            decode(torch.from_numpy(half.data).flatten(0, 1), half.type, dtype).view(half.shape)
            for half in (self.keys, self.values)
        )
        return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)

    def blocks(self) -> Tensor:
        """The halves have blocks in different directions. Raises: CheckpointError: always."""
        raise CheckpointError(f"{self.keys.name}: joined with its other half, it has no blocks.")


def stored_tensors(file: GGUFFile, num_heads: int, num_kv_heads: int) -> dict[str, GGUFStored]:
    """Return every tensor of the file under its Hugging Face name, none of them read yet.

    Args: num_heads, num_kv_heads: of the model; q and k are reordered head by head.
    Raises: CheckpointError: a tensor that this table does not know.
    """
    architecture = file.architecture
    names = NAMES | OWN_NAMES.get(architecture, {})
    found, unknown = {}, []
    for tensor in file.tensors.values():
        if tensor.name in ELSEWHERE:
            continue
        module, _, kind = tensor.name.rpartition(".")
        layer = re.match(r"blk\.(\d+)\.", module)
        number = layer[1] if layer else ""
        pattern = module.replace(f"blk.{number}.", "blk.{}.", 1) if layer else module
        if pattern not in names:
            unknown.append(tensor.name)
            continue
        heads = {"attn_q": num_heads, "attn_k": num_kv_heads}.get(module.rpartition(".")[2])
        if heads and tensor.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{file.path}: {tensor.name} has {tensor.shape[0]} rows, which {heads} heads cannot share."
            )
        order = unpaired(tensor.shape[0], heads) if heads and architecture in PAIRED_ROTARY else None
        minus = 1.0 if tensor.name.endswith("norm.weight") and architecture in NORM_PLUS_ONE else 0.0
        name = names[pattern].format(number) + ("" if pattern in BARE else f".{kind}")
        if pattern.endswith(("attn_k_b", "attn_v_b")):
            keys, values = (file.tensors.get(f"blk.{number}.attn_{half}_b.weight") for half in "kv")
            if keys is None or values is None:
                raise CheckpointError(f"{file.path}: {tensor.name} stands without its other half.")
            found[name] = JoinedHeads(keys, values)
            continue
        if "#" not in name:
            found[name] = GGUFStored(tensor, order, minus)
            continue
        for expert in range(tensor.shape[0]):
            one = GGUFTensor(tensor.name, tensor.shape[1:], tensor.type, tensor.data[expert])
            found[name.replace("#", str(expert))] = GGUFStored(one)
    if unknown:
        raise CheckpointError(f"{file.path}: tensors unknown for {architecture}: {', '.join(sorted(unknown)[:8])}.")
    return found


def unpaired(rows: int, heads: int) -> Tensor:
    """Return which stored row each row of the model is: stored are x0 y0 x1 y1 ..., wanted x0 x1 ... y0 y1 ..."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
