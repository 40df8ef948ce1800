"""`RecordReader` reads and checks the records of a native or safetensors checkpoint, and fills tensors for loads."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import increment_version

from .._engine import _C, device_streams, torch_copies
from .._engine.dtype_codes import dtype_code
from .._engine.engine_errors import named_errors, of_system
from .._engine.options import batch_bytes, engine_options, threads_of
from .._engine.overlap import groups_of, overlap
from .._engine.rows import int_table
from .._engine.tensor_checks import can_be_filled, is_host_memory
from .._engine.wrapper_tensors import is_wrapper
from .._state.tensor_table import ON_HOST, device_number, is_fast_to_fill, narrowed, place_of
from .._storage.open_storage import is_inconclusive, read_twice, stat_of, storage_at
from .._storage.paths import check_relative
from ..errors import CheckpointError, CorruptCheckpointError, IncompatibleStateError
from ..settings import DirectIO
from .checkpoint import Checkpoint, Chunk
from .non_contiguous_records import tensor_in_archive
from .seen_files import SeenFiles
from .wrapper_records import WrapperLoad, check_classes

_PATHS = ("in_place_bytes", "slot_bytes", "direct_bytes", "buffered_bytes")  # fields of LoadStats


@dataclass(frozen=True)
class ReadOptions:
    """The options of a load's reads."""

    thread_count: int | None = None  #: None: the setting
    verify: bool = True  #: False skips checksums
    weights_only: bool = True  #: False lets objects run code
    direct_io: DirectIO = "auto"
    allow_cast: bool = False  #: converts to the dtypes of the tensors that are filled
    timeout: float | None = None  #: seconds to wait until a save has copied the tensors to fill; None: the setting


@dataclass(slots=True)
class Record:
    """The record location of a tensor's chunk or an object, its CRC-32, dtype and shape."""

    key: str
    file: int  #: index into `RecordReader.paths`
    offset: int
    length: int
    crc: int  #: CRC-32 of the tensor's bytes or of the whole object, -1 if metadata has none
    dtype: torch.dtype = torch.uint8
    sizes: Sequence[int] = ()


@dataclass(slots=True)
class Target:
    """A tensor to fill with the values at `storage_offset` of a record's chunk."""

    record: Record
    storage_offset: Sequence[int]
    tensor: torch.Tensor
    filled: torch.Tensor  #: the engine fills this: the tensor itself if it can, otherwise one of the stored dtype
    device: int = -1  #: the CUDA device that `filled` is on
    commit: Callable[[torch.Tensor], object] | None = None  #: called when the tensor is filled
    again: Callable[[], torch.Tensor] | None = None  #: returns the same part of the state's tensor again


@dataclass
class _Group:
    """Tensors that are read together, their rows in the engine's table, and the device of each row."""

    targets: list[Target]
    table: array[int] = field(default_factory=int_table)
    devices: array[int] = field(default_factory=int_table)


