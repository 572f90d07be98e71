"""engine/chat.py: what is done at once and what goes to a thread."""

import asyncio
import time
from types import SimpleNamespace

from tinyserve.engine import chat
from tinyserve.text.template import ChatTemplate

HI = [{"role": "user", "content": "Hi"}]
TEXT = "{% for m in messages %}{{ m.content }}{% endfor %}{{ think }}"


class Threads:
    """An intake that counts what is sent off the loop, and takes its time with a text that says so."""

    def __init__(self):
        self.hops = 0

    async def off_loop(self, work):
        self.hops += 1
        return work()

    def encode_prompt(self, text, *, add_special_tokens):
        end = time.thread_time() + (0.003 if "slow" in text else 0)
        while time.thread_time() < end:
            pass
        return list(text.encode())


def test_short_conversations_need_no_thread():
    """A hop to a thread and back costs 0.05 ms, and up to 5 beside other threads; after one, 0 hops for a short one."""
    threads = Threads()
    tokenizer = SimpleNamespace(facts=SimpleNamespace(special_tokens={}))
    talk = chat.Chat(SimpleNamespace(template=ChatTemplate(TEXT), tokenizer=tokenizer), threads)

    async def hops(messages, **options):
        before = threads.hops
        await talk.encode(messages, **options)
        return threads.hops - before

    async def go():
        assert await hops(HI) == 1  # how long it takes is not known yet
        assert await hops(HI) == await hops(HI, chat_template_kwargs={"think": False}) == 0
        for messages, options in (
            ([{"role": "user", "content": "x" * 3000}], {}),
            (HI * 9, {}),
            ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], {}),
            (HI, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
            (HI, {"chat_template_kwargs": {"think": 10**9}}),
            (HI, {"chat_template": TEXT}),
        ):
            assert await hops(messages, **options) == 1
        assert await hops([{"role": "user", "content": "slow"}]) == 0
        assert await hops(HI) == 1 and await hops(HI) == 0  # once it was slow, it has to be quick again first

    asyncio.run(go())
