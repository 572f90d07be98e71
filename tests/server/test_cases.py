"""Reported failures of other servers, replayed over HTTP through the whole engine (real scheduler, runner, sampler).

After every case: a control request still gives its usual answer, nothing runs or waits, every block is back.
"""

import asyncio
import time
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.scripted import BOS, CONTEXT, EOS, EOT, TEMPLATE, FlatModel, ScriptModel, byte_tokenizer
from tinyserve import config
from tinyserve.engine.engine import Engine
from tinyserve.engine.parts import Parts
from tinyserve.server.app import create_app
from tinyserve.server.face import Service
from tinyserve.text.template import ChatTemplate
from tinyserve.text.tokenizer import Tokenizer, TokenizerFacts

from .conftest import events, refused, strict
from .test_socket import eventually, raw, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


async def engine_of(model, *, add_bos=False, extra_eos=(), **options):
    from tokenizers import processors

    raw_tokenizer = byte_tokenizer()
    if add_bos:
        pieces = [("<|bos|>", BOS)]
        raw_tokenizer.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=pieces)
    facts = TokenizerFacts(special_tokens={"bos_token": "<|bos|>", "eos_token": "<|eos|>"})
    parts = Parts(
        model=model,
        tokenizer=Tokenizer(raw_tokenizer, facts),
        template=ChatTemplate(TEMPLATE, special_tokens={"bos_token": "<|bos|>"}),
        served_names=("tiny",),
        max_model_len=CONTEXT,
        eos_ids={EOS},
        extra_eos_ids=set(extra_eos),
    )
    settings = {"device": "cpu", "num_gpu_blocks_override": 100, "block_size": 16, "max_num_seqs": 8, **options}
    engine = await Engine.start(config.build(settings), parts=parts)
    model.attach(engine.machine.runner)
    return engine


def idle(engine):
    cache = engine.machine.scheduler
    return not cache.has_work and len(engine.streams) == 0


@asynccontextmanager
async def client(model, **options):
    """An httpx client of a whole server in process; checks at the end that nothing is left behind."""
    engine = await engine_of(model, **options)
    app = create_app(Service(engine.config, engine))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=20) as http:
        yield http
        await eventually(lambda: idle(engine))
        engine.machine.scheduler.check_integrity()
        control = await http.post(TEXT, json={"prompt": "control", "temperature": 0, "max_tokens": 2})
        assert control.status_code == 200, control.text
    await engine.close()


def ask(run, model, path, *bodies, **options):
    """The responses to these bodies, one after the other, from one server."""

    async def go():
        async with client(model, **options) as http:
            return [await http.post(path, json=body) for body in bodies]

    return run(go())


def text_of(response):
    return strict(response.text)["choices"][0]["text"]


def joined(response):
    return "".join(c["text"] for chunk in events(response) for c in chunk["choices"])


def test_characters_split_over_tokens(run):
    """C01: no half character in any delta; the joined stream equals the whole answer, also when cut inside one."""
    script = [97, 240, 159, 140, 182, 195, 169, 46]
    for extra, expected in (({}, "a🌶é."), ({"max_tokens": 3}, "a\ufffd")):
        body = {"prompt": "x", "temperature": 0, "max_tokens": 20, **extra}
        whole, stream = ask(run, ScriptModel(script), TEXT, body, {**body, "stream": True})
        assert text_of(whole) == joined(stream) == expected
        if not extra:
            assert not any("\ufffd" in c["text"] for chunk in events(stream) for c in chunk["choices"])


@pytest.mark.parametrize(
    ("script", "extra", "text", "reason", "tokens"),
    [
        ([65, 66, 67, 257, 71, 72, 73, 74, 75], {"stop": ["DEFGHIJ"]}, "ABC", "stop", 8),
        (
            [65, 66, 67, 257, 71, 72, 73, 74, 75],
            {"stop": "DEFGHIJ", "include_stop_str_in_output": True},
            "ABCDEFGHIJ",
            "stop",
            8,
        ),
        ([65, 66, 67, 257, 71, 72, 73, 88, 75], {"stop": ["DEFGHIJ"]}, "ABCDEFGHIXK", "stop", 10),
        ([65, 66, 67, 257, 71], {"stop": "E"}, "ABCD", "stop", 4),
    ],
)
def test_stop_strings_over_several_tokens(run, script, extra, text, reason, tokens):
    """C02: text is cut at the stop string, held back no longer than needed, and counted to the completing token."""
    body = {"prompt": "x", "temperature": 0, "max_tokens": 20, **extra}
    whole, stream = ask(run, ScriptModel(script), TEXT, body, {**body, "stream": True})
    answer = strict(whole.text)

    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, reason)
    assert answer["usage"]["completion_tokens"] == tokens
    assert joined(stream) == text


