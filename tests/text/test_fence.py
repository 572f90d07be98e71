"""text/fence.py: templates of strangers cost their sender a 400 and everybody else nothing."""

import asyncio
import json
import signal
import time
from pathlib import Path

import pytest

from tests.cases.lag import watched
from tinyserve.errors import Overloaded, RequestError
from tinyserve.text import fence
from tinyserve.text.fence import Fence

T0 = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
HOSTILE = {
    "padding": "{{ 'a'.center(1000000000) }}",
    "padding by a filter": "{{ 'a'|center(1000000000) }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "doubling": "{% set n = namespace(a='a' * 99) %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "joining": "{% set a = 'a' * 1000000 %}{{ a.join(a) }}",
    "slices": "{{ range(10)|slice(100000000)|list|length }}",
    "no end": "{% for i in range(99999) %}{% set x = range(99999)|sum %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "exit": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
}


def job(template, content="Hi", **options):
    messages = [{"role": "user", "content": content}]
    return json.dumps(
        {"template": template, "special_tokens": {"bos_token": "<s>"}, "messages": messages, "options": options}
    ).encode()


def test_hostile_templates_end_and_the_next_one_is_rendered(monkeypatch):
    """In this process they took up to 50 s and 6 GB with the interpreter held; here a second each at most."""
    monkeypatch.setattr(fence, "SECONDS", 1)
    monkeypatch.setattr(
        fence, "_CODE", fence._CODE.replace("; child()", "; import tinyserve.text.fence as f; f.SECONDS = 1; child()")
    )

    async def work():
        fenced = Fence()
        assert await fenced.render(job(T0, "é")) == "<s>[user]é"
        async with watched() as lag:
            for name, template in HOSTILE.items():
                start = time.monotonic()
                with pytest.raises(RequestError):
                    await fenced.render(job(template))
                assert time.monotonic() - start < 10, name
                assert await fenced.render(job(T0)) == "<s>[user]Hi", name
        with pytest.raises(RequestError, match="too bad"):
            await fenced.render(job("{{ raise_exception('too bad') }}"))
        with pytest.raises(RequestError, match="not valid Jinja"):
            await fenced.render(job("{% if %}"))
        await fenced.close()
        return lag.worst

    assert asyncio.run(work()) < 0.5


def test_jobs_wait_for_each_other_and_a_cancelled_one_leaves_no_answer_behind():
    """20 at once: 16 may wait; a reader that goes away in the middle does not hand its text to the next."""

    async def work():
        fenced = Fence()
        found = await asyncio.gather(*(fenced.render(job(T0, str(i))) for i in range(20)), return_exceptions=True)
        assert [text for text in found if isinstance(text, str)] == [f"<s>[user]{i}" for i in range(16)]
        refused = [error for error in found if not isinstance(error, str)]
        assert len(refused) == 4 and all(isinstance(error, Overloaded) and error.retry_after for error in refused)
        slow = asyncio.create_task(fenced.render(job("{% for i in range(99999) %}{{ i }}{% endfor %}")))
        await asyncio.sleep(0.01)
        slow.cancel()
        assert await fenced.render(job(T0, "next")) == "<s>[user]next"
        await fenced.close()

    asyncio.run(work())


def test_what_fails_before_a_template_is_begun_is_not_its_fault(monkeypatch):
    """The next one after an idle child was killed, and all where none could be started, were told to take less time."""

    async def work():
        fenced = Fence()
        assert await fenced.render(job(T0)) == "<s>[user]Hi"
        for number in (signal.SIGKILL, signal.SIGTERM):
            child = fenced._child
            child.send_signal(number)
            await child.wait()
            assert await fenced.render(job(T0)) == "<s>[user]Hi" and fenced._child is not child
        monkeypatch.setattr(fence, "SECONDS", 0)
        stopped = fenced._child
        stopped.send_signal(signal.SIGSTOP)  # by hand, or as a machine without memory does
        monkeypatch.setattr(fence, "_CODE", "raise SystemExit")
        with pytest.raises(Overloaded, match="cannot be started now"):
            await fenced.render(job(T0))
        assert await stopped.wait() == -signal.SIGKILL
        monkeypatch.undo()
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "create_subprocess_exec", no_descriptor)
            with pytest.raises(Overloaded, match="cannot be started now"):
                await fenced.render(job(T0))
        assert await fenced.render(job(T0)) == "<s>[user]Hi"
        await fenced.close()

    asyncio.run(work())


async def no_descriptor(*_, **__):
    raise OSError(24, "Too many open files")


def test_a_child_that_does_not_come_up_is_ended(monkeypatch):
    """It was left behind, with its pipes."""
    begun = []
    begin = asyncio.create_subprocess_exec

    async def noted(*command, **options):
        begun.append(await begin(*command, **options))
        return begun[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    monkeypatch.setattr(fence, "_CODE", "import time; time.sleep(600)")
    monkeypatch.setattr(fence, "START_SECONDS", 0.05)

    async def work():
        with pytest.raises(Overloaded):
            await Fence().render(job(T0))
        return await begun[0].wait()

    assert asyncio.run(work()) == -signal.SIGKILL


def test_the_child_has_no_environment(monkeypatch):
    """Breaks if an access token could be read by whoever gets out of the sandbox."""
    monkeypatch.setenv("HF_TOKEN", "secret")

    async def work():
        child = await fence._start()
        environment = Path(f"/proc/{child.pid}/environ").read_bytes()
        child.kill()
        await child.wait()
        return environment

    assert b"secret" not in asyncio.run(work())
