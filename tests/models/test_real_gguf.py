"""The two real models, read from GGUF and de-quantised, choose the tokens of transformers (tests/data/ref_tokens.json).

Teacher forced: the reference's own tokens are fed, and the top token after each must be the reference's next one.
"""

import json
from pathlib import Path

import pytest

from tests import real_models
from tests.models.batching import Paged
from tinyserve.checkpoint.source import resolve
from tinyserve.models.registry import load_model

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "ref_tokens.json").read_text())
pytestmark = pytest.mark.model


def first_difference(path, prompts, count):
    """Feeds all prompts as one batch; returns (prompt, step, wanted, got) of the first token that differs, or None."""
    paged = Paged(load_model(resolve(str(path)), dtype="float32"), block_size=16, num_blocks=256)
    rows, asked = {}, {}
    for name, prompt in prompts.items():
        rows[name] = paged.add(prompt["prompt_ids"] + prompt["new_ids"][: count - 1])
        asked[rows[name]] = len(prompt["prompt_ids"]) + count - 1
    logits = paged.step(asked)
    for name, prompt in prompts.items():
        chosen = logits[rows[name]][len(prompt["prompt_ids"]) - 1 :].argmax(-1).tolist()
        for step, (wanted, got) in enumerate(zip(prompt["new_ids"][:count], chosen, strict=True)):
            if wanted != got:
                return name, step, wanted, got
    return None


def test_smollm2_chooses_the_reference_tokens():
    """64 tokens of each of 7 prompts; the smallest gap to the second choice is 0.0018."""
    assert first_difference(real_models.smollm2(), REFERENCE["smollm2"]["prompts"], 64) is None


def test_gemma3_chooses_the_reference_tokens():
    """24 tokens of each of 5 prompts."""
    assert first_difference(real_models.gemma3(), REFERENCE["gemma3"]["prompts"], 24) is None
