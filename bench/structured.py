"""What a grammar costs: 64 sequences that are all held to a JSON schema, beside the same without, on one device.

    python bench/structured.py --model FOLDER [--batch 64] [--out 256] [--device cuda] [--workers 8]

FOLDER holds a config.json; weights are random numbers. The vocabulary is made up: bytes, and random words up to the
model's size, so that a mask has the real number of bits. The schemas never end, so all runs give equally many tokens:
records of an enum, a number and a flag; the same with a text, which noise hardly ever ends; and with a text of at most
20 letters, near whose end the library looks at the whole vocabulary, which takes milliseconds. The process is set as
the server sets its own. Prints a line for each: tokens a second, the ratio to none, what masks take of the loop, those
that it waits for included, and what one takes of a worker.
"""

import argparse
import asyncio
import json
import random
import sys
import time

from attrs import evolve

from tinyserve.cli.process import SWITCH_INTERVAL, keep_loaded
from tinyserve.config import CacheOptions, EngineConfig, LoadOptions, ModelOptions, SchedulerOptions
from tinyserve.engine.assemble import assemble
from tinyserve.engine.engine import Engine
from tinyserve.engine.parts import Phases, load_parts
from tinyserve.grammar import replicas
from tinyserve.request import SamplingParams
from tinyserve.text.tokenizer import TokenizerFacts

KINDS = {"enum": ["small", "middle", "large"]}
FIELDS = {"kind": KINDS, "size": {"type": "integer"}, "open": {"type": "boolean"}}


def records(**more: dict) -> dict:
    """The form of a list without an end, of records with these fields more."""
    row = {"type": "object", "properties": {**FIELDS, **more}, "required": [*FIELDS, *more]}
    return {"json": {"type": "array", "minItems": 100_000, "items": row}}


FORMS = {
    "none": None,
    "records": records(),
    "text": records(name={"type": "string"}),
    "bounded text": records(name={"type": "string", "maxLength": 20}),
}


class MadeUp:
    """A vocabulary of any size: 256 bytes, then words, spaces with words, and marks of JSON."""

    special_ids = frozenset({256})
    bytewise = True
    facts = TokenizerFacts()

    def __init__(self, size: int) -> None:
        draw = random.Random(0)
        marks = ['{"', '":', '",', '"}', "},", "[{", "}]", '": "', '", "', "\n  ", " {"]
        words = [bytes([byte]) for byte in range(256)] + [b"<end>"] + [mark.encode() for mark in marks]
        while len(words) < size:
            word = "".join(draw.choices("etaoinshrdlucmfwypvbgkjqxz", k=draw.randint(2, 9)))
            words.append(draw.choice(["", " "]).encode() + word.encode())
        self.words = words[:size]
        self.vocab_size = size

    def token_bytes(self, index: int) -> bytes:
        return self.words[index] if index < len(self.words) else b""

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        return list(text.encode())


async def run(engine: Engine, batch: int, out: int, form: dict | None) -> float:
    """Tokens a second of a batch."""
    params = SamplingParams(
        temperature=1.0, seed=0, max_tokens=out, ignore_eos=True, detokenize=False, structured_outputs=form
    )

    async def one(number: int) -> int:
        count = 0
        async for output in engine.generate([1 + number] * 128, evolve(params, seed=number)):
            count += len(output.token_ids)
        return count

    start = time.perf_counter()
    counts = await asyncio.gather(*(one(number) for number in range(batch)))
    return sum(counts) / (time.perf_counter() - start)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", type=int, help="processes that compute masks [as the server has them]")
    args = parser.parse_args()
    if args.workers is not None:
        replicas.usual_workers = lambda cores: args.workers
    config = EngineConfig(
        model=ModelOptions(model=args.model, max_model_len=args.out + 136, device=args.device),
        load=LoadOptions(load_format="dummy", use_tqdm_on_load=False),
        cache=CacheOptions(enable_prefix_caching=False),
        scheduler=SchedulerOptions(max_num_seqs=args.batch),
    )
    parts = load_parts(config, Phases())
    parts.tokenizer, parts.eos_ids = MadeUp(parts.model.vocab_size), frozenset({256})
    engine = await Engine.start(config, parts=parts, machine=await asyncio.to_thread(assemble, config, parts, Phases()))
    await asyncio.to_thread(engine.machine.grammars.warm)
    masks = engine.machine.masks
    masks.replicas.start()
    for _ in range(600):
        if masks.replicas.workers < masks.replicas.count:
            await asyncio.sleep(0.05)
    sys.setswitchinterval(SWITCH_INTERVAL)
    keep_loaded()
    while engine.machine.runner.graphs.next() is not None:
        await asyncio.sleep(0.05)  # idle, so that they are recorded
    free = None
    for name, form in FORMS.items():
        await run(engine, args.batch, 16, form)
        masks.seconds, masks.rows, before = 0.0, 0, masks.replicas.spent
        rate = max([await run(engine, args.batch, args.out, form) for _ in range(args.runs)])
        free = free or rate
        row = {"form": name, "tok_s": round(rate, 1), "ratio": round(rate / free, 3)}
        if form:
            row["mask_us_per_row"] = round(1e6 * masks.seconds / max(1, masks.rows), 1)
            row["mask_us_per_step"] = round(1e6 * masks.seconds / (args.runs * args.out), 1)
            seconds, made = (now - then for now, then in zip(masks.replicas.spent, before, strict=True))
            row["workers"], row["workers_us_per_mask"] = masks.replicas.workers, round(1e6 * seconds / max(1, made), 1)
            row["made_by_workers"] = round(made / max(1, masks.rows), 3)
        print(json.dumps(row), flush=True)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
