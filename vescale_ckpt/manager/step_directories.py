"""How the directories `step-N` under one root go: those of checkpoints, and what is left of saves that died.

One is set aside in one step, under a name that is nobody's checkpoint; of that `.metadata` goes first, and only then
the rest. So whatever is interrupted, what is named `step-N` is whole or not a checkpoint at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager

from .._native import names, steps
from .._storage.directory import directory_at
from .._storage.leftovers import SAVE_GRACE
from .._storage.locks import LOCK_NAME
from . import step_metrics

logger = logging.getLogger(__name__)


def remove(root: str, which: Iterable[int]) -> list[int]:
    """Removes checkpoints that nobody reads or saves to; returns those that are gone. The others stay whole."""
    gone = []
    for step in which:
        with alone(steps.path_of(root, step)) as nobody:
            # Where the file system cannot tell, a load that runs loses its files and says so.
            if nobody is not False and _set_aside(root, step):
                gone.append(step)
    return _erased(root, gone, "removed the checkpoints of steps %s from %s")


def remove_leftovers(root: str) -> list[int]:
    """Removes what saves that died have left: directories of steps without `.metadata` and with nothing but files of
    ours, into which nobody saves. Returns their steps."""
    gone = []
    for step in steps.all_steps(root):
        path = steps.path_of(root, step)
        if not _is_leftover(path):
            continue
        old = _age(path) > SAVE_GRACE
        if not old and not _tells_if_in_use(path):
            continue
        with alone(path) as nobody:
            # Looked at again: whoever was about to commit has done so by now.
            if (nobody or (nobody is None and old)) and _is_leftover(path) and _set_aside(root, step):
                gone.append(step)
    return _erased(root, gone, "removed what unfinished saves of steps %s left in %s")


def alone(path: str) -> AbstractContextManager[bool | None]:
    """A context: whether nobody saves a checkpoint into the directory or loads from it. No manager's save and no load
    of ours begins as long as it lasts. None: nobody can tell."""
    found = _names(path) or []
    return directory_at(path).alone(
        held=[names.METADATA_NAME] if names.METADATA_NAME in found else [], tested=filter(names.is_data_file, found)
    )


def _erased(root: str, gone: list[int], text: str) -> list[int]:
    directory_at(root).erase_set_aside(steps.is_step, first=names.METADATA_NAME)
    if gone:
        logger.info(text, gone, root)
    return gone


def _names(path: str) -> list[str] | None:
    try:
        return directory_at(path).names()
    except OSError:
        return None


def _is_leftover(path: str) -> bool:
    found = _names(path)
    return found is not None and all(
        names.is_of_a_save(name)
        or name == LOCK_NAME
        or name.startswith((step_metrics.FILE_NAME, steps.ORDER_NAME))
        for name in found
    )  # fmt: skip


def _tells_if_in_use(path: str) -> bool:
    """Whether it has a file that a save would hold locked. One that has just begun, not by a manager, has none yet."""
    return any(name == LOCK_NAME or names.is_data_file(name) for name in _names(path) or ())


def _age(path: str) -> float:
    """Seconds since something was made in it or removed from it."""
    try:
        return time.time() - directory_at(path).stat().modified_ns / 1e9
    except OSError:
        return 0.0


def _set_aside(root: str, step: int) -> bool:
    try:
        directory_at(root).set_aside(f"step-{step}")
    except OSError as error:  # an older one of that name is still there, say
        logger.warning("cannot remove %s now: %s", steps.path_of(root, step), error)
        return False
    return True
