"""Commits a save as the checkpoint of its directory, and removes files that no checkpoint names.

A data file belongs to a checkpoint if a metadata file names it, in its own directory or in one beside it. No save
writes to a file that exists, so the old checkpoint stays whole until `.metadata` is replaced in one step. Files that no
metadata names are removed after that, and before the next save.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from functools import partial

from ..._engine import _C
from ..._storage import orphans
from ..._storage.open_storage import storage_at
from ..._storage.orphans import Orphan
from ..._storage.paths import in_sibling
from ..._storage.storage import Storage
from . import delta_table, file_names
from .file_names import DELTA_NAME, LEASE_MARKER
from .named_files import named_by_any, needed_beside

logger = logging.getLogger(__name__)


def commit(
    directory: str,
    rank: int | None,
    metadata: bytes | _C.PendingFile,
    index: bytes | None,
    delta: bytes | None = None,
    overwrite: bool = True,
) -> None:
    """Replaces the directory's metadata file and its index, atomically and durably. `rank`: None for the metadata of
    all ranks. `delta`: the content of `.metadata.delta`. `overwrite`: as for `Storage.commit`. Raises OSError and
    `_C.EngineError`."""
    storage = storage_at(directory)
    beside = {file_names.index_name(rank): index, DELTA_NAME: delta}
    if overwrite:  # readers ignore index and delta table unless they match the metadata
        _write_beside(storage, beside)
    storage.commit(file_names.metadata_name(rank), metadata, overwrite)
    if not overwrite:  # before the commit another save may have committed, and they would replace its own
        try:
            _write_beside(storage, beside)
        except (OSError, _C.EngineError) as error:
            logger.warning("the checkpoint in %s is whole, but its index is missing: %s", directory, error)
    if index is None:
        with contextlib.suppress(OSError, _C.EngineError):
            storage.remove(file_names.index_name(rank))


def _write_beside(storage: Storage, contents: Mapping[str, bytes | None]) -> None:
    for name, content in contents.items():
        if content is not None:
            storage.write(name, content)


def remove_orphans(
    directory: str,
    superseded: AbstractSet[str] = frozenset(),
    only_rank: int | None = None,
    *,
    dry_run: bool = False,
) -> list[str]:
    """Removes files that no metadata file of the directory names, and returns their names. They are orphans of dead
    saves, and the files of `superseded`, which the metadata before the last commit named.

    Files of a running save of another process or rank are locked and stay. If a metadata file cannot be read, nothing
    is removed, because it may name any file. If the directory has a marker file, or a checkpoint beside it is a delta
    save, this holds for the metadata of all checkpoints beside it. `only_rank`: removes only that rank's files. Logs
    failures, because an orphan does no harm. `dry_run`: removes nothing, and returns what would be removed.

    An object store has no locks. There a file counts as an orphan when nobody has written it for a day. If `superseded`
    names files, only these are removed there.
    """
    try:
        storage = storage_at(directory)
        only_superseded = not storage.has_locks and bool(superseded)
        found = [name for name in superseded if in_sibling(name) is None] if only_superseded else storage.names()
        mine = None if only_rank is None else (f"__{only_rank}_", f"__{only_rank}.")
        candidates = [
            name
            for name in found
            if (
                name in superseded
                or file_names.is_data_file(name)
                or file_names.is_temporary_file(name)
                or name == DELTA_NAME
            )
            and (mine is None or name.startswith(mine))
        ]
        named = named_by_any(directory) if candidates else set()
        left = [name for name in candidates if name not in named]
        is_marked = storage.has(LEASE_MARKER) if only_superseded else LEASE_MARKER in found
        looks = is_marked or left
        with needed_beside(directory, dry_run=dry_run, unnamed=True) if looks else nullcontext(set[str]()) as needed:
            if needed is None:
                left = [name for name in left if file_names.is_temporary_file(name)]
            elif needed:
                left = [name for name in left if name not in needed]
            elif is_marked and not dry_run:
                storage.remove(LEASE_MARKER)
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
        elif name == DELTA_NAME:
            if not delta_table.belongs(directory):
                yield Orphan(paths, None, orphans.SMALL_FILE_GRACE)
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
