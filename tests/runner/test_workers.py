"""runner/workers.py: jobs in order, errors to whoever waits, and an end that waits or does not."""

import gc
import threading
import time
import weakref

import pytest

from tinyserve.runner.workers import Workers


def test_jobs_run_in_order_and_errors_come_out():
    workers, seen = Workers("test"), []
    jobs = [workers.submit(seen.append, number) for number in range(50)]
    failed = workers.submit(lambda: 1 / 0)
    workers.close()

    assert seen == list(range(50)) and all(job.done() for job in jobs)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    with pytest.raises(RuntimeError, match="closed"):
        workers.submit(seen.append, 1)
    workers.close()


def test_closing_without_waiting_cancels_what_has_not_begun():
    """Of two jobs on one thread, the first is under way for as long as the gate is shut: 1 done, 1 cancelled."""
    workers, gate, begun = Workers("test"), threading.Event(), threading.Event()
    first = workers.submit(lambda: (begun.set(), gate.wait(5)))
    second = workers.submit(lambda: None)
    assert begun.wait(5)
    start = time.monotonic()
    workers.close(wait=False)
    assert time.monotonic() - start < 1 and second.cancelled()
    gate.set()
    assert first.result(5)


def test_forgotten_threads_end_and_hold_nothing():
    class Thing:
        pass

    workers, thing = Workers("forgotten"), Thing()
    there = weakref.ref(thing)
    workers.submit(lambda thing: None, thing).result(5)
    del thing
    for _ in range(100):
        if there() is None:
            break
        time.sleep(0.01)
    assert there() is None
    del workers
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("forgotten")]
