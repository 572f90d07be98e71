"""C10: a broken regex or grammar is one client's problem."""

import asyncio
import gc
import threading
import time
import weakref

import pytest

from tests.scripted import FlatModel, ScriptModel
from tinyserve.engine import admission
from tinyserve.engine.admission import Admission
from tinyserve.engine.llm import LLM
from tinyserve.errors import Overloaded, RequestError
from tinyserve.grammar import line, matcher
from tinyserve.request import SamplingParams
from tinyserve.server import sse
from tinyserve.structured import StructuredOutputsParams

from .harness import CHAT, HI, TEXT, eventually, serving
from .lag import watched

GOOD = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}}


def schema(value):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


BROKEN = [
    *({"structured_outputs": {"regex": regex}} for regex in ("(", "*a", "[z-a]", "a{3,2}", "(?<=x)y", r"(.*)\1")),
    {"structured_outputs": {"grammar": 'start: "a" nowhere'}},
    {"structured_outputs": {"grammar": "root ::= ("}},
    {"structured_outputs": {"json_object": False}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"structural_tag": {"structures": [], "triggers": []}}},
    {"guided_regex": "("},
    schema({"type": "strnig"}),
    schema(""),
    schema({"not": {"type": "string"}}),
    schema({"$ref": "#/nowhere"}),
    schema({"$ref": "https://example.com/schema"}),
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema"}},
    {**GOOD, "structured_outputs": {"regex": "a"}},
]


@pytest.mark.anyio
async def test_each_is_a_400_and_nobody_else_notices(tok):
    """Each right after a valid request and while a stream of 60 tokens runs, whose text stays as it is."""
    async with serving(ScriptModel([97] * 60, seconds=0.005), tok) as server:
        text = (await server.ask(TEXT, {"model": "tiny", "prompt": "x", "max_tokens": 60})).text
        for start in range(0, len(BROKEN), 7):
            running = asyncio.create_task(server.stream(TEXT, {"model": "tiny", "prompt": "x", "max_tokens": 60}))
            for body in BROKEN[start : start + 7]:
                assert (await server.ask(CHAT, {**HI, **GOOD, "max_tokens": 8})).text in ("1", "2")
                error = await server.refused(CHAT, {**HI, **body})
                assert error["param"], (body, error)
            assert (await running).text == text
        plain = await server.ask(CHAT, {**HI, "response_format": {"type": "text"}, "max_tokens": 5})
        assert plain.text == "aaaaa"


@pytest.mark.anyio
async def test_a_keyword_that_is_not_enforced_is_named(tok):
    words = {
        "uniqueItems": True, "contains": {}, "not": {}, "propertyNames": {}, "dependentRequired": {}, "if": {},
        "$dynamicRef": "#a", "dependencies": {}, "unevaluatedProperties": False, "dependentSchemas": {},
        "minContains": 2, "unevaluatedItems": False,
    }  # fmt: skip
    async with serving(ScriptModel(), tok) as server:
        for word, value in words.items():
            error = await server.refused(CHAT, {**HI, **schema({"type": ["array", "object"], word: value})})
            assert word in error["message"], error


@pytest.mark.anyio
async def test_big_repetitions_do_not_hold_the_loop(tok):
    """`(a{1,500}){1,500}` and worse: an answer or an error of their own, while another stream gets its tokens."""
    async with serving(ScriptModel([97] * 400), tok) as server:
        gaps = []

        async def tick():
            while True:
                start = time.monotonic()
                await asyncio.sleep(0.001)
                gaps.append(time.monotonic() - start)

        ticking = asyncio.create_task(tick())
        big = {
            f"k{number}": {"type": "string", "pattern": "^[a-z]{1,50}(foo|bar)[0-9]{2,40}$"} for number in range(500)
        }
        for body in (
            {"structured_outputs": {"regex": "(a{1,500}){1,500}"}},
            {"structured_outputs": {"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"}},
            schema({"type": "object", "properties": big, "additionalProperties": False}),
        ):
            reply = await server.ask(CHAT, {**HI, **body, "max_tokens": 100})
            assert reply.status in (200, 400)
        ticking.cancel()
        assert max(gaps) < 0.25


@pytest.mark.anyio
async def test_a_grammar_that_fails_while_its_answers_are_queued(tok, monkeypatch):
    """Threads may be done with a wrong grammar before anybody waits for it: a 400 too, and not a wait without end."""
    queued = Admission._queued

    def slowly(self, prepared, index):
        answer = queued(self, prepared, index)
        if (wanted := answer.request.constraint) is not None:
            self._machine.grammars.compiled(wanted).exception(timeout=30)
        return answer

    monkeypatch.setattr(Admission, "_queued", slowly)
    async with serving(ScriptModel([97] * 8), tok) as server:
        error = await asyncio.wait_for(server.refused(CHAT, {**HI, "structured_outputs": {"regex": "(later"}}), 10)
    assert "regex" in error["message"]


