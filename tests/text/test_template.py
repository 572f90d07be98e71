"""template.py, jinja.py, messages.py: what transformers renders, the cases C07, C08 and C23, and hostile templates."""

import time
from datetime import datetime

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.scripted import TEMPLATE, byte_tokenizer
from tests.text.test_tokenizer import real, with_bos
from tinyserve.errors import RequestError
from tinyserve.text.messages import normalise
from tinyserve.text.template import ChatTemplate
from tinyserve.text.tokenizer import Tokenizer

TOK = Tokenizer(byte_tokenizer())
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
T0 = ChatTemplate(TEMPLATE, special_tokens=SPECIAL)

# Written for this test in the manner of well-known families: header tokens, tools as JSON, thinking switches,
# content lists, alternation checks, dates, loop controls, generation marks.
CHATML = (
    "{% for message in messages %}\n{{ '<|im_start|>' + message.role + '\\n' }}{% generation %}{{ message.content }}"
    "{% endgeneration %}{{ '<|im_end|>\\n' }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
HEADERS = """{{- bos_token }}
{%- set ns = namespace(system='none given', seen=0) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system = message['content'] | trim %}
        {%- continue %}
    {%- endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {{- '<|start|>' ~ message['role'] ~ '<|stop|>\\n' ~ ns.system if loop.first else '<|start|>' ~ message['role'] }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name }}({{ call.function.arguments | tojson }})
    {%- endfor %}
    {{- message['content'] | trim + eos_token }}
    {%- if ns.seen == 3 %}{% break %}{% endif %}
{%- endfor %}
{%- if tools %}
    {%- for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}
{%- endif %}
"""
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
MACRO_PARTS = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for item in content %}"
    "{{ '<' ~ item.text ~ '>' }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}{{ message.role }}: {{ show(message.content) }}\n{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<a> 京", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1, "y": "<京>"}'}}
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "  Be brief. "}, {"role": "user", "content": "{{ 7*7 }} <b>\n"}],
    [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a \U0001f336"},
        {"role": "user", "content": "京"},
    ],
]


def oracle(text):
    backend = byte_tokenizer()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=text, **SPECIAL)


@pytest.mark.parametrize("text", [TEMPLATE, CHATML, HEADERS, MACRO_PARTS], ids=["t0", "chatml", "headers", "macro"])
@pytest.mark.parametrize("chat", CHATS, ids=["user", "system", "three"])
@pytest.mark.parametrize("prompted", [True, False])
def test_equal_to_transformers(text, chat, prompted):
    expected = oracle(text).apply_chat_template(chat, tools=TOOLS, tokenize=False, add_generation_prompt=prompted)
    actual = ChatTemplate(text, special_tokens=SPECIAL).render(chat, tools=TOOLS, add_generation_prompt=prompted)

    assert expected == actual


def test_kwargs_equal_transformers():
    template = ChatTemplate(CHATML)
    expected = oracle(CHATML).apply_chat_template(
        CHATS[0], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )

    assert expected == template.render(CHATS[0], enable_thinking=False, not_in_the_template=object())
    assert expected.endswith("<think></think>")
    assert "enable_thinking" in template.variables and "not_in_the_template" not in template.variables


@pytest.mark.parametrize("text", [CHATML, MACRO_PARTS, TEMPLATE])
def test_continued_messages_equal_transformers(text):
    chat = [*CHATS[0], {"role": "assistant", "content": "The capital"}]
    expected = oracle(text).apply_chat_template(chat, tokenize=False, continue_final_message=True)

    assert expected == ChatTemplate(text, special_tokens=SPECIAL).render(chat, continue_final_message=True)
    assert expected.endswith("The capital")


def test_continuing_conflicts_and_templates_that_drop_the_text():
    with pytest.raises(RequestError, match="exclude each other"):
        T0.render(CHATS[0], continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(RequestError, match="does not print"):
        ChatTemplate("nothing").render(CHATS[0], continue_final_message=True)


def test_smollm2s_own_template():
    """37 and 27 tokens, equal to the reference ids (tests of the tokenizer hold the ids)."""
    tokenizer = real("smollm2")
    template = ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.facts.special_tokens)
    text = template.render([{"role": "user", "content": "What is the capital of France?"}])

    assert len(tokenizer.encode(text, add_special_tokens=False)) == 37
    assert template.content_format == "string"


