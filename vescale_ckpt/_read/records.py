"""Reads and checks records of a checkpoint's data files, native or safetensors, for one load."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._engine import _C
from .._engine.errors import named_errors
from .._engine.options import engine_options, used_paths
from .._engine.rows import int_table
from .._storage.directory import check_relative, stat_of
from ..errors import CheckpointError, CorruptCheckpointError
from ..reports import LoadStats
from ..settings import DirectIO
from .contents import Contents
from .non_contiguous_records import tensor_in_archive
from .seen_files import SeenFiles

_PATHS = ("in_place_bytes", "slot_bytes", "direct_bytes", "uncached_bytes", "buffered_bytes")  # of LoadStats


@dataclass(frozen=True)
class ReadOptions:
    """How a load reads."""

    thread_count: int | None = None  #: None: the setting's
    verify: bool = True  #: False skips checksums
    weights_only: bool = True  #: False lets objects run code
    direct_io: DirectIO = "auto"
    allow_cast: bool = False  #: converts to the dtypes of the tensors that are filled
    timeout: float | None = None  #: seconds to wait until a save has copied the tensors to fill; None: the setting's


@dataclass(slots=True)
class Record:
    """The record location of a tensor's chunk or an object, its CRC-32, dtype and shape."""

    key: str
    file: int  #: index into the paths of `RecordReader`
    offset: int
    length: int
    crc: int  #: CRC-32 of the tensor's bytes or of the whole object, -1 if metadata has none
    dtype: torch.dtype = torch.uint8
    sizes: Sequence[int] = ()


