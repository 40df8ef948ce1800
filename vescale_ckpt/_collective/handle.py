"""`SaveHandle` reports the state, progress, result and error of a save to its caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from ..reports import SaveStats


class Notice:
    """Whether any caller has retrieved the outcome of a save."""

    def __init__(self) -> None:
        self.raised = False  #: the error was raised to a caller
        self.asked = False  #: `exception` was called


class _SaveFuture(Future[SaveStats]):
    """The future of a save. An error that it raises counts as retrieved, as with `SaveHandle.result`."""

    def __init__(self, notice: Notice) -> None:
        super().__init__()
        self._notice = notice
        self.set_running_or_notify_cancel()  # `cancel` then returns False: other ranks take part in the save

    def result(self, timeout: float | None = None) -> SaveStats:
        try:
            return super().result(timeout)
        finally:
            self._notice.raised |= self.done() and super().exception() is not None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._notice.asked = True
        return error


class SaveHandle:
    """A save that is running or done."""

    def __init__(
        self,
        result: Future[SaveStats],
        staged: Future[None],
        progress: Callable[[], tuple[int, int]] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> None:
        self.staged = staged  #: a future that is done when the state may change again
        self.skipped = False  #: True: nothing was saved because another save was running, and `result` raises
        self.notice = Notice()
        #: has the same outcome; done when all callbacks added before have run
        self.future: Future[SaveStats] = _SaveFuture(self.notice)
        self._result = result
        self._progress = progress
        self._cancel = cancel  # None when the save is over
        self._progress_lock = threading.Lock()
        self._told_bytes = (0, 0)

        if result.done():
            self.callbacks_ran()

    def done(self) -> bool:
        """Whether the checkpoint is durable, or the save has failed."""
        return self._result.done()

    def cancel(self) -> bool:
        """Cancels the save on all ranks, without waiting for it to end. Not collective: a call on one rank is enough,
        from any thread. This rank stops writing within seconds. The other ranks learn of it after they have written
        their part, unless they call `cancel`, too; until then `result` waits, on all ranks. A sync in progress, or a
        wait for another rank, is not interrupted.

        Returns:
            True: `result` raises `SaveCancelledError` on all ranks (or `CheckpointTimeoutError`, if ranks do not
            arrive); nothing is committed, the files of the save are removed, and the next save works as usual.
            False: the commit has begun, or the save has ended; `result` has the outcome.

        Raises:
            CheckpointTimeoutError: the store that the ranks share does not answer; nothing is cancelled.
        """
        cancel = self._cancel  # of the rank's Save (save.py)
        return cancel is not None and not self.done() and cancel()

    def result(self, timeout: float | None = None) -> SaveStats:
        """Waits until the checkpoint is durable on all ranks, and returns this rank's statistics.

        Raises:
            CheckpointError: the save failed, on any rank.
            TimeoutError: the save is still running after `timeout` seconds (None: no limit); it continues.
        """
        self.notice.raised |= self.exception(timeout) is not None
        return self._result.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits like `result`, and returns the error of the save, or None. The next save still raises this error."""
        error = self.wait(timeout)
        self.notice.asked = True
        return error

    def wait(self, timeout: float | None = None) -> BaseException | None:
        """Like `exception`, but a failure still counts as not retrieved, so it sets the exit status of the process."""
        try:
            return self._result.exception(timeout)
        except futures.TimeoutError as late:  # distinct from the built-in class before Python 3.11
            raise TimeoutError(f"the save is not done after {timeout:g} s") from late

    @property
    def stats(self) -> SaveStats | None:
        """This rank's statistics; None while the save runs, and after a failure."""
        done = self._result.done() and self._result.exception() is None
        return self._result.result() if done else None

    def add_done_callback(self, function: Callable[[SaveHandle], object]) -> None:
        """Calls `function(handle)` when the save is done, on the save's thread; immediately if it is done already."""
        self._result.add_done_callback(lambda _: function(self))

    def callbacks_ran(self) -> None:
        """Completes `future`. The save's thread calls this after it has set the result."""
        self._cancel = None
        error = self._result.exception()
        if error is None:
            self.future.set_result(self._result.result())
        else:
            self.future.set_exception(error)

    def progress(self) -> tuple[int, int]:
        """Returns (bytes of tensors that this rank has written, bytes it writes in total). Neither ever decreases."""
        done, total = self._progress() if self._progress is not None and not self.done() else (0, 0)
        if self.done() and self._result.exception() is None:
            done = total = self._result.result().bytes
        with self._progress_lock:
            total = max(total, self._told_bytes[1])
            self._told_bytes = max(min(done, total), self._told_bytes[0]), total
            return self._told_bytes


def settled(value: Any = None, error: BaseException | None = None) -> Future[Any]:
    """Returns a completed future, with `error` if given, otherwise with `value`."""
    future: Future[Any] = Future()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
    return future