class RecordReader:
    """Reads records of one checkpoint, and counts what it has read.

    Any thread may call `read_tensors`, one at a time. The other methods belong to the thread that made the reader.
    """

    def __init__(self, checkpoint: Checkpoint, options: ReadOptions, seen: SeenFiles) -> None:
        self._root = checkpoint.root
        self._is_safetensors = checkpoint.format == "safetensors"
        self.options = options
        self.threads = threads_of(options.thread_count)
        self.where = checkpoint.path
        self.paths: list[str] = []
        self.file_numbers: dict[str, int] = {}  #: {name in metadata: index into `paths`}
        self._seen = seen
        self._wrappers = WrapperLoad()
        self.streams: device_streams.Streams = {}  #: streams of the loading thread; tensors are filled after their work
        by_requests = storage_at(self.where).by_requests
        # The key is whether the page cache is always used.
        self._engine_options = {
            cached: engine_options(options.thread_count, False if cached else options.direct_io, requests=by_requests)
            for cached in (False, True)
        }
        self._safetensors: dict[bool, _C.SafetensorsReads] = {}  # of reads that raised no error
        self.totals: dict[str, Any] = dict.fromkeys(_PATHS, 0)
        self.bytes = 0  #: this load needed so many
        self.unverified_bytes = 0
        self.fallback_tensors = 0

    def file(self, name: str, key: str) -> int:
        """Returns the index of a data file in `paths`, and records the file's identity before it is read. Raises
        `UntrustedCheckpointError` with `key` if its name leads out of the root."""
        number = self.file_numbers.get(name)
        if number is None:
            path = os.path.join(self._root, check_relative(name, key))
            self._seen.look(path)
            number = self.file_numbers[name] = len(self.paths)
            self.paths.append(path)
        return number

    def record(self, key: str, chunk: Chunk, dtype: torch.dtype = torch.uint8) -> Record:
        return Record(key, self.file(chunk.file, key), chunk.offset, chunk.bytes, chunk.crc, dtype, chunk.sizes)

    def finish(self) -> None:
        """Raises `CheckpointError` if a file changed after `file`, or a wrapper was not filled as a whole."""
        self._wrappers.end()
        self._seen.check(self.paths)

    # --- Objects

    def objects(self, records: list[Record], known: dict[int, bytes]) -> Iterator[tuple[Record, bytes]]:
        """Yields each object's bytes, checked. `known`: {row of `records`: bytes} that were read for all ranks."""
        own = iter(self.read_whole([record for row, record in enumerate(records) if row not in known]))
        for row, record in enumerate(records):
            data = known[row] if row in known else next(own)
            yield record, self._sound(data, record, whole=True)

    def _sound(self, data: bytes, record: Record, *, whole: bool) -> bytes:
        """Returns the bytes of an archive after `_check_archive`. Reads them again if they are damaged."""
        read: bytes | None = data

        def checked() -> bytes:
            nonlocal read
            found, read = self.read_whole([record])[0] if read is None else read, None
            self._check_archive(found, record, whole=whole)
            return found

        return read_twice(self.where, checked)

    def read_whole(self, records: list[Record]) -> list[bytes]:
        if not records:
            return []
        self._check_ranges(records)
        table = int_table()
        for record in records:
            table.extend((record.file, record.offset, record.length))
        with named_errors(lambda row: records[row].key, self.where):
            return _C.read_objects(self.paths, table, self._engine_options[False])

    def _check_ranges(self, records: list[Record]) -> None:
        """Checks that the records lie in their files, before memory is allocated for them."""
        sizes: dict[str, int] = {}
        for record in records:
            path = self.paths[record.file]
            if path not in sizes:
                try:
                    sizes[path] = stat_of(path).size
                except OSError as error:
                    if is_inconclusive(error.errno, path):
                        raise of_system(error, path) from error
                    raise CorruptCheckpointError(
                        f"{record.key}: data file is missing: {error}", key=record.key, file=path
                    ) from error
            if record.offset + record.length > sizes[path]:
                raise self._corrupt(
                    record,
                    f"file {path} is truncated: it has {sizes[path]} bytes, the object at offset {record.offset} needs "
                    f"{record.length}",
                )

    def _check_archive(self, data: bytes, record: Record, *, whole: bool) -> None:
        """Checks that an archive is sound; with `whole`, also that it has the CRC-32 in metadata."""
        damage = _C.check_archive(data, self.options.verify)
        if not damage and whole and self.options.verify and record.crc not in (-1, _C.crc32(data)):
            damage = "it is not the object that was saved"
        if damage:
            place = f"record of {record.length} bytes at offset {record.offset} of {self.paths[record.file]}"
            raise self._corrupt(record, f"{damage} ({place})")

    def _corrupt(self, record: Record, reason: str) -> CorruptCheckpointError:
        path = self.paths[record.file]
        return CorruptCheckpointError(f"{record.key}: {reason}", key=record.key, file=path, offset=record.offset)

    # --- Tensors

    def target(
        self,
        record: Record,
        storage_offset: Sequence[int],
        tensor: torch.Tensor,
        commit: Callable[[torch.Tensor], object] | None = None,
        again: Callable[[], torch.Tensor] | None = None,
    ) -> Target:
        if tensor.dtype == record.dtype:
            if is_host_memory(tensor):
                return Target(record, storage_offset, tensor, tensor, -1, commit)
            if (place := place_of(tensor)) > ON_HOST and is_fast_to_fill(tensor):
                return Target(record, storage_offset, tensor, tensor, device_number(place), commit)
        if not can_be_filled(tensor):
            raise CheckpointError(
                f"{record.key}: the tensor to load into has no memory: its storage was freed or is too small"
            )
        if tensor.is_cuda or place_of(tensor) > ON_HOST:
            with suppress(torch.OutOfMemoryError):  # then by the host
                filled = torch.empty(tensor.shape, dtype=record.dtype, device=tensor.device)
                if (place := place_of(filled)) > ON_HOST:
                    return Target(record, storage_offset, tensor, filled, device_number(place), commit, again)
        filled = torch.empty(tensor.shape, dtype=record.dtype, device="cpu")
        return Target(record, storage_offset, tensor, filled, -1, commit, again)

    def fill(self, targets: Iterator[Target], *, through_cache: bool = False) -> None:
        """Fills the targets in groups. While the engine reads one group, the next is prepared."""

        def read(group: _Group) -> dict[str, Any]:
            def key_of(row: int) -> str:
                return group.targets[row].record.key

            return self.read_tensors(group.table, key_of, devices=group.devices, through_cache=through_cache)

        for group, report in overlap(_groups(targets), read):
            self.count(report)
            for row in report["unread"]:
                self.fill_from_archive(group.targets[row])
            for target in group.targets:
                self.hand_over(target)
            for target in group.targets:
                if target.commit is not None:
                    target.commit(target.tensor)
            increment_version([target.tensor for target in group.targets])

    def read_tensors(
        self,
        table: bytes | array[int],
        key_of: Callable[[int], str],
        *,
        devices: bytes | array[int] = b"",
        through_cache: bool = False,
    ) -> dict[str, Any]:
        """Reads the rows of the engine's table into memory, after the queued work in `streams`. Returns a report for
        `count`. Its `unread` are the rows of records that `fill_from_archive` has to read. `key_of` names a row in
        errors. `devices`: the CUDA device of each row, -1 for host memory; empty if all rows are in host memory."""
        producers = device_streams.producers(devices, self.streams.__getitem__)
        options = self._engine_options[through_cache]
        reads = self._safetensors.pop(through_cache, None)

        def read() -> dict[str, Any]:
            nonlocal reads
            if not self._is_safetensors:
                return _C.read_tensors(self.paths, table, self.options.verify, options, devices, producers)
            used, reads = reads or _C.SafetensorsReads(self.options.verify, options), None
            report = used.read_tensors(self.paths, table, devices, producers)
            reads = used  # it is not kept after an error, because it pins the old versions of objects
            return report

        with named_errors(key_of, self.where):
            report = read_twice(self.where, read)
        if reads is not None:
            self._safetensors[through_cache] = reads
        return report

    def count(self, report: dict[str, Any], *, for_others: bool = False) -> None:
        for name in self.totals:
            self.totals[name] += report[name]
        self.unverified_bytes += report["unverified_bytes"]
        if not for_others:
            self.bytes += report["needed_bytes"]

    def hand_over(self, target: Target) -> None:
        """Copies the values to the tensor itself, unless the engine has filled it."""
        if target.filled is target.tensor:
            return
        if is_wrapper(target.tensor):
            self._wrappers.fill_with_values(target.record.key, target.tensor, target.filled, target.again)
            return
        try:
            torch_copies.copy(target.tensor, target.filled)
        except (RuntimeError, NotImplementedError) as error:
            key, layout, why = target.record.key, target.tensor.layout, str(error)
            if layout is not torch.strided:
                why = f"a tensor of layout {layout} cannot be filled: load into a dense one ({why})"
            raise CheckpointError(f"{key}: {why}", key=key) from error

    def fill_from_archive(self, target: Target) -> None:
        """Fills a target from a record that the engine left unread, because its tensor is a wrapper subclass or not
        contiguous. Fills `filled`, or a wrapper directly."""
        record = target.record
        self.fallback_tensors += 1
        (data,) = self.read_whole([record])
        data = self._sound(data, record, whole=False)  # checked even without `verify`: the record's form is unexpected
        if not _C.archive_has_checksums(data):
            self.unverified_bytes += target.filled.nbytes
        try:
            crc = record.crc if self.options.verify else -1
            tensor = tensor_in_archive(data, record.sizes, crc, weights_only=self.options.weights_only)
        except ValueError as error:
            check_classes(record.key, data)
            place = f"the record at offset {record.offset} of {self.paths[record.file]}"
            raise self._corrupt(record, f"{place} {error}") from error.__cause__
        if is_wrapper(tensor):
            if is_wrapper(target.tensor):
                target.filled = target.tensor
            self._wrappers.fill(record.key, target.filled, tensor, target.storage_offset, target.again)
            return
        if tensor.dtype != record.dtype and not self.options.allow_cast:
            raise IncompatibleStateError(record.key, f"dtype {record.dtype}", f"dtype {tensor.dtype}")
        target.filled.copy_(narrowed(tensor, target.storage_offset, target.filled.shape))


def _groups(targets: Iterator[Target]) -> Iterator[_Group]:
    """Cuts the targets into groups. The number of targets limits a group, and so do the bytes of memory for targets
    that are not filled in place. Two groups hold such memory at a time."""

    def bytes_of(target: Target) -> int:
        return 0 if target.filled is target.tensor else target.filled.nbytes

    for members in groups_of(targets, bytes_of, batch_bytes()):
        group = _Group(members)
        for target in members:
            record, filled = target.record, target.filled
            code = dtype_code(record.dtype, record.key)
            group.table.extend(
                (record.file, record.offset, record.length, record.crc, code, len(record.sizes), *record.sizes)
            )
            group.table.extend((*target.storage_offset, *filled.shape, filled.data_ptr(), *filled.stride()))
            group.devices.append(target.device)
        yield group
