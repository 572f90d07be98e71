"""The processes that compute masks, as the loop's process sees them: started, spoken to, started again, ended.

They start when masks of many rows are wanted in short steps for the first time, one thread sees to that, and answers
what they ask: how this process's tokenizer writes a text. One that died is started again after AGAIN_SECONDS, and its
rows are computed by the loop meanwhile. Messages are sent without waiting.

Before: board.py, child.py.  After: replicas.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import selectors
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
from attrs import define, field, frozen

from .board import ASK, ASLEEP, LONGEST, READY, WAKE, Board
from .child import start_child
from .words import Tokens, Words

AGAIN_SECONDS = 30.0
_log = logging.getLogger(__name__)


@frozen(kw_only=True, eq=False)
class Facts:
    """What a worker is made from.

    Args:
        tokenizer, size: as of Grammars.   words: gives the vocabulary.   most: rows of a step.
        share: lets the device read memory without a copy on the way; returns what ends that, or None: it cannot.
    """

    tokenizer: Tokens
    size: int
    words: Callable[[], Words]
    most: int
    share: Callable[[np.ndarray], Callable[[], None] | None]


@define(eq=False)
class _Hand:
    """One process. ready: it takes orders.   born: how often it was started.   died: when, by time.monotonic()."""

    index: int
    process: subprocess.Popen[bytes] | None = None
    link: socket.socket | None = None
    ready: bool = False
    born: int = 0
    died: float = field(default=-AGAIN_SECONDS)


class Crew:
    """A few processes.

    Attributes:
        board: shared with them; None until they have been started.
        direct: whether the device reads the board itself.
    """

    def __init__(self, count: int, facts: Facts) -> None:
        self._facts = facts
        self._hands = [_Hand(index) for index in range(count)]
        self._thread: threading.Thread | None = None
        self._closed = False
        self._words = -1  # descriptor of the vocabulary
        self._bell, self._ear = socket.socketpair()  # rung when they are to end
        self.board: Board | None = None
        self.direct = False

    def __len__(self) -> int:
        return len(self._hands)

    def start(self) -> None:
        """Start them, in a thread; once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="tinyserve-masks", daemon=True)
            self._thread.start()

    def born(self, index: int) -> int:
        """A number of the process that takes orders now; 0: none does."""
        hand = self._hands[index]
        return hand.born if hand.ready else 0

    def order(self, index: int, message: bytes) -> bool:
        """Send an order. False: nobody takes it now."""
        hand = self._hands[index]
        try:
            return hand.ready and hand.link.send(message) > 0
        except BlockingIOError:
            return False
        except (OSError, AttributeError):  # it ends, or has just done so
            hand.ready = False
            hand.process.kill()
            return False

    def wake(self) -> None:
        """Have those that sleep watch for tokens."""
        asleep = self.board.notes[:, ASLEEP]
        if asleep.any():
            for index in np.flatnonzero(asleep).tolist():
                self.order(index, WAKE)

    def close(self) -> None:
        """End them."""
        self._closed = True
        with contextlib.suppress(OSError):  # closed before
            self._bell.send(WAKE)
        if self._thread is not None:
            self._thread.join()
        self._bell.close()
        self._ear.close()

    # ---- the thread

    def _serve(self) -> None:
        try:
            self._prepare()
            with selectors.DefaultSelector() as links:
                links.register(self._ear, selectors.EVENT_READ)
                while not self._closed:
                    gone = [hand for hand in self._hands if hand.link is None]
                    for hand in gone:
                        if time.monotonic() - hand.died >= AGAIN_SECONDS:
                            self._start(hand, links)
                    for key, _ in links.select(AGAIN_SECONDS if gone else None):
                        if key.data is not None:
                            self._hear(key.data, links)
        except Exception as error:
            _log.warning("masks are computed by the loop alone: %r", error)
        finally:
            self._tidy()

    def _prepare(self) -> None:
        """Make what all of them share."""
        facts = self._facts
        words = facts.words()
        data = pickle.dumps((words.bytes, sorted(facts.tokenizer.special_ids), facts.size, list(words.end_ids)))
        self._words = os.memfd_create("tinyserve-words")
        with open(self._words, "wb", closefd=False) as file:
            file.write(data)
        board = Board(len(self._hands), -(-facts.most // len(self._hands)), words.width)
        release = facts.share(board.memory)
        if release is not None:
            self.direct = True
            weakref.finalize(board, release).atexit = False
        self.board = board

    def _start(self, hand: _Hand, links: selectors.BaseSelector) -> None:
        link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.setblocking(False)
        board = self.board
        files = (board.file, self._words, theirs.fileno())
        what = json.dumps([board.workers, board.rows, board.bits.shape[1], hand.index, *files])
        call = "from tinyserve.grammar.mask_worker import serve; serve()"
        with theirs:
            hand.process = start_child(call, what, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=files)
        hand.link = link
        links.register(link, selectors.EVENT_READ, hand)

    def _hear(self, hand: _Hand, links: selectors.BaseSelector) -> None:
        """Take a message of a worker, or its end."""
        try:
            message = hand.link.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if message == READY:
            hand.born += 1
            hand.ready = True
        elif message.startswith(ASK):
            ids = self._facts.tokenizer.encode(message[1:].decode("utf-8", "surrogatepass"), add_special_tokens=False)
            try:
                hand.link.send(pickle.dumps(("ids", list(ids))))
            except OSError:  # it has not read for long, and would wait for this for ever
                hand.process.kill()
        else:
            links.unregister(hand.link)
            hand.ready = False
            hand.link.close()
            hand.link, hand.died = None, time.monotonic()
            hand.process.kill()
            status = hand.process.wait()
            if not self._closed:
                _log.warning("a process that computes masks ended (%s); it is started again later", status)

    def _tidy(self) -> None:
        for hand in self._hands:
            hand.ready = False
            if hand.process is not None:
                hand.process.kill()
                hand.process.wait()
            if hand.link is not None:
                hand.link.close()
        if self._words >= 0:
            os.close(self._words)
        if self.board is not None:
            os.close(self.board.file)
