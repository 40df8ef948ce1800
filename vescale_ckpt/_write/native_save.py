"""`NativeSave` is one rank's save in DCP's own layout: the directory checked before it, and committed after it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from .._engine.errors import named_system_errors
from .._native import commit
from .._native.metadata_file import has_metadata
from .._ranks.one_place import separate
from .._storage.directory import directory_at
from .._storage.locks import drop_dead_locks
from ..errors import CheckpointError
from .data_files import DataFiles
from .rank_files import FileOptions


def new_save_id() -> str:
    return uuid.uuid4().hex


class NativeSave:
    """`begin` on each rank; `clean_up` on the coordinator before any rank writes; then `files`; `commit` on the
    coordinator when all ranks have written; `end` on each rank, whatever happened.

    Args:
        alone: whether ranks save without collectives, each with metadata of its own.
    """

    def __init__(self, options: FileOptions, *, overwrite: bool = True, alone: bool = False) -> None:
        self.options = options
        self.metadata_rank = options.rank if alone else None  #: None: the metadata is that of all ranks
        self._overwrite = overwrite
        self._superseded: set[str] = set()  # files that the metadata named which this save replaces
        self._files: DataFiles | None = None  # locked while this save goes on

    def begin(self) -> None:
        """Raises `CheckpointError` where the directory is not to be written to."""
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
        """Removes what nothing names, which is left from a save that died: without its space this one might not fit."""
        self._superseded = commit.named_files(self.options.path, self.metadata_rank)
        commit.remove_leftovers(self.options.path, only_rank=self.metadata_rank)

    def files(self) -> DataFiles:
        """What this rank writes to. Called once."""
        self._files = DataFiles(self.options)
        return self._files

    def check_one_place(self, names: Sequence[Iterable[str]]) -> None:
        """Before the commit: that the files which ranks have written, their `names` by rank, are in this directory."""
        path = self.options.path
        storage = directory_at(path)
        here = set(storage.names())
        missing = [
            rank for rank, of_rank in enumerate(names) if not all(name in here or storage.has(name) for name in of_rank)
        ]
        if missing:
            raise separate(path, missing)

    def commit(self, content: bytes, index: bytes | None) -> None:
        """Makes `content` the metadata of the directory, atomically and durably, and removes what it does not name."""
        path = self.options.path
        try:
            with named_system_errors(path):
                commit.commit(path, self.metadata_rank, content, index)
        except BaseException:
            self.end()  # what this rank has written goes, unless the metadata that is there names it
            commit.remove_leftovers(path, only_rank=self.metadata_rank)
            raise
        commit.remove_leftovers(path, self._superseded, only_rank=self.metadata_rank)
        self._superseded = set()

    def end(self) -> None:
        """Committed or not, this save is over. May be called again."""
        if self._files is not None:
            self._files.release()
