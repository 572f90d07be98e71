"""Command-R and Aya: attention and feed-forward side by side behind one layer norm without bias; scaled logits.

Command-R+ normalises q and k, each head with weights of its own. Command-R7B and A (Cohere2) have windows with rotation
on three layers of four, and no rotation on the fourth.

Before: models/config.py, layers/.  After: models/decoder.py runs it; models/stablelm.py takes the layer.

Source: keys of config.json; the parallel block: arXiv:2204.02311 sec. 2.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from ..layers.attention import Attention, Batch, Heads, Scores
from ..layers.mlp import GatedMLP
from ..layers.norm import HeadNorms, LayerNorm, QKNorms
from ..layers.rope import Rope
from . import llama
from .config import FULL, HF, SLIDING, ModelConfig, activation, layer_kinds, rope_spec, windows
from .decoder import Decoder

WEIGHTS = llama.WEIGHTS | {
    "layers.*.norm": "model.layers.*.input_layernorm",
    "layers.*.attn.adjust.q": "model.layers.*.self_attn.q_norm",
    "layers.*.attn.adjust.k": "model.layers.*.self_attn.k_norm",
}


# What Cohere2 checkpoints say about features that this file has built in.
MEANT = {
    "use_parallel_block": True,
    "use_gated_activation": True,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
    "use_embedding_sharing": True,
}


class Layer(nn.Module):
    """One block. Args: norm: makes a norm of the stream; attn, mlp: the two sub-blocks."""

    def __init__(self, hidden: int, norm: partial[LayerNorm], attn: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.norm = norm(hidden)
        self.attn = attn
        self.mlp = mlp

    def forward(self, x: Tensor, delta: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """x: [T, H] stream; delta: [T, H] output of the last block, not added yet."""
        x, h = self.norm.add(x, delta)
        return x, self.attn(h, batch) + self.mlp(h)


def head_norms(c: ModelConfig, *, single: bool = False) -> QKNorms:
    """Return layer norms over each head of q and of k."""
    counts = c.num_heads, c.num_kv_heads
    norms = (HeadNorms(count, c.head_dim, c.norm_eps, single=single) for count in counts)
    return QKNorms(*norms, (counts[0] * c.head_dim, counts[1] * c.head_dim))


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, tied=True, eps=1e-5)
    kind = activation(hf)
    bias = hf.get("attention_bias", default=False)
    for key, value in MEANT.items():
        hf.expect(key, value)
    second = c.architecture == "Cohere2ForCausalLM"
    qk_norm = hf.expect("use_qk_norm", False) if second else hf.get("use_qk_norm", default=False)
    pattern = hf.get("sliding_window_pattern", "_sliding_window_pattern", "layer_switch", default=4)
    kinds = layer_kinds(hf, c.num_layers, every=pattern) if second else [FULL] * c.num_layers
    window = windows(hf, kinds, 4096)
    rope = Rope(rope_spec(hf, c.head_dim, theta=10000.0 if second else 5e5, interleaved=True))
    norm = partial(LayerNorm, eps=c.norm_eps, bias=False)

    def layer(index: int) -> Layer:
        attn = Attention(
            c.hidden,
            Heads(c.num_heads, c.num_kv_heads, c.head_dim),
            rope=rope if kinds[index] == SLIDING or not second else None,
            scores=Scores(window=window[index]),
            qkv_bias=bias,
            out_bias=bias,
            adjust=head_norms(c) if qk_norm else None,
        )
        return Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind))

    return Decoder(c, layer, norm=norm, logit_scale=hf.get("logit_scale", default=0.0625))
