"""The document and the page: valid, complete, true to what the routes do, and usable without a network."""

import html
import re
from pathlib import Path

import jsonschema
import pytest
from llguidance import LLMatcher

from tinyserve import config
from tinyserve.grammar.asked import Asked
from tinyserve.server import anthropic, bodies, generate, responses_items
from tinyserve.server.app import ROUTES
from tinyserve.server.fields import Fields
from tinyserve.server.openapi import REFUSALS
from tinyserve.server.schema import Param, either, inside, integer, listed, sampled, text
from tinyserve.structured import StructuredOutputsParams

from .conftest import FakeEngine, client_of, refused, strict

HI = {"messages": [{"role": "user", "content": "Hi"}]}
# Fields of OpenAI's and vLLM's requests that a client may send; each must be declared, so that none is ignored unseen.
SHARED = """model n temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty seed stop
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words logit_bias
    use_beam_search length_penalty watermarking add_special_tokens response_format structured_outputs priority
    request_id session_id return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params
    ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream stream_options stream_interval user
    service_tier best_of logprobs echo max_tokens"""
OF_CHAT = """messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls reasoning_effort
    include_reasoning add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    media_io_kwargs mm_processor_kwargs return_prompt_text return_weight_versions routed_experts_prompt_start"""
OF_TEXT = "prompt prompt_embeds suffix"


def inner_of(name, param):
    """The fields of an object field, by their paths."""
    inner = param.kind.inner
    return [(f"{name}.{part.name}", part) for part in inner.params.values()] if inner else []


async def call(method, url, engine=None, **arguments):
    async with client_of(engine or FakeEngine()) as client:
        return await client.request(method, url, **arguments)


@pytest.fixture(scope="module")
def document():
    import asyncio

    return strict(asyncio.run(call("GET", "/openapi.json")).text)


def test_the_document_holds_every_route_and_its_references_lead_somewhere(document):
    described_routes = {(method.upper(), path) for path, ways in document["paths"].items() for method in ways}
    routes = {(method, path.replace("{name:path}", "{name}")) for method, path, _ in ROUTES}
    text = str(document)

    pages = {("GET", path) for path in ("/docs", "/openapi.json", "/", "/dashboard")}
    assert described_routes == routes - pages
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in document["components"]["schemas"]
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = [told["operationId"] for ways in document["paths"].values() for told in ways.values()]
    assert len(set(names)) == len(names)


def test_every_known_field_is_declared():
    assert set(f"{SHARED} {OF_CHAT}".split()) <= set(bodies.CHAT.params)
    assert set(f"{SHARED} {OF_TEXT}".split()) <= set(bodies.COMPLETION.params)


@pytest.mark.parametrize(
    ("url", "body", "declared"),
    [
        ("/v1/chat/completions", HI, bodies.CHAT),
        ("/v1/completions", {"prompt": "x"}, bodies.COMPLETION),
        (
            "/v1/responses",
            {"input": "x", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
            responses_items.BODY,
        ),
        (
            "/v1/messages",
            {
                **HI,
                "max_tokens": 3,
                "output_config": {"effort": "low"},
                "thinking": {"type": "adaptive"},
                "tools": [{"name": "f", "input_schema": {}}],
                "tool_choice": {"type": "none"},
            },
            anthropic.BODY,
        ),
        ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {"logprobs": 1}}, generate.BODY),
    ],
)
def test_every_declared_field_is_read_or_refused_or_said_to_change_nothing(run, monkeypatch, url, body, declared):
    read = set()
    raw = Fields.raw
    monkeypatch.setattr(Fields, "raw", lambda self, name: read.add(self.path + name) or raw(self, name))
    run(call("POST", url, json={**body, "stream": True, "logprobs": 1 if "prompt" in body else True}))
    run(call("POST", url, json={**body, "use_beam_search": True}))
    names = {
        path: param
        for name, outer in declared.params.items()
        for path, param in [(name, outer), *inner_of(name, outer)]
        if param.refused is None and "changes no answer" not in param.help
    }
    unread = set(names) - read - {name for name in names if name.split(".")[0] in ("stream_options", "response_format")}

    assert unread == set(), unread


