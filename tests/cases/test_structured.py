"""Structured output with everything else: n, seeds, penalties, stops, chunks, preemption, steps in flight, thoughts."""

import asyncio
import json
import math
import re
import threading
import weakref

import pytest
import torch

from tests.scripted import END_THINK, THINK, VOCAB, FlatModel, ScriptModel, byte_tokenizer

from .harness import CHAT, HI, TEXT, eventually, serving

pytestmark = pytest.mark.anyio
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORM = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
ASK = {"model": "tiny", "prompt": "q" * 20, "max_tokens": 150, "temperature": 1, **FORM}
BODIES = [
    {**ASK, "seed": 3, "n": 3},
    {**ASK, "seed": 4, "logprobs": 2, "frequency_penalty": 0.4},
    {**ASK, "seed": 5, "min_tokens": 30},
    {**ASK, "seed": 6, "structured_outputs": {"regex": "(ab|cd){3,20}"}, "presence_penalty": 1.0},
    {**ASK, "seed": 7, "structured_outputs": {"choice": ["alpha", "beta", "alphabet"]}, "ignore_eos": True},
    {"model": "tiny", "prompt": "free", "max_tokens": 40, "temperature": 1, "seed": 8},
    {"model": "tiny", "prompt": "free too", "max_tokens": 40, "temperature": 0, "logprobs": 1},
]


class Waves(ScriptModel):
    """Logits that depend on the step and the first token of the prompt alone, to the last bit, in any batch."""

    def logits(self, hidden):
        tokens = torch.arange(VOCAB, dtype=torch.float64)
        rows = [4 * torch.sin(tokens * 12.9898 + step * 78.233 + first) for step, first in hidden.tolist()]
        return torch.stack(rows).float()


def check(body, choice):
    """What ended by itself satisfies its grammar."""
    form = body.get("structured_outputs")
    if form is None or choice["finish_reason"] != "stop":
        return
    if "json" in form:
        value = json.loads(choice["text"])
        assert set(value) == {"a", "b"} and len(value["a"]) <= 3 and value["b"] in ("x", "y")
    elif "regex" in form:
        assert re.fullmatch(form["regex"], choice["text"])
    else:
        assert choice["text"] in form["choice"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"depth": 2},
        {"depth": 2, "max_num_batched_tokens": 8, "enable_prefix_caching": False},
        {"depth": 2, "num_gpu_blocks_override": 18},
    ],
)
async def test_answers_do_not_depend_on_the_schedule(tok, options):
    """All together equal each alone with one step in flight; free answers are those without constrained neighbours."""
    async with serving(Waves(), tok) as server:
        alone = [(await server.ask(TEXT, body)).choices for body in BODIES]
    async with serving(Waves(), tok, **options) as server:
        for body in BODIES:  # so that their grammars are there, and all run together
            await server.ask(TEXT, {**body, "max_tokens": 1, "min_tokens": 0})
        together = await asyncio.gather(*(server.ask(TEXT, body) for body in BODIES))
        if options.get("num_gpu_blocks_override"):
            assert server.scheduler.stats().preemptions > 0
    for body, reply, expected in zip(BODIES, together, alone, strict=True):
        assert [c["text"] for c in reply.choices] == [c["text"] for c in expected]
        assert [c["finish_reason"] for c in reply.choices] == [c["finish_reason"] for c in expected]
        for choice in reply.choices:
            check(body, choice)
    assert sum(c["finish_reason"] == "stop" for reply in together for c in reply.choices) >= 6


class Queueing:
    """A device that takes launches on the caller's thread, as a GPU does; the numbers are the CPU's."""

    is_cpu = False

    def __init__(self, device):
        self._device = device

    def __getattr__(self, name):
        return getattr(self._device, name)


def wiped(bits):
    bits[:] = 0
    return bits


async def test_forwards_run_before_the_mask_is_known(tok):
    """Two steps in flight: constrained rows are in every step, and what they say stays the same. Nobody looks at masks
    any more when those of the next step begin: their memory is wiped then."""
    async with serving(Waves(), tok) as server:
        alone = [(await server.ask(TEXT, body)).texts for body in BODIES]
    async with serving(Waves(), tok, depth=2) as server:
        runner, early = server.engine.machine.runner, []
        pool = server.engine.machine.masks
        buffer, pool._buffer = pool._buffer, lambda *size: wiped(buffer(*size))
        runner.device, launch = Queueing(runner.device), runner._launch_early
        runner._launch_early = lambda step: early.append(step) or launch(step)
        together = await asyncio.gather(*(server.ask(TEXT, body) for body in BODIES))
    assert [reply.texts for reply in together] == alone
    assert len(early) > 20


