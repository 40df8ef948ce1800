"""`SaveHandle` gives the caller of a save its state, progress, result and error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from ..errors import SaveCancelledError
from ..reports import SaveStats


class Notice:
    """Whether any caller has seen how a save ended."""

    def __init__(self) -> None:
        self.raised = False  #: the error was raised to a caller
        self.asked = False  #: `exception` was called


class _SaveFuture(Future[SaveStats]):
    """The future of a save. What it raises counts as seen, as what `SaveHandle.result` raises."""

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
        self.skipped = False  #: whether nothing was saved, because another save was running; `result` raises then
        self.what = ""  #: path and rank, for `repr`
        self.notice = Notice()
        #: a future of the same outcome, done when all callbacks that were added before have run
        self.future: Future[SaveStats] = _SaveFuture(self.notice)
        self._result = result
        self._progress = progress
        self._cancel = cancel  # None when the save is over
        self._progress_lock = threading.Lock()
        self._told_bytes = (0, 0)

        if result.done():
            self.callbacks_ran()

    def __repr__(self) -> str:
        error = self._result.exception() if self._result.done() else None
        if self.skipped:
            state = "skipped"
        elif not self.done():
            state = "writing" if self.staged.done() else "staging"
        elif error is None:
            state = "durable"
        else:
            state = "cancelled" if isinstance(error, SaveCancelledError) else f"failed: {type(error).__name__}"
        return f"<{' '.join(filter(None, ('SaveHandle', self.what)))}: {state}>"

    def done(self) -> bool:
        """Whether the checkpoint is durable, or the save has failed."""
        return self._result.done()

    def cancel(self) -> bool:
        """Cancels the save on all ranks; returns without waiting for its end. One rank's call is enough, from any
        thread. This rank stops writing within seconds. Others learn of it when they have written their part, unless
        they call this, too; until then `result` waits, on all ranks.

        Returns whether the save is cancelled. Then `result` raises `SaveCancelledError` on all ranks (or
        `CheckpointTimeoutError`, if ranks do not come); nothing is committed, the files of the save are removed, and
        the next save is made as any other. False: the commit has begun, or the save is over, as `result` tells.
        Raises `CheckpointTimeoutError`, and cancels nothing, if the store that the ranks share does not answer.

        A call of the system that does not return (a sync), and a wait for another rank, end first.
        """
        cancel = self._cancel
        return cancel is not None and not self.done() and cancel()

    def result(self, timeout: float | None = None) -> SaveStats:
        """Waits until the checkpoint is durable and returns this rank's statistics. Raises the error of the save, of
        any rank. Raises `TimeoutError` after `timeout` seconds, while the save continues."""
        self.notice.raised |= self.exception(timeout) is not None
        return self._result.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits until the save is done and returns its error or None. The next save still raises this error."""
        error = self.wait(timeout)
        self.notice.asked = True
        return error

    def wait(self, timeout: float | None = None) -> BaseException | None:
        """The same as `exception`, but a failure still counts as unseen and sets the process's exit status."""
        try:
            return self._result.exception(timeout)
        except futures.TimeoutError as late:  # a class of its own before Python 3.11
            raise TimeoutError(f"the save is not done after {timeout:g} s") from late

    @property
    def stats(self) -> SaveStats | None:
        """The statistics of this rank; None until the checkpoint is durable, and if the save has failed."""
        done = self._result.done() and self._result.exception() is None
        return self._result.result() if done else None

    def add_done_callback(self, function: Callable[[SaveHandle], object]) -> None:
        """Calls `function(handle)` when the save is done, on the save's thread; at once if it is done already."""
        self._result.add_done_callback(lambda _: function(self))

    def callbacks_ran(self) -> None:
        """Completes `future`. Called by the thread of the save, after the result was set."""
        self._cancel = None
        error = self._result.exception()
        if error is None:
            self.future.set_result(self._result.result())
        else:
            self.future.set_exception(error)

    def progress(self) -> tuple[int, int]:
        """Bytes of tensors that this rank has written, and has to write in total. Neither number ever decreases."""
        done, total = self._progress() if self._progress is not None and not self.done() else (0, 0)
        if self.done() and self._result.exception() is None:
            done = total = self._result.result().bytes
        with self._progress_lock:
            total = max(total, self._told_bytes[1])
            self._told_bytes = max(min(done, total), self._told_bytes[0]), total
            return self._told_bytes


def settled(value: Any = None, error: BaseException | None = None) -> Future[Any]:
    """A future that is done, with the error if one is given, else with the value."""
    future: Future[Any] = Future()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
    return future