def count(messages, **options):
    return len(TOK.encode(T0.render(messages, **options), add_special_tokens=False))


def test_t0_counts():
    """The counts of the cases: 20 for "Hi", 26 for text that looks like a template (C08c)."""
    assert count([{"role": "user", "content": "Hi"}]) == 20
    assert count([{"role": "user", "content": "{{ 7*7 }}"}]) == 26


ABSENT = object()


@pytest.mark.parametrize("content", [None, ABSENT, ""])
def test_c07_abc_null_missing_and_empty_content(content):
    """38 tokens; 42 would mean that the word None went into the prompt."""
    assistant = {"role": "assistant", "tool_calls": [CALL]} | ({} if content is ABSENT else {"content": content})
    chat = [{"role": "user", "content": "q"}, assistant, {"role": "tool", "tool_call_id": "c1", "content": "42"}]

    assert count(chat) == 38


def test_c07_d_empty_tool_calls_are_no_tool_calls():
    plain = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ok"}]
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{{ m.tool_calls is defined }}{% endfor %}")

    assert template.render(plain) == template.render([plain[0], {**plain[1], "tool_calls": []}])


def test_c07_f_lists_of_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    assert "[user]a\nb[assistant]" in T0.render([{"role": "user", "content": parts}])
    assert "<a><b>" in ChatTemplate(MACRO_PARTS).render([{"role": "user", "content": parts}])


def test_c07_i_arguments_are_a_mapping():
    template = ChatTemplate("{{ messages[1].tool_calls[0].function.arguments.x }}")

    assert template.render([{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [CALL]}]) == "1"


USER = {"role": "user", "content": "q"}


def call(**function):
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([], "messages must not be empty"),
        ("Hi", "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        ([USER, 3], r"messages\[1\]"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": "user", "content": None}], r"messages\[0\].content"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\].text"),
        ([{"role": "user", "content": [3]}], r"messages\[0\].content\[0\]"),
        ([USER, call(name="f", arguments="not json")], r"messages\[1\].*is not JSON"),
        ([USER, call(name="f", arguments="[1]")], r"messages\[1\].*JSON object"),
        ([USER, call(name="f", arguments='{"x": NaN}')], r"messages\[1\].*NaN"),
        ([USER, call(name="f", arguments="[" * 100_000)], r"messages\[1\]"),
        ([USER, call(arguments="{}")], r"messages\[1\].tool_calls\[0\].function.name"),
        ([USER, {"role": "assistant", "tool_calls": "x"}], r"messages\[1\].tool_calls"),
        ([USER, {"role": "assistant", "tool_calls": [{}]}], r"messages\[1\].tool_calls\[0\]"),
    ],
)
def test_wrong_messages_are_named_by_place(messages, place):
    with pytest.raises(RequestError, match=place):
        T0.render(messages)


def test_the_callers_messages_are_not_changed():
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None}]
    before = repr(chat)
    T0.render(chat, continue_final_message=True)

    assert before == repr(chat)


def test_developer_is_system_unless_the_template_knows_it():
    chat = [{"role": "developer", "content": "d"}]

    assert T0.render(chat, add_generation_prompt=False) == "<|bos|>[system]d"
    assert ChatTemplate("{{ messages[0].role }}{# developer #}").render(chat) == "developer"


def test_refusals_and_bare_strings_are_text():
    parts = ["a", {"type": "refusal", "refusal": "no"}, {"type": "output_text", "text": "b"}]

    assert normalise([{"role": "assistant", "content": parts}])[0]["content"] == "a\nno\nb"


def test_c08_a_refusals_carry_the_templates_text():
    with pytest.raises(RequestError, match="roles must alternate user/assistant"):
        ChatTemplate(ALTERNATING).render([{"role": "system", "content": "x"}])


