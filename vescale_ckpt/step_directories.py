"""The directories `step-N` under one root: which are checkpoints, how one goes, and what is left of those that did not
come to be.

A directory is a checkpoint if it is named `step-N` and holds `.metadata`. It goes by one rename to `step-N.deleting`,
which is nobody's checkpoint; of that `.metadata` goes first, and only then the rest. So whatever is interrupted, what
is named `step-N` is whole or not a checkpoint at all.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Container, Iterable

from . import _C, directory_lock, layout, step_metrics

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_DOOMED = ".deleting"
ORDER_NAME = ".order"  #: of the record which branch of the training a checkpoint belongs to
_LONG_AGO = 24 * 3600.0  # seconds: a save that is going on has touched its directory since


def path_of(root: str, step: int) -> str:
    return os.path.join(root, f"step-{step}")


def complete_steps(root: str, known: Container[int] = ()) -> list[int]:
    """Steps whose directory holds a checkpoint, rising. Links, files and other names are none. Of those that are
    `known` to have held one only the name is looked for."""
    return [step for step in _steps(root) if step in known or layout.has_metadata(path_of(root, step), None)]


def remove(root: str, steps: Iterable[int]) -> list[int]:
    """Removes checkpoints that nobody reads or saves to; returns those that are gone. The others stay whole."""
    gone = []
    for step in steps:
        path = path_of(root, step)
        with directory_lock.alone(path) as alone:
            # Where the file system cannot tell, a load that runs loses its files and says so.
            if alone is not False and _doom(path):
                gone.append(step)
    return _erased(root, gone, "removed the checkpoints of steps %s from %s")


def remove_leftovers(root: str) -> list[int]:
    """Removes what saves that died have left: directories of steps without `.metadata` and with nothing but files of
    ours, into which nobody saves. Returns their steps."""
    gone = []
    for step in _steps(root):
        path = path_of(root, step)
        if not _is_leftover(path):
            continue
        old = _age(path) > _LONG_AGO
        if not old and not _tells_if_in_use(path):
            continue
        with directory_lock.alone(path) as alone:
            # Looked at again: whoever was about to commit has done so by now.
            if (alone or (alone is None and old)) and _is_leftover(path) and _doom(path):
                gone.append(step)
    return _erased(root, gone, "removed what unfinished saves of steps %s left in %s")


def _erased(root: str, gone: list[int], text: str) -> list[int]:
    _erase_doomed(root)
    if gone:
        logger.info(text, gone, root)
    return gone


def _steps(root: str) -> list[int]:
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)


def _is_leftover(path: str) -> bool:
    try:
        names = os.listdir(path)
    except OSError:
        return False
    return all(
        layout.is_of_a_save(name)
        or name == directory_lock.LOCK_NAME
        or name.startswith((step_metrics.FILE_NAME, ORDER_NAME))
        for name in names
    )


def _tells_if_in_use(path: str) -> bool:
    """Whether it has a file that a save would hold locked. One that has just begun, not by a manager, has none yet."""
    return any(name == directory_lock.LOCK_NAME or layout.is_data_file(name) for name in os.listdir(path))


def _age(path: str) -> float:
    try:
        return time.time() - os.stat(path).st_mtime
    except OSError:
        return 0.0


def _doom(path: str) -> bool:
    try:
        os.rename(path, path + _DOOMED)
    except OSError as error:  # an older one of that name is still there, say
        logger.warning("cannot remove %s now: %s", path, error)
        return False
    return True


def _erase_doomed(root: str) -> None:
    """Also what an earlier removal has left. Errors are logged: the next time is soon enough."""
    with os.scandir(root) as entries:
        doomed = [
            entry.path
            for entry in entries
            if entry.name.endswith(_DOOMED)
            and _STEP.fullmatch(entry.name.removesuffix(_DOOMED))
            and stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode)
        ]
    if not doomed:
        return
    try:
        _C.sync_directory(root)  # or a crash might bring the old name back, to what is half erased
    except _C.EngineError as error:
        logger.warning("cannot remove %s now: %s", ", ".join(doomed), error)
        return
    for path in doomed:
        try:
            _erase(path)
        except (OSError, _C.EngineError) as error:
            if error.errno != errno.ENOENT:  # two who erase the same
                logger.warning("cannot remove %s now: %s", path, error)


def _erase(path: str) -> None:
    metadata = os.path.join(path, layout.METADATA_NAME)
    if os.path.lexists(metadata):
        os.unlink(metadata)
        _C.sync_directory(path)
    shutil.rmtree(path)