def test_echo_with_prompt_logprobs(run):
    """C03: layout of four entries, null first; zero new tokens give two; the stream joins to the same lists."""
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
    whole, none, stream, many = ask(
        run,
        ScriptModel([99, 100]),
        TEXT,
        body,
        {**body, "max_tokens": 0},
        {**body, "stream": True},
        {**body, "logprobs": 500},
    )
    logprobs = strict(whole.text)["choices"][0]["logprobs"]
    short = strict(none.text)
    chunks = [c for chunk in events(stream) for c in chunk["choices"]]

    assert text_of(whole) == "abcd"
    assert (logprobs["tokens"], logprobs["text_offset"]) == (["a", "b", "c", "d"], [0, 1, 2, 3])
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert (short["choices"][0]["text"], len(short["choices"][0]["logprobs"]["tokens"])) == ("ab", 2)
    assert [short["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")] == [2, 0, 2]
    assert [token for c in chunks for token in c["logprobs"]["tokens"]] == ["a", "b", "c", "d"]
    refused(many, 400, "logprobs")


def test_two_choices_in_a_stream(run):
    """C04: usage 20/10/30; the texts differ; the whole answer with the same seed gives the same pair."""
    body = {**HI, "n": 2, "seed": 7, "temperature": 1, "max_tokens": 5}
    stream, whole = ask(
        run, FlatModel(), CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}}, body
    )
    chunks = events(stream)
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")

    assert chunks[-1]["usage"] == {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}
    assert texts[0] != texts[1]
    assert [choice["message"]["content"] for choice in strict(whole.text)["choices"]] == [texts[0], texts[1]]


def history(**assistant):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [call], **assistant},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ],
        "max_tokens": 1,
    }


def test_null_missing_and_list_content(run):
    """C07: 38 prompt tokens with content null, missing or empty; 42 would mean the word None went in."""
    bodies = [history(content=None), history(), history(content="")]
    responses = ask(run, ScriptModel([97]), CHAT, *bodies)

    assert [strict(response.text)["usage"]["prompt_tokens"] for response in responses] == [38, 38, 38]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": None}], None),
        ([], "messages"),
        (
            history(tool_calls=[{"id": "c", "type": "function", "function": {"name": "f", "arguments": "no"}}])[
                "messages"
            ],
            None,
        ),
        ([{"role": "user"}], None),
        ([{"content": "x"}], None),
        ([{"role": 5, "content": "x"}], None),
        ([{"role": "user", "content": [{"type": "nothing"}]}], None),
    ],
)
def test_messages_that_are_none(run, messages, param):
    (response,) = ask(run, ScriptModel(), CHAT, {"messages": messages})

    assert "essage" in refused(response, 400, param)


def test_injection_is_data(run):
    """C08: 26 prompt tokens: the braces of a user are text."""
    (response,) = ask(run, ScriptModel([97]), CHAT, {"messages": [{"role": "user", "content": "{{ 7*7 }}"}]})

    assert strict(response.text)["usage"]["prompt_tokens"] == 26


def test_sampling_at_its_edges(run):
    """C12: seeds do not matter at 0; top_k off or >= the vocabulary changes nothing; 1e-6 and top_k 1 are greedy."""
    base = {"prompt": "x", "max_tokens": 8}
    script = ScriptModel(b"abcdefgh")
    greedy = ask(
        run, script, TEXT, *({**base, "temperature": 0, **seed} for seed in ({"seed": 1}, {"seed": 2}, {}, {}))
    )
    wide = ask(
        run,
        FlatModel(),
        TEXT,
        *({**base, "seed": 7, **k} for k in ({}, {"top_k": -1}, {"top_k": 0}, {"top_k": 320}, {"top_k": 10_000})),
    )
    narrow = ask(run, ScriptModel(b"abcdefgh"), TEXT, {**base, "top_k": 1}, {**base, "temperature": 1e-6})

    assert {text_of(response) for response in [*greedy, *narrow]} == {"abcdefgh"}
    assert len({text_of(response) for response in wide}) == 1


