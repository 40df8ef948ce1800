"""`NativeLayout` is DCP's own layout: each rank writes its own data files; one `.metadata` locates all records."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .._checkpoint.native import commit_metadata, extra_copies
from .._checkpoint.native.commit_metadata import Replaced
from .._checkpoint.native.extra_copies import ExtraFiles
from .._checkpoint.native.file_names import METADATA_NAME, data_name
from .._checkpoint.native.metadata_check import TRAILER_BYTES
from .._checkpoint.native.metadata_file import has_metadata
from .._checkpoint.native.save_facts import stamped
from .._engine import _C
from .._engine.engine_errors import named_errors, named_system_errors
from .._engine.options import threads_of, used_paths
from .._observe.timeline import phase
from .._plan.global_plan import GlobalPlan, Locations
from .._ranks.shared_directory import separate_directories
from .._state.extra_files import with_files
from .._storage.locks import drop_dead_locks
from .._storage.open_storage import storage_at
from .._storage.pending import make_locked, new_token
from .._storage.storage import COMMITTED_MEANWHILE, Lease
from ..errors import CheckpointError
from .layout import Layout, SaveOptions, Written

LEAST_FILE_BYTES = 64 << 20  #: per data file, where a rank spreads its tensors over several files


class NativeLayout(Layout):
    """The files of one save in DCP's own layout. This rank's files are locked until the save ends.

    Args:
        extra_files: {name: content}; the commit also copies them into the directory.
    """

    _may_spread = True  # whether a rank may write several data files, where that is faster
    _writer: _C.FileWriter | None = None

    def __init__(self, options: SaveOptions, extra_files: Mapping[str, bytes] | None = None) -> None:
        super().__init__(options)
        self._extra_files = extra_copies.check_files(extra_files)
        self._replaced = Replaced()  # the checkpoint that was there when the save began
        self._names: list[str] = []
        self._first = 0  # the number of the open file, or of the first one
        self._of_all: Sequence[Iterable[str]] = ()  # file names of each rank, on the coordinator
        self._token = ""
        self._lock = Lease()  # on the first file; marks all files as those of a running save
        self._needed = 0  # bytes that the open file needs
        self._tensor_bytes = 0
        self._stats_of_files: list[dict[str, int]] = []
        self._locations = _C.LocationTable()
        self._pending: _C.PendingFile | None = None  # `.metadata`, if it is written while it is generated

    def begin(self, is_coordinator: bool) -> None:
        path = self.options.path
        drop_dead_locks(path)
        storage_at(path).make()
        if not is_coordinator and storage_at(path).by_requests:
            return  # the coordinator checks for all
        if not self.options.overwrite and has_metadata(path, None):
            raise _holds_checkpoint(path)
        if is_coordinator:
            if not self.options.overwrite:
                storage_at(path).check_exclusive_commits()
            self._replaced = Replaced.read(path)
            commit_metadata.remove_orphans(path, frozenset())

    # --- With the other ranks

    def values(self, state: dict[str, Any], is_coordinator: bool) -> dict[str, Any]:
        return with_files(state, self._extra_files if is_coordinator else {})

    def message(self) -> bytes:
        return self.located().pack()

    def contents(self, planned: GlobalPlan, messages: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        locations = list(map(Locations.unpack, messages))
        self._of_all = [of_rank.files for of_rank in locations]
        save_id = stamped(self.options.save_id, len(messages))
        return [self.make_metadata(planned, locations, save_id), *[()] * (len(messages) - 1)]

    def make_metadata(self, planned: GlobalPlan, locations: Sequence[Locations], save_id: str) -> tuple[bytes, ...]:
        """Returns what the coordinator commits; `.metadata` is written to its pending file while it is generated."""
        self._pending = storage_at(self.options.path).pending(METADATA_NAME)
        return planned.files(locations, self.options.path, save_id, target=self._pending)

    def check_files(self, names: Sequence[Iterable[str]]) -> None:
        """Sets the names of the files that each rank has written. Raises `CheckpointError` if any is missing from this
        directory."""
        self._of_all, path = names, self.options.path
        storage = storage_at(path)
        here = set(storage.names())
        missing = [
            rank for rank, of_rank in enumerate(names) if not all(name in here or storage.has(name) for name in of_rank)
        ]
        if missing:
            raise separate_directories(path, missing)

    # --- Data files

    def open(self, body_bytes: Any, part: int | None = None, *, in_background: bool = False) -> None:
        self._in_background = in_background
        self._finish_file()
        options, self._needed = self.options, _C.expected_bytes(body_bytes)
        most_files = 1
        if part is None and self._may_spread:
            most_files = min(threads_of(options.thread_count), max(1, self._needed // LEAST_FILE_BYTES))
        name = ""

        def make() -> tuple[str, _C.FileWriter]:
            nonlocal name
            if not self._names:
                self._token = new_token()
            name = data_name(options.rank, self._token, part)
            path = os.path.join(options.path, name)
            with named_errors(str, options.path, self._needed):
                storage_at(options.path).check_space(self._needed)
                return path, _C.FileWriter(path, self._needed, self._for_engine(), options.checksums, most_files)

        if self._names:
            _, file = make()
        else:
            file, self._lock = make_locked(make)
        self._first = len(self._names)
        self._names.append(name)
        try:
            with named_errors(str, options.path, self._needed):
                for number in range(1, file.wanted_files):
                    self._names.append(data_name(options.rank, self._token, number))
                    file.add_file(os.path.join(options.path, self._names[-1]))
        except BaseException:
            del file  # the error's traceback would keep its files, and the space reserved for them
            raise
        self._writer = file
        if self._cancelled:
            self.cancel()
        self._tensor_bytes += sum(memoryview(body_bytes).cast("B").cast("q"))

    @property
    def _path(self) -> str:
        """The path of the open file; of the first one, if there are several."""
        return os.path.join(self.options.path, self._names[self._first])

    def write_table(self, table: Any, key_of: Callable[[int], str], rows: Sequence[int]) -> None:
        assert self._writer is not None
        with named_errors(key_of, self.options.path, self._needed):
            self._writer.write_tensors(table, self._locations, rows, self._first)

    def write_records(self, records: list[bytes], keys: list[str], rows: Sequence[int], of_tensors: bool) -> None:
        assert self._writer is not None
        needed = self._needed + sum(map(len, records))
        with named_errors(keys.__getitem__, self.options.path, needed):
            self._writer.write_objects(records, self._locations, rows, self._first)

    def located(self) -> Locations:
        """Returns where all written rows are stored. Leaves out files that hold no row: of several files, some stay
        empty if one tensor has most of the bytes."""
        table, used = self._locations.in_used_files()
        return Locations(table, [self._names[file] for file in used])

    def _finish_file(self) -> None:
        """Makes the open file's content durable and closes it immediately: there may be one file per tensor."""
        if (file := self._writer) is None:
            return
        with named_errors(str, self.options.path, self._needed), phase("sync", self._path):
            length = file.finish(self.options.sync_files)
        stats = file.stats()
        self._writer = None
        self._done_bytes += length
        self._stats_of_files.append(stats)
        if self.options.direct_io is True and stats["buffered_bytes"]:
            raise CheckpointError(
                f"direct_io=True, but {self._path} could not be written past the page cache ({used_paths(stats)})"
            )

    def finish(self) -> Written:
        self._finish_file()
        if self.options.sync_files and self._names:
            with named_errors(str, self.options.path), phase("sync", self.options.path):
                storage_at(self.options.path).sync()  # makes the names durable, too
        return Written(self._tensor_bytes, self._done_bytes, self._stats_of_files)

    def discard(self, error: BaseException | None = None) -> None:
        self.end()
        self._writer = None  # an unfinished file removes itself
        self._remove(self._names)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(_C.EngineError, OSError):  # the error that led here is raised
                storage_at(self.options.path).remove(name)

    # --- The commit

    def commit(self, *content: bytes) -> None:
        """Replaces the metadata, atomically and durably, and removes the files that it does not name. `content`: the
        metadata (only its end, if a pending file has it), and the index, if there is one."""
        path = self.options.path
        extra = ExtraFiles(path, self._extra_files)
        metadata, index = (*content, None)[:2]
        assert metadata is not None
        length = len(metadata) if self._pending is None else self._pending.size
        try:
            with named_system_errors(path, length + sum(map(len, content[1:]))):
                if self._pending is not None:
                    self._pending.check()  # before a copy or the index of the old checkpoint is touched
                if self.options.overwrite:
                    extra.withdraw(self._replaced.extra_names(path))
                commit_metadata.commit(path, self._pending or metadata, index, self.options.overwrite)
        except BaseException as error:
            extra.put_back(length, metadata[-TRAILER_BYTES:])
            self.end()  # unlocks this rank's files: they are removed unless the metadata in place names them
            commit_metadata.remove_orphans(path, frozenset())
            if isinstance(error.__cause__, FileExistsError):  # so it is known that no metadata will name them
                self._remove(name for of_rank in self._of_all for name in of_rank)
                raise _holds_checkpoint(path, COMMITTED_MEANWHILE) from error
            raise
        extra.publish()
        commit_metadata.remove_orphans(path, self._replaced.files)
        self._replaced = Replaced()

    def end(self) -> None:
        """Releases the locks: from now on, files that no metadata names are orphans."""
        if self._pending is not None:
            self._pending.discard()  # no effect once it is committed
        self._pending = None
        self._lock.release()


def _holds_checkpoint(path: str, when: str = "") -> CheckpointError:
    return CheckpointError(f"{path} holds a checkpoint already and overwrite=False{when}", path=path)