def test_c08_b_the_date_is_told_at_each_call():
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%H:%M') }}")

    assert template.render([USER], now=datetime(2024, 2, 29, 23, 59)) == "2024-02-29 23:59"
    before, told, after = datetime.now(), template.render([USER]), datetime.now()
    assert told in (f"{before:%Y-%m-%d %H:%M}", f"{after:%Y-%m-%d %H:%M}")


def test_c08_c_content_is_data():
    assert "[user]{{ 7*7 }}[assistant]" in T0.render([{"role": "user", "content": "{{ 7*7 }}"}])
    assert "{% raw %}" in T0.render([{"role": "user", "content": "{% raw %}"}])


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "add_generation_prompt"])
def test_c08_d_reserved_names(name):
    with pytest.raises(RequestError, match=f"must not contain '{name}'"):
        T0.render([USER], variables={name: "x"})


@pytest.mark.parametrize("name", ["self", "now", "variables", "raise_exception", "strftime_now", "bos", "loop", ""])
def test_other_names_change_nothing(name):
    """Names of this package's own arguments and helpers are names like any other to a stranger."""
    assert T0.render([USER], variables={name: 3}) == T0.render([USER])
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([USER], variables={name: 3}) == str(datetime.now().year)


def test_c08_e_tojson_is_not_for_html():
    """Stock Jinja gives "a\\u003c\\u4eac"."""
    template = ChatTemplate("{{ messages[0].content | tojson }}")

    assert template.render([{"role": "user", "content": "a<京'&"}]) == '"a<京\'&"'


def test_c23_one_bos():
    """20 tokens on the chat route although both the template and the tokenizer want a BOS; (f) the same ids."""
    tokenizer = with_bos()
    text = T0.render([{"role": "user", "content": "Hi"}])

    assert len(tokenizer.encode(text, add_special_tokens=False)) == 20
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (TEMPLATE, "string"),
        (CHATML, "string"),
        (HEADERS, "string"),
        (MACRO_PARTS, "openai"),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for p in m.content | reject('none') %}{{ p }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c[1:] %}{{ p }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for p in m.get('content') %}{{ p }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}", "string"),
    ],
)
def test_content_format_is_read_from_the_template(text, kind):
    assert ChatTemplate(text).content_format == kind


def test_content_format_can_be_forced():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    assert "a\nb" in ChatTemplate(MACRO_PARTS, content_format="string").render([{"role": "user", "content": parts}])


def test_plain_text_is_wrapped_for_templates_that_only_know_lists():
    text = "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}"

    assert ChatTemplate(text).render([{"role": "user", "content": "ab"}]) == "(ab)"


def test_named_templates():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})

    assert (template.render([USER]), template.render([USER], tools=TOOLS), template.render([USER], tools=[])) == (
        "plain", "tools", "plain",
    )  # fmt: skip
    with pytest.raises(RequestError, match="rag, tool_use"):
        ChatTemplate({"rag": "r", "tool_use": "t"}).render([USER])
    assert ChatTemplate({"only": "o"}).render([USER]) == "o"


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * [1, 2] }}",
        "{{ 10 ** 1000000000 }}",
        "{% for i in range(90000) %}{{ 'x' * 1000000 }}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_templates_that_fail_or_attack_cost_one_400(text):
    """Each ends within seconds, as the sender's error; the first would run for hours."""
    template = ChatTemplate(text)
    start = time.process_time()
    with pytest.raises(RequestError):
        template.render([USER])

    assert time.process_time() - start < 8


def test_invalid_templates_are_refused_when_built():
    with pytest.raises(RequestError, match="not valid Jinja"):
        ChatTemplate("{% for %}")
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplate({})


def test_long_chats_are_quick_and_within_the_budget():
    """2000 messages: 10 ms here."""
    chat = [{"role": "user", "content": "x" * 100}, {"role": "assistant", "content": "y"}] * 1000
    start = time.process_time()
    T0.render(chat)

    assert time.process_time() - start < 1
