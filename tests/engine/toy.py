"""An engine without torch: the real scheduler, cache, tokenizer and streams around a runner that follows a rule.

`ToyRunner(rule)` keeps the rows as the device would (it is told differences only) and chooses every token by
`rule(tokens so far, prompt length) -> {token: logprob}`, so that any schedule must give the same answer.
"""

import asyncio
import math
import random
import threading
import time
from functools import cache

from tokenizers import processors

from tests.scripted import byte_tokenizer
from tinyserve.config import build
from tinyserve.engine.assemble import Machine
from tinyserve.engine.engine import Engine
from tinyserve.engine.parts import Parts
from tinyserve.kv.cache import KVCache
from tinyserve.kv.groups import KVGroup
from tinyserve.runner.flight import Flight
from tinyserve.runner.workers import Workers
from tinyserve.scheduling.scheduler import Scheduler
from tinyserve.step import SliceOutput, StepOutput, TokenLogprobs
from tinyserve.text.tokenizer import Tokenizer, TokenizerFacts

VOCAB, EOS, EOT, CONTEXT = 320, 260, 261, 256


def script(*ids):
    """A rule: ids[k] at step k, then the end token."""

    def rule(tokens, prompt_len):
        step = len(tokens) - prompt_len
        return {(ids[step] if step < len(ids) else EOS): -0.1, 33: -3.0, 34: -4.0}

    return rule


def letters(tokens, prompt_len):
    """A rule: a letter that depends on all tokens before, never an end token."""
    mixed = random.Random(hash(tuple(tokens))).sample(range(97, 107), 4)
    return dict(zip(mixed, (-0.5, -1.5, -2.5, -3.5), strict=True))


class ToyRunner:
    """Runs steps on one thread. seconds: of a step; fail_at: step that raises; gate: while not set, steps wait."""

    def __init__(self, rule, *, seconds=0.0, fail_at=None, bad=()):
        self.rule, self.seconds, self.fail_at, self.bad = rule, seconds, fail_at, set(bad)
        self.rows = {}
        self.steps = 0
        self.gate = threading.Event()
        self.gate.set()
        self.worker = Workers("toy")
        self.closed = False

    def launch(self, step):
        return Flight(step.step_id, self.worker.submit(self.run, step))

    def improve(self):
        return False

    def close(self):
        self.closed = True
        self.worker.close()

    def run(self, step):
        self.gate.wait(30)
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("the device fell off the bus")
        time.sleep(self.seconds)
        for slot in step.closed:
            self.rows.pop(slot, None)
        for opening in step.opened:
            self.rows[opening.slot] = (list(opening.tokens), opening.prompt_len, opening.params)
        return StepOutput(step.step_id, tuple(self.slice(piece) for piece in step.slices))

    def slice(self, piece):
        tokens, prompt_len, params = self.rows[piece.slot]
        assert piece.end <= len(tokens), "a position is computed before its token exists"
        prompt = None
        if params.scores_from() is not None:
            ends = range(max(piece.start, params.scores_from()), min(piece.end, prompt_len - 1))
            rows = {params.prompt_start + i: row for i, row in enumerate(params.prompt_ids)}
            count = params.prompt_logprobs or 0
            prompt = tuple(self.record(tokens[: p + 1], 1, tokens[p + 1], count, rows.get(p, ())) for p in ends)
        if not piece.samples:
            return SliceOutput(piece.slot, prompt_logprobs=prompt)
        scores = self.rule(tokens[: piece.end], prompt_len)
        if params.allowed is not None:
            scores = {token: score for token, score in scores.items() if token in params.allowed} or {0: 0.0}
        token = max(scores, key=scores.get)
        if params.temperature > 0:
            draw = random.Random(hash((params.seed, piece.end)))
            token = draw.choices(list(scores), [math.exp(s / params.temperature) for s in scores.values()])[0]
        bad = (tokens[0], piece.end - prompt_len) in self.bad
        tokens[piece.end :] = [token]
        logprobs = None
        if params.logprobs is not None:
            logprobs = (self.record(tokens[: piece.end], prompt_len, token, params.logprobs, params.logprob_ids),)
        pooled = (float(tokens[piece.end - 1]), 1.0) if params.pooled else None
        return SliceOutput(piece.slot, (token,), logprobs, prompt, pooled, bad=bad)

    def record(self, tokens, prompt_len, token, count, asked=()):
        scores = self.rule(tokens, prompt_len)
        order = sorted(scores, key=lambda one: -scores[one])
        top = order if count == -1 else order[:count]
        rank = 1 + order.index(token) if token in scores else len(order) + 1
        named = tuple(-math.inf if t == -1 else scores.get(t, -20.0) for t in asked)
        return TokenLogprobs(token, scores.get(token, -20.0), rank, tuple(top), tuple(scores[t] for t in top), named)


@cache
def tokenizer(add_bos=False):
    """The byte tokenizer of the fixtures, as the engine sees tokenizers."""
    raw = byte_tokenizer()
    if add_bos:
        raw.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", 259)])
    return Tokenizer(raw, TokenizerFacts(special_tokens={"bos_token": "<|bos|>", "eos_token": "<|eos|>"}))


def make_parts(**changes):
    """Parts without a model."""
    values = {"model": None, "tokenizer": tokenizer(), "max_model_len": CONTEXT, "eos_ids": {EOS}}
    return Parts(**values | changes)


def machine(rule, *, blocks=200, depth=2, runner=None, **options):
    """A config and a machine around `rule`."""
    config = build({"model": "toy", "disable_log_stats": True, "depth": depth, **options}).resolve("cpu")
    kv = KVCache((KVGroup(0, None, (0,)),), blocks, 16, enable_prefix_caching=True)
    made = Machine(
        scheduler=Scheduler(config.scheduler, kv, max_model_len=CONTEXT),
        runner=runner or ToyRunner(rule),
        cache=kv,
        vocab_size=VOCAB,
        max_model_len=CONTEXT,
        depth=depth,
    )
    return config, made


async def start(rule=letters, *, parts=None, **options):
    """A running engine around `rule`."""
    config, made = machine(rule, **options)
    return await Engine.start(config, parts=parts or make_parts(), machine=made)


async def answer(outputs):
    """All of a call's outputs, as (texts by index, ids by index, last outputs by index, all outputs)."""
    texts, ids, last, pieces = {}, {}, {}, []
    async for output in outputs:
        texts[output.index] = texts.get(output.index, "") + output.text
        ids[output.index] = ids.get(output.index, ()) + output.token_ids
        last[output.index] = output
        pieces.append(output)
    return texts, ids, last, pieces


def assert_idle(engine):
    """Everything is given back: the counts are those of the start, and the cache is whole."""
    scheduler = engine.machine.scheduler
    scheduler.check_integrity()
    assert not scheduler.has_work
    assert len(engine.streams) == 0


async def settle(engine):
    """Wait until no step is under way."""
    await asyncio.wait_for(engine.streams.empty.wait(), 5)
    await asyncio.wait_for(engine._landed.wait(), 5)