def test_seeds_at_their_edges(run):
    fine, large = ask(run, FlatModel(), TEXT, {"prompt": "x", "seed": -5}, {"prompt": "x", "seed": 2**70})

    assert fine.status_code == 200
    refused(large, 400, "seed")


def test_limits_of_the_answer(run):
    """C13: absent and null are the context (chat: 256 - 20) or 16; 10000 is clamped to the room left; 0 is empty."""
    model = ScriptModel([97] * 400)
    chat = ask(
        run,
        model,
        CHAT,
        HI,
        {**HI, "max_tokens": None},
        {**HI, "max_tokens": 10_000},
        {**HI, "max_tokens": 9, "max_completion_tokens": 5},
    )
    text = ask(
        run,
        ScriptModel([97] * 400),
        TEXT,
        {"prompt": "a" * 10},
        {"prompt": "a" * 10, "max_tokens": 0},
        {"prompt": "a" * 10, "max_tokens": 10_000},
    )
    counts = [strict(response.text)["usage"]["completion_tokens"] for response in [*chat, *text]]

    assert counts == [236, 236, 236, 5, 16, 0, 246]
    assert all(strict(response.text)["choices"][0]["finish_reason"] == "length" for response in [*chat, *text])


def test_prompts_around_the_limit(run):
    """C14: 255 tokens leave room for one; 256 and 300 are refused with both numbers, before any forward."""
    model = ScriptModel([97] * 400)
    bodies = [{"prompt": "a" * length, "stream": stream} for length in (256, 300) for stream in (False, True)]
    fits, *others = ask(run, model, TEXT, {"prompt": "a" * 255}, *bodies)

    assert strict(fits.text)["usage"]["completion_tokens"] == 1
    for body, response in zip(bodies, others, strict=True):
        message = refused(response, 400)
        assert "256" in message and str(len(body["prompt"])) in message
        assert strict(response.text)["error"]["code"] == "context_length_exceeded"


def test_a_prompt_that_the_pool_can_never_hold(run):
    """C14 d: 8 blocks of 16 tokens, 200 tokens asked: refused at once."""
    (response,) = ask(run, ScriptModel([97]), TEXT, {"prompt": "a" * 200}, num_gpu_blocks_override=8)

    refused(response, 400)


def test_prompt_forms(run):
    """C15: texts and ids give equal answers, indexes are prompt * n + answer."""
    bodies = [{"prompt": p, "n": 2, "seed": 1, "max_tokens": 4} for p in ("a", ["a", "bb"], [97], [[97], [98, 98]])]
    one, two, one_ids, two_ids = (strict(r.text) for r in ask(run, FlatModel(), TEXT, *bodies))

    assert [choice["text"] for choice in one["choices"]] == [choice["text"] for choice in one_ids["choices"]]
    assert [choice["text"] for choice in two["choices"]] == [choice["text"] for choice in two_ids["choices"]]
    assert [answer["usage"]["prompt_tokens"] for answer in (one, two, one_ids, two_ids)] == [1, 3, 1, 3]


def test_empty_prompts(run):
    """C15: without a BOS an empty prompt is refused; with an automatic one it is one token."""
    for response in ask(run, FlatModel(), TEXT, {"prompt": ""}, {"prompt": ["a", ""]}):
        refused(response, 400)
    (response,) = ask(run, FlatModel(), TEXT, {"prompt": ""}, add_bos=True)
    assert strict(response.text)["usage"]["prompt_tokens"] == 1


def test_logit_bias(run):
    """C16: only a, never a, an added token, and what is refused."""
    base = {"prompt": "x", "temperature": 0, "max_tokens": 4}
    good = [{"97": 100}, {"97": -100}, {"261": -100}, {str(i): -100 for i in range(266)}]
    bad = [{"320": 5}, {"-1": 5}, {"abc": 1}, {"97": 1e30}, {str(i): 1 for i in range(50_000)}]
    responses = ask(run, FlatModel(), TEXT, *({**base, "logit_bias": bias} for bias in [*good, *bad]))

    assert text_of(responses[0]) == "aaaa"
    assert "a" not in text_of(responses[1])
    assert [response.status_code for response in responses[: len(good)]] == [200] * 4
    for response in responses[len(good) :]:
        refused(response, 400)


