"""InternLM 2 and 2.5: Llama under other names, with q, k and v in one matrix, group by group.

Before: models/llama.py.  After: models/decoder.py runs it.

Source: arXiv:2403.17297 sec. 2.2; keys of config.json.
"""

from __future__ import annotations

from ..checkpoint.table import From
from . import llama
from .config import HF
from .decoder import Decoder

WEIGHTS = {
    "embed": "model.tok_embeddings",
    "layers.*.attn_norm": "model.layers.*.attention_norm",
    "layers.*.attn.qkv": From("model.layers.*.attention.wqkv", grouped=True),
    "layers.*.attn.out": "model.layers.*.attention.wo",
    "layers.*.mlp_norm": "model.layers.*.ffn_norm",
    "layers.*.mlp.gate_up": ("model.layers.*.feed_forward.w1", "model.layers.*.feed_forward.w3"),
    "layers.*.mlp.down": "model.layers.*.feed_forward.w2",
    "norm": "model.norm",
    "head": "output",
}


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    hf.expect("bias", False)
    return llama.build(hf)