async def test_one_request_waits_for_its_grammar_and_others_do_not(tok):
    """While a grammar compiles: its request waits, others run; it can be aborted; then it is answered."""
    async with serving(ScriptModel([97] * 8), tok) as server:
        grammars = server.engine.machine.grammars
        gate = asyncio.Event()
        loop, compiling = asyncio.get_running_loop(), grammars._compile

        def slow(*given):
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(20)
            return compiling(*given)

        grammars._compile = slow
        body = {"model": "tiny", "prompt": "x", "max_tokens": 5, "structured_outputs": {"regex": "b{3}"}}
        waiting = asyncio.create_task(server.ask(TEXT, body))
        gone = asyncio.create_task(server.ask(TEXT, {**body, "structured_outputs": {"regex": "c"}}))
        broken = asyncio.create_task(server.ask(TEXT, {**body, "structured_outputs": {"regex": "("}}))
        await eventually(lambda: server.scheduler.num_waiting == 3)
        assert (await server.ask(TEXT, {"model": "tiny", "prompt": "x", "max_tokens": 5})).text == "aaaaa"
        assert (server.scheduler.num_waiting, server.scheduler.num_running) == (3, 0)
        gone.cancel()
        await eventually(lambda: server.scheduler.num_waiting == 2)
        gate.set()
        assert (await waiting).text == "bbb"
        assert (await broken).status == 400


async def test_a_grammar_that_only_waited_for_others_is_asked_for_later(tok, monkeypatch):
    """Behind grammars of others that took their time it was a 400, "make it simpler". It is compiled meanwhile,
    and there when it is asked for again."""
    async with serving(ScriptModel([98] * 8), tok) as server:
        grammars, gate, held = server.engine.machine.grammars, threading.Event(), threading.Event()
        compiling = grammars._compile

        def slow(*given):
            held.set()
            assert gate.wait(60)
            return compiling(*given)

        grammars._compile = slow
        body = {"model": "tiny", "prompt": "x", "max_tokens": 5, "structured_outputs": {"regex": "b{3}"}}
        others = asyncio.create_task(server.ask(TEXT, {**body, "structured_outputs": {"regex": "b{2}"}}))
        await eventually(held.is_set, 30)
        monkeypatch.setattr("tinyserve.engine.admission.WAIT_SECONDS", 0.05)
        late = await server.http.post(TEXT, json=body)
        again = await server.http.post(
            CHAT, json={**HI, "stream": True, "structured_outputs": body["structured_outputs"]}
        )
        monkeypatch.undo()
        gate.set()
        assert (late.status_code, again.status_code) == (503, 503) and "grammars of other requests" in late.text
        assert int(late.headers["retry-after"]) >= 1
        assert (await others).texts == ["bb"] and (await server.ask(TEXT, body)).texts == ["bbb"]


async def test_json_mode_ends_however_much_the_model_likes_blanks(tok):
    """A model that always prefers a line break, or the digit 1."""
    for liked in (10, 49):
        async with serving(ScriptModel([liked] * 400), tok) as server:
            body = {**HI, "temperature": 0, "max_tokens": 230}
            schema = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
            form = {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}},
            }
            reply = await server.ask(CHAT, {**body, "response_format": form})
            assert reply.reason == "stop" and set(json.loads(reply.text)) == {"a"}


NUMBER = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "mistral", "none"])
async def test_numbers_of_forced_calls_end(tok, parser):
    """In the arguments of a call: a model that always prefers the digit 1 comes to an end, which is no infinity."""
    tool = {"type": "function", "function": {"name": "f", "parameters": NUMBER}}
    async with serving(ScriptModel([49] * 400), tok, tool_call_parser=parser) as server:
        forced = {**HI, "temperature": 0, "max_tokens": 230, "tools": [tool], "tool_choice": "required"}
        reply = await server.ask(CHAT, {**forced, "parallel_tool_calls": False})
        (call,) = reply.choices[0]["message"]["tool_calls"]
        assert reply.reason == "tool_calls"
        assert math.isfinite(json.loads(call["function"]["arguments"])["n"])


