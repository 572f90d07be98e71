"""C08: a template's refusal is the sender's 400; content is data; a hostile template hurts nobody else."""

import asyncio
import time
from datetime import datetime, timedelta

import pytest

from tests.scripted import ScriptModel
from tinyserve.text import fence

from .harness import CHAT, HI, TEXT, serving, write_tokenizer

pytestmark = pytest.mark.anyio
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
ENDLESS = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + 3 * "{% endfor %}"


async def test_a_refusal_of_the_template(tmp_path):
    """(a): 400 with the template's own text."""
    async with serving(ScriptModel([97]), write_tokenizer(tmp_path, template=NO_SYSTEM)) as server:
        system = {"role": "system", "content": "s"}
        error = await server.refused(CHAT, {**HI, "messages": [system, *HI["messages"]]})
        fine, _ = await server.both(CHAT, HI)

    assert "no system here" in error["message"]
    assert fine.usage["prompt_tokens"] == 2


async def test_dates_are_those_of_the_request(tmp_path, monkeypatch):
    """(b): today and now, again for each request."""
    template = "{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%H:%M') }}"
    async with serving(ScriptModel([97]), write_tokenizer(tmp_path, template=template)) as server:
        before = datetime.now()
        text = await server.prompt_text(HI)
        after = datetime.now()
        assert text in {moment.strftime("%Y-%m-%d %H:%M") for moment in (before, after)}

        class Tomorrow(datetime):
            @classmethod
            def now(cls, tz=None):
                return before + timedelta(days=1, hours=1)

        monkeypatch.setattr("tinyserve.text.jinja.datetime", Tomorrow)
        assert await server.prompt_text(HI) == Tomorrow.now().strftime("%Y-%m-%d %H:%M")


async def test_content_is_data(tok):
    """(c): 26 prompt tokens."""
    async with serving(ScriptModel([97]), tok) as server:
        body = {**HI, "messages": [{"role": "user", "content": "{{ 7*7 }}"}]}
        whole, _ = await server.both(CHAT, body)
        assert await server.prompt_text(body) == "<|bos|>[user]{{ 7*7 }}[assistant]"

    assert whole.usage["prompt_tokens"] == 26


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ],
)
async def test_templates_of_requests_are_not_trusted(tok, extra, param):
    """(d): 400 for both ways to bring one."""
    async with serving(ScriptModel([97]), tok) as server:
        assert (await server.refused(CHAT, {**HI, **extra}))["param"] == param


async def test_an_operator_may_trust_templates_of_requests(tok):
    """(d): with the switch the field works; it is still no keyword."""
    async with serving(ScriptModel([97]), tok, trust_request_chat_template=True) as server:
        whole, _ = await server.both(CHAT, {**HI, "chat_template": "x"})
        assert whole.usage["prompt_tokens"] == 1


async def test_too_many_templates_at_once_are_a_503(tok, monkeypatch):
    """It was a 400, which no client sends again: good ones that came in a crowd were lost."""
    monkeypatch.setattr(fence, "MAX_WAITING", 0)
    async with serving(ScriptModel([97]), tok, trust_request_chat_template=True) as server:
        refused = await server.http.post(CHAT, json={**HI, "chat_template": "x"})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert await server.metric("admission_rejections", reason="queue_templates") == 1
        assert (await server.ask(CHAT, HI)).status == 200


async def test_a_template_without_end_hurts_nobody(tok):
    """With the switch: 400 when the renderer's budget is spent; a running stream's gaps stay under half a second."""
    model = ScriptModel([97] * 200, seconds=0.01)
    async with serving(model, tok, socket=True, trust_request_chat_template=True) as server:
        endless = asyncio.create_task(server.ask(CHAT, {**HI, "chat_template": ENDLESS}))
        gaps, last = [], None
        while not endless.done():
            body = {"prompt": "x", "max_tokens": 50, "stream": True}
            async with server.http.stream("POST", TEXT, json=body) as response:
                async for _ in response.aiter_bytes():
                    now = time.monotonic()
                    gaps.append(now - (last or now))
                    last = now
        reply = await endless

    assert (reply.status, reply.error["param"]) == (400, "chat_template")  # whichever of the limits it met
    assert "stopped" in reply.error["message"]
    assert reply.seconds < 15
    assert len(gaps) > 20 and max(gaps) < 0.5


@pytest.mark.parametrize("content", ["a<京", 'it\'s "&" <b>'])
async def test_json_as_hugging_face_writes_it(tmp_path, content):
    """(e): no escapes of HTML; "<" as a six-letter escape would change every tool prompt."""
    template = "{{ messages[0].content | tojson }}"
    async with serving(ScriptModel([97]), write_tokenizer(tmp_path, template=template)) as server:
        body = {**HI, "messages": [{"role": "user", "content": content}]}
        escaped = content.replace('"', '\\"')
        assert await server.prompt_text(body) == f'"{escaped}"'


async def test_keywords_reach_the_template(tmp_path):
    """(f)"""
    template = "{{ 'off' if enable_thinking is false else 'on' }}"
    async with serving(ScriptModel([97]), write_tokenizer(tmp_path, template=template)) as server:
        assert await server.prompt_text(HI) == "on"
        assert await server.prompt_text({**HI, "chat_template_kwargs": {"enable_thinking": False}}) == "off"
        whole, _ = await server.both(CHAT, {**HI, "chat_template_kwargs": {"enable_thinking": False}})
    assert whole.usage["prompt_tokens"] == 3
