"""A process that follows answers in their grammars, and has each one's next mask ready: what the loop would compute.

It sees a token as soon as the loop has told it (board.py), moves the answer's matcher on and writes its mask, without
being asked. While tokens come it watches for the next ones; after IDLE_SECONDS without any it sleeps until the loop
wakes it. Orders come as messages, and one of them begins each answer. The matcher is the loop's own (matcher.py), so
what it leaves undone (an answer that cannot go on, a mask that takes long) the loop does, and says what is wrong.

    link:   loop --("open", ...), ("ids", ...), "wake"--> worker        worker --READY, ASK + text--> loop

It ends with the loop's process: the link ends then, which a thread of its own waits for.

Before: board.py, compile.py.  After: replicas.py, which starts it.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import socket
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from .board import ASK, ASLEEP, LONGEST, MASKS, NANOSECONDS, NUMBER, READY, RING, WAKE, Board
from .compile import Grammars
from .deep import with_stack
from .mask import write_mask
from .matcher import Matcher
from .trial import PARENT_STACK, compiled

IDLE_SECONDS = 0.02
SWITCH_SECONDS = 1e-4  # who waits for messages gets its turn while tokens are watched
KEPT = 32  # grammars
SHORT = range(1, 10)  # letters: of masks that are slow in the loop, the slowest, which a step waits for, take less
LOOKS = 64  # between two looks at the clock
GAP_SECONDS = 2e-4  # without a token: the next one is of another step
NAP = 0.5  # of the time between two steps, in which a worker leaves its core to others


class Vocabulary:
    """The tokenizer of another process, as far as grammars need it.

    Args: special_ids, words: as there, words by their ids.   ask: ids of a text, as that process has them.
    """

    def __init__(self, special_ids: Sequence[int], words: list[bytes], ask: Any) -> None:
        self.special_ids = frozenset(special_ids)
        self.vocab_size = len(words)
        self._words = words
        self._ask = ask

    def token_bytes(self, index: int) -> bytes:
        """The bytes of a token."""
        return self._words[index]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text without those that a tokenizer adds: grammars want no others."""
        return self._ask(text)


class _Row:
    """One answer. Args: place: of its mask.   word: the last of `told` that it has followed."""

    def __init__(self, place: int, word: int, matcher: Matcher) -> None:
        self.place = place
        self.word = word
        self.matcher = matcher


