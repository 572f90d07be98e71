"""An architecture without a file here, run by the optional package transformers: its modules, our attention and cache.

transformers lets a caller replace the attention of its models by a function. Ours takes the rotated q, k and v of all
tokens of a step, writes k and v to the paged cache and attends over the block tables, so scheduler, prefix cache,
sampler and server see a model like any other. What a layer keeps (heads, head size, window) is learned from one run
with a function that only looks.

Not every model of transformers can run so: some keep a state of their own, mix tokens elsewhere than in attention, or
mask in ways that the function is not told. So a loaded model first has to give, over the paged cache and in two pieces,
the logits that transformers gives for a short prompt by itself; else it is refused.

Before: checkpoint/source.py (the files).  After: models/registry.py, for names that are not in its table.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from ..checkpoint.source import Source
from ..errors import CheckpointError, UnsupportedModel
from ..kernels.attention_decode import attention_decode
from ..kernels.attention_prefill import attention_prefill
from ..kernels.rope import qk_norm_rope_write
from ..kv.groups import KVGroup, LayerKV, group_layers
from ..kv.storage import Pair, allocate, layer_view
from ..layers.attention import Batch, LayerCache
from .config import FULL, SLIDING, ModelConfig, choose_dtype, context_factor, context_length, stored_dtype, token_ids
from .hf import HF

log = logging.getLogger(__name__)

NAME = "tinyserve"  # of our function among the attentions of transformers
CURE = "pip install 'tinyserve[transformers]' runs many architectures that have no file here"
CHECK_TOKENS, CHECK_SPLIT = 12, 7
# Largest difference of any logit in the self-check, in units of the largest logit.
CHECK_BOUND = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}


@frozen
class Call:
    """One attention layer as its call shows it. window: as the layer states it."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None


@define(eq=False)
class Look:
    """Stands for a step in the run that only looks; collects one Call a layer, by the layer's id, in order."""

    calls: dict[int, Call] = field(factory=dict)

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Tensor:
        """[1, H, T, D] each -> zeros [1, T, Hq, D]"""
        if id(layer) in self.calls or not getattr(layer, "is_causal", True) or k.shape != v.shape:
            raise UnsupportedModel("its attention is called twice a layer, looks ahead, or has values of another size")
        self.calls[id(layer)] = Call(q.shape[1], k.shape[1], k.shape[3], options.get("sliding_window"))
        return torch.zeros_like(q.transpose(1, 2))


@frozen(eq=False)
class Step:
    """A real step: the batch, and the cache of each layer by the layer's id."""

    batch: Batch
    caches: Mapping[int, tuple[LayerKV, LayerCache]]

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Tensor:
        """[1, H, T, D] each -> [1, T, Hq, D]; writes k and v."""
        batch, (kind, cache) = self.batch, self.caches[id(layer)]
        qkv = torch.cat((q, k, v), dim=1)[0].transpose(0, 1).flatten(1)
        places = (None, cache.k, cache.v, batch.slots_to_write[cache.group])
        heads = {"num_heads": q.shape[1], "num_kv_heads": kind.kv_heads}
        query = qk_norm_rope_write(qkv, batch.positions, *places, **heads, memo=batch.memo)
        scale = options.get("scaling")
        scores = {
            "scale": kind.head_dim**-0.5 if scale is None else scale,
            "window": kind.window or 0,
            "softcap": options.get("softcap") or 0.0,
            "sinks": options.get("s_aux"),
        }
        return self._weigh(query, cache, scores)[None]

    def _weigh(self, q: Tensor, cache: LayerCache, scores: dict[str, Any]) -> Tensor:
        """[T, Hq, D] -> the same; decodes stand first and have a kernel of their own."""
        batch, decodes = self.batch, self.batch.num_decodes
        tables, lengths = batch.block_tables[cache.group], batch.seq_lens
        out = torch.empty_like(q)
        if decodes:
            pages = (q[:decodes], cache.k, cache.v, tables[:decodes], lengths[:decodes])
            attention_decode(*pages, max_seq_len=batch.max_seq_len, out=out[:decodes], memo=batch.memo, **scores)
        if decodes < batch.num_seqs:
            rest = (q, cache.k, cache.v, tables[decodes:], batch.query_start[decodes:], lengths[decodes:])
            attention_prefill(*rest, max_query_len=batch.max_query_len, out=out, **scores)
        return out


