"""Agents end to end: a scripted model calls a tool in its family's format, gets the result, and answers.

The clients are the official ones, over a real socket.
"""

import json

import anthropic
import openai
import pydantic
import pytest
import torch

from tests.scripted import EOS, VOCAB, ScriptModel, byte_tokenizer
from tests.text.parsers.formats import FORMATS

from .harness import serving

pytestmark = pytest.mark.anyio
FORMS = {form.name: form for form in FORMATS}
PARSERS = {
    "hermes": "hermes", "llama3_json": "llama3_json", "mistral": "mistral", "deepseek_v3": "deepseek_v3",
    "qwen3_coder": "qwen3_coder", "glm45": "glm45", "kimi_k2": "kimi_k2", "openai": "harmony",
}  # fmt: skip
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
F = {"type": "function", "function": {"name": "f", "description": "weather", "parameters": CITY}}
ASK = [{"role": "user", "content": "Oslo?"}]


class Turns(ScriptModel):
    """Says the next of its texts in each turn: which turn it is shows in how many results of tools the prompt holds."""

    def __init__(self, *texts):
        super().__init__()
        self.turns = [byte_tokenizer().encode(text).ids for text in texts]

    def forward(self, batch):
        steps = super().forward(batch)[:, :1]
        counts = batch.query_start[1:] - batch.query_start[:-1]
        turns = [self._turn(slot) for slot in batch.slots.tolist()]
        return torch.cat([steps, torch.repeat_interleave(torch.tensor(turns), counts)[:, None].float()], dim=1)

    def _turn(self, slot):
        prompt = bytes(token for token in self.rows.tokens[slot, : self.rows.prompt_lens[slot]].tolist() if token < 256)
        return min(prompt.count(b"[tool]"), len(self.turns) - 1)

    def logits(self, hidden):
        logits = torch.zeros(len(hidden), VOCAB)
        for row, (step, turn) in zip(logits, hidden.int().tolist(), strict=True):
            script = self.turns[turn]
            row[script[step] if 0 <= step < len(script) else EOS] = 50.0
        return logits


def model(name):
    form = FORMS[name]
    return Turns(form.calls([("f", {"city": "Oslo"})]), form.text.format("It rains."))


def address(server):
    return str(server.http.base_url).rstrip("/")


def talk(server):
    return openai.AsyncOpenAI(base_url=f"{address(server)}/v1", api_key="k", max_retries=0)


async def serve(name, tok, **options):
    return serving(model(PARSERS[name]), tok, socket=True, tool_call_parser=name, **options)


@pytest.mark.parametrize("name", sorted(PARSERS))
async def test_an_agent_loop(tok, name):
    """Call, result, answer; streamed through the client's helper and whole."""
    async with await serve(name, tok) as server, talk(server) as client:
        for streamed in (False, True):
            messages, turns = list(ASK), 0
            while turns < 3:
                turns += 1
                asked = {"model": "tiny", "messages": messages, "tools": [F], "temperature": 0}
                if streamed:
                    async with client.chat.completions.stream(**asked) as stream:
                        completion = await stream.get_final_completion()
                else:
                    completion = await client.chat.completions.create(**asked)
                choice = completion.choices[0]
                if choice.finish_reason == "stop":
                    break
                assert choice.finish_reason == "tool_calls" and not choice.message.content
                (call,) = choice.message.tool_calls
                assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"city": "Oslo"})
                function = {"name": call.function.name, "arguments": call.function.arguments}
                messages += [
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": call.id, "type": "function", "function": function}],
                    },
                    {"role": "tool", "tool_call_id": call.id, "content": "rain"},
                ]
            assert turns == 2 and choice.message.content == "It rains."


class Weather(pydantic.BaseModel):
    city: str
    degrees: int | None


async def test_parse_gives_a_pydantic_object(tok):
    """A model that wants to say more fills in the form and ends."""
    wordy = Turns('{"city": "Oslo", "degrees": 5, "extra": 1} And so on.')
    async with serving(wordy, tok, socket=True) as server, talk(server) as client:
        found = await client.chat.completions.parse(
            model="tiny", messages=ASK, response_format=Weather, temperature=0, max_tokens=100, stop=None
        )
        assert isinstance(found.choices[0].message.parsed, Weather)
        response = await client.responses.parse(model="tiny", input="Oslo?", text_format=Weather, temperature=0)
        assert isinstance(response.output_parsed, Weather)


