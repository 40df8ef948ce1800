"""Finishes asynchronous saves when the process ends, and sets its exit status for a failure that no caller has seen.

`atexit` runs this. Forked children of `multiprocessing` do not call `atexit`: there its finalizers run it.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
from collections.abc import Callable

from .._engine import _C
from .handle import Notice

logger = logging.getLogger(__name__)

_FIRST, _LAST = 1000, -sys.maxsize  # priorities of a child's finalizers

_notices: set[Notice] = set()  # one for each save that is running or has failed
_ending = False
_child = 0  # process id of the child of multiprocessing in which finalizers are set


def register(finish: Callable[[], None]) -> None:
    """Sets `finish`, which is called when the process ends and must end all running saves."""

    def at_end() -> None:
        _begin(finish)
        if status := _status():
            _C.set_exit_status(status)

    atexit.register(at_end)


def add_save(notice: Notice, finish: Callable[[], None]) -> None:
    """Watches a save that is about to run in the background. `finish` is that of `register`."""
    global _child
    for known in list(_notices):  # at once: threads of other saves discard theirs meanwhile
        if known.raised or known.asked:
            _notices.discard(known)
    _notices.add(notice)
    if multiprocessing.parent_process() is not None and _child != os.getpid():
        _child = os.getpid()
        multiprocessing.util.Finalize(None, _begin, (finish,), exitpriority=_FIRST)
        multiprocessing.util.Finalize(None, _end_child, exitpriority=_LAST)


def discard_save(notice: Notice) -> None:
    _notices.discard(notice)


def process_is_ending() -> bool:
    """Whether the process is ending: it would not wait for a save that began now."""
    return _ending


def _begin(finish: Callable[[], None]) -> None:
    global _ending
    _ending = True
    finish()


def _status() -> int:
    """The exit status for unseen failures; 0: there are none, the status stays."""
    unseen = sum(not notice.raised and not notice.asked for notice in list(_notices))
    if not unseen:
        return 0
    text = "an asynchronous save has" if unseen == 1 else f"{unseen} asynchronous saves have"
    # What the process ends with is not known here: it may have failed already.
    logger.error("%s failed, and nobody asked: if this process ends with status 0, that becomes 1", text)
    return 1


def _end_child() -> None:
    ending: BaseException | None = sys.exc_info()[1]
    fails = ending is not None and not (isinstance(ending, SystemExit) and ending.code in (None, 0))
    if not fails and (status := _status()):
        raise SystemExit(status)


def _forget_after_fork() -> None:
    global _ending
    _ending = False
    _notices.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
