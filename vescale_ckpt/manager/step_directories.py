"""Removes directories `step-N` below a root for the manager: old checkpoints, and the leftovers of saves that died.

A directory is first renamed, in one step, to a name that no reader takes for a checkpoint. Then `.metadata` is removed,
and after it the other files. An interruption therefore leaves each `step-N` whole, or without `.metadata`.
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
    """Removes the checkpoints that are not being read or saved to, and returns their steps. The others stay whole."""
    gone = []
    for step in which:
        with exclusive(steps.path_of(root, step)) as unused:
            # None: the file system has no locks. A load that is running loses its files then, and raises.
            if unused is not False and _set_aside(root, step):
                gone.append(step)
    return _erased(root, gone, "removed the checkpoints of steps %s from %s")


def remove_leftovers(root: str, *, dry_run: bool = False) -> list[int]:
    """Removes the directories that dead saves have left: those without `.metadata`, with only files of this package,
    and that no save is using. Returns their steps. `dry_run`: removes nothing, and returns what would be removed."""
    gone = []
    for step in steps.all_steps(root):
        path = steps.path_of(root, step)
        if not _is_leftover(path):
            continue
        old = _age(path) > SAVE_GRACE
        if not old and not _tells_if_in_use(path):
            continue
        with exclusive(path) as unused:
            # Checked again under the lock: a save may have committed in the meantime.
            if (unused or (unused is None and old)) and _is_leftover(path) and (dry_run or _set_aside(root, step)):
                gone.append(step)
    return gone if dry_run else _erased(root, gone, "removed what unfinished saves of steps %s left in %s")


def exclusive(path: str) -> AbstractContextManager[bool | None]:
    """A context that yields True if no save and no load is using the directory, False if one is, None if the file
    system cannot tell. No manager's save and no load of this package can begin while the context is open."""
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
    """Whether the directory has a file that a running save would hold locked. A save without a manager has none yet
    when it has just begun."""
    return any(name == LOCK_NAME or names.is_data_file(name) for name in _names(path) or ())


def _age(path: str) -> float:
    """Seconds since an entry was created in the directory or removed from it."""
    try:
        return time.time() - directory_at(path).stat().modified_ns / 1e9
    except OSError:
        return 0.0


def _set_aside(root: str, step: int) -> bool:
    try:
        directory_at(root).set_aside(f"step-{step}", first=names.METADATA_NAME)
    except OSError as error:  # for instance, an older directory of the same name is still being removed
        logger.warning("cannot remove %s now: %s", steps.path_of(root, step), error)
        return False
    return True