async def test_the_responses_api_calls_functions(tok):
    """Streamed and whole; the conversation goes on with previous_response_id."""
    tool = {"type": "function", "name": "f", "parameters": CITY, "strict": False}
    async with await serve("hermes", tok) as server, talk(server) as client:
        first = await client.responses.create(model="tiny", input="Oslo?", tools=[tool], temperature=0)
        (call,) = first.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "f", {"city": "Oslo"})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        asked = {
            "model": "tiny",
            "input": [result],
            "previous_response_id": first.id,
            "tools": [tool],
            "temperature": 0,
        }
        assert (await client.responses.create(**asked)).output_text == "It rains."
        kinds, arguments = [], ""
        async with client.responses.stream(model="tiny", input="Oslo?", tools=[tool], temperature=0) as stream:
            async for event in stream:
                kinds.append(event.type)
                arguments += event.delta if event.type == "response.function_call_arguments.delta" else ""
        assert json.loads(arguments) == {"city": "Oslo"} and kinds[-1] == "response.completed"


async def test_anthropic_tools(tok):
    """tool_use blocks, and the client's own tool runner end to end."""

    @anthropic.beta_async_tool
    async def f(city: str) -> str:
        """Weather.

        Args:
            city: where
        """
        return f"rain in {city}"

    async with await serve("hermes", tok) as server:
        client = anthropic.AsyncAnthropic(base_url=address(server), api_key="k", max_retries=0)
        tool = {"name": "f", "description": "weather", "input_schema": CITY}
        asked = {"model": "tiny", "max_tokens": 150, "messages": ASK}
        message = await client.messages.create(**asked, tools=[tool])
        (block,) = message.content
        assert (message.stop_reason, block.type, block.name, block.input) == (
            "tool_use",
            "tool_use",
            "f",
            {"city": "Oslo"},
        )
        async with client.messages.stream(**asked, tools=[tool]) as stream:
            assert (await stream.get_final_message()).content[0].input == {"city": "Oslo"}
        runner = client.beta.messages.tool_runner(**asked, tools=[f])
        assert (await runner.until_done()).content[0].text == "It rains."
        any_tool = await client.messages.create(**asked, tools=[tool], tool_choice={"type": "tool", "name": "f"})
        assert any_tool.stop_reason == "tool_use" and any_tool.content[0].name == "f"
        await client.close()


async def test_thoughts_in_all_three_apis(tok):
    """A thought and a call: reasoning, a reasoning item, a thinking block; whole and streamed."""
    thinker = Turns("<think>\nhm\n</think>\n\n" + FORMS["hermes"].calls([("f", {"city": "Oslo"})]), "It rains.")
    options = {"socket": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with serving(thinker, tok, **options) as server, talk(server) as client:
        asked = {"model": "tiny", "messages": ASK, "tools": [F], "temperature": 0}
        whole = await client.chat.completions.create(**asked)
        message = whole.choices[0].message
        assert (message.reasoning, message.reasoning_content, message.content) == ("hm", "hm", None)
        assert whole.usage.completion_tokens_details.reasoning_tokens == 6  # <think> \n h m \n </think>
        thought = ""
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            thought += getattr(chunk.choices[0].delta, "reasoning", None) or ""
        assert thought == "hm"
        hidden = await client.chat.completions.create(**asked, extra_body={"include_reasoning": False})
        assert hidden.choices[0].message.reasoning is None and hidden.choices[0].message.tool_calls
        tool = {"type": "function", "name": "f", "parameters": CITY, "strict": False}
        response = await client.responses.create(model="tiny", input="Oslo?", tools=[tool], temperature=0)
        assert [item.type for item in response.output] == ["reasoning", "function_call"]
        assert response.usage.output_tokens_details.reasoning_tokens == 6
        other = anthropic.AsyncAnthropic(base_url=address(server), api_key="k", max_retries=0)
        tool = {"name": "f", "input_schema": CITY}
        message = await other.messages.create(model="tiny", max_tokens=150, messages=ASK, tools=[tool])
        assert [block.type for block in message.content] == ["thinking", "tool_use"]
        await other.close()


async def test_the_clients_own_runner_of_responses(tok):
    """It checks every item that it sends back: ids, statuses, and thoughts; whole, streamed, and calling at once."""
    runners = pytest.importorskip("openai.lib.responses_tool_runner")

    async def execute(arguments):
        return f"rain in {arguments['city']}"

    tool = {"type": "function", "name": "f", "parameters": {**CITY, "additionalProperties": False}, "strict": True}
    thought = "<think>\nhm\n</think>\n\n"
    thinker = Turns(thought + FORMS["hermes"].calls([("f", {"city": "Oslo"})]), thought + "It rains.")
    options = {"socket": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with serving(thinker, tok, **options) as server, talk(server) as client:
        for how in ({}, {"stream": True}, {"stream": True, "eager": True}):
            runner = runners.AsyncResponsesToolRunner(functions=[runners.AsyncRegisteredFunction(tool, execute)])
            response = await runner.run(client, {"model": "tiny", "input": "Oslo?", "temperature": 0}, **how)
            assert response.output_text == "It rains."
