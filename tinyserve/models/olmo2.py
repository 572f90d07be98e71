"""OLMo 2 and 3: norms after the sub-blocks instead of before, and one norm over all heads of q, one over all of k.

OLMo 3 adds windows on three layers of four; those keep the plain rotation where full layers stretch theirs.

Before: models/config.py, layers/.  After: models/decoder.py runs it; models/exaone4.py takes the layer.

Source: arXiv:2501.00656 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from ..layers.attention import Attention, Batch, Heads, Scores
from ..layers.mlp import GatedMLP
from ..layers.norm import QKNorms, RMSNorm
from ..layers.rope import Rope
from . import gemma3, llama
from .config import FULL, HF, ModelConfig, activation, layer_kinds, rope_spec, windows
from .decoder import Decoder

POST_NORM = {
    "layers.*.attn_post_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp_post_norm": "model.layers.*.post_feedforward_layernorm",
}
WEIGHTS = llama.WEIGHTS | POST_NORM | {
    "layers.*.attn.adjust.q": "model.layers.*.self_attn.q_norm",
    "layers.*.attn.adjust.k": "model.layers.*.self_attn.k_norm",
}  # fmt: skip


class Layer(nn.Module):
    """One block. Args: norm: makes a norm of the stream; attn, mlp: the two sub-blocks."""

    def __init__(self, hidden: int, norm: partial[RMSNorm], attn: Attention, mlp: GatedMLP) -> None:
        super().__init__()
        self.attn = attn
        self.attn_post_norm = norm(hidden)
        self.mlp = mlp
        self.mlp_post_norm = norm(hidden)

    def forward(self, x: Tensor, delta: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """x: [T, H] stream; delta: [T, H] output of the last block, not added yet."""
        x = x if delta is None else x + delta
        x = x + self.attn_post_norm(self.attn(x, batch))
        return x, self.mlp_post_norm(self.mlp(x))


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, eps=1e-5)
    kind = activation(hf)
    bias = hf.get("attention_bias", default=False)
    if c.architecture == "Olmo2ForCausalLM":
        kinds, rope, window = [FULL] * c.num_layers, {FULL: Rope(rope_spec(hf, c.head_dim))}, [None] * c.num_layers
    else:
        kinds = layer_kinds(hf, c.num_layers, every=4)
        rope = gemma3.ropes(hf, c.head_dim, full=5e5, local=hf.get("rope_theta", default=5e5))
        window = windows(hf, kinds, 4096)
    norm = partial(RMSNorm, eps=c.norm_eps)
    widths = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def layer(index: int) -> Layer:
        attn = Attention(
            c.hidden,
            Heads(c.num_heads, c.num_kv_heads, c.head_dim),
            rope=rope[kinds[index]],
            scores=Scores(window=window[index]),
            qkv_bias=bias,
            out_bias=bias,
            adjust=QKNorms(norm(widths[0]), norm(widths[1]), widths),
        )
        return Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind))

    return Decoder(c, layer, norm=norm)
