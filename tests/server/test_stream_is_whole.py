"""The stream joined equals the whole answer, on every route and for any mix of fields."""

import asyncio
import random

from tests.engine.toy import letters, script
from tests.served import in_process, strict
from tinyserve.text.template import ChatTemplate

from .conftest import events, named_events, numbered_events
from .toys import toy_service

TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}>")
WORDS = script(*"Héllo 🌶 wörld, 日本 <|x|> end".encode(), *b"END and more")


def shared(rng):
    """Fields that chat, completions and generate all have."""
    fields = {"seed": rng.randrange(100), "max_tokens": rng.choice([1, 2, 5, 30])}
    greedy = rng.random() < 0.5
    fields |= {"temperature": 0} if greedy else {"temperature": 1, "n": rng.choice([1, 2, 3])}
    options = {
        "stop": rng.choice(["b", ["bc", "d"], ["END"], ["🌶"], "ö"]),
        "include_stop_str_in_output": rng.random() < 0.5,
        "min_tokens": 1,
        "ignore_eos": True,
        "bad_words": ["a"],
        "logit_bias": {"97": -5, "98": 3},
        "stop_token_ids": [101],
        "repetition_penalty": 1.3,
        "skip_special_tokens": False,
    }
    for name in rng.sample(list(options), rng.choice([0, 1, 2, 4])):
        fields[name] = options[name]
    return fields


def choices_of(chunks, key):
    """Per index: the joined text, ids and logprobs, and how it ended."""
    found = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            one = found.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "ended": None})
            piece = choice["delta"] if key == "delta" else choice
            one["text"] += piece.get("content" if key == "delta" else "text") or ""
            one["ids"] += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            lists = [logprobs.get(name) or [] for name in LISTS]
            one["logprobs"] += logprobs.get("content") or list(zip(*lists, strict=True))
            if choice["finish_reason"]:
                one["ended"] = (choice["finish_reason"], choice["stop_reason"])
    return found


LISTS = ("tokens", "token_logprobs", "text_offset", "top_logprobs")


def whole_of(answer, chat):
    found = {}
    for choice in answer["choices"]:
        logprobs = choice["logprobs"] or {}
        entries = (
            (logprobs.get("content") or []) if chat else list(zip(*(logprobs.get(n) or [] for n in LISTS), strict=True))
        )
        found[choice["index"]] = {
            "text": choice["message"]["content"] if chat else choice["text"],
            "ids": choice["token_ids"] or [],
            "logprobs": entries,
            "ended": (choice["finish_reason"], choice["stop_reason"]),
        }
    return found


async def pair(client, url, body):
    whole = await client.post(url, json=body)
    stream = await client.post(url, json={**body, "stream": True})
    assert whole.status_code == stream.status_code, (body, whole.text, stream.text)
    return whole, stream


async def openai_pair(client, rng):
    chat = rng.random() < 0.5
    body = {**shared(rng), "return_token_ids": rng.random() < 0.5, "stream_interval": rng.choice([1, 3])}
    if chat:
        body |= {"messages": [{"role": "user", "content": rng.choice("xyz")}]}
        body |= {"logprobs": True, "top_logprobs": 2} if rng.random() < 0.4 else {}
        body |= {"echo": True, "continue_final_message": False} if rng.random() < 0.2 else {}
    else:
        body |= {"prompt": rng.choice(["x", ["x", "yz"], [120, 121], [[120], [121, 122]]])}
        body |= {"logprobs": 2} if rng.random() < 0.4 else {}
        body |= {"echo": True} if rng.random() < 0.4 else {}
    whole, stream = await pair(client, "/v1/chat/completions" if chat else "/v1/completions", body)
    if whole.status_code == 400:
        return 0
    usage = {**body, "stream": True, "stream_options": {"include_usage": True}}
    last = events(await client.post("/v1/chat/completions" if chat else "/v1/completions", json=usage))[-1]["usage"]
    answer = strict(whole.text)
    joined = choices_of(events(stream), "delta" if chat else "text")
    assert joined == whole_of(answer, chat), body
    assert last == {k: v for k, v in answer["usage"].items() if v is not None}, body
    return 1


async def block_pair(client, rng):
    body = {"temperature": 0, "seed": 1} | ({"stop": "b"} if rng.random() < 0.3 else {})
    if rng.random() < 0.5:
        body |= {"input": rng.choice("xyz"), "max_output_tokens": rng.choice([1, 5, 30])}
        whole, stream = await pair(client, "/v1/responses", body)
        answer, found = strict(whole.text), numbered_events(stream)
        final = found[-1]["response"]
        texts = ["".join(p["text"] for p in item["content"]) for item in answer["output"]]
        deltas = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
        assert "".join(texts) == deltas and final["usage"] == answer["usage"], body
        assert (final["status"], final["incomplete_details"]) == (answer["status"], answer["incomplete_details"])
    else:
        body = {"messages": [{"role": "user", "content": rng.choice("xyz")}], "temperature": 0}
        body |= {"max_tokens": rng.choice([1, 5, 30]), "stop_sequences": rng.choice([[], ["bc"], ["END"]])}
        whole, stream = await pair(client, "/v1/messages", body)
        answer, found = strict(whole.text), named_events(stream)
        deltas = "".join(e["delta"]["text"] for e in found if e["type"] == "content_block_delta")
        assert "".join(block["text"] for block in answer["content"]) == deltas, body
        ended = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
        assert found[-2]["delta"] == ended and found[-2]["usage"] == answer["usage"], body
    return 1


def test_streams_join_to_the_whole_answer():
    """150 random bodies over two models, one of whose tokens are single bytes of characters."""

    async def go():
        checked = 0
        for rule in (letters, WORDS):
            rng = random.Random(3)
            async with toy_service(rule, template=TEMPLATE) as service, in_process(service) as client:
                for number in range(75):
                    checked += await (block_pair if number % 4 == 0 else openai_pair)(client, rng)
        assert checked > 110

    asyncio.run(asyncio.wait_for(go(), 250))
