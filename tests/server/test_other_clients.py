"""Programs above the official libraries, against a running server with a real model: litellm, langchain, lm-eval.

They are too large for the test command (200, 60 and 500 MB); where one is not installed, its test is skipped.
"""

import json

import pydantic
import pytest

from tests.real_models import smollm2
from tinyserve.checkpoint.source import resolve
from tinyserve.text.tokenizer import Tokenizer

from .hosted import KEY, QUESTION, hosting

pytestmark = pytest.mark.model
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}}}  # fmt: skip
WEATHER = "How is the weather in Oslo?"
AS_JSON = "Which city is the capital of France? Answer as JSON."


class City(pydantic.BaseModel):
    name: str
    european: bool


@pytest.fixture(scope="module")
def hosted():
    with hosting() as server:
        yield server


def test_litellm(hosted, monkeypatch):
    """As its provider for vLLM, and for Anthropic: chat, stream, usage, tools, forms, texts, responses, its errors."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    asked = {"model": "hosted_vllm/smol", "api_base": hosted.address + "/v1", "api_key": KEY, "temperature": 0}
    whole = litellm.completion(messages=QUESTION, max_tokens=24, **asked)
    usage = {"stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(messages=QUESTION, max_tokens=24, stream=True, **usage, **asked))
    question = [{"role": "user", "content": WEATHER}]
    tools = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    called = litellm.completion(messages=question, max_tokens=60, **tools, **asked).choices[0]
    formed = litellm.completion(messages=QUESTION, max_tokens=60, response_format=City, **asked)
    text = litellm.text_completion(prompt="The capital of France is", max_tokens=4, **asked).choices[0].text
    response = litellm.responses(input=QUESTION[0]["content"], max_output_tokens=24, **asked)
    message = litellm.completion(
        messages=QUESTION, max_tokens=24, **{**asked, "model": "anthropic/smol", "api_base": hosted.address}
    )

    answer = whole.choices[0].message.content
    assert "Paris" in answer and "Paris" in text
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    (call,) = called.message.tool_calls
    assert (called.finish_reason, json.loads(call.function.arguments)) == ("tool_calls", {"city": "Oslo"})
    assert City.model_validate_json(formed.choices[0].message.content)
    assert response.output[0].content[0].text == message.choices[0].message.content == answer
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=QUESTION, **{**asked, "model": "hosted_vllm/nope"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "a " * 5000}], **asked)


def test_langchain(hosted):
    """Chat, stream, a pydantic class, tools and their results as history, texts, a batch."""
    langchain = pytest.importorskip("langchain_openai")
    said = pytest.importorskip("langchain_core.messages")
    asked = {"model": "smol", "base_url": hosted.address + "/v1", "api_key": KEY, "temperature": 0}
    chat, text = langchain.ChatOpenAI(**asked, max_tokens=60), langchain.OpenAI(**asked, max_tokens=4)
    whole = chat.invoke(QUESTION[0]["content"])
    called = chat.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False).invoke(WEATHER)
    (call,) = called.tool_calls
    rest = chat.invoke([said.HumanMessage(WEATHER), called, said.ToolMessage("Rain.", tool_call_id=call["id"])])

    assert "Paris" in whole.content and whole.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in chat.stream(QUESTION[0]["content"])) == whole.content
    assert isinstance(chat.with_structured_output(City).invoke(AS_JSON), City)
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    assert rest.content and "Paris" in text.invoke("The capital of France is")
    assert [each.content for each in chat.batch([QUESTION[0]["content"]] * 2)] == [whole.content] * 2


def test_lm_eval(hosted, tmp_path, monkeypatch):
    """Its local-completions model: choices by likelihood through echo, a whole text's, and answers up to a stop."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    models = pytest.importorskip("lm_eval.models.openai_completions")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    tokenizer = Tokenizer.load(resolve(str(smollm2())))
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    model = models.LocalCompletionsAPI(
        model="smol", base_url=hosted.address + "/v1/completions", tokenizer=str(tmp_path), batch_size=2
    )

    def ask(kind, *arguments):
        made = [instance(kind, {}, each, number) for number, each in enumerate(arguments)]
        return getattr(model, kind)(made)

    context = "The capital of France is"
    scored = ask("loglikelihood", *[(context, ending) for ending in (" Paris", " banana", " Paris, the city")])
    (rolled,) = ask("loglikelihood_rolling", (context + " Paris",))
    (text,) = ask("generate_until", (context, {"until": ["."], "max_gen_toks": 8}))

    (paris, greedy), (banana, never), (longer, _) = scored
    assert greedy and not never and -3 < paris < 0 and banana < paris - 3 and longer < paris
    assert rolled < paris - 5 and text.strip() == "Paris"
