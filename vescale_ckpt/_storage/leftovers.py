"""Removes files and folders that dead writers have left, for saves, exports and conversions."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .._engine import _C
from ..errors import CheckpointError
from . import locks, urls
from .clock import seconds_since
from .directory import directory_at, stat_of

logger = logging.getLogger(__name__)

#: Seconds without a modification after which files count as left over. Used only where there are no locks: a living
#: writer modifies its files more often.
SMALL_FILE_GRACE = 600.0  # one file that is written at once
SAVE_GRACE = 24 * 3600.0  # the files of a save or an export
NEVER = float("inf")  # a folder: its modification time does not tell about the files in it


def _not_wanted() -> bool:
    return False


@dataclass(frozen=True)
class Leftover:
    """Files or a folder that one writer may have left."""

    paths: Sequence[str]  #: removed together, the last one first
    marked: str | None  #: the file or folder that the writer keeps locked; None: such files are never locked
    grace_seconds: float
    is_wanted: Callable[[], bool] = _not_wanted  #: called last, with `marked` locked: the writer may have committed
    are_folders: bool = False


def remove(found: Iterable[Leftover], *, dry_run: bool = False) -> list[str]:
    """Removes the leftovers that have no living writer and are not wanted, and returns their paths. Failures are only
    logged, because a leftover does no harm. `dry_run`: removes nothing, and returns what would be removed."""
    removed: list[str] = []
    for leftover in found:
        try:
            if _remove(leftover, dry_run):
                removed.extend(leftover.paths)
        except (CheckpointError, OSError, _C.EngineError) as error:
            if getattr(error, "errno", None) != errno.ENOENT:
                logger.warning("cannot remove leftover %s: %s", leftover.paths[0], error)
    return removed


def _remove(leftover: Leftover, dry_run: bool) -> bool:
    if urls.is_url(leftover.paths[0]):
        return _remove_objects(leftover, dry_run)
    with contextlib.ExitStack() as held:
        if leftover.marked is not None:
            others = [path for path in leftover.paths if path != leftover.marked]
            over = held.enter_context(locks.abandoned(leftover.marked, leftover.grace_seconds, others))
        elif leftover.grace_seconds:
            touched = max(os.stat(path).st_mtime for path in leftover.paths)
            directory = os.path.dirname(os.path.abspath(leftover.paths[0]))
            over = seconds_since(touched, directory, leftover.grace_seconds) >= leftover.grace_seconds
        else:
            over = True
        if not over or leftover.is_wanted():
            return False
        for path in reversed(() if dry_run else leftover.paths):
            remove_entry(path, leftover.are_folders)
    return True


def _remove_objects(leftover: Leftover, dry_run: bool) -> bool:
    """In an object store nobody locks anything: only age tells that a writer is gone."""
    if leftover.grace_seconds:
        touched = max(stat_of(path).modified_ns for path in leftover.paths) / 1e9
        directory = os.path.dirname(leftover.paths[0])
        if seconds_since(touched, directory, leftover.grace_seconds) < leftover.grace_seconds:
            return False
    if leftover.is_wanted():
        return False
    if dry_run:
        return True
    if not leftover.grace_seconds and not leftover.are_folders:  # of one folder, and in no order: a checkpoint's files
        above = os.path.dirname(leftover.paths[0])
        directory_at(above).remove_all(os.path.basename(path) for path in leftover.paths)
        return True
    for path in reversed(leftover.paths):
        remove_entry(path, leftover.are_folders)
    return True


def remove_entry(path: str, is_folder: bool) -> None:
    """Removes a file, or a folder with as much of its content as possible. Of a link to a folder it removes the link.
    Raises `_C.EngineError` for files, and OSError in object stores."""
    if urls.is_url(path):
        above, _, name = path.rpartition("/")
        for inside in directory_at(path).names() if is_folder else ():
            remove_entry(f"{path}/{inside}", stat_of(f"{path}/{inside}").is_folder)
        directory_at(above).remove(name)
        return
    if is_folder and os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        _C.remove_file(path)
