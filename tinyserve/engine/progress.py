"""How many prompts are answered, shown by the thread that asked.

The engine's loop only notes what is done. The bar is made and moved by the thread that waits for the answers, so one of
the caller's own may raise, leave the program, or ask the same engine for more, and the loop goes on for everybody.

Before: background.py, whose calls show it.  After: llm.py.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Progress:
    """A bar of finished prompts with the tokens per second that went in and came out.

    Args: use: whether there is one; or what makes it, called as tqdm is.   total: prompts.
    """

    def __init__(self, use: bool | Callable[..., Any], total: int) -> None:
        self._use = use
        self._total = total
        self._news: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()

    def begin(self) -> None:
        """All prompts are valid: from here on there is a bar."""
        self._tell(0, 0, 0)

    def done(self, tokens_in: int, tokens_out: int) -> None:
        """One more prompt is answered."""
        self._tell(1, tokens_in, tokens_out)

    def _tell(self, *news: int) -> None:
        if self._use:
            self._news.put(news)

    def show(self, work: Future[Any]) -> None:
        """Show what is told until the work has ended. Raises: whatever the caller's own bar raises."""
        if not self._use:
            return
        work.add_done_callback(lambda _: self._news.put(None))
        if self._news.get() is None:
            return
        bar = self._bar()
        start, read, written = time.monotonic(), 0, 0
        try:
            while (news := self._news.get()) is not None:
                read, written = read + news[1], written + news[2]
                seconds = max(time.monotonic() - start, 1e-6)
                text = f"in {read / seconds:.0f} tok/s, out {written / seconds:.0f} tok/s"
                bar.set_postfix_str(text, refresh=False)
                bar.update(news[0])
        finally:
            bar.close()

    def _bar(self) -> Any:
        from ..checkpoint.bars import bar_class

        make = self._use if callable(self._use) else bar_class()
        return make(total=self._total, desc="Prompts", dynamic_ncols=True)