def test_clients_that_leave(run):
    """C17: running, waiting and queued requests end within 1 s; blocks are back; the prefix stays for a retry."""

    async def go():
        model = ScriptModel([97] * 200, seconds=0.02)
        engine = await engine_of(model, max_num_seqs=1)
        async with serving(engine) as server:
            _, waiting = await raw(server, CHAT, {**HI, "max_tokens": 200})
            await eventually(lambda: model.forwards > 2)
            _, queued = await raw(server, CHAT, {"messages": [{"role": "user", "content": "Q"}], "stream": True})
            await eventually(lambda: engine.machine.scheduler.num_waiting == 1)
            queued.close()
            await eventually(lambda: engine.machine.scheduler.num_waiting == 0)
            waiting.close()
            await eventually(lambda: idle(engine))
            reader, both = await raw(server, CHAT, {**HI, "stream": True, "n": 2})
            await reader.readuntil(b'"content":"a"')
            both.close()
            await eventually(lambda: idle(engine))
            engine.machine.scheduler.check_integrity()
            text = engine.metrics.exposition()[0].decode()
            assert 'request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 4.0' in text

    run(go())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_bad_logits_fail_their_own_request(run, poison):
    """C22: two good tokens, then an error event (or a 500); the neighbour is unchanged; a counter goes up."""

    async def go():
        model = ScriptModel(b"abcdef", poison={(ord("N"), 2): poison})
        async with client(model) as http:
            bad, stream, good = await asyncio.gather(
                http.post(TEXT, json={"prompt": "N", "temperature": 0}),
                http.post(TEXT, json={"prompt": "N", "temperature": 0, "stream": True}),
                http.post(TEXT, json={"prompt": "x", "temperature": 0}),
            )
            return bad, stream, good, (await http.get("/metrics")).text

    bad, stream, good, metrics = run(go())
    chunks = events(stream)

    refused(bad, 500)
    assert "error" in chunks[-1]
    assert "".join(c["text"] for chunk in chunks[:-1] for c in chunk["choices"]) == "ab"
    assert text_of(good) == "abcdef"
    assert 'corrupted_requests_total{engine="0",model_name="tiny"} 2.0' in metrics


def test_one_bos(run):
    """C23: chat 20 tokens (21 = doubled); prompts 2, 2, 2, 1."""
    options = {"add_bos": True}
    (chat,) = ask(run, ScriptModel([97]), CHAT, HI, **options)
    forms = [
        {"prompt": "x"},
        {"prompt": "<|bos|>x"},
        {"prompt": "<|bos|>x", "add_special_tokens": False},
        {"prompt": [120]},
    ]
    texts = ask(run, ScriptModel([97]), TEXT, *forms, **options)
    (ids,) = ask(run, ScriptModel([97]), "/tokenize", HI, **options)

    assert strict(chat.text)["usage"]["prompt_tokens"] == strict(ids.text)["count"] == 20
    assert [strict(response.text)["usage"]["prompt_tokens"] for response in texts] == [2, 2, 2, 1]


def test_several_end_ids(run):
    """C24: either ends; ignore_eos goes on; stop strings add; stop_token_ids report themselves."""
    base = {"prompt": "x", "temperature": 0}
    plain, ignored, stops, ids = (
        strict(response.text)
        for response in ask(
            run,
            ScriptModel([97, EOT, 98]),
            TEXT,
            base,
            {**base, "ignore_eos": True, "max_tokens": 3},
            {**base, "stop": ["zz"]},
            {**base, "stop_token_ids": [97]},
            extra_eos=[EOT],
        )
    )

    assert [(a["choices"][0]["text"], a["choices"][0]["finish_reason"]) for a in (plain, ignored, stops)] == [
        ("a", "stop"),
        ("ab", "length"),
        ("a", "stop"),
    ]
    assert ignored["usage"]["completion_tokens"] == 3
    assert ids["choices"][0]["stop_reason"] == 97 and ids["choices"][0]["finish_reason"] == "stop"


def test_the_loop_serves_while_a_step_runs(run):
    """A forward of 0.3 s must not delay /health by more than 0.15 s: steps run in a thread."""

    async def go():
        async with client(ScriptModel([97] * 3, seconds=0.3)) as http:
            answer = asyncio.create_task(http.post(TEXT, json={"prompt": "x"}))
            worst = 0.0
            while not answer.done():
                start = time.monotonic()
                await http.get("/health")
                worst = max(worst, time.monotonic() - start)
                await asyncio.sleep(0.01)
            return worst

    assert run(go()) < 0.15
