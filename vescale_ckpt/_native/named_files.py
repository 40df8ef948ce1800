"""Finds the data files that metadata names: that of a directory, and that of the checkpoints beside it.

A delta save names data files of older checkpoints. Before it commits, each of their directories has a mark, an empty
file. Without a mark nobody looks for such names. With a mark, the metadata of the directories beside it decides which
files are needed. A delta save keeps the marks locked while it runs.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Iterator

from .._engine import _C
from .._storage import leftovers
from .._storage.directory import directory_at
from .._storage.siblings import folder_above, in_sibling
from ..errors import CheckpointError
from . import metadata_file, names
from .metadata_file import has_metadata
from .names import MARK_NAME


def named_files(directory: str, rank: int | None) -> set[str]:
    """Data files that one metadata file of the directory names; none if that file is missing or cannot be read."""
    if not has_metadata(directory, rank):
        return set()
    try:
        return _named_files(directory, rank)
    except CheckpointError:
        return set()


def named_by_any(directory: str) -> set[str]:
    """Data files that the metadata files of the directory name now. Raises `CheckpointError` if one cannot be read."""
    named: set[str] = set()
    for name in filter(names.is_metadata_file, directory_at(directory).names()):
        named |= _named_files(directory, names.rank_of_metadata(name))
    return named


def named_beside(directory: str) -> set[str]:
    """Data files of the directory that checkpoints beside it name now. Raises `CheckpointError` if the metadata of one
    cannot be read: it may name any file."""
    above, own = folder_above(directory)
    named: set[str] = set()
    folders = directory_at(above).folders()
    for folder in folders:
        path = os.path.join(above, folder)
        if folder != own and has_metadata(path, None):
            found = map(in_sibling, _named_files(path, None))
            named |= {file.file for file in found if file is not None and file.folder == own}
    if set(directory_at(above).folders()) != set(folders):
        raise CheckpointError(f"folders in {above} were renamed while they were looked at", path=above)
    return named


@contextlib.contextmanager
def needed_beside(directory: str) -> Iterator[set[str] | None]:
    """A context that gives `named_beside`, for a directory that has a mark, and in an object store for any. While it
    lasts, no delta save begins to refer to the directory. None: the files of the directory must stay, because a delta
    save that runs may name any of them, or because metadata cannot be read."""
    with contextlib.ExitStack() as held:
        needed = None
        with contextlib.suppress(CheckpointError, OSError):
            storage = directory_at(directory)
            if held.enter_context(storage.unused(MARK_NAME, leftovers.SAVE_GRACE)):
                needed = named_beside(directory) if storage.has(MARK_NAME) else set()
        yield needed


def check_replaceable(path: str) -> None:
    """Raises `CheckpointError` if a folder must not be replaced, because checkpoints beside it name files in it."""
    if directory_at(path).has(MARK_NAME):
        with needed_beside(path) as needed:
            if needed != set():
                raise CheckpointError(
                    f"{path} is not replaced: checkpoints beside it name its files (saves with base=), or a save is "
                    "running that may",
                    path=path,
                )


def _named_files(directory: str, rank: int | None) -> set[str]:
    index = metadata_file.read_index(directory, rank)
    if index is not None:
        with contextlib.suppress(_C.EngineError):  # damaged
            return {posixpath.normpath(path) for path in index.files}
    storage = metadata_file.read_metadata(directory, rank).storage_data
    values = storage.values() if isinstance(storage, dict) else ()
    paths = (getattr(info, "relative_path", None) for info in values)
    return {posixpath.normpath(path) for path in paths if isinstance(path, str)}
