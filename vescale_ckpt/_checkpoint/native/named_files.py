"""Finds the data files that checkpoints need, in their own directory and in those beside it, for clean-ups and saves.

A delta save names data files of older checkpoints, its parent checkpoints. Before it commits, it makes an empty marker
file in each of their directories, and keeps it locked while it runs. The metadata of the directories beside a parent
checkpoint decides which of its files are needed. A tool that copied a directory may have left out the marker file. Then
a delta table beside the directory shows that metadata must be read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..._engine import _C
from ..._state import extra_files
from ..._storage import orphans
from ..._storage.open_storage import storage_at
from ..._storage.paths import folder_above, in_sibling
from ..._storage.storage import Storage
from ...errors import CheckpointError
from . import file_names
from .file_names import DELTA_NAME, LEASE_MARKER
from .metadata_file import has_metadata, metadata_fingerprint

if TYPE_CHECKING:
    from .native_checkpoint import NativeCheckpoint


@dataclass(frozen=True)
class Replaced:
    """What a save needs to know of the checkpoint that it replaces."""

    fingerprint: str = ""  #: of its metadata; empty if there is none
    files: frozenset[str] = frozenset()  #: data files that it names
    checkpoint: NativeCheckpoint | None = None

    @classmethod
    def read(cls, directory: str, rank: int | None) -> Replaced:
        """Reads it from one metadata file of the directory. Nothing is known if that is missing or cannot be read."""
        if not has_metadata(directory, rank):
            return cls()
        try:
            found, checkpoint = metadata_fingerprint(directory, rank), _opened(directory, rank)
            return cls(found, frozenset(checkpoint.named_files()), checkpoint)
        except (CheckpointError, OSError):
            return cls()

    def extra_names(self, directory: str, rank: int | None) -> list[str]:
        """Returns the names of the extra files of the checkpoint that is there now. Reads it if it is another one."""
        is_same = False
        with contextlib.suppress(OSError):
            is_same = metadata_fingerprint(directory, rank) == self.fingerprint
        present = self if is_same else self.read(directory, rank)
        try:
            return [] if present.checkpoint is None else extra_files.names_in(present.checkpoint.keys())
        except CheckpointError:
            return []  # loads cannot read it, either


def named_files(directory: str, rank: int | None) -> set[str]:
    """Data files that one metadata file of the directory names; none if that file is missing or cannot be read."""
    if not has_metadata(directory, rank):
        return set()
    try:
        return _named(directory, rank)
    except CheckpointError:
        return set()


def _opened(directory: str, rank: int | None) -> NativeCheckpoint:
    from .native_checkpoint import NativeCheckpoint  # it imports torch, and most checkpoints name no others' files

    return NativeCheckpoint.by_index(directory, rank)


def _named(directory: str, rank: int | None) -> set[str]:
    return _opened(directory, rank).named_files()


def named_by_any(directory: str) -> set[str]:
    """Data files that the metadata files of the directory name now. Raises `CheckpointError` if one cannot be read."""
    named: set[str] = set()
    for name in filter(file_names.is_metadata_file, storage_at(directory).names()):
        named |= _named(directory, file_names.rank_of_metadata(name))
    return named


def named_beside(directory: str) -> set[str]:
    """Data files of the directory that checkpoints beside it name now. Raises `CheckpointError` if the metadata of one
    cannot be read: it may name any file."""
    above, own = folder_above(directory)
    named: set[str] = set()
    folders = storage_at(above).folders()
    for folder in folders:
        path = os.path.join(above, folder)
        if folder != own and has_metadata(path, None):
            found = map(in_sibling, _named(path, None))
            named |= {file.file for file in found if file is not None and file.folder == own}
    if set(storage_at(above).folders()) != set(folders):
        raise CheckpointError(f"folders in {above} were renamed while they were looked at", path=above)
    return named


@contextlib.contextmanager
def needed_beside(directory: str, *, dry_run: bool = False, unnamed: bool = False) -> Iterator[set[str] | None]:
    """A context that gives `named_beside`. While it lasts, no delta save begins to name files of the directory, if it
    has a marker file or is in an object store. It gives None if the files of the directory must stay, because a running
    delta save may name any of them, or because metadata cannot be read. Makes a marker file that is missing and needed,
    unless `dry_run`.

    `unnamed`: only files will be removed that the metadata of the directory, which was read before, does not name. If
    there is neither a marker file nor a lease now, a delta save that leases the directory later reads that metadata,
    and so names none of them."""
    with contextlib.ExitStack() as held:
        needed = None
        with contextlib.suppress(CheckpointError, OSError, _C.EngineError):
            storage = storage_at(directory)
            if unnamed and storage.by_requests:
                is_marked = any(name.startswith(LEASE_MARKER) for name in storage.names())
            else:
                is_marked = storage.has(LEASE_MARKER)
            found = set[str]() if is_marked else _named_without_marker(storage)
            if found and not dry_run:
                storage.keep_marker(LEASE_MARKER)
                is_marked = True
            if not is_marked and (storage.has_locks or unnamed):
                needed = found
            elif held.enter_context(storage.lock_if_unleased(LEASE_MARKER, orphans.SAVE_GRACE)):
                # In an object store a save may have made the marker file before the remover's notice was written.
                needed = named_beside(directory) if storage.has(LEASE_MARKER) else found
        yield needed


def _named_without_marker(storage: Storage) -> set[str]:
    """Returns `named_beside` for a directory without a marker file. Looks for delta tables first, because that costs
    less than reading metadata."""
    if storage.by_requests and has_metadata(storage.path, None) and not storage.has(DELTA_NAME):
        return set()  # it was never a base. This saves requests: most jobs save without base=
    above, own = folder_above(storage.path)
    try:
        folders = storage_at(above).folders()
    except PermissionError:  # then only a marker file could show it
        return set()
    if any(folder != own and storage_at(os.path.join(above, folder)).has(DELTA_NAME) for folder in folders):
        return named_beside(storage.path)
    return set()


def check_replaceable(path: str) -> None:
    """Raises `CheckpointError` if a folder must not be replaced, because checkpoints beside it name files in it."""
    with needed_beside(path) as needed:
        if needed != set():
            raise CheckpointError(
                f"{path} is not replaced: checkpoints beside it name its files (saves with base=), or a save is "
                "running that may",
                path=path,
            )
