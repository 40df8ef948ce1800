"""Calls the TCPStore on a separate thread for `Rendezvous`, so that no caller waits for a store that hangs.

`in_time` does that for single calls of torch that may exceed their own timeouts.

A call to a store on a machine that is cut off returns only when TCP gives up, after minutes, and holds the client's
lock until then. Such a call blocks only this thread. Its callers get an error after a bounded time.
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

STORE_SECONDS = 2.0  # a store has so long to answer, and a failed rank to write its report
_DELAY = 0.02  # a note is written after so many seconds; a later note within that time replaces it

_Result = TypeVar("_Result")
_STORE_GONE = (
    "the store that the ranks share does not answer: the process that hosts it (rank 0, where torch made it) has died "
    "or hangs, or the network to it is down"
)


def in_time(function: Callable[[], _Result], seconds: float, name: str) -> _Result:
    """Calls a function of torch that may exceed its own timeout, on a new thread, and returns its result.

    Raises TimeoutError after `seconds`. The thread goes on until the function returns.
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
    except concurrent.futures.TimeoutError as late:  # this is another class before Python 3.11
        raise TimeoutError(f"{name}: not done within {seconds:.0f} s") from late


class StoreGoneError(CheckpointTimeoutError):
    """The store fails or does not answer: the process that hosts it has died or hangs, or cannot be reached."""

    def __init__(self) -> None:
        super().__init__("asking the store that the ranks share", [], _STORE_GONE)


class StoreThread:
    """One connection to the store. `connect` makes it on the thread. The thread ends with this object.

    `heartbeat`: a repeated note is written every so many seconds.
    """

    def __init__(self, connect: Callable[[], Store], heartbeat: float) -> None:
        self.answers = True  #: False after the first question without an answer
        self._requests = _Requests(connect, heartbeat)
        thread = threading.Thread(target=self._requests.serve, name="vescale_ckpt store", daemon=True)
        thread.start()
        _threads[thread] = self._requests
        weakref.finalize(self, self._requests.end)

    def ask(self, question: Callable[[Store], _Result], seconds: float = STORE_SECONDS) -> _Result:
        """Returns the result of `question`. Raises StoreGoneError if the store fails or does not answer in `seconds`.

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
        """Writes `text(n)` under a key soon; n counts the writes. If `repeated`, writes it again at each heartbeat
        until the next note. Costs the caller microseconds. Does not report failures: later questions raise an error."""
        self._requests.note(key, text, repeated)


class _Requests:
    """The questions and notes for the thread. The thread holds no reference to the StoreThread, so that the end of the
    StoreThread ends the thread."""

    def __init__(self, connect: Callable[[], Store], heartbeat: float) -> None:
        self._connect = connect
        self._heartbeat = heartbeat
        self._store: Store | None = None
        self._changed = threading.Condition()
        self._questions: deque[tuple[Callable[[Store], Any], Future[Any]]] = deque()
        self._note: tuple[str, Callable[[int], str], bool] | None = None
        self._due = float("inf")  # the time to write the note
        self._idle = False  # whether the thread sleeps until a notification
        self._writes = 0
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
                # A rank notes its place before it asks, so notes are written first.
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
        self._writes += 1
        try:
            self._connected_store().set(key, text(self._writes))
        except Exception:
            self._takes_notes = False  # torch prints a warning for each attempt at a dead store
            return
        with self._changed:
            if repeated and self._note is not None and self._note[2] and self._due == float("inf"):
                self._due = time.monotonic() + self._heartbeat

    def _answer(self, question: Callable[[Store], Any], future: Future[Any]) -> None:
        try:
            result = question(self._connected_store())
        except BaseException as error:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(error)
        else:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_result(result)

    def _connected_store(self) -> Store:
        if self._store is None:
            self._store = self._connect()
        return self._store


_threads: weakref.WeakKeyDictionary[threading.Thread, _Requests] = weakref.WeakKeyDictionary()


def _end_all() -> None:
    """Ends all threads. If a call to the store returned while the interpreter ends, `std::terminate` would end the
    process."""
    threads = dict(_threads)
    for requests in threads.values():
        requests.end()
    deadline = time.monotonic() + STORE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_end_all)
