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
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..._engine import _C
from ..._state import extra_files
from ..._storage import orphans
from ..._storage.open_storage import storage_at
from ..._storage.orphans import Orphan
from ...errors import CheckpointError
from . import file_names
from .metadata_file import has_metadata, metadata_fingerprint

if TYPE_CHECKING:
    from .native_checkpoint import NativeCheckpoint

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
    superseded: AbstractSet[str] | None = None,
    *,
    dry_run: bool = False,
) -> list[str]:
    """Removes files that no metadata file of the directory names, and returns their names. They are orphans of dead
    saves, and the files of `superseded`, which the metadata before a save named.

    Files of a running save of another process or rank are locked and stay. If a metadata file cannot be read, nothing
    is removed, because it may name any file. Logs failures, because an orphan does no harm. `dry_run`: removes nothing,
    and returns what would be removed.

    An object store has no locks. There a file counts as an orphan when nobody has written it for a day; a save, which
    gives `superseded`, removes only these there, and `vescale-ckpt repair` looks for others.
    """
    try:
        storage, old = storage_at(directory), superseded or frozenset()
        candidates = [
            name
            for name in (storage.names() if superseded is None or storage.has_locks else old)
            if name in old or file_names.is_data_file(name) or file_names.is_temporary_file(name)
        ]
        named = named_by_any(directory) if candidates else set()
        left = [name for name in candidates if name not in named]
        removed = orphans.remove(_orphans(directory, left, old), dry_run=dry_run)
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


# --- What metadata names


@dataclass(frozen=True)
class Replaced:
    """What a save needs to know of the checkpoint that it replaces."""

    fingerprint: str = ""  #: of its metadata; empty if there is none
    files: frozenset[str] = frozenset()  #: data files that it names
    checkpoint: NativeCheckpoint | None = None

    @classmethod
    def read(cls, directory: str) -> Replaced:
        """Reads it from the metadata of the directory. Nothing is known if that is missing or cannot be read."""
        if not has_metadata(directory, None):
            return cls()
        try:
            found, checkpoint = metadata_fingerprint(directory), _opened(directory, None)
            return cls(found, frozenset(checkpoint.named_files()), checkpoint)
        except (CheckpointError, OSError):
            return cls()

    def extra_names(self, directory: str) -> list[str]:
        """Returns the names of the extra files of the checkpoint that is there now. Reads it if it is another one."""
        is_same = False
        with contextlib.suppress(OSError):
            is_same = metadata_fingerprint(directory) == self.fingerprint
        present = self if is_same else self.read(directory)
        try:
            return [] if present.checkpoint is None else extra_files.names_in(present.checkpoint.keys())
        except CheckpointError:
            return []  # loads cannot read it, either


def _opened(directory: str, rank: int | None) -> NativeCheckpoint:
    from .native_checkpoint import NativeCheckpoint  # it imports torch

    return NativeCheckpoint.by_index(directory, rank)


def named_by_any(directory: str) -> set[str]:
    """Data files that the metadata files of the directory name now. Raises `CheckpointError` if one cannot be read."""
    named: set[str] = set()
    for name in filter(file_names.is_metadata_file, storage_at(directory).names()):
        named |= _opened(directory, file_names.rank_of_metadata(name)).named_files()
    return named