def attention(
    layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls in each attention layer; the step travels among its keywords."""
    step = options.get("step")
    if step is None:
        raise UnsupportedModel("its layers do not hand keywords on to their attention")
    if attention_mask is not None:
        raise UnsupportedModel("it makes masks of its own")
    return step.attend(layer, q, k, v, options), None


class Given(nn.Module):
    """Stands for the body of a model when only its head is to run: gives back what it is given."""

    def __init__(self, made: Callable[..., Any]) -> None:
        super().__init__()
        self.made = made

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """Return the record that a body returns."""
        return self.made(last_hidden_state=inputs_embeds)


class Fallback(nn.Module):
    """A model of transformers with the face of models/decoder.py::Decoder.

    Args:
        config: its facts.
        body: all but the head; `head`: the whole model with a `Given` in place of its body.
        layers: what each attention layer keeps, by the layer's id, in order.
    """

    recordable = False  # its modules may ask the device for numbers, which no graph can hold

    def __init__(self, config: ModelConfig, body: nn.Module, head: nn.Module, layers: Mapping[int, LayerKV]) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.body = body
        self.head = head
        self.kept = dict(layers)
        self.caches: dict[int, tuple[LayerKV, LayerCache]] = {}

    @property
    def embed(self) -> nn.Module:
        """The embedding of the tokens."""
        return self.body.get_input_embeddings()

    def kv_layers(self) -> list[LayerKV]:
        """What each layer keeps of every token, in order of the layers."""
        return list(self.kept.values())

    def reach(self, positions: int, device: torch.device) -> None:
        """Nothing: the modules compute their positions themselves."""

    def bind(self, groups: Sequence[KVGroup], storage: Sequence[Pair]) -> None:
        """Give each layer its cache; see Decoder.bind."""
        ids, kinds = list(self.kept), self.kv_layers()
        for group in groups:
            for layer, (k, v) in zip(group.layers, storage, strict=False):
                cache = LayerCache(layer_view(k, kinds[layer]), layer_view(v, kinds[layer]), group.index)
                self.caches[ids[layer]] = (kinds[layer], cache)

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden state of each token, [T, H]; writes the tokens' keys and values."""
        return run(self.body, batch.tokens, batch.positions, Step(batch, self.caches))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, [L, H] -> [L, V]."""
        return self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]


def run(body: nn.Module, tokens: Tensor, positions: Tensor, step: Look | Step) -> Tensor:
    """Run the body over tokens [T] at their positions; attention is the step's. Returns: [T, H]."""
    rows = {"input_ids": tokens[None].long(), "position_ids": positions[None].long()}
    return body(**rows, use_cache=False, step=step).last_hidden_state[0]


def load(
    source: Source, config: Mapping[str, Any], *, dtype: str | torch.dtype, device: torch.device, load_format: str
) -> Fallback:
    """Load a checkpoint by transformers, and check that it runs over the paged cache as it does there.

    Args:
        source: its files.   config: config.json with the user's changes.
        dtype, device, load_format: as of models/registry.py::load_model.
    Raises: UnsupportedModel: transformers is not installed, does not know the architecture, or cannot run it over a
        paged cache; CheckpointError: files and config do not fit each other.
    """
    name = config["architectures"][0]
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedModel(f"Architecture {name!r} is not implemented. {CURE}.")
    import transformers

    made = getattr(transformers, name, None)
    if made is None or not getattr(made, "_supports_attention_backend", False) or load_format == "gguf":
        raise UnsupportedModel(
            f"Architecture {name!r} has no file here, and transformers cannot run it over our cache."
        )
    transformers.AttentionInterface.register(NAME, attention)
    settings = made.config_class.from_dict(dict(config))
    hf = HF(config)
    dtype = dtype if isinstance(dtype, torch.dtype) else choose_dtype(dtype, _Stored(stored_dtype(hf)), device)
    model = _weights(made, source, settings, dtype, load_format).to(device).eval()
    try:
        found = wrap(model, hf, name)
        check(model, found)
    except (UnsupportedModel, TypeError, ValueError, RuntimeError, AttributeError, KeyError) as why:
        raise UnsupportedModel(f"Architecture {name!r} has no file here, nor can transformers run it: {why}.") from why
    log.warning("%s has no file in tinyserve: it runs through transformers' modules, more slowly", name)
    return found


@frozen
class _Stored:
    """As much of a ModelConfig as `choose_dtype` reads."""

    dtype: torch.dtype | None


def _weights(made: Any, source: Source, settings: Any, dtype: torch.dtype, load_format: str) -> nn.Module:
    """Return the model, filled. Raises: CheckpointError: tensors are missing, left over, or of another shape."""
    if load_format == "dummy":
        settings._attn_implementation = NAME
        return made._from_config(settings, dtype=dtype)
    options = {"config": settings, "dtype": dtype, "attn_implementation": NAME, "local_files_only": True}
    try:
        model, told = made.from_pretrained(source.folder, output_loading_info=True, use_safetensors=True, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{source.name}: transformers cannot load it: {error}") from error
    faults = [f"{len(told[kind])} {kind}: {sorted(told[kind])[:8]}" for kind in told if told[kind]]
    if faults:
        raise CheckpointError(
            "\n  ".join(["The checkpoint does not fit the model that its config describes:", *faults])
        )
    return model


def wrap(model: nn.Module, hf: HF, name: str) -> Fallback:
    """Take a model apart into body and head, and learn what its layers keep. Raises: UnsupportedModel."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    # Heads may look for more in the record than every body gives; None stands for it.
    record = type("Record", (BaseModelOutputWithPast,), {"__getattr__": lambda self, name: None})
    body, look = model.base_model, Look()
    if body is model:
        raise UnsupportedModel("its body and its head are one")
    here = next(model.parameters()).device
    with torch.inference_mode():
        run(body, torch.zeros(2, device=here, dtype=torch.int32), torch.arange(2, device=here), look)
    text = model.config.get_text_config()
    calls, windows = list(look.calls.values()), layer_windows(text, list(look.calls.values()))
    layers = {
        key: LayerKV(call.kv_heads, call.head_dim, window)
        for key, call, window in zip(look.calls, calls, windows, strict=True)
    }
    config = ModelConfig(
        architecture=name,
        dtype=stored_dtype(hf),
        vocab_size=text.vocab_size,
        hidden=text.hidden_size,
        inner=0,
        num_layers=len(calls),
        num_heads=calls[0].heads,
        num_kv_heads=calls[0].kv_heads,
        head_dim=calls[0].head_dim,
        norm_eps=0.0,
        max_model_len=context_length(hf, context_factor(hf)),
        tied_head=bool(text.tie_word_embeddings),
        eos_ids=token_ids(hf, "eos_token_id"),
    )
    setattr(model, model.base_model_prefix, Given(record))
    return Fallback(config, body, model, layers)


def layer_windows(text: Any, calls: Sequence[Call]) -> list[int | None]:
    """Return the window of each layer: by the kinds of layers that the config lists, else as the layers state it.

    Raises: UnsupportedModel: no layer attends, or there are layers of another kind.
    """
    kinds = getattr(text, "layer_types", None)
    if kinds is None and calls and len(calls) == text.num_hidden_layers:
        return [call.window for call in calls]
    if not calls or kinds is None or len(kinds) != len(calls) or set(kinds) - {FULL, SLIDING}:
        other = sorted(set(kinds or ()) - {FULL, SLIDING})
        raise UnsupportedModel(
            f"{len(calls)} of its {text.num_hidden_layers} layers attend as ours do; others: {other}"
        )
    return [text.sliding_window if kind == SLIDING else None for kind in kinds]


def check(model: nn.Module, found: Fallback) -> None:
    """Hold the model to what transformers computes by itself: a prompt in two pieces, over a cache of a few blocks.

    Args: model: the head of `found`, whose body is put back for the comparison.
    Raises: UnsupportedModel: the logits differ.
    """
    body, stub = found.body, getattr(model, model.base_model_prefix)
    weight = next(body.parameters())
    tokens = torch.arange(CHECK_TOKENS, device=weight.device) * 7919 % found.vocab_size
    layers = found.kv_layers()
    groups = group_layers(layers)
    found.bind(groups, allocate(groups, layers, 1 + len(groups), 16, weight.dtype, weight.device))
    with torch.inference_mode():
        pieces = (tokens[:CHECK_SPLIT], 0), (tokens[CHECK_SPLIT:], CHECK_SPLIT)
        ours = torch.cat([found.logits(found(one_sequence(piece, start, len(groups)))) for piece, start in pieces])
        setattr(model, model.base_model_prefix, body)
        model.set_attn_implementation("eager")
        theirs = model(tokens[None], use_cache=False).logits[0]
        model.set_attn_implementation(NAME)
        setattr(model, model.base_model_prefix, stub)
    found.caches.clear()
    difference, size = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    if not difference <= CHECK_BOUND.get(weight.dtype, 0.1) * max(size, 1.0):
        raise UnsupportedModel(f"over a paged cache its logits differ by {difference:.2g}, of {size:.2g}")


@frozen(kw_only=True, eq=False)
class OneSequence:
    """A batch of a single sequence whose tokens stand in one block of each group."""

    tokens: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Sequence[Tensor]
    slots_to_write: Sequence[Tensor]
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    num_seqs: int = 1
    memo: dict = field(factory=dict)


def one_sequence(tokens: Tensor, start: int, groups: int, block_size: int = 16) -> OneSequence:
    """Return the batch that computes `tokens` from position `start` on; all fit into block g + 1 of group g."""
    count, end = len(tokens), start + len(tokens)
    numbers = torch.arange(start, end, device=tokens.device)
    ints = {"dtype": torch.int32, "device": tokens.device}
    return OneSequence(
        tokens=tokens.int(),
        positions=numbers.int(),
        query_start=torch.tensor([0, count], **ints),
        seq_lens=torch.tensor([end], **ints),
        block_tables=[torch.full((1, 1), group + 1, **ints) for group in range(groups)],
        slots_to_write=[numbers + block_size * (group + 1) for group in range(groups)],
        num_decodes=int(count == 1),
        max_query_len=count,
        max_seq_len=end,
    )
