"""Removes orphans for saves, exports and conversions: files and folders of writers that died."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .._engine import _C
from ..errors import CheckpointError
from .open_storage import storage_at

logger = logging.getLogger(__name__)

#: Where there are no locks, files count as orphans after so many seconds without a modification: a living writer
#: modifies its files more often.
SMALL_FILE_GRACE = 600.0  # the age of one file that is written at once
SAVE_GRACE = 24 * 3600.0  # the age of files of a save or an export
NEVER = float("inf")  # the age of a folder: its modification time does not show writes to the files in it


@dataclass(frozen=True)
class Orphan:
    """Files or a folder that one writer may have left."""

    paths: Sequence[str]  #: files of one folder, removed together, the last one first
    locked: str | None  #: the path that the writer keeps locked; None: such files are never locked
    grace_seconds: float
    is_wanted: Callable[[], bool] = lambda: False  #: called last, with `locked` locked: the writer may have committed
    are_folders: bool = False


def remove(found: Iterable[Orphan], *, dry_run: bool = False) -> list[str]:
    """Removes the orphans that have no living writer and are not wanted, and returns their paths. Failures are only
    logged, because an orphan does no harm. `dry_run`: removes nothing, and returns what would be removed."""
    removed: list[str] = []
    for orphan in found:
        try:
            if _remove(orphan, dry_run):
                removed.extend(orphan.paths)
        except (CheckpointError, OSError, _C.EngineError) as error:
            if getattr(error, "errno", None) != errno.ENOENT:
                logger.warning("cannot remove orphan %s: %s", orphan.paths[0], error)
    return removed


def _remove(orphan: Orphan, dry_run: bool) -> bool:
    storage = storage_at(os.path.dirname(orphan.paths[0]) or os.curdir)
    names = [os.path.basename(path) for path in orphan.paths]
    locked = None if orphan.locked is None else os.path.basename(orphan.locked)
    with storage.lock_if_abandoned(names, locked, orphan.grace_seconds) as is_over:
        if not is_over or orphan.is_wanted():
            return False
        if dry_run:
            return True
        if not orphan.are_folders:
            storage.remove_all(reversed(names))
        for name in reversed(names) if orphan.are_folders else ():
            storage.remove_folder(name)
    return True
