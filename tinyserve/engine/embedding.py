"""Vectors for texts: the hidden state of a text's last token, of length 1.

A text is computed like the prompt of a request for one token, which nobody sees: it shares steps, blocks and the prefix
cache with everything else, and its last position has seen all of it.

Before: intake.py (Call), runner/pooled.py (where the vector comes from).  After: llm.py, server/embeddings.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import numpy as np

from ..errors import EngineError, Overloaded
from ..request import FinishReason, Output, PoolingParams, SamplingParams
from .intake import Call
from .outputs import EmbeddingOutput, EmbeddingRequestOutput

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
_POOLED = PoolingParams()


class Front(Protocol):
    """What is needed of the engine."""

    def outputs(self, call: Call) -> AsyncGenerator[Output, None]:
        """Queue a call and yield its outputs."""
        ...


async def embed(engine: Front, prompt: Any, *, normalize: bool = True, **options: Any) -> EmbeddingRequestOutput:
    """The vector [H] float32 of one prompt.

    Args: normalize: scale it to length 1.   options: more of Call: request_id, priority, cache_salt ...
    Raises: RequestError, Overloaded (also when it was aborted), EngineError.
    """
    call = Call(prompt=prompt, sampling=ONE_TOKEN, pooling=_POOLED, **options)
    async with aclosing(engine.outputs(call)) as outputs:
        async for output in outputs:
            if output.error is not None:
                raise output.error
            if output.pooled is not None:
                vector = np.array(output.pooled, dtype=np.float32)
                if normalize:
                    vector /= max(float(np.linalg.norm(vector)), 1e-12)
                usage = output.usage
                return EmbeddingRequestOutput(
                    output.request_id, EmbeddingOutput(vector), usage.prompt_tokens, usage.cached_tokens
                )
            if output.finish_reason is FinishReason.ABORT:
                raise Overloaded("The request was aborted.")
    raise EngineError("The model gave no vector.")