class Worker:
    """Follows the answers of its places.

    Args: board, index: the shared memory, and which of its workers this is.   link: to the loop.
    """

    def __init__(self, board: Board, index: int, link: socket.socket) -> None:
        first = index * board.cells
        self._bits = board.bits
        self._told = memoryview(board.told)[first : first + board.cells]
        self._made = memoryview(board.made)[first : first + board.cells]
        self._ring = memoryview(board.ring)[first * RING : (first + board.cells) * RING]
        self._notes = memoryview(board.notes[index])
        self._link = link
        self._messages: SimpleQueue[bytes] = SimpleQueue()
        self._later: deque[Any] = deque()  # orders that came while it waited for something else
        self._rows: dict[int, _Row] = {}
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._grammars: Grammars | None = None

    def begin(self, words: str) -> None:
        """Read the vocabulary and say that orders are taken. Args: words: a file of it."""
        threading.Thread(target=self._listen, name="tinyserve-link", daemon=True).start()
        with open(words, "rb") as file:
            tokens, special_ids, size, end_ids = pickle.load(file)
        vocabulary = Vocabulary(special_ids, tokens, self._ask)
        self._grammars = Grammars(vocabulary, size, end_ids, quick=None, slow=None)
        self._grammars.library(SHORT)
        gc.collect()
        gc.freeze()
        self._link.send(READY)

    def run(self) -> None:
        """Follow what is told, for ever."""
        told, rows, messages = self._told, self._rows, self._messages
        seen, last, looks = b"", time.perf_counter(), 0
        begun, step = last, IDLE_SECONDS  # when tokens came last after a while, and the shortest time between two such
        while True:
            if self._later or not messages.empty():
                self._obey(self._next())
                seen, last = b"", time.perf_counter()
            elif (now := told.tobytes()) != seen:
                if looks and (start := time.perf_counter()) - last > GAP_SECONDS:
                    begun, step = start, min(start - begun, 1.1 * step)
                seen, looks = now, 0
                for cell, row in list(rows.items()):
                    if told[cell] != row.word:
                        self._follow(cell, row)
                last = time.perf_counter()
            elif (looks := looks + 1) >= LOOKS:
                looks, quiet = 1, time.perf_counter() - last
                if quiet > IDLE_SECONDS:
                    self._sleep(seen)
                    last = time.perf_counter()
                elif quiet > GAP_SECONDS / 2 and (nap := begun + NAP * step - quiet - last) > GAP_SECONDS:
                    time.sleep(nap)

    def _sleep(self, seen: bytes) -> None:
        """Wait for a message, unless a token comes now."""
        self._notes[ASLEEP] = 1
        if self._told.tobytes() == seen:
            self._later.append(self._read(self._messages.get()))
        self._notes[ASLEEP] = 0

    def _listen(self) -> None:
        while message := self._link.recv(LONGEST + 1):
            self._messages.put(message)
        os._exit(0)

    def _read(self, message: bytes) -> Any:
        return pickle.loads(message) if message != WAKE else None

    def _next(self) -> Any:
        return self._later.popleft() if self._later else self._read(self._messages.get())

    def _ask(self, text: str) -> list[int]:
        """Ids of a text, from the loop's process. Raises: ValueError: it is too long for a message."""
        asked = ASK + text.encode("utf-8", "surrogatepass")
        if len(asked) > LONGEST:
            raise ValueError("a text is too long")
        self._link.send(asked)
        while True:
            order = self._read(self._messages.get())
            if order is not None and order[0] == "ids":
                return order[1]
            self._later.append(order)

    def _obey(self, order: Any) -> None:
        if order is None:
            return
        _, cell, place, word, text, terms = order
        self._rows.pop(cell, None)
        try:
            wanted, stop_ids, least, tokens = terms
            grammar: Future[Any] = Future()
            grammar.set_result(self._grammar(text) if text else None)
            matcher = Matcher(grammar, lambda: self._grammars.words, wanted, stop_ids, least, tokens)
            row = self._rows[cell] = _Row(place, word, matcher)
            self._write(cell, row)
        except Exception:  # the loop computes its masks
            self._rows.pop(cell, None)

    def _grammar(self, text: str) -> Any:
        """A grammar of its own for this process."""
        found = self._kept.get(text)
        if found is None:
            tokens = self._grammars.library()
            found = self._kept[text] = compiled(tokens, text)
            found.compute_bitmask()
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(text)
        return found

    def _follow(self, cell: int, row: _Row) -> None:
        """Take the tokens that were told, and write the mask behind the last."""
        word, start = self._told[cell], cell * RING
        if word >> 32 != row.word >> 32 or word & NUMBER == NUMBER:
            del self._rows[cell]  # another answer has its place, and its order is on its way; or it went another way
            return
        try:
            while row.word < word:
                entry = self._ring[start + (row.word + 1) % RING]
                if entry >> 32 != (row.word + 1) & NUMBER:
                    raise LookupError("too far behind")
                row.matcher.advance(entry & NUMBER)
                row.word += 1
            self._write(cell, row)
        except Exception:
            self._rows.pop(cell, None)

    def _write(self, cell: int, row: _Row) -> None:
        begin = time.perf_counter_ns()
        bits = self._bits[row.place]
        write_mask(row.matcher, bits, bits.ctypes.data)
        if row.matcher.error is None:
            self._made[cell] = row.word
        self._notes[NANOSECONDS] += time.perf_counter_ns() - begin
        self._notes[MASKS] += 1


def serve() -> None:
    """The process. Its argument: sizes of the board, which worker it is, descriptors of board, words and link."""
    workers, rows, width, index, file, words, link = json.loads(sys.argv[2])
    sys.setswitchinterval(SWITCH_SECONDS)
    board = Board(workers, rows, width, file)
    worker = Worker(board, index, socket.socket(fileno=link))

    def work() -> None:
        worker.begin(f"/proc/self/fd/{words}")
        worker.run()

    with_stack(PARENT_STACK, work)  # grammars are nested deeply; a thread for each might never begin
