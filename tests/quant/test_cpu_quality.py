"""The default precision on the real model: as good as fp32 on a fixed text, at every number of rows."""

import math
from pathlib import Path

import pytest

from tests.real_models import smollm2
from tinyserve import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

TEXT = (Path(__file__).parents[2] / "bench" / "cpu_text.txt").read_text()[:1500]


def perplexity(dtype, step):
    """Of TEXT, computed `step` tokens at a time."""
    options = {"dtype": dtype, "max_model_len": 512, "max_num_seqs": 1, "max_num_batched_tokens": step}
    with LLM(str(smollm2()), use_tqdm_on_load=False, num_gpu_blocks_override=64, **options) as llm:
        ids = llm.get_tokenizer().encode(TEXT)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        found = llm.generate([ids], params, use_tqdm=False)[0].prompt_logprobs[1:]
    return math.exp(-sum(row[token].logprob for token, row in zip(ids[1:], found, strict=True)) / (len(ids) - 1))


def test_perplexity_stays_within_two_percent_of_fp32():
    """Breaks at 1.02 for prompts (int8 products) or for decode steps (4 rows: the int4 products)."""
    exact = perplexity("float32", 512)

    assert perplexity("auto", 512) / exact == pytest.approx(1, abs=0.02)
    assert perplexity("auto", 4) / exact == pytest.approx(1, abs=0.02)
