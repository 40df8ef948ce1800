"""`NativeSave` checks, cleans up and commits the directory of a save in DCP's own layout, for one rank."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from .._engine.errors import named_system_errors
from .._native import commit
from .._native.metadata_file import has_metadata
from .._ranks.shared_directory import separate_directories
from .._storage.directory import directory_at
from .._storage.locks import drop_dead_locks
from ..errors import CheckpointError
from .data_files import DataFiles
from .rank_files import FileOptions


def new_save_id() -> str:
    return uuid.uuid4().hex


class NativeSave:
    """One rank's save. The order of calls: `begin` on each rank; `clean_up` on the coordinator before any rank writes;
    `files` on each rank; `commit` on the coordinator after all ranks have written; `end` on each rank, also after a
    failure.

    Args:
        alone: whether ranks save without collectives, each with metadata of its own.
    """

    def __init__(self, options: FileOptions, *, overwrite: bool = True, alone: bool = False) -> None:
        self.options = options
        self.metadata_rank = options.rank if alone else None  #: None: one metadata file for all ranks
        self._overwrite = overwrite
        self._superseded: set[str] = set()  # the files of the checkpoint that this save replaces
        self._files: DataFiles | None = None  # locked while this save goes on

    def begin(self) -> None:
        """Raises `CheckpointError` if the directory must not be written to."""
        path = self.options.path
        drop_dead_locks(path)
        directory_at(path).make()
        if not self._overwrite and has_metadata(path, self.metadata_rank):
            raise CheckpointError(f"{path} holds a checkpoint already and overwrite=False", path=path)
        if self.metadata_rank is not None and has_metadata(path, None):
            raise CheckpointError(
                f"{path} holds a checkpoint that all ranks saved together, which loads would go on to find: "
                "ranks that save without collectives need a directory of their own",
                path=path,
            )

    def clean_up(self) -> None:
        """Removes files that no metadata names. They are left from a save that died, and this save may need the
        space."""
        self._superseded = commit.named_files(self.options.path, self.metadata_rank)
        commit.remove_leftovers(self.options.path, only_rank=self.metadata_rank)

    def files(self) -> DataFiles:
        """The files that this rank writes. Called once."""
        self._files = DataFiles(self.options)
        return self._files

    def check_shared_directory(self, names: Sequence[Iterable[str]]) -> None:
        """Call it before the commit. Raises `CheckpointError` if files that ranks have written, `names` by rank, are
        not in this directory."""
        path = self.options.path
        storage = directory_at(path)
        here = set(storage.names())
        missing = [
            rank for rank, of_rank in enumerate(names) if not all(name in here or storage.has(name) for name in of_rank)
        ]
        if missing:
            raise separate_directories(path, missing)

    def commit(self, content: bytes, index: bytes | None) -> None:
        """Replaces the metadata by `content`, atomically and durably, and removes the files that it does not name."""
        path = self.options.path
        try:
            with named_system_errors(path):
                commit.commit(path, self.metadata_rank, content, index)
        except BaseException:
            self.end()  # unlocks this rank's files: they are removed unless the metadata in place names them
            commit.remove_leftovers(path, only_rank=self.metadata_rank)
            raise
        commit.remove_leftovers(path, self._superseded, only_rank=self.metadata_rank)
        self._superseded = set()

    def end(self) -> None:
        """Ends this save, committed or not. May be called again."""
        if self._files is not None:
            self._files.release()
