"""Runs the asynchronous saves of each process group in the background, one after another.

When the process ends, running saves are completed, and the exit status is set if a save failed and no caller retrieved
the error. This runs in an `atexit` hook, or in a finalizer of `multiprocessing` in its forked children, which skip
`atexit`.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Literal, get_args

import torch.distributed as dist

from .. import settings
from .._engine import _C
from .._engine.live_objects import LiveObjects
from .._ranks.exchange import Exchange
from .._ranks.groups import PerGroup
from .._ranks.rendezvous import GRACE
from ..errors import CheckpointTimeoutError, SaveCancelledError, SaveFailedError
from ..reports import SaveStats
from .handle import Notice, SaveHandle, settled
from .save import Save

_SECONDS_TO_GIVE_UP = 10.0  # time to report an abandoned save to other ranks
_FIRST, _LAST = 1000, -sys.maxsize  # priorities of a child's finalizers

logger = logging.getLogger(__name__)

OnBusy = Literal["wait", "skip", "raise"]
ON_BUSY: tuple[OnBusy, ...] = get_args(OnBusy)


class BackgroundQueue:
    """The saves of one process group; at most one runs at a time. A thread holds `lock` while it starts a save."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.hurried = False  #: whether saves run at full speed, because training is about to end
        self._last: SaveHandle | None = None
        self._save: Save | None = None  # while it is running
        self._thread: threading.Thread | None = None  # of the last save; ends after all callbacks of its handle
        self._path = ""
        self._rank = 0

    @staticmethod
    def of(process_group: dist.ProcessGroup | None) -> BackgroundQueue:
        return _queues.of(process_group)

    @property
    def busy(self) -> bool:
        return self._last is not None and not self._last.done()

    def all_free(self, process_group: dist.ProcessGroup | None, timeout: float | None) -> bool:
        """Whether no rank has a running save. Collective; returns the same value on all ranks."""
        exchange = Exchange.of(process_group, timeout, purpose="busy")
        return exchange.agree([int(not self.busy)], "asking whether a save goes on") == [1]

    def wait_until_done(self, timeout: float) -> None:
        """Waits until the last save has succeeded or failed. Raises `CheckpointTimeoutError` after `timeout`
        seconds."""
        if self._last is None:
            return
        save = self._save
        # The running save may time out at the same moment; grant it the time to find out which ranks are late.
        grace = GRACE if save is not None and save.exchange.size > 1 else 0.0
        try:
            self._last.wait(timeout + grace)
        except TimeoutError:
            phase = f"waiting for the save to {self._path} before this one"
            raise CheckpointTimeoutError(phase, [], f"{phase}: not done after {timeout:.0f} s") from None

    def take_failure(self) -> SaveFailedError | None:
        """Returns the error of the last save, which must be done, if no caller has retrieved it; later calls return
        None. A cancelled save is not a failure."""
        last, self._last = self._last, None
        error = None if last is None else last.wait()
        if last is None or error is None or last.notice.raised or isinstance(error, SaveCancelledError):
            return None
        last.notice.raised = True
        rank, text = getattr(error, "rank", self._rank), f"the save to {self._path} before this one failed: {error}"
        return SaveFailedError(rank, error, text)

    def finish_in_background(self, save: Save) -> SaveHandle:
        """Finishes a staged save on a new thread, or synchronously if the process is ending."""
        result: Future[SaveStats] = Future()
        if (plan := save.staged_plan) is not None:
            plan.in_background = not self.hurried
            handle = SaveHandle(result, plan.staged, plan.progress, save.cancel)
        else:
            handle = SaveHandle(result, settled(error=save.steps.error), None, save.cancel)
        self._last, self._save, self._path = handle, save, save.path
        self._rank = save.exchange.rank
        _busy_queues.add(self)
        _add_save(handle.notice)

        def finish() -> None:
            try:
                stats = save.finish()
            except BaseException as error:
                if isinstance(error, SaveCancelledError):
                    _notices.discard(handle.notice)  # not a failure
                else:
                    logger.error("the save to %s failed: %s", save.path, error)
                self._save = None
                result.set_exception(error)
            else:
                self._save = None
                _notices.discard(handle.notice)
                result.set_result(stats)
            handle.callbacks_ran()

        thread = threading.Thread(target=finish, name="vescale_ckpt save", daemon=True)
        if not process_is_ending():  # otherwise nothing would wait for the thread
            with suppress(RuntimeError):  # the interpreter is ending and starts no threads
                thread.start()
                self._thread = thread
                return handle
        finish()
        return handle


_queues = PerGroup(BackgroundQueue)
_busy_queues: LiveObjects[BackgroundQueue] = LiveObjects()
_notices: set[Notice] = set()  # one per save that is running or has failed
_ending = False
_child = 0  # PID of the multiprocessing child that has registered finalizers


def process_is_ending() -> bool:
    """Whether the process is ending, so that it would not wait for a save that starts now."""
    return _ending


def _add_save(notice: Notice) -> None:
    """Registers a save that is about to run for the exit status; in a `multiprocessing` child also its finalizers."""
    global _child
    for known in list(_notices):  # a copy: threads of other saves discard theirs concurrently
        if known.raised or known.asked:
            _notices.discard(known)
    _notices.add(notice)
    if multiprocessing.parent_process() is not None and _child != os.getpid():
        _child = os.getpid()
        multiprocessing.util.Finalize(None, _end, exitpriority=_FIRST)
        multiprocessing.util.Finalize(None, _end_child, exitpriority=_LAST)


def _finish_before_exit() -> None:
    """Waits for running saves at the end of the process, at most `exit_timeout` seconds in total, then abandons
    them."""
    seconds = int(settings.lenient("exit_timeout"))
    deadline = time.monotonic() + seconds
    for queue in _busy_queues:
        if (thread := queue._thread) is None:
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if queue.busy:
            logger.error("the save to %s is given up, because the process ends: nothing is committed", queue._path)
            if seconds == 0 and queue._last is not None:  # the user asked not to wait: no failure
                queue._last.notice.asked = True
            if (save := queue._save) is not None:
                save.abandon()
            thread.join(_SECONDS_TO_GIVE_UP)


def _end() -> None:
    global _ending
    _ending = True
    _finish_before_exit()


def _at_exit() -> None:
    _end()
    if status := _status():
        _C.set_exit_status(status)


def _end_child() -> None:
    ending: BaseException | None = sys.exc_info()[1]
    fails = ending is not None and not (isinstance(ending, SystemExit) and ending.code in (None, 0))
    if not fails and (status := _status()):
        raise SystemExit(status)


def _status() -> int:
    """Returns the exit status for failures that no caller retrieved; 0 leaves the status unchanged."""
    unseen = sum(not notice.raised and not notice.asked for notice in list(_notices))
    if not unseen:
        return 0
    text = "an asynchronous save has" if unseen == 1 else f"{unseen} asynchronous saves have"
    # The status that the process ends with is unknown here: it may be a failure already.
    logger.error("%s failed, and nobody asked: if this process ends with status 0, that becomes 1", text)
    return 1


def _forget_after_fork() -> None:
    """Forgets running saves in a forked child: they belong to the parent."""
    global _ending
    _ending = False
    _queues.forget()
    _busy_queues.clear()
    _notices.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_forget_after_fork)
