"""What a process needs that answers, or asks, a thousand times at once: files, and few pauses of Python's own.

Before: nothing.  After: serve.py, bench.py.
"""

from __future__ import annotations

import contextlib
import gc
import resource

SWITCH_INTERVAL = 5e-4  # seconds that a busy thread may keep the interpreter from the loop; Python's own 5e-3 is felt
COLLECT_AFTER = 10_000, 20, 20  # objects; Python's own 700 cost a tenth of the time that serving a token takes


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
