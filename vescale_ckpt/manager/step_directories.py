"""Removes directories `step-N` below a root for the manager: old checkpoints, and orphans of dead saves.

A directory is first renamed, in one step, to a name that no reader takes for a checkpoint. Then `.metadata` is removed,
and after it the other files. An interruption therefore leaves each `step-N` whole, or without `.metadata`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Iterable
from contextlib import AbstractContextManager

from .._checkpoint.native import file_names, step_order
from .._storage.open_storage import stat_of, storage_at
from .._storage.orphans import SAVE_GRACE
from .._storage.paths import is_url
from .._storage.storage import LOCK_NAME

logger = logging.getLogger(__name__)


def remove(root: str, which: Iterable[int]) -> list[int]:
    """Removes the checkpoints that nobody reads or saves to, and returns their steps. Checkpoints in use stay
    whole."""
    gone = []
    for step in which:
        path = step_order.path_of(root, step)
        # `unused` is None if the file system has no locks. Then a running load loses its files, and raises.
        with exclusive(path) as unused:
            if unused is not False and _set_aside(root, step):
                gone.append(step)
    return _erased(root, gone, "removed the checkpoints of steps %s from %s")


def remove_unused(path: str) -> bool:
    """Removes a checkpoint unless it is in use; whatever its name is. An interruption leaves it whole, or without its
    name. What earlier interruptions have left beside it is removed, too."""
    above, name = os.path.split(path.rstrip("/") if is_url(path) else os.path.abspath(path))
    with exclusive(path) as unused:
        if unused is False:
            return False
        storage_at(above).set_aside(name, file_names.METADATA_NAME)
    suffix = os.path.splitext(name)[1] or name
    storage_at(above).erase_set_aside(lambda found: found.endswith(suffix), file_names.METADATA_NAME)
    return True


def remove_orphans(
    root: str, which: Iterable[int] | None = None, *, besides: Container[int] = (), dry_run: bool = False
) -> list[int]:
    """Removes directories of dead saves, and returns their steps. Such a directory has no `.metadata`, has only files
    of this package, and no save uses it.

    Args:
        which: steps to look at; None: all.
        besides: steps that are known to be none. In an object store each look at one is a request.
        dry_run: removes nothing, and returns the steps only.
    """
    gone = []
    for step in step_order.all_steps(root) if which is None else which:
        if step in besides:
            continue
        path = step_order.path_of(root, step)
        found = _names(path)
        if found is None or file_names.METADATA_NAME in found or not all(map(_is_ours, found)):
            continue
        versions, old = _versions(path), _age(path) > SAVE_GRACE
        # A running save would hold one of these locked, but a save without a manager has none at its beginning.
        if not old and not any(name == LOCK_NAME or file_names.is_data_file(name) for name in found):
            continue
        with exclusive(path) as unused:
            # Checked again under the lock: a save may have committed in the meantime.
            found = _names(path)
            is_orphan = found is not None and all(map(_is_ours, found))
            is_unused = unused or (unused is None and old)
            is_same = versions is not None and _versions(path) == versions
            if is_orphan and is_unused and is_same and (dry_run or _set_aside(root, step)):
                gone.append(step)
    return gone if dry_run else _erased(root, gone, "removed what unfinished saves of steps %s left in %s")


def exclusive(path: str) -> AbstractContextManager[bool | None]:
    """A context that yields True if no save and no load is using the directory, False if one is, None if the file
    system cannot tell. No manager's save and no load of this package can begin while the context is open."""
    storage = storage_at(path)
    found = (_names(path) or []) if storage.has_locks else []
    return storage.lock_exclusively(
        held=[file_names.METADATA_NAME] if file_names.METADATA_NAME in found else [],
        tested=filter(file_names.is_data_file, found),
    )


def _is_ours(name: str) -> bool:
    """Whether a save or its manager may have left the file."""
    return (
        file_names.is_of_a_save(name)
        or name == LOCK_NAME
        or name.startswith((file_names.METRICS_NAME, step_order.ORDER_NAME))
    )


def _erased(root: str, gone: list[int], text: str) -> list[int]:
    storage_at(root).erase_set_aside(step_order.is_step, first=file_names.METADATA_NAME)
    if gone:
        logger.info(text, gone, root)
    return gone


def _names(path: str) -> list[str] | None:
    try:
        return storage_at(path).names()
    except OSError:
        return None


def _versions(path: str) -> dict[str, tuple[int, ...]] | None:
    """The versions of a directory's files, in storages without locks: a change shows that a save has begun there. None
    if they change now."""
    storage = storage_at(path)
    try:
        return {name: storage.stat(name).identity for name in (() if storage.has_locks else _names(path) or ())}
    except FileNotFoundError:
        return None


def _age(path: str) -> float:
    """Seconds since an entry was created in the directory or removed from it."""
    try:
        return storage_at(os.path.dirname(path)).age(stat_of(path).modified_ns, SAVE_GRACE)
    except OSError:
        return 0.0


def _set_aside(root: str, step: int) -> bool:
    try:
        storage_at(root).set_aside(f"step-{step}", first=file_names.METADATA_NAME)
    except OSError as error:  # for instance, an older directory of the same name is still being removed
        logger.warning("cannot remove %s now: %s", step_order.path_of(root, step), error)
        return False
    return True
