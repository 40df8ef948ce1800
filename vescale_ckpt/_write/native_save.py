"""`NativeSave` writes the data files of one rank for a save in DCP's own layout, and commits the metadata."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .._checkpoint.native import commit_metadata
from .._checkpoint.native.extra_copies import ExtraFiles
from .._checkpoint.native.file_names import data_name
from .._checkpoint.native.metadata_file import has_metadata
from .._checkpoint.native.named_files import named_files
from .._engine import _C
from .._engine.errors import named_errors, named_system_errors
from .._engine.options import engine_options, used_paths
from .._engine.rows import words
from .._observe.timeline import phase
from .._plan.save_plan import PackedItems
from .._ranks.shared_directory import separate_directories
from .._storage.locks import drop_dead_locks
from .._storage.open_storage import storage_at
from .._storage.pending import make_locked, new_token
from .._storage.storage import Lease
from ..errors import CheckpointError
from ..reports import SaveStats
from .delta import Delta
from .delta_base import DeltaBase
from .rank_save import RankSave, SaveOptions


class NativeSave(RankSave):
    """A `RankSave` in DCP's own layout. Each rank writes files of its own, which are locked until the save ends."""

    def __init__(self, options: SaveOptions) -> None:
        super().__init__(options)
        self.metadata_rank = options.rank if options.alone else None  #: None: one metadata file for all ranks
        self._superseded: set[str] = set()  # the files of the checkpoint that this save replaces
        self._names: list[str] = []
        self._token = ""
        self._lock: Lease | None = None  # on the first file; it marks all files as those of a running save
        self._file: _C.FileWriter | None = None
        self._needed = 0  # bytes, for the open file
        self._in_background = False
        self._tensor_bytes = self._file_bytes = 0
        self._stats_of_files: list[dict[str, int]] = []
        self.delta: Delta | None = None  #: of a save with `base=`: what need not be written
        self.base: DeltaBase | None = None  #: the same, on the coordinator
        self._open_later: Callable[[Any], None] | None = None  # makes the file of a delta save, if it needs one

    def begin(self) -> None:
        path = self.options.path
        drop_dead_locks(path)
        storage_at(path).make()
        if not self.options.overwrite and has_metadata(path, self.metadata_rank):
            raise CheckpointError(f"{path} holds a checkpoint already and overwrite=False", path=path)
        if self.metadata_rank is not None and has_metadata(path, None):
            raise CheckpointError(
                f"{path} holds a checkpoint that all ranks saved together, which loads would go on to find: "
                "ranks that save without collectives need a directory of their own",
                path=path,
            )

    def clean_up(self) -> None:
        """Removes files that no metadata names. Raises `CheckpointError` if `overwrite=False` cannot hold there."""
        if not self.options.overwrite:
            storage_at(self.options.path).check_exclusive_commits()
        self._superseded = named_files(self.options.path, self.metadata_rank)
        self._remove_leftovers()

    def unread(self, items: PackedItems) -> Mapping[int, Sequence[int]]:
        return {} if self.delta is None else self.delta.unread(items)

    # --- Data files

    def open(self, body_bytes: Any, part: int | None = None, *, in_background: bool = False) -> None:
        self._in_background = in_background
        if self.delta is None:
            self._open(body_bytes, part)
        else:  # how much will be written is not known yet
            self._open_later = lambda body_bytes: self._open(body_bytes, part)

    def _open(self, body_bytes: Any, part: int | None) -> None:
        self._finish_file()
        self._open_later = None
        options, self._needed = self.options, _C.expected_bytes(body_bytes)

        def make() -> tuple[str, _C.FileWriter]:
            if not self._names:
                self._token = new_token()
            self.name = data_name(options.rank, self._token, part)
            with named_errors(str, options.path, self._needed):
                storage_at(options.path).check_space(self._needed)
                return self._path, _C.FileWriter(self._path, body_bytes, self._for_engine(), options.checksums)

        if self._names:
            _, self._file = make()
        else:
            self._file, self._lock = make_locked(make)
        self._names.append(self.name)
        self._tensor_bytes += sum(memoryview(body_bytes).cast("B").cast("q"))

    def _for_engine(self) -> _C.Options:
        return engine_options(self.options.thread_count, self.options.direct_io, self._in_background)

    @property
    def _path(self) -> str:
        return os.path.join(self.options.path, self.name)

    def write_table(self, table: Any, key_of: Callable[[int], str], rows: Sequence[int]) -> list[int]:
        if self.delta is not None:
            return self.delta.write(table, key_of, rows, self._for_engine(), self._write_new)
        return self._write_table(table, key_of)

    def _write_new(self, table: Any, key_of: Callable[[int], str], body_bytes: Any) -> list[int]:
        """Writes tensors that no older checkpoint has."""
        if self._open_later is not None:
            self._open_later(body_bytes)
        else:
            self._tensor_bytes += sum(body_bytes)
        return self._write_table(table, key_of)

    def _write_table(self, table: Any, key_of: Callable[[int], str]) -> list[int]:
        assert self._file is not None
        with named_errors(key_of, self.options.path, self._needed):
            return words(self._file.write_tensors(table)).tolist()

    def write_archives(self, archives: list[bytes], keys: list[str], rows: Sequence[int]) -> list[int]:
        if self.delta is None:
            return self.write_contents(archives, keys)
        return self.delta.write_archives(archives, keys, rows, self.write_contents)

    def write_contents(self, contents: list[bytes], keys: list[str]) -> list[int]:
        if not contents:
            return []
        if self._open_later is not None:
            self._open_later(b"")
        assert self._file is not None
        needed = self._needed + sum(map(len, contents))
        with named_errors(keys.__getitem__, self.options.path, needed):
            return words(self._file.write_objects(contents)).tolist()

    def located(self, placed: Sequence[int]) -> tuple[bytes, list[str]]:
        places, _ = super().located(placed)
        return (places, self._names) if self.delta is None else self.delta.locate(places, self._names)

    def _finish_file(self) -> None:
        """Makes the content of the open file durable, and closes it: there may be as many files as tensors."""
        if (file := self._file) is None:
            return
        with named_errors(str, self.options.path, self._needed), phase("sync", self._path):
            length = file.finish(self.options.sync_files)
        stats = file.stats()
        self._file = None
        self._file_bytes += length
        self._stats_of_files.append(stats)
        if self.options.direct_io is True and stats["uncached_bytes"] + stats["buffered_bytes"]:
            raise CheckpointError(
                f"direct_io=True, but {self._path} could not be written past the page cache ({used_paths(stats)})"
            )

    def finish(self, tensors: int, objects: int) -> SaveStats:
        self._finish_file()
        if self.options.sync_files and self._names:
            with named_errors(str, self.options.path), phase("sync", self.options.path):
                storage_at(self.options.path).sync()  # makes the names durable, too
        stats = self._stats(tensors, objects, self._tensor_bytes, self._file_bytes, self._stats_of_files)
        if self.delta is None:
            return stats
        return replace(stats, reused_bytes=self.delta.reused_bytes, reused_tensors=self.delta.reused_tensors)

    def progress(self) -> int:
        file = self._file
        return self._file_bytes + (0 if file is None else file.progress())

    def cancel(self) -> None:
        if (file := self._file) is not None:
            file.cancel()

    def discard(self) -> None:
        self.end()
        self._file = None  # an unfinished file removes itself
        for name in self._names:
            with contextlib.suppress(_C.EngineError, OSError):  # the error that led here is raised
                storage_at(self.options.path).remove(name)

    # --- The commit

    def check_shared_directory(self, names: Sequence[Iterable[str]]) -> None:
        """Call it before the commit. Raises `CheckpointError` if files that ranks have written, `names` by rank, are
        not in this directory."""
        path = self.options.path
        storage = storage_at(path)
        here = set(storage.names())
        missing = [
            rank for rank, of_rank in enumerate(names) if not all(name in here or storage.has(name) for name in of_rank)
        ]
        if missing:
            raise separate_directories(path, missing)

    def commit(self, content: bytes, index: bytes | None, delta: bytes | None = None) -> None:
        """Replaces the metadata by `content`, atomically and durably, and removes the files that it does not name.
        `delta`: the content of `.metadata.delta`, of a save with `base=`."""
        path = self.options.path
        extra = ExtraFiles(path, self.options.extra_files, self.metadata_rank)
        try:
            with named_system_errors(path):
                extra.withdraw()
                commit_metadata.commit(path, self.metadata_rank, content, index, delta, self.options.overwrite)
        except BaseException:
            extra.put_back(content)
            self.end()  # unlocks this rank's files: they are removed unless the metadata in place names them
            self._remove_leftovers()
            raise
        extra.publish()
        self._release_base()  # the new metadata keeps its files from now on
        if self._superseded or storage_at(path).has_locks:
            commit_metadata.remove_leftovers(path, self._superseded, only_rank=self.metadata_rank)
        self._superseded = set()

    def _remove_leftovers(self) -> None:
        # Where only age tells that a save has died, `vescale-ckpt repair` looks for such files.
        if storage_at(self.options.path).has_locks:
            commit_metadata.remove_leftovers(self.options.path, only_rank=self.metadata_rank)

    def _release_base(self) -> None:
        if self.base is not None:
            self.base.release()
        self.base = None

    def end(self) -> None:
        """Releases the locks: from now on, files that no metadata names are leftovers."""
        self._release_base()
        if self._lock is not None:
            self._lock.release()
        self._lock = None
