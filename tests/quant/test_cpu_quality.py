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
    """Breaks at 1.02 for prompts (dense copies) or for decode steps (4 rows: int4 products; 8: dense)."""
    exact = perplexity("float32", 512)

    assert perplexity("auto", 512) / exact == pytest.approx(1, abs=0.02)
    assert perplexity("auto", 4) / exact == pytest.approx(1, abs=0.02)
    assert perplexity("auto", 8) / exact == pytest.approx(1, abs=0.02)


def test_the_default_precision_answers_the_first_question_that_anybody_asks():
    """Breaks if prompts are computed with 8 bits of their inputs: then the answer is in French, and wrong."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM(str(smollm2()), use_tqdm_on_load=False, max_model_len=512, num_gpu_blocks_override=64) as llm:
        for prompts in ([question], [question], [question] * 7):  # alone; with its prefix cached; in a batch
            results = llm.chat(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
            assert all("Paris" in result.outputs[0].text for result in results)
