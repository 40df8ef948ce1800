"""A thread that talks to the store which the processes share, so that nobody else waits for a store that hangs.

A call to the store of a machine that is cut off returns when TCP gives up, which takes minutes, and holds the client's
lock until then. Here that holds the clerk, and who asks it is told in time that the store does not answer.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from .._engine.torch_private import Store
from ..errors import CheckpointTimeoutError

GRACE_SECONDS = 2.0  # seconds that a store has to answer, and that a rank has to say why it left
_DELAY = 0.02  # seconds; of notes that follow one another at once, the last is written

_Result = TypeVar("_Result")
_STORE_GONE = (
    "the store that the ranks share does not answer: the process that hosts it (rank 0, where torch made it) has died "
    "or hangs, or the network to it is down"
)


class StoreGoneError(CheckpointTimeoutError):
    """The store fails or does not answer: the process that hosts it has died or hangs, or cannot be reached."""

    def __init__(self) -> None:
        super().__init__("asking the store that the ranks share", [], _STORE_GONE)


class StoreClerk:
    """One connection to the store. `connect` makes it, on the clerk's thread. It ends with this object.

    `beat`: seconds after which a note that is to be repeated is.
    """

    def __init__(self, connect: Callable[[], Store], beat: float) -> None:
        self.answers = True  #: False from the first question on that it had no answer to
        self._desk = _Desk(connect, beat)
        threading.Thread(target=self._desk.serve, name="vescale_ckpt roll call", daemon=True).start()
        weakref.finalize(self, self._desk.end)

    def ask(self, question: Callable[[Store], _Result], seconds: float = GRACE_SECONDS) -> _Result:
        """What the store answers. Raises StoreGoneError if it does not within so many seconds.

        A question must be such that a store that is there answers at once: notes wait for it.
        """
        future: Future[_Result] = Future()
        self._desk.take(question, future)
        try:
            return future.result(seconds)
        except (RuntimeError, concurrent.futures.TimeoutError) as error:
            self.answers = False
            raise StoreGoneError from error

    def note(self, key: str, text: Callable[[int], str], repeated: bool) -> None:
        """Has `text(n)` written under a key, soon, n-th time; again and again if it is to be `repeated`, until the next
        note. Costs microseconds. A store that does not take it is no error: who needs names finds out."""
        self._desk.note(key, text, repeated)


class _Desk:
    """What the thread and those who ask share: it must not hold the clerk itself, whose end is the thread's."""

    def __init__(self, connect: Callable[[], Store], beat: float) -> None:
        self._connect = connect
        self._beat = beat
        self._store: Store | None = None
        self._changed = threading.Condition()
        self._questions: deque[tuple[Callable[[Store], Any], Future[Any]]] = deque()
        self._note: tuple[str, Callable[[int], str], bool] | None = None
        self._due = float("inf")  # when the note is to be written
        self._idle = False  # the thread sleeps until it is woken
        self._beats = 0
        self._takes_notes = True
        self._ended = False

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def take(self, question: Callable[[Store], Any], future: Future[Any]) -> None:
        with self._changed:
            self._questions.append((question, future))
            self._changed.notify()

    def note(self, key: str, text: Callable[[int], str], repeated: bool) -> None:
        with self._changed:
            self._note = key, text, repeated
            if not self._takes_notes:
                return
            self._due = min(self._due, time.monotonic() + _DELAY)
            if self._idle:
                self._changed.notify()

    def serve(self) -> None:
        while True:
            with self._changed:
                while not (self._ended or self._questions or self._due <= time.monotonic()):
                    self._idle = self._due == float("inf")
                    self._changed.wait(None if self._idle else max(0.0, self._due - time.monotonic()))
                    self._idle = False
                if self._ended:
                    break
                # Notes before questions: what is asked is asked by who has noted where it is.
                note = self._note if self._due < float("inf") else None
                self._due = float("inf")
                question = self._questions.popleft() if self._questions else None
            if note is not None:
                self._write(*note)
            if question is not None:
                self._answer(*question)
                del question
        for _, future in self._questions:
            future.cancel()
        self._store = None

    def _write(self, key: str, text: Callable[[int], str], repeated: bool) -> None:
        self._beats += 1
        try:
            self._of_store().set(key, text(self._beats))
        except Exception:
            self._takes_notes = False  # of a store that has died, each attempt would print a warning of torch's
            return
        with self._changed:
            if repeated and self._note is not None and self._note[2] and self._due == float("inf"):
                self._due = time.monotonic() + self._beat

    def _answer(self, question: Callable[[Store], Any], future: Future[Any]) -> None:
        try:
            result = question(self._of_store())
        except BaseException as error:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(error)
        else:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_result(result)

    def _of_store(self) -> Store:
        if self._store is None:
            self._store = self._connect()
        return self._store