async def test_hidden_thoughts_are_not_told_by_their_tokens(tok):
    """include_reasoning false with logprobs and ids, which would spell the thought; whole and streamed."""
    script = [THINK, *b"secret", END_THINK, *b"hello"]
    asked = {**HI, "temperature": 0, "max_tokens": 40, "include_reasoning": False, "logprobs": True, "top_logprobs": 2}
    async with serving(ScriptModel(script), tok, reasoning_parser="qwen3") as server:
        whole, stream = await server.both(CHAT, {**asked, "return_token_ids": True})
        assert whole.text == "hello" and whole.body["prompt_token_ids"]
        for choice in (*whole.choices, *(choice for chunk in stream.chunks for choice in chunk["choices"])):
            assert choice.get("logprobs") is None and choice.get("token_ids") is None
        shown, _ = await server.both(CHAT, {**asked, "include_reasoning": True})
        assert len(shown.logprobs["content"]) == 14


async def test_stop_strings_cut_a_form(tok):
    """A stop string ends a constrained answer as it ends any other."""
    async with serving(ScriptModel(byte_tokenizer().encode("abcdef").ids), tok) as server:
        body = {"prompt": "x", "structured_outputs": {"regex": "[a-z]+"}, "stop": ["cd"], "temperature": 0}
        assert await server.text(body) == "ab"


async def test_a_form_holds_behind_the_thought(tok):
    """The thought is free, the answer is not; both whole and streamed, and with a budget of 4 tokens."""
    script = [THINK, *b"hm {x}", END_THINK, *b"hello"]
    async with serving(ScriptModel(script), tok, reasoning_parser="qwen3") as server:
        body = {**HI, "temperature": 0, "max_tokens": 100, "structured_outputs": {"regex": "h[0-9]"}}
        whole, _ = await server.both(CHAT, body)
        message = whole.choices[0]["message"]
        assert message["reasoning"] == "hm {x}" and re.fullmatch("h[0-9]", message["content"])
        short = await server.ask(CHAT, {**body, "thinking_token_budget": 4})
        assert short.choices[0]["message"]["reasoning"] == "hm {"
        assert re.fullmatch("h[0-9]", short.choices[0]["message"]["content"])
        held = {**body["structured_outputs"], "enable_in_reasoning": True}
        error = await server.refused(CHAT, {**body, "thinking_token_budget": 4, "structured_outputs": held})
        assert error["param"] == "thinking_token_budget"
        none = await server.ask(CHAT, {**HI, "temperature": 0, "thinking_token_budget": 0, "max_tokens": 20})
        assert none.choices[0]["message"]["reasoning"] is None
        cut = await server.ask(CHAT, {**HI, "temperature": 0, "max_tokens": 4})
        assert (cut.choices[0]["message"]["reasoning"], cut.choices[0]["message"]["content"]) == ("hm ", None)
        assert cut.reason == "length"
    async with serving(ScriptModel(script), tok) as server:
        error = await server.refused(CHAT, {**HI, "thinking_token_budget": 4})
        assert error["param"] == "thinking_token_budget"


async def test_a_budget_that_a_tools_grammar_cannot_keep_is_refused(tok):
    """In harmony's format a call ends the turn, so one grammar spans thought and call: the budget was passed over."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    async with serving(ScriptModel([97]), tok, tool_call_parser="openai", reasoning_parser="openai_gptoss") as server:
        body = {**HI, "tools": [tool], "tool_choice": "required", "max_tokens": 4, "thinking_token_budget": 4}
        error = await server.refused(CHAT, body)
        assert error["param"] == "thinking_token_budget" and "format of this model" in error["message"]
        assert (await server.ask(CHAT, {**body, "tool_choice": "auto"})).status == 200


async def test_a_grammar_that_nobody_keeps_is_gone_at_once(tok):
    """Also without Python's collector, which comes by seldom: a request's own bookkeeping does not hold it."""
    async with serving(FlatModel(), tok) as server:
        for number in range(2):
            await server.ask(TEXT, {"prompt": "q", "max_tokens": 2, "structured_outputs": {"json": {"const": number}}})
        await server.ask(TEXT, {"prompt": "another step", "max_tokens": 2})
        await server.settled()
        kept = server.engine.machine.grammars._cache
        grammars = [weakref.ref(kept.popitem()[1]) for _ in range(len(kept))]
        await asyncio.sleep(0)

        assert len(grammars) == 2 and all(grammar() is None for grammar in grammars)
