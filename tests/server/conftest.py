"""A fake engine with the real one's face: byte tokens, scripted answers, and a count of what runs."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from tests.served import in_process, listening, strict
from tinyserve import config
from tinyserve.engine.adapters import NoDesk
from tinyserve.errors import ContextLengthExceeded, NumericsError, RequestError
from tinyserve.request import FinishReason, Logprob, Output, Usage
from tinyserve.server.face import Service
from tinyserve.telemetry import Metrics
from tinyserve.text.parsers.registry import Parsing

END = 260
NAMES = {259: "<|bos|>", 260: "<|eos|>"}


class ByteTokenizer:
    """Ids 0..255 are bytes; 259 <|bos|>, 260 <|eos|>."""

    vocab_size = 266

    def encode(self, text, *, add_special_tokens=True, limit=None):
        return list(text.encode())[: None if limit is None else limit + 1]

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else NAMES.get(token, "").encode()

    def decode(self, ids, *, skip_special_tokens=True):
        return b"".join(self.token_bytes(i) for i in ids if i < 256 or not skip_special_tokens).decode(
            "utf-8", "replace"
        )


class FakeEngine:
    """Answers every prompt with `script`, one token a step, then the end token.

    Args:
        delay: seconds per step.   fail_at: step at which NumericsError comes, or None.
        queued: an event that a request waits for before its first step, or None.
    """

    def __init__(self, script=b"abc", *, delay=0.0, fail_at=None, max_model_len=256, queued=None):
        self.script, self.delay, self.fail_at, self.queued = list(script), delay, fail_at, queued
        self.max_model_len = max_model_len
        self.tokenizer = ByteTokenizer()
        self.parsing = Parsing()
        self.served_names = ("tiny", "alias")
        self.adapters = NoDesk()
        self.default_sampling = {}
        self.metrics = Metrics("tiny", log=False)
        self.running = self.started = self.ended = self.steps = 0
        self.calls, self.chats = [], []
        self.dead = None
        self.closing = asyncio.Event()
        self.stalled_seconds = 0.0

    def check_health(self):
        if self.dead:
            raise self.dead

    async def tokenize(self, prompt, **options):
        return self.tokenizer.encode(prompt, **options)

    async def encode_chat(self, messages, **options):
        self.chats.append((messages, options))
        text = "".join(f"[{m['role']}]{m.get('content') or ''}" for m in messages)
        ids = [259, *self.tokenizer.encode(text + "[assistant]" * options["add_generation_prompt"])]
        if len(ids) >= self.max_model_len:
            raise ContextLengthExceeded(len(ids), self.max_model_len)
        return ids

    async def generate(self, prompt, sampling=None, **options) -> AsyncIterator[Output]:
        self.calls.append((list(prompt), sampling, options))
        if sampling.logprobs is not None and sampling.logprobs > 20:
            raise RequestError("logprobs: at most 20", param="logprobs")
        if len(prompt) >= self.max_model_len:
            raise ContextLengthExceeded(len(prompt), self.max_model_len)
        self.running += sampling.n
        self.started += 1
        try:
            if self.queued is not None:
                await self.queued.wait()
            limit = self.max_model_len - len(prompt) if sampling.max_tokens is None else sampling.max_tokens
            for step in range(max(limit, 1)):
                await asyncio.sleep(self.delay)
                self.steps += 1
                for index in range(sampling.n):
                    yield self._output(prompt, sampling, step, limit, index)
                if self._last(step, limit) or self.closing.is_set():
                    return
        finally:
            self.ended += 1
            self.running -= sampling.n

    def _last(self, step, limit):
        return step + 1 >= limit or step >= len(self.script)

    def _output(self, prompt, sampling, step, limit, index):
        usage = Usage(prompt_tokens=len(prompt), completion_tokens=min(step + 1, limit), cached_tokens=2)
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None and step == 0:
            prompt_logprobs = (None, *({token: Logprob(-1.5, 1, chr(token))} for token in prompt[1:]))
        base = {"request_id": "x", "index": index, "usage": usage, "prompt_logprobs": prompt_logprobs}
        if self.closing.is_set():
            return Output(**base, finish_reason=FinishReason.ABORT)
        if limit == 0:
            return Output(**base, finish_reason=FinishReason.LENGTH)
        if step == self.fail_at:
            return Output(**base, finish_reason=FinishReason.ERROR, error=NumericsError("The model produced NaN."))
        token = self.script[step] if step < len(self.script) else END
        entry = None
        if sampling.logprobs is not None:
            entry = ({token: Logprob(float("-inf") if token == 33 else -0.5, 1, self.tokenizer.decode([token]))},)
        reason = FinishReason.STOP if token == END else FinishReason.LENGTH if step + 1 >= limit else None
        text = self.tokenizer.decode([token])
        return Output(**base, text=text, token_ids=(token,), logprobs=entry, finish_reason=reason)

    def stats(self):
        return SimpleNamespace(running=self.running, waiting=0, deferred=0, kv_usage=0.0)

    def progress(self, request_id):
        return 0, 0, 1

    async def beam_search(self, prompt, params, **options):
        def beam(text, reason, last):
            tokens = [*text.encode(), *last]
            logprobs = [{token: Logprob(-0.5, 1, chr(token))} for token in tokens]
            return SimpleNamespace(
                tokens=[*prompt, *tokens], answer=text, logprobs=logprobs, finish_reason=reason, stop_reason=None
            )

        return SimpleNamespace(sequences=[beam("abc", "length", []), beam("ab", "stop", [END])][: params.beam_width])

    async def close(self, drain_seconds=0.0):
        self.closing.set()


def service_of(engine, **options):
    return Service(config.build({"model": "tiny-folder", **options}), engine)


def client_of(engine, **options):
    """An httpx client that calls the app in process."""
    return in_process(service_of(engine, **options))


def serving(engine, **options):
    """The Server of an engine on a socket, for a block."""
    return listening(service_of(engine, port=0, **options))


def events(response):
    """The data of a stream's events, checked: one id, [DONE] last, one finish reason per choice."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    found = [strict(block.removeprefix("data: ")) for block in blocks]
    chunks = [chunk for chunk in found if "error" not in chunk]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) <= 1
    if len(chunks) == len(found):
        finished = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"] is not None]
        assert sorted(finished) == sorted({c["index"] for chunk in chunks for c in chunk["choices"]})
    return found


def named_events(response):
    """The data of a stream's events, each named as its data says."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(strict(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
    return found


def numbered_events(response):
    """The same of the responses API: numbered from 0 without a gap."""
    found = named_events(response)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def refused(response, status, param=None):
    """Check an error's shape; returns its message."""
    assert response.status_code == status, response.text
    error = strict(response.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param, error
    return error["message"]


@pytest.fixture
def run():
    """Run a coroutine in a loop of its own, for at most 30 seconds."""
    return lambda coroutine: asyncio.run(asyncio.wait_for(coroutine, 30))
