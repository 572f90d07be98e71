"""Beam search under a grammar: the best answers among those that it allows, by the probabilities that it leaves."""

import json

import pytest
import torch

from tests.scripted import END_THINK, EOS, THINK, ScriptModel

from .harness import CHAT, HI, TEXT, serving
from .test_structured import SCHEMA

pytestmark = pytest.mark.anyio
PROMPT = [120, 121]


def ranked(oracle, answers):
    """[(answer, total log-probability)], best first; each step's mass is shared among the bytes that may come."""
    found = {}
    for answer in answers:
        total, written = 0.0, []
        for token in [*answer.encode(), EOS]:
            rest = [other.encode()[len(written) :] for other in answers if [*other.encode()][: len(written)] == written]
            may = sorted({each[0] if each else EOS for each in rest})
            scores = oracle.logits([*PROMPT, *written])[-1][may].log_softmax(-1)
            total += scores[may.index(token)].item()
            written.append(token)
        found[answer] = total / len(written)
    return sorted(found.items(), key=lambda pair: -pair[1])


async def test_the_best_choices_are_found(tiny, oracle):
    """A beam wider than the tree against brute force; a wrong grammar is the sender's 400."""
    answers = ["ab", "ac", "abc", "xyz", "x"]
    asked = {"prompt": PROMPT, "use_beam_search": True, "max_tokens": 6, "structured_outputs": {"choice": answers}}
    async with serving(tiny) as server:
        found = await server.ask(TEXT, {**asked, "n": 8, "logprobs": 1})
        narrow = await server.ask(TEXT, {**asked, "n": 2, "ignore_eos": True})
        error = await server.ask(TEXT, {**asked, "n": 2, "structured_outputs": {"regex": "("}})

    best = ranked(oracle, answers)
    assert found.texts == [answer for answer, _ in best] and set(found.reasons) == {"stop"}
    for choice, (answer, score) in zip(found.choices, best, strict=True):
        values = choice["logprobs"]["token_logprobs"]
        assert sum(values) / (len(answer) + 1) == pytest.approx(score, abs=1e-3)
    assert len(set(narrow.texts)) == 2 and set(narrow.texts) <= set(answers)
    assert error.status == 400 and "structured_outputs" in error.error["message"]


async def test_beams_of_json_in_chat(tiny):
    """Every beam that ended by itself satisfies the schema; so do the arguments of a tool that must be called."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    asked = {**HI, "use_beam_search": True, "n": 3, "max_tokens": 60}
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}}}  # fmt: skip
    async with serving(tiny) as server:
        formed = await server.ask(CHAT, {**asked, "response_format": form})
        called = await server.ask(CHAT, {**asked, "tools": [tool], "tool_choice": "required"})

    ended = [text for text, reason in zip(formed.texts, formed.reasons, strict=True) if reason == "stop"]
    assert ended and all({"a", "b"} == json.loads(text).keys() for text in ended)
    calls = [choice["message"]["tool_calls"] for choice in called.choices if choice["finish_reason"] == "tool_calls"]
    assert calls and all(json.loads(each[0]["function"]["arguments"])["city"] in ("Rome", "Oslo") for each in calls)


class Recited(ScriptModel):
    """Says its script after the 20 tokens of HI, whoever asks: the requests of a beam have a longer prompt each."""

    def forward(self, batch):
        return torch.stack([batch.positions - 19, batch.positions], dim=1).float()


async def test_a_thought_goes_before_the_form(tok):
    """The thought of a beam is free; the grammar walks behind its end only."""
    script = [THINK, 104, 109, END_THINK, *b"yes"]
    async with serving(Recited(script), tok, reasoning_parser="deepseek_r1") as server:
        asked = {
            **HI,
            "use_beam_search": True,
            "n": 1,
            "max_tokens": 20,
            "structured_outputs": {"choice": ["yes", "no"]},
        }
        (choice,) = (await server.ask(CHAT, asked)).choices

    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", "yes")