@pytest.mark.parametrize(
    "name", [name for name, param in bodies.CHAT.params.items() if param.refused is not None], ids=str
)
def test_a_refused_field_is_a_400_that_names_it_and_its_off_values_pass(run, name):
    refused(run(call("POST", "/v1/chat/completions", json={**HI, name: "something"})), 400, name)
    for off in (None, *bodies.CHAT.params[name].off):
        assert run(call("POST", "/v1/chat/completions", json={**HI, name: off})).status_code == 200


def test_answers_are_what_the_document_says(run, document):
    for method, url, body in (
        ("POST", "/v1/chat/completions", {**HI, "logprobs": True}),
        ("POST", "/v1/completions", {"prompt": ["a", "b"], "logprobs": 1}),
        ("POST", "/tokenize", {"prompt": "x"}),
        ("POST", "/detokenize", {"tokens": [97]}),
        ("GET", "/v1/models", None),
        ("GET", "/version", None),
        ("GET", "/load", None),
    ):
        told = document["paths"][url][method.lower()]["responses"]["200"]["content"]["application/json"]["schema"]
        answer = strict(run(call(method, url, json=body)).text)
        jsonschema.validate(answer, told)

        assert set(answer) >= {name for name in told["properties"] if name != "prompt_logprobs"}


def test_a_field_that_is_not_declared_cannot_be_read():
    """Breaks if a route reads a field that the document does not have."""
    with pytest.raises(LookupError):
        Fields({"x": 1}, declared=bodies.CHAT).raw("x")


def test_ranges_come_from_the_sampling_parameters():
    schema = sampled("temperature", "").schema()
    assert (schema["minimum"], schema["maximum"], schema["default"]) == (0, 2, 1.0)
    assert sampled("top_p", "").schema()["exclusiveMinimum"] == 0


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (integer(1, 3), [1, 3], [0, 4, True, 1.0, "1"]),
        (listed(integer(), most=2), [[], [1, 2]], [[1, 2, 3], [True], "a", {}]),
        (either(text(), listed(text())), ["a", ["a"]], [1, [1], {}]),
        (inside(Param("a", integer(), required=True)), [{"a": 1}, {"a": 1, "b": 2}], [{}, {"a": "x"}, []]),
    ],
)
def test_kinds(kind, good, bad):
    """What the checker takes, the schema takes, and the other way round."""
    validator = jsonschema.Draft202012Validator(kind.schema)
    for value in good:
        kind.check(value, "x")
        assert validator.is_valid(value)
    for value in bad:
        with pytest.raises(ValueError, match="x"):
            kind.check(value, "x")
        assert not validator.is_valid(value) or value == 1.0


def test_the_page_needs_nothing_from_elsewhere_and_shows_all(run):
    response = run(call("GET", "/docs"))
    page = response.text

    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"<script|src=|@import|url\(|https?://", page)
    described_routes = [(method, path) for method, path, handler in ROUTES if hasattr(handler, "facts")]
    for method, path in described_routes:
        assert f"<code>{method} {path.replace('{name:path}', '{name}')}</code> " in page
    assert len(described_routes) > 30
    for flag in config.flags():
        (row,) = re.findall(rf"<tr><td><code>{flag.cli}</code>.*?(?=<tr>|</table>)", page)
        kind, env = re.findall("<td class=dim>([^<]*)", row)
        assert env == flag.env and kind and all(choice in kind for choice in flag.choices)
    for name in bodies.CHAT.params:
        assert f"<code>{name}</code>" in page


STREAMS = {
    "/v1/chat/completions": {
        **HI,
        "logprobs": True,
        "return_progress": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"prompt": "x", "logprobs": 1, "stream_options": {"include_usage": True}},
    "/inference/v1/generate": {"token_ids": [97], "sampling_params": {}, "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {**HI, "max_tokens": 9},
}


@pytest.mark.parametrize("url", STREAMS)
@pytest.mark.parametrize("fails", [False, True])
def test_the_page_tells_every_event_of_a_stream_and_what_is_in_it(run, document, url, fails):
    """It said "text/event-stream: string" of all five."""
    engine = FakeEngine()
    engine.fail_at = 1 if fails else None
    lines = run(call("POST", url, engine, json={**STREAMS[url], "stream": True})).text.splitlines()
    told = document["paths"][url]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]["description"]
    names = {line.removeprefix("event: ") for line in lines if line.startswith("event: ")}
    events = [strict(line[6:]) for line in lines if line.startswith("data: {")]
    members = {name for event in events for name in event} | {
        name for event in events for choice in event.get("choices", ()) for name in choice
    }

    assert len(events) > 1 and (not fails or any("rror" in line for line in lines[-4:]))
    assert {name for name in names | members - {"system_fingerprint", "prompt_token_ids"} if name not in told} == set()
    page = run(call("GET", "/docs")).text
    assert told.splitlines()[-1] in html.unescape(page)


