"""Structured output where processes compute the masks: what is said is what it was without them."""

import asyncio
import os
import signal
import time

import pytest

from tinyserve.grammar import replicas
from tinyserve.grammar.board import ORDERED

from .harness import TEXT, eventually, serving
from .test_structured import BODIES, Waves, check

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not ORDERED, reason="this processor may show other processes writes in another order"),
]


@pytest.fixture
def eager(monkeypatch):
    """Every step is short, has enough rows, and waits for workers."""
    monkeypatch.setattr(replicas, "STEP_SECONDS", 1e9)
    monkeypatch.setattr(replicas, "LATE_SECONDS", 1.5)
    monkeypatch.setattr(replicas, "FEWEST", 1)
    monkeypatch.setattr(replicas, "usual_workers", lambda cores: 2)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8, "num_gpu_blocks_override": 18}])
async def test_answers_do_not_depend_on_who_computes_masks(tok, eager, monkeypatch, options):
    """14 answers together, some preempted, some aborted, one worker killed in the middle: each is what it is alone."""
    with monkeypatch.context() as patched:
        patched.setattr(replicas, "usual_workers", lambda cores: 0)
        async with serving(Waves(), tok) as server:
            alone = [(await server.ask(TEXT, body)).choices for body in BODIES]
    async with serving(Waves(), tok, depth=2, **options) as server:
        found = server.engine.machine.masks.replicas
        assert found.workers == 0, "they wait until they are needed"
        found.start()
        found._wanted = True
        await eventually(lambda: found.workers == 2, 60)
        pids = [hand.process.pid for hand in found._crew._hands]
        tasks = [asyncio.create_task(server.ask(TEXT, body)) for body in (*BODIES, *BODIES)]
        gone = [asyncio.create_task(server.ask(TEXT, {**body, "seed": 99})) for body in BODIES[:3]]
        await eventually(lambda: found.spent[1] > 50, 30)
        for task in gone:
            task.cancel()
        os.kill(pids[0], signal.SIGKILL)
        together = [(await task).choices for task in tasks]
        if options:
            assert server.scheduler.stats().preemptions > 0
        assert found.spent[1] > 100
    for body, choices, expected in zip((*BODIES, *BODIES), together, alone * 2, strict=True):
        assert [c["text"] for c in choices] == [c["text"] for c in expected]
        for choice in choices:
            check(body, choice)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


async def test_workers_end_with_the_process_that_started_them(tmp_path):
    """Killed with SIGKILL: both workers, one of which sleeps, are gone a moment later, and so is their memory."""
    code = """if True:
        import sys, time
        from tests.scripted import VOCAB
        from tests.grammar.harness import GRAMMARS, TOKENIZER
        from tinyserve.grammar.crew import Facts
        from tinyserve.grammar.replicas import Replicas
        facts = Facts(tokenizer=TOKENIZER, size=VOCAB, words=lambda: GRAMMARS.words, most=4, share=lambda memory: None)
        found = Replicas(2, facts)
        found.start()
        while found.workers < 2:
            time.sleep(0.01)
        print(*(hand.process.pid for hand in found._crew._hands), flush=True)
        time.sleep(600)
    """
    import sys

    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    try:
        pids = [int(word) for word in (await asyncio.wait_for(child.stdout.readline(), 90)).split()]
        assert len(pids) == 2
    finally:
        child.kill()
        await child.wait()
    end = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") and _runs(pid) for pid in pids):
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


def _runs(pid):
    """Whether it is more than what its parent has not asked for yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