@pytest.mark.anyio
async def test_a_grammar_that_takes_ever_longer_ends_alone(tok, monkeypatch):
    """Each token of an ambiguous grammar costs more than the one before, up to seconds, which others would wait for."""
    monkeypatch.setattr(matcher, "USUAL_SECONDS", 0.0005)
    monkeypatch.setattr(matcher, "SPARE_SECONDS", 0.05)
    async with serving(ScriptModel([97] * 240), tok) as server:
        slow = {"structured_outputs": {"grammar": 'start: s\ns: s s s | s s | "a" | "aa"'}, "max_tokens": 240}
        free, held = await asyncio.gather(
            server.ask(TEXT, {"model": "tiny", "prompt": "x", "max_tokens": 240}), server.ask(CHAT, {**HI, **slow})
        )
    assert free.text == "a" * 240
    assert held.status == 400 and "takes too long" in held.error["message"]
    assert held.seconds < 20


@pytest.mark.anyio
async def test_a_long_text_that_has_to_come_holds_nobody(tok):
    """To find out that 120,000 characters are the only way on took 0.13 s, in which no other thread could run."""
    async with serving(FlatModel(), tok) as server, watched() as lag:
        for number in range(3):
            long = schema({"enum": [f"{number}{letter}" + letter * 120_000 for letter in "yz"]})
            reply = await server.ask(CHAT, {**HI, **long, "max_tokens": 20, "seed": number})
            assert reply.status == 200 and reply.text[2:].strip("yz") == ""
    assert lag.worst < 0.08, str(lag)


@pytest.mark.anyio
async def test_too_many_optional_properties_are_counted_at_once(tok):
    """5,000 took 4.7 s and were told of parser rows; any number of required ones is followed."""
    names = {f"p{number}": {"type": "integer"} for number in range(5000)}
    many = {"type": "object", "properties": names, "additionalProperties": False}
    async with serving(FlatModel(), tok) as server:
        await server.ask(CHAT, {**HI, **GOOD, "max_tokens": 2})  # the process that tries grammars has started
        # Each is another schema, so that none is answered from the cache; other work on this machine is not counted.
        asked = [schema({**many, "title": f"number {number}"}) for number in range(3)]
        replies = [await server.ask(CHAT, {**HI, **body}) for body in asked]
        reply = min(replies, key=lambda one: one.seconds)
        assert reply.status == 400 and reply.seconds < 0.5
        assert "5000 optional properties" in reply.error["message"] and "'required'" in reply.error["message"]
        reply = await server.ask(CHAT, {**HI, **schema({**many, "required": list(names)}), "max_tokens": 5})
        assert reply.status == 200


class Held:
    """Grammars of a server that are compiled when `gate` is set; `tried`: the regexes that were."""

    def __init__(self, server):
        self.grammars = server.engine.machine.grammars
        self.gate, self.tried, compiling = threading.Event(), [], self.grammars._compile

        def compile_later(wanted, *given):
            assert self.gate.wait(60)
            self.tried.append(wanted.value)
            return compiling(wanted, *given)

        self.grammars._compile = compile_later


def regex(text, **more):
    return {"model": "tiny", "prompt": "x", "max_tokens": 9, "structured_outputs": {"regex": text}, **more}


@pytest.mark.anyio
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 3}, {"n": 70}, {"prompt": ["x"] * 5}])
async def test_grammars_of_clients_that_left_are_not_compiled(tok, monkeypatch, more):
    """150 requests in 5 s, whose clients had gone at once, kept everybody's new grammars waiting for minutes. Nor is
    one compiled whose request is refused because the queue is full."""

    def full(request):
        raise Overloaded("full")

    async with serving(ScriptModel([97] * 8), tok) as server:
        held = Held(server)
        kept = len(held.grammars._cache)
        first = asyncio.create_task(server.ask(TEXT, regex("b")))
        await eventually(lambda: server.scheduler.num_waiting == 1)
        for number in range(3):
            gone = [asyncio.create_task(server.ask(TEXT, regex(f"c{number}{n}", **more))) for n in range(4)]
            await eventually(lambda: server.scheduler.num_waiting >= 5)
            for task in gone:
                task.cancel()
            await eventually(lambda: server.scheduler.num_waiting == 1)
        last = asyncio.create_task(server.ask(TEXT, regex("d")))
        await eventually(lambda: len(held.grammars._line) == 1)
        with monkeypatch.context() as patched:
            patched.setattr(server.scheduler, "add", full)
            assert (await server.ask(TEXT, regex("e"))).status == 503
        assert len(held.grammars._line) == 1
        held.gate.set()
        assert ((await first).text, (await last).text) == ("b", "d")
        assert held.tried == ["b", "d"] and len(held.grammars._cache) == kept + 2