class RecordReader:
    """Reads the data files of one load, and counts what it reads. Not thread-safe."""

    def __init__(self, contents: Contents, options: ReadOptions, seen: SeenFiles) -> None:
        self.contents = contents
        self.options = options
        self.where = contents.path
        self.paths: list[str] = []
        self.file_numbers: dict[str, int] = {}  #: by name in metadata
        self._root = contents.root
        self._seen = seen
        self._looked_at: dict[str, None] = {}  # names of files, in the order of `look_at`
        self._of_engine = engine_options(options.thread_count, options.direct_io)
        self._through_cache = engine_options(options.thread_count, False)
        self._safetensors: dict[bool, _C.SafetensorsReads] | None = {} if contents.safetensors else None
        self._totals = dict.fromkeys(_PATHS, 0)
        self.bytes = 0  #: that this load needed
        self.shared_bytes = 0  #: of `bytes`, those that several ranks needed and one of them read
        self._unverified = 0
        self._fallbacks = 0

    # --- Files

    def file(self, name: str, key: str) -> int:
        """The number of a data file. Raises `UntrustedCheckpointError`, naming `key`, if its name leaves the root."""
        index = self.file_numbers.get(name)
        if index is None:
            self.look_at(name, key)
            index = self.file_numbers[name] = len(self.paths)
            self.paths.append(os.path.join(self._root, name))
        return index

    def look_at(self, name: str, key: str) -> None:
        """Records the file's identity before it is read. Raises as `file`."""
        if name not in self._looked_at:
            check_relative(name, key)
            self._looked_at[name] = None
            self._seen.look(os.path.join(self._root, name))

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` if a file changed after `look_at`."""
        self._seen.check(os.path.join(self._root, name) for name in self._looked_at)

    # --- Objects

    def objects(self, records: list[Record], known: dict[int, bytes]) -> Iterator[tuple[Record, bytes]]:
        """Each object's bytes, checked. `known`: objects that were read for all ranks, by row of `records`."""
        own = iter(self.read_whole([record for row, record in enumerate(records) if row not in known]))
        for row, record in enumerate(records):
            data = known[row] if row in known else next(own)
            self._check_archive(data, record, whole=True)
            yield record, data

    def read_whole(self, records: list[Record]) -> list[bytes]:
        if not records:
            return []
        self._check_ranges(records)
        table = int_table()
        for record in records:
            table.extend((record.file, record.offset, record.length))
        with named_errors(lambda row: records[row].key, self.where):
            return _C.read_objects(self.paths, table, self._of_engine)

    def _check_ranges(self, records: Iterable[Record]) -> None:
        """Checks that the records lie in their files, before memory is allocated for them."""
        sizes: dict[str, int] = {}
        for record in records:
            path = self.paths[record.file]
            if path not in sizes:
                try:
                    sizes[path] = stat_of(path).size
                except OSError as error:
                    raise CorruptCheckpointError(
                        f"{record.key}: data file is missing: {error}", key=record.key, file=path
                    ) from error
            if record.offset + record.length > sizes[path]:
                raise CorruptCheckpointError(
                    f"{record.key}: file {path} is truncated: it has {sizes[path]} bytes, the object at offset "
                    f"{record.offset} needs {record.length}",
                    key=record.key,
                    file=path,
                    offset=record.offset,
                )

    def _check_archive(self, data: bytes, record: Record, *, whole: bool) -> None:
        """Checks that an archive is sound; with `whole`, also the CRC-32 in metadata, which is of the whole archive."""
        damage = _C.check_archive(data, self.options.verify)
        if not damage and whole and self.options.verify and record.crc not in (-1, _C.crc32(data)):
            damage = "it is not the object that was saved"
        if damage:
            path = self.paths[record.file]
            raise CorruptCheckpointError(
                f"{record.key}: {damage} (record of {record.length} bytes at offset {record.offset} of {path})",
                key=record.key,
                file=path,
                offset=record.offset,
            )

    # --- Tensors

    def read_tensors(
        self, table: bytes | array[int], key_of: Callable[[int], str], *, through_cache: bool = False
    ) -> dict[str, Any]:
        """Reads the rows of the engine's table into memory. Returns a report for `count`; its `unread` are the rows of
        records that `tensor_in` has to read. `key_of` names a row in errors.

        May be called on any thread, but on one at a time.
        """
        options = self._through_cache if through_cache else self._of_engine
        with named_errors(key_of, self.where):
            if self._safetensors is None:
                return _C.read_tensors(self.paths, table, self.options.verify, options)
            reads = self._safetensors.get(through_cache)
            if reads is None:
                reads = self._safetensors[through_cache] = _C.SafetensorsReads(self.options.verify, options)
            return reads.read_tensors(self.paths, table)

    def count(self, report: dict[str, Any], *, for_others: bool = False) -> None:
        for name in self._totals:
            self._totals[name] += report[name]
        self._unverified += report["unverified_bytes"]
        if not for_others:
            self.bytes += report["needed_bytes"]

    def tensor_in(self, record: Record, needed_bytes: int) -> torch.Tensor:
        """The whole tensor of a record that the engine left unread: it is not contiguous."""
        self._fallbacks += 1
        (data,) = self.read_whole([record])
        if not _C.archive_has_checksums(data):
            self._unverified += needed_bytes
        self._check_archive(data, record, whole=False)  # also without `verify`: the record has an unexpected form
        path = self.paths[record.file]
        crc = record.crc if self.options.verify else -1
        try:
            return tensor_in_archive(data, record.sizes, crc)
        except ValueError as error:
            raise CorruptCheckpointError(
                f"{record.key}: the record at offset {record.offset} of {path} {error}",
                key=record.key,
                file=path,
                offset=record.offset,
            ) from error.__cause__

    # --- The end

    def stats(self, seconds: float, tensors: int, objects: int) -> LoadStats:
        """The load's statistics. Raises `CheckpointError` if direct I/O was required but not possible."""
        if self.options.direct_io is True and self._totals["uncached_bytes"] + self._totals["buffered_bytes"]:
            raise CheckpointError(
                f"direct_io=True, but {self.where} could not be read past the page cache ({used_paths(self._totals)})"
            )
        return LoadStats(
            seconds=seconds,
            tensors=tensors,
            objects=objects,
            bytes=self.bytes,
            io_path=used_paths(self._totals),
            verified=self.options.verify,
            unverified_bytes=self._unverified,
            fallback_tensors=self._fallbacks,
            shared_bytes=self.shared_bytes,
            **self._totals,
        )