def test_the_page_tells_what_refusals_mean_and_how_they_look(run):
    """Statuses were bare numbers; Retry-After, and the docstrings' "Raises", were not for readers of this page."""
    page = run(call("GET", "/docs")).text
    text = html.unescape(page)

    for status, meaning in REFUSALS.items():
        assert f"<tr><td><code>{status}</code><td>{meaning[:20]}" in text
    for sent in (b"", b'{"messages": 1}'):
        for url in ("/v1/chat/completions", "/v1/messages"):
            error = strict(run(call("POST", url, content=sent, headers={"content-type": "application/json"})).text)
            assert all(f'"{name}"' in text.split("id=refusals")[1] for name in {*error, *error["error"]})
    assert "Retry-After" in page and "Raises:" not in page and "EngineDead" not in page


def test_the_page_lists_pages_parsers_limits_and_the_syntax_of_grammars(run):
    text = html.unescape(run(call("GET", "/docs")).text)

    for path in ("/", "/dashboard", "/docs", "/openapi.json"):
        assert f"<code>GET {path}</code></a>" in text
    for name in ("hermes", "pythonic", "deepseek_r1"):
        assert name in text.split("--tool-call-parser")[1].split("--enable-auto-tool-choice")[0]
    assert "list of string, at most 64" in text and "list of string, at most 128" in text
    assert all(word in text for word in ("Lark", "GBNF", "triggered_tags", '"triggers"'))


def test_grammars_and_tags_of_the_page_are_such():
    """Whoever pastes them gets what the page promises."""
    help = bodies.STRUCTURED.help
    grammars = re.findall(r"`(start: .*?|root ::= .*?)`", help)
    tag = strict(re.search(r"`({.structures.*?})`", help)[1].replace("SCHEMA", '{"type": "object"}'))

    assert len(grammars) == 2
    for kind, value in (*(("grammar", one) for one in grammars), ("structural_tag", tag)):
        asked = Asked(StructuredOutputsParams(**{kind: value}).constraint(), {})
        assert LLMatcher.validate_grammar(asked.text) == "", kind


def test_the_page_names_every_metric_as_it_is_scraped(run):
    scraped = re.findall(r"^# TYPE (\S+) ", run(call("GET", "/metrics")).text, re.MULTILINE)
    names = {name.removeprefix("tinyserve:") for name in scraped}
    ours = {name for name in names if not name.startswith(("process_", "python_")) and not name.endswith("_created")}
    page = run(call("GET", "/docs")).text

    assert len(ours) > 30
    assert {name for name in ours if f"<code>{name}</code>" not in page} == set()


def test_an_option_is_shown_with_its_type_and_range(run):
    """They were not shown: neither which words --dtype takes nor that --port ends at 65535."""
    page = run(call("GET", "/docs")).text
    for name, kind in (
        ("--dtype", "auto, float32, float, bfloat16, float16, half"), ("--port", "integer 0 .. 65535"),
        ("--gpu-memory-utilization", "number &gt; 0 .. 1"), ("--enforce-eager", "true or false"),
        ("--cudagraph-capture-sizes", "list of integer 1 .. "), ("--hf-overrides", "JSON object"),
        ("--max-model-len", "integer 1 ..  or auto"), ("--model", "text"),
    ):  # fmt: skip
        assert re.search(f"<code>{name}</code><td class=dim>{re.escape(kind)}<", page), name


def test_routes_that_are_no_part_of_the_document_are_in_the_readme():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    pages = {path for _, path, handler in ROUTES if not hasattr(handler, "facts")}

    assert pages == {"/docs", "/openapi.json", "/", "/dashboard"}
    assert {path for path in pages if not re.search(rf"`{path}`|:8000{path}>", readme)} == set()
