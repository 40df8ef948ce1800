"""Commits a save as the checkpoint of its directory, and removes files that no checkpoint names.

A data file belongs to a checkpoint if a metadata file of its directory names it. No save writes to a file that exists,
so the old checkpoint stays whole until `.metadata` is replaced in one step. Files that no metadata names are removed
after that, and before the next save.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from functools import partial

from ..._engine import _C
from ..._storage import orphans
from ..._storage.open_storage import storage_at
from ..._storage.orphans import Orphan
from . import file_names
from .named_files import named_by_any

logger = logging.getLogger(__name__)


def commit(
    directory: str,
    metadata: bytes | _C.PendingFile,
    index: bytes | None,
    overwrite: bool = True,
) -> None:
    """Replaces the directory's metadata file and its index, atomically and durably. `overwrite`: as for
    `Storage.commit`. Raises OSError and `_C.EngineError`."""
    storage = storage_at(directory)
    if overwrite and index is not None:  # readers ignore an index unless it matches the metadata
        storage.write(file_names.INDEX_NAME, index)
    storage.commit(file_names.METADATA_NAME, metadata, overwrite)
    if not overwrite and index is not None:  # before the commit another save's index may be there
        try:
            storage.write(file_names.INDEX_NAME, index)
        except (OSError, _C.EngineError) as error:
            logger.warning("the checkpoint in %s is whole, but its index is missing: %s", directory, error)
    if index is None:
        with contextlib.suppress(OSError, _C.EngineError):
            storage.remove(file_names.INDEX_NAME)


def remove_orphans(
    directory: str,
    superseded: AbstractSet[str] = frozenset(),
    *,
    dry_run: bool = False,
) -> list[str]:
    """Removes files that no metadata file of the directory names, and returns their names. They are orphans of dead
    saves, and the files of `superseded`, which the metadata before the last commit named.

    Files of a running save of another process or rank are locked and stay. If a metadata file cannot be read, nothing
    is removed, because it may name any file. Logs failures, because an orphan does no harm. `dry_run`: removes nothing,
    and returns what would be removed.

    An object store has no locks. There a file counts as an orphan when nobody has written it for a day. If `superseded`
    names files, only these are removed there.
    """
    try:
        storage = storage_at(directory)
        only_superseded = not storage.has_locks and bool(superseded)
        found = superseded if only_superseded else storage.names()
        candidates = [
            name
            for name in found
            if name in superseded or file_names.is_data_file(name) or file_names.is_temporary_file(name)
        ]
        named = named_by_any(directory) if candidates else set()
        left = [name for name in candidates if name not in named]
        removed = orphans.remove(_orphans(directory, left, superseded), dry_run=dry_run)
    except Exception as error:  # a committed save must not fail here
        logger.warning("orphans in %s are kept, because the search for them failed: %s", directory, error)
        return []
    if removed and not dry_run:
        logger.info("removed %d files that no checkpoint names from %s", len(removed), directory)
    return [os.path.basename(path) for path in removed]


def _orphans(directory: str, candidates: Iterable[str], superseded: AbstractSet[str]) -> Iterator[Orphan]:
    candidates = [*candidates]
    if storage_at(directory).by_requests and (old := [name for name in candidates if name in superseded]):
        yield Orphan([os.path.join(directory, name) for name in old], None, 0.0)
        candidates = [name for name in candidates if name not in superseded]
    for name in candidates:
        paths = [os.path.join(directory, name)]
        if name in superseded:
            yield Orphan(paths, None, 0.0)
        elif file_names.is_temporary_data_file(name):
            yield Orphan(paths, paths[0], orphans.SAVE_GRACE)
        elif file_names.is_temporary_file(name):
            yield Orphan(paths, None, orphans.SMALL_FILE_GRACE if file_names.may_be_in_use(name) else 0.0)
        else:
            first = file_names.first_part(name)
            marked = os.path.join(directory, first if storage_at(directory).has(first) else name)
            # The save may have committed and released its lock after the metadata was read here.
            yield Orphan(paths, marked, orphans.SAVE_GRACE, is_wanted=partial(_is_named, directory, name))


def _is_named(directory: str, name: str) -> bool:
    return name in named_by_any(directory)
