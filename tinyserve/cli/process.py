"""What a process needs that answers, or asks, a thousand times at once: files, and few pauses of Python's own.

Before: nothing.  After: serve.py, bench.py.
"""

from __future__ import annotations

import contextlib
import gc
import resource

SWITCH_INTERVAL = 5e-4  # seconds that a busy thread may keep the interpreter from the loop; Python's own 5e-3 is felt
# objects: Python's own 700 cost a tenth of the time that serving a token takes. Of 5 times 5000, as many as a burst of
# clients leaves alive, one look takes 10 ms. All that a thousand streams hold takes 0.3 s, which is seldom, but not so
# seldom that what requests leave behind (2 KB each) would take longer than that.
COLLECT_AFTER = 5_000, 5, 50


def allow_files() -> None:
    """As many open files as the system lets us have: a connection is one, and the usual 1024 are few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def keep_loaded() -> None:
    """What is loaded by now stays; the collector need not look at it again, and seldom at the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
