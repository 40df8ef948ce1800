"""Calls the TCPStore on a thread of its own for `Rendezvous`, so that no caller waits for a store that hangs.

`in_time` does that for single calls of torch that may exceed their own timeouts.

A call to a store on a machine that is cut off returns only when TCP gives up, after minutes, and holds the client's
lock until then. Here only this thread is blocked; its callers get an error after a bounded time.
"""

from __future__ import annotations

import atexit
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

GRACE_SECONDS = 2.0  # for a store to answer, and for a rank that failed to write its report
_DELAY = 0.02  # seconds from a note to its writing; of several notes in that time only the last is written

_Result = TypeVar("_Result")
_STORE_GONE = (
    "the store that the ranks share does not answer: the process that hosts it (rank 0, where torch made it) has died "
    "or hangs, or the network to it is down"
)


def in_time(function: Callable[[], _Result], seconds: float, name: str) -> _Result:
    """The result of a function of torch that may exceed its own timeout: a thread of its own calls it.

    Raises TimeoutError after `seconds`; the thread goes on until the function returns.
    """
    future: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return future.result(seconds)
    except concurrent.futures.TimeoutError as late:  # a class of its own before Python 3.11
        raise TimeoutError(f"{name}: not done within {seconds:.0f} s") from late


class StoreGoneError(CheckpointTimeoutError):
    """The store fails or does not answer: the process that hosts it has died or hangs, or cannot be reached."""

    def __init__(self) -> None:
        super().__init__("asking the store that the ranks share", [], _STORE_GONE)


class StoreThread:
    """One connection to the store. `connect` makes it, on the thread. The thread ends with this object.

    `beat`: seconds between two writings of a repeated note.
    """

    def __init__(self, connect: Callable[[], Store], beat: float) -> None:
        self.answers = True  #: False after the first question without an answer
        self._requests = _Requests(connect, beat)
        thread = threading.Thread(target=self._requests.serve, name="vescale_ckpt store", daemon=True)
        thread.start()
        _threads[thread] = self._requests
        weakref.finalize(self, self._requests.end)

    def ask(self, question: Callable[[Store], _Result], seconds: float = GRACE_SECONDS) -> _Result:
        """The result of `question`. Raises StoreGoneError if the store fails or does not answer within `seconds`.

        `question` must not wait inside the store, because notes are written after it.
        """
        future: Future[_Result] = Future()
        self._requests.take(question, future)
        try:
            return future.result(seconds)
        except (RuntimeError, concurrent.futures.TimeoutError) as error:
            self.answers = False
            raise StoreGoneError from error

    def note(self, key: str, text: Callable[[int], str], repeated: bool) -> None:
        """Writes `text(n)` under a key soon, where n counts the writings. If `repeated`, writes it again at each beat
        until the next note. Costs the caller microseconds. Failures are not reported: later questions fail with an
        error."""
        self._requests.note(key, text, repeated)


class _Requests:
    """The questions and notes for the thread. The thread holds this object and no StoreThread: the end of the
    StoreThread ends the thread."""

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
                # A rank that asks has noted its place before; so notes are written first.
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
            self._takes_notes = False  # each attempt at a dead store would print a warning of torch
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


_threads: weakref.WeakKeyDictionary[threading.Thread, _Requests] = weakref.WeakKeyDictionary()


def _end_all() -> None:
    """A call to the store that returned while the interpreter ends would end the process by `std::terminate`."""
    threads = dict(_threads)
    for requests in threads.values():
        requests.end()
    deadline = time.monotonic() + GRACE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_end_all)
