"""What the linear layers of a model get to see when it reads a text: the sums of x xᵀ that quant/compensate.py needs.

The model is loaded as it is served, one text goes through it in prompts of `PROMPT` tokens, and each layer adds up its
inputs. A sum has as many numbers as a layer has inputs, squared, so only as many layers as fit in `SUM_BYTES`, and in
half of what the device has free, add up at a time; the text is read once for each such share of the layers. Experts,
which see few tokens each, are not watched.

Before: engine/llm.py, layers/linear.py.  After: quantize.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError

PROMPT = 512  # tokens
MOST_TOKENS = 131072
SUM_BYTES = 8 << 30


class Watching:
    """A layer's format that adds up what it multiplies. Args: format: the layer's own."""

    def __init__(self, format: Any) -> None:
        self.names = format.names
        self.total: Any = None
        self._format = format

    def matmul(self, x: Any, layer: Any) -> Any:
        """The layer's product; x [T, inputs] is added to the sum."""
        wide = x.float()
        part = wide.t() @ wide
        self.total = part if self.total is None else self.total.add_(part)
        return self._format.matmul(x, layer)


def read_text(path: Path) -> str:
    """Return a text. Raises: ConfigError: it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--calibrate {path}: not a text that can be read ({error}).") from None


def sums(model: str, text: str) -> Iterator[tuple[str, Any]]:
    """Yield each linear layer's name in the checkpoint, one for each of its parts, and its sum [K, K] float32.

    Raises: ConfigError: the text is too short.
    """
    from ..checkpoint.load import targets
    from ..checkpoint.table import sources
    from ..engine.llm import LLM
    from ..layers.linear import Linear
    from ..models.registry import family
    from ..request import SamplingParams

    options = {"max_num_batched_tokens": PROMPT, "max_num_seqs": 1}
    options |= {"num_gpu_blocks_override": 2 * PROMPT // 16, "block_size": 16, "enable_prefix_caching": False}
    with LLM(model, enforce_eager=True, use_tqdm_on_load=False, **options) as llm:
        ids = llm.get_tokenizer().encode(text)[:MOST_TOKENS]
        if len(ids) < 64:
            raise ConfigError(f"--calibrate: {len(ids)} tokens of text are too few to calibrate with; give thousands.")
        size = min(PROMPT, llm.engine.max_model_len - 1)
        prompts = [ids[start : start + size] for start in range(0, len(ids), size)]
        read = SamplingParams(max_tokens=1, prompt_logprobs=0)  # so that the last layer computes all tokens, too
        own = llm.engine.machine.runner.model
        weights = family(own.config.architecture).WEIGHTS
        linear = [(path, one) for path, one in targets(own) if isinstance(one, Linear) and path != "head"]
        most = min(SUM_BYTES, llm.engine.machine.runner.device.memory().free_bytes // 2)
        for share in shares(linear, most):
            formats = [layer.format for _, layer in share]
            for _, layer in share:
                layer.format = Watching(layer.format)
            llm.generate(prompts, read, use_tqdm=False)
            for (path, layer), before in zip(share, formats, strict=True):
                watched, layer.format = layer.format, before
                for name in sources(weights, path, len(layer.parts)) if watched.total is not None else ():
                    yield name, watched.total


def shares(layers: list[tuple[str, Any]], most: int) -> Iterator[list[tuple[str, Any]]]:
    """Cut the layers in shares whose sums take at most so many bytes, or of one layer each."""
    share: list[tuple[str, Any]] = []
    size = 0
    for path, layer in layers:
        if share and size + 4 * layer.inputs**2 > most:
            yield share
            share, size = [], 0
        share.append((path, layer))
        size += 4 * layer.inputs**2
    if share:
        yield share
