"""Calls the TCPStore on a separate thread for `Rendezvous`, so that no caller waits for a store that hangs.

`in_time` does that for single calls of torch that may exceed their own timeouts.

A call to a store on a machine that is cut off returns only when TCP times out, after minutes, and holds the client's
lock until then. Such a call blocks only this thread; its callers get an error after a bounded time.
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
from functools import partial
from typing import Any, TypeVar

from .._engine.torch_private import Store, clone_of, default_store
from ..errors import CheckpointTimeoutError

STORE_SECONDS = 2.0  # limit for the store to answer, and for a failed rank to write its report
_SECOND = 1.0
_NEVER = float("inf")
_DELAY = 0.02  # seconds before a note is written; a later note within that time replaces it

_Result = TypeVar("_Result")
_STORE_GONE = (
    "the store that the ranks share does not answer: the process that hosts it (rank 0, where torch made it) has died "
    "or hangs, or the network to it is down"
)


def in_time(
    function: Callable[[], _Result], seconds: float, name: str, in_vain: Callable[[], object] | None = None
) -> _Result:
    """Calls a function of torch that may exceed its own timeout, on a new thread, and returns its result.

    Raises TimeoutError after `seconds`, or when `in_vain`, polled once a second, returns true. The thread continues
    until the function returns.
    """
    future: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if concurrent.futures.wait([future], min(left, _SECOND)).done:
            return future.result()
        if in_vain is not None and in_vain():
            break
    raise TimeoutError(f"{name}: not done within {seconds:.0f} s")


class StoreGoneError(CheckpointTimeoutError):
    """The store fails or does not answer: the process that hosts it has died or hangs, or cannot be reached."""

    def __init__(self) -> None:
        super().__init__("asking the store that the ranks share", [], _STORE_GONE)


class StoreThread:
    """One connection to the store, for all groups and purposes of this process.

    `connect` opens it on the thread, at the first query or note. The thread ends with this object.
    """

    def __init__(self, connect: Callable[[], Store]) -> None:
        self.answers = True  #: False after the first query without an answer
        self._requests = _Requests(connect)
        thread = threading.Thread(target=self._requests.serve, name="vescale_ckpt store", daemon=True)
        thread.start()
        _threads[thread] = self._requests
        weakref.finalize(self, self._requests.end)

    def ask(self, question: Callable[[Store], _Result], seconds: float = STORE_SECONDS) -> _Result:
        """Returns the result of `question`. Raises StoreGoneError if the store fails or does not answer in `seconds`.

        `question` must not block in the store, because it delays notes.
        """
        future: Future[_Result] = Future()
        self._requests.take(question, future)
        try:
            return future.result(seconds)
        except (RuntimeError, concurrent.futures.TimeoutError) as error:
            self.answers = False
            raise StoreGoneError from error

    def note(self, key: str, text: Callable[[int], str], heartbeat: float | None) -> None:
        """Writes `text(n)` under a key soon; n counts the writes. `heartbeat`: repeats the write at this interval in
        seconds, until the next note under this key, or `forget`; None: once. Costs the caller microseconds. Failures
        are not reported here; later queries raise."""
        self._requests.note(key, text, heartbeat)

    def forget(self, key: str) -> None:
        """Stops writing under a key."""
        self._requests.forget(key)


class _Note:
    """A pending write under a key. `due`: its time."""

    def __init__(self, text: Callable[[int], str], heartbeat: float | None, due: float) -> None:
        self.text, self.heartbeat, self.due = text, heartbeat, due
        self.is_new = True  # not written yet


class _Requests:
    """The queries and notes for the thread. The thread holds no reference to the StoreThread, so that it ends with the
    StoreThread."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._store: Store | None = None
        self._changed = threading.Condition()
        self._questions: deque[tuple[Callable[[Store], Any], Future[Any]]] = deque()
        self._notes: dict[str, _Note] = {}
        self._wakes = 0.0  # when the sleeping thread wakes up; 0: it is awake
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

    def note(self, key: str, text: Callable[[int], str], heartbeat: float | None) -> None:
        with self._changed:
            if not self._takes_notes:
                return
            due = time.monotonic() + _DELAY
            if (before := self._notes.get(key)) is not None:
                due = min(due, before.due)
            self._notes[key] = _Note(text, heartbeat, due)
            if self._wakes == _NEVER:
                self._changed.notify()

    def forget(self, key: str) -> None:
        with self._changed:
            self._notes.pop(key, None)

    def serve(self) -> None:
        while True:
            with self._changed:
                while not (self._ended or self._questions or self._next_due() <= time.monotonic()):
                    self._wakes = self._next_due()
                    self._changed.wait(None if self._wakes == _NEVER else max(0.0, self._wakes - time.monotonic()))
                    self._wakes = 0.0
                if self._ended:
                    break
                # A rank records where it is before it queries, so notes are written first.
                notes = [*self._notes.items()]
                question = self._questions.popleft() if self._questions else None
            for key, note in notes:
                if note.due <= time.monotonic() or (question is not None and note.is_new):
                    self._write(key, note)
            if question is not None:
                self._answer(*question)
                del question
        for _, future in self._questions:
            future.cancel()
        self._store = None

    def _next_due(self) -> float:
        return min((note.due for note in self._notes.values()), default=_NEVER)

    def _write(self, key: str, note: _Note) -> None:
        self._writes += 1
        try:
            self._connected_store().set(key, note.text(self._writes))
        except Exception:
            self._takes_notes = False  # torch prints a warning for each attempt at a dead store
            with self._changed:
                self._notes.clear()
            return
        with self._changed:
            note.is_new = False
            if self._notes.get(key) is not note:
                return  # a newer note exists
            if note.heartbeat is None:
                del self._notes[key]
            else:
                note.due = time.monotonic() + note.heartbeat

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


def of_default_group() -> StoreThread:
    """Returns this process's connection to the store of torch.distributed's default group; a new one if the last does
    not answer, because a waiting client waits until TCP times out, perhaps long after the network has recovered."""
    store = default_store()
    with _shared_lock:
        found = _shared.get(store)
        if found is None or not found.answers:
            found = _shared[store] = StoreThread(partial(clone_of, store))
        return found


_shared: weakref.WeakKeyDictionary[Store, StoreThread] = weakref.WeakKeyDictionary()
_shared_lock = threading.Lock()
_threads: weakref.WeakKeyDictionary[threading.Thread, _Requests] = weakref.WeakKeyDictionary()


def _end_all() -> None:
    """Ends all threads: a call to the store that returns while the interpreter ends would cause `std::terminate`."""
    threads = dict(_threads)
    for requests in threads.values():
        requests.end()
    deadline = time.monotonic() + STORE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_end_all)
