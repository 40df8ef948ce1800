"""`DataFiles` writes the data files of one rank for a save in DCP's layout."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from .._engine import _C
from .._engine.errors import check_space, named_errors
from .._engine.options import engine_options, used_paths
from .._engine.rows import words
from .._native.names import data_name
from .._storage.directory import directory_at
from .._storage.locks import FileLock
from .._storage.pending import make_locked, new_token
from ..errors import CheckpointError
from ..reports import SaveStats
from .rank_files import FileOptions, RankFiles


class DataFiles(RankFiles):
    """All data files of a rank's save. As a context, an error removes them and releases the save's lock."""

    def __init__(self, options: FileOptions) -> None:
        super().__init__(options)
        self._files: list[DataFile] = []
        self._token = ""
        self._lock: FileLock | None = None  # on the first file; it marks all files as those of a running save

    def open(self, body_bytes: Any, part: int | None = None, *, in_background: bool = False) -> DataFile:
        def make() -> tuple[str, DataFile]:
            if not self._files:
                self._token = new_token()
            file = DataFile(self.options, data_name(self.options.rank, self._token, part), body_bytes, in_background)
            return file.path, file

        if self._files:
            _, file = make()
        else:
            file, self._lock = make_locked(make)
        self._files.append(file)
        return file

    def finish(self, tensors: int, objects: int) -> SaveStats:
        """Makes the names of the files durable; each of them is finished already."""
        options, files = self.options, self._files
        if options.sync_files and files:
            with named_errors(str, options.path):
                directory_at(options.path).sync()
        return self._stats(
            tensors,
            objects,
            sum(file.tensor_bytes for file in files),
            sum(file.length for file in files),
            [file.stats for file in files],
        )

    def discard(self) -> None:
        self.release()
        for file in self._files:
            file.discard()

    def release(self) -> None:
        """Releases the lock: from now on, files that no metadata names are leftovers. May be called again."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None


class DataFile:
    """One data file while it is written. It is removed unless `finish` is called, and by `discard`."""

    def __init__(self, options: FileOptions, name: str, body_bytes: Any, in_background: bool) -> None:
        self.options = options
        self.name = name
        self.path = os.path.join(options.path, name)
        self.length = 0
        self.stats: dict[str, int] = {}
        self.tensor_bytes = sum(memoryview(body_bytes).cast("B").cast("q"))
        self.needed = _C.expected_bytes(body_bytes)
        with named_errors(str, options.path, self.needed):
            check_space(options.path, self.needed)
            for_engine = engine_options(options.thread_count, options.direct_io, in_background)
            self.file: _C.FileWriter | None = _C.FileWriter(self.path, body_bytes, for_engine, options.checksums)

    def write_table(self, table: Any, key_of: Callable[[int], str], rows: Sequence[int]) -> list[int]:
        assert self.file is not None
        with named_errors(key_of, self.options.path, self.needed):
            return words(self.file.write_tensors(table)).tolist()

    def write_contents(self, contents: list[bytes], keys: list[str]) -> list[int]:
        if not contents:
            return []
        assert self.file is not None
        needed = self.needed + sum(map(len, contents))
        with named_errors(keys.__getitem__, self.options.path, needed):
            return words(self.file.write_objects(contents)).tolist()

    def finish(self) -> None:
        assert self.file is not None
        with named_errors(str, self.options.path, self.needed):
            self.length = self.file.finish(self.options.sync_files)
        self.stats = self.file.stats()
        self.file = None  # closes the file: there may be as many files as tensors
        if self.options.direct_io is True and self.stats["uncached_bytes"] + self.stats["buffered_bytes"]:
            raise CheckpointError(
                f"direct_io=True, but {self.path} could not be written past the page cache ({used_paths(self.stats)})"
            )

    def progress(self) -> int:
        file = self.file
        return self.length if file is None else file.progress()

    def cancel(self) -> None:
        if (file := self.file) is not None:
            file.cancel()

    def discard(self) -> None:
        self.file = None  # an unfinished file removes itself
        with contextlib.suppress(_C.EngineError):  # the error that led here is raised
            directory_at(self.options.path).remove(self.name)
