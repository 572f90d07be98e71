"""Ids that a request names, scored by a real model and compared with transformers."""

import pytest
import torch

from tests.cases.harness import VOCAB, Oracle, write_tiny
from tinyserve.engine.llm import LLM
from tinyserve.request import SamplingParams

PROMPT = [97 + (i * i) % 23 for i in range(30)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 4}], ids=["whole", "chunks"])
def test_named_ids_have_the_log_probabilities_of_transformers(tiny, options):
    """Teacher scoring from position 11 of 30 (18 rows of 5 ids) and two ids for each new token, within 1e-3; beside
    other requests, and with the prompt cut at 8 tokens."""
    oracle = Oracle(tiny)
    ids = torch.randint(0, VOCAB, (18, 5), generator=torch.Generator().manual_seed(1))
    asked = SamplingParams(
        temperature=0, max_tokens=4, logprobs=0, logprob_token_ids=[98, 300],
        prompt_logprob_token_ids=ids.numpy(), prompt_logprob_start=11,
    )  # fmt: skip
    plain = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(tiny), dtype="float32", max_model_len=64, num_gpu_blocks_override=64, **options) as llm:
        result = llm.generate([PROMPT, PROMPT, PROMPT[:7]], [plain, asked, plain], use_tqdm=False)[1]

    right = oracle.logits(PROMPT).log_softmax(-1)[11:29].gather(1, ids)
    assert torch.from_numpy(result.prompt_token_id_logprobs).sub(right).abs().max() < 1e-3
    known = list(PROMPT)
    for token, entry in zip(result.outputs[0].token_ids, result.outputs[0].logprobs, strict=True):
        scores = oracle.logits(known)[-1].log_softmax(-1)
        assert {id: one.logprob for id, one in entry.items()} == pytest.approx(
            {id: scores[id].item() for id in {token, 98, 300}}, abs=1e-3
        )
        known.append(token)