@pytest.mark.anyio
async def test_too_many_grammars_that_wait_are_a_503_at_once(tok, monkeypatch):
    """They were held with all that was asked for until their turn came, any number of them."""
    monkeypatch.setattr(line, "MOST", 2)
    async with serving(ScriptModel([97] * 8), tok) as server:
        held = Held(server)
        first = asyncio.create_task(server.ask(TEXT, regex("b")))
        await eventually(lambda: server.scheduler.num_waiting == 1 and not len(held.grammars._line))
        waiting = [asyncio.create_task(server.ask(TEXT, regex(f"c{n}"))) for n in range(2)]
        await eventually(lambda: server.scheduler.num_waiting == 3)
        for more in ({}, {"stream": True}, {"use_beam_search": True}):
            refused = await server.http.post(TEXT, json=regex("d", **more))
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert await server.metric("admission_rejections", reason="queue_grammars") >= 2
        held.gate.set()
        assert [(await each).text for each in (first, *waiting)] == ["b", "c0", "c1"]


@pytest.mark.anyio
@pytest.mark.parametrize("more", [{}, {"stream_options": {"prompt_progress": True}}])
async def test_a_stream_is_told_of_its_grammar_by_the_status(tok, monkeypatch, more):
    """After 15 s of waiting came a comment, and with it a 200; then a 503, or a 400, as an event: no client retried."""
    monkeypatch.setattr(sse, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(admission, "WAIT_SECONDS", 0.3)
    bodies = [(TEXT, regex("b", **more)), (CHAT, {**HI, "structured_outputs": {"regex": "c"}, **more})]
    async with serving(ScriptModel([97] * 8), tok, sse_keep_alive_interval=0.02) as server:
        held = Held(server)
        other = asyncio.create_task(server.ask(TEXT, regex("other")))
        await eventually(lambda: server.scheduler.num_waiting == 1 and not len(held.grammars._line))
        other.cancel()
        for path, body in bodies:
            late = await server.http.post(path, json={**body, "stream": True})
            assert late.status_code == 503 and int(late.headers["retry-after"]) >= 1, late.text
        monkeypatch.setattr(admission, "WAIT_SECONDS", 20.0)
        wrong = asyncio.create_task(server.http.post(TEXT, json={**regex("(", **more), "stream": True}))
        right = asyncio.create_task(server.http.post(TEXT, json={**regex("d", **more), "stream": True}))
        await asyncio.sleep(0.2)
        held.gate.set()
        assert ((await wrong).status_code, (await right).status_code) == (400, 200)


def test_an_llm_that_refused_a_grammar_is_given_back(tiny):
    """The error of a wrong grammar is kept, and with it were the frames of who was told first: del llm gave nothing
    back, neither the model's memory nor threads nor the process that tries grammars."""
    llm = LLM(str(tiny), device="cpu", block_size=16, num_gpu_blocks_override=20, max_num_seqs=2)

    for wrong in ("(", "(", "["):
        form = SamplingParams(max_tokens=3, structured_outputs=StructuredOutputsParams(regex=wrong))
        with pytest.raises(RequestError):
            llm.generate("a", form, use_tqdm=False)
    trial = llm.engine.machine.grammars._trial(slow=False)
    gone, thread = weakref.ref(llm), llm._background._thread
    del llm
    gc.collect()
    assert gone() is None
    thread.join(30)
    assert not thread.is_alive() and trial._child is None


def test_the_forms_of_one_call_wait_for_one_another(tiny, monkeypatch):
    """More than may wait in a server, 3 here, failed the whole call: nobody can retry inside it."""
    monkeypatch.setattr(line, "MOST", 3)
    texts = [f"w{number}" for number in range(12)]
    forms = [SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(choice=[text])) for text in texts]
    with LLM(str(tiny), device="cpu", block_size=16, num_gpu_blocks_override=20, max_num_seqs=2) as llm:
        answers = llm.generate(["a"] * len(forms), forms, use_tqdm=False)
    assert [answer.outputs[0].text for answer in answers] == texts


@pytest.mark.anyio
async def test_a_burst_of_ordinary_grammars_is_answered(tok):
    """300 clients at once, each with a form of its own: 44 were told to come back."""
    async with serving(ScriptModel([97] * 8), tok) as server:
        found = await asyncio.gather(*(server.ask(TEXT, regex(f"b{number}")) for number in range(300)))
    assert [reply.text for reply in found] == [f"b{number}" for number in range(300)]
