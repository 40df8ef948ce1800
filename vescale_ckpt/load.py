"""One call of `read_data`: from what was planned to filled tensors and objects, every byte checked."""

from __future__ import annotations

import io
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from . import _C, engine, objects, settings
from ._native.names import check_relative, checked_place, crc_of
from ._storage.directory import stat_of
from .describe import Description
from .errors import CheckpointError, CorruptCheckpointError, IncompatibleStateError
from .gate import wait_until_copied
from .hooks import is_method_of
from .item_reads import PlacedItem, Record, item_reads, resolves_views
from .lazy_metadata import save_id, stored_bytes
from .load_planner import LoadPlanner as OurLoadPlanner
from .load_planner import not_all_there, wanted_elements
from .node import ranks_of_this_node
from .odd_record import crc_of_values
from .overlap import GROUP_TENSORS, overlap
from .packed import PackedReads, ReadRow
from .process_groups import resolved
from .routed_read import Outcome
from .shared_reading import SharedReading
from .stats import LoadStats
from .stock import StorageInfo, bump_versions

if TYPE_CHECKING:
    from .reader import StorageReader


_LEAST_OVERLAP = 1.5


@dataclass(slots=True)
class _Target:
    """A tensor to fill, from where, and the host memory that is filled: its own where the engine can use that."""

    record: Record
    storage_offset: Sequence[int]
    lengths: Sequence[int]
    tensor: torch.Tensor
    host: torch.Tensor
    item: ReadItem | None  #: what the planner is told of, unless it planned in packed form

    @property
    def key(self) -> str:
        return self.record.key


@dataclass
class _Items:
    """What is to be read, by how."""

    transformed: list[ReadItem] = field(default_factory=list)
    objects: list[tuple[ReadItem, StorageInfo]] = field(default_factory=list)
    tensors: list[tuple[ReadItem, StorageInfo]] = field(default_factory=list)


@dataclass
class _Group:
    """Tensors that are read together, and their rows in the engine's table."""

    targets: list[_Target] = field(default_factory=list)
    table: array[int] = field(default_factory=engine.int_table)


class _FailedElsewhereError(Exception):
    """Another rank has an error to tell."""


class Load:
    """One call of read_data."""

    def __init__(self, reader: StorageReader, metadata: Metadata, planner: LoadPlanner) -> None:
        self.reader = reader
        self.metadata = metadata
        self.planner = planner
        self.options = engine.options(reader.thread_count, reader.direct_io)
        self.cached_options = engine.options(reader.thread_count, False)  # through the page cache
        self._safetensors: dict[bool, _C.SafetensorsReads] = {}  # open files, by whether through the page cache
        # Ours take the object itself, unless a subclass wants to decode the bytes.
        self.takes_objects = isinstance(planner, OurLoadPlanner) and is_method_of(planner, "load_bytes", OurLoadPlanner)
        self.allow_cast = bool(getattr(planner, "allow_cast", False))
        self.paths: list[str] = []
        self.path_index: dict[str, int] = {}
        self._looked_at: dict[str, None] = {}  # names of files, before anything is read
        self.chunk_index: dict[str, dict[Any, ChunkStorageMetadata]] = {}
        self.totals = dict.fromkeys(
            ("in_place_bytes", "slot_bytes", "direct_bytes", "uncached_bytes", "buffered_bytes"), 0
        )
        self.bytes = 0
        self.shared_bytes = 0
        self._objects_of_all: dict[int, bytes] = {}  # by number, of those that one rank has read for all
        self.unverified = 0
        self.fallbacks = 0
        self._filled: list[torch.Tensor] = []

    def run(self, items: Sequence[ReadItem], sharing: SharedReading | None = None) -> None:
        """With `sharing` in step with other ranks, which read some of it. If one of those fails in that, this returns
        without an error, and without all that is wanted."""
        started = time.perf_counter()
        tensors = read_objects = 0
        try:
            with suppress(_FailedElsewhereError):
                planner = self.planner
                packed = items if isinstance(items, PackedReads) and items.planner() is planner else None
                if packed is not None and isinstance(planner, OurLoadPlanner):
                    tensors, read_objects = self._run_packed(packed, planner, sharing)
                else:
                    tensors, read_objects = self._run_items(items, sharing)
                self.reader.seen.check(os.path.join(self.reader.directory, name) for name in self._looked_at)
        finally:
            filled, self._filled = self._filled, []
            bump_versions(filled)
        if self.reader.direct_io is True and self.totals["uncached_bytes"] + self.totals["buffered_bytes"]:
            raise CheckpointError(
                f"direct_io=True, but {self.reader.path} could not be read past the page cache "
                f"({engine.used_paths(self.totals)})"
            )
        self.reader.last_stats = LoadStats(
            seconds=time.perf_counter() - started,
            tensors=tensors,
            objects=read_objects,
            bytes=self.bytes,
            io_path=engine.used_paths(self.totals),
            verified=self.reader.verify,
            unverified_bytes=self.unverified,
            fallback_tensors=self.fallbacks,
            shared_bytes=self.shared_bytes,
            **self.totals,
        )

    def _begin_filling(self, description: Description | None) -> None:
        """Before the first byte gets into the tensors of it. Torch learns that they are changed, now and when all is
        done: who looks at them before the load and after it, or in the middle of it, finds another version. What still
        copies them for an asynchronous save is waited for."""
        tensors = [] if description is None else description.tensors
        if description is not None and (bad := engine.overlapping(tensors)):
            items = range(len(description.names))
            raise _overlaps(
                next(description.names[item] for item in items if description.tensor_number(item) == bad[0])
            )
        phase = f"loading {self.reader.path}: wait until a save has copied the state"
        wait_until_copied(phase, settings.timeout(self.reader.timeout))
        self._filled += tensors
        state = getattr(self.planner, "state_dict", None)
        if isinstance(state, dict) and engine.holds_any(state, DTensor):  # these count for themselves
            self._filled += [value for value in state.values() if isinstance(value, DTensor)]
        bump_versions(self._filled)

    # --- What our planner planned on the index

    def _run_packed(
        self, reads: PackedReads, planner: OurLoadPlanner, sharing: SharedReading | None
    ) -> tuple[int, int]:
        names = reads.description.names

        def checked() -> PackedReads:
            for name in reads.plan.files:
                self._add_file(name, self.reader.path)
            self._begin_filling(reads.description)
            return reads

        def object_records() -> list[Record]:
            return [Record(names[row.item], row.file, row.offset, row.length, row.crc) for row in reads.objects()]

        alone = checked() if sharing is None else self._share(sharing, checked, object_records)
        records = object_records()
        for record, data in self._objects(records):
            planner.put_object(record.key, objects.load(data, weights_only=self.reader.weights_only, key=record.key))
        if alone is not None:
            self.read_packed(alone)
        return reads.count_tensors(), len(records)

    def _share(
        self,
        sharing: SharedReading,
        reads_of: Callable[[], PackedReads | None],
        object_records: Callable[[], list[Record]],
    ) -> PackedReads | None:
        """Has ranks read for each other; what this one is left to read by itself of what `reads_of` says.

        `object_records` are those of its objects."""

        def save_of() -> tuple[str, int]:
            return save_id(self.metadata), stored_bytes(self.metadata)

        reads, routed = sharing.begin(reads_of, save_of, self.reader.verify)

        def read_objects(rows: list[int]) -> list[bytes]:
            records = object_records()
            return self._read_whole([records[row] for row in rows])

        if routed is None:
            return reads
        self._objects_of_all = routed.objects(read_objects)
        outcome = routed.deliver(self, reads)
        if outcome is Outcome.failed_elsewhere:
            raise _FailedElsewhereError
        if outcome is Outcome.delivered:
            self.bytes = self.shared_bytes = routed.routes.shared_bytes
            return None if reads is None else reads.only(routed.routes.own)
        return reads

    def read_packed(self, reads: PackedReads, overlap: float | None = None) -> None:
        """The tensors. `overlap`: how often the ranks of a node read each byte, if that is known. Where that is often
        they go through the page cache, each for itself: past it each would fetch the same anew."""
        if overlap is None:
            overlap = self._overlap(reads)
        shared = overlap > _LEAST_OVERLAP and self.reader.direct_io == "auto"
        options = self.cached_options if shared else self.options
        names = reads.description.names
        if reads.description.all_ready and not self.allow_cast:
            table = reads.read_table()
            rows: list[ReadRow] = []

            def row_at(number: int) -> ReadRow:
                if not rows:
                    rows.extend(reads.rows())
                return rows[number]

            with engine.named_errors(lambda number: names[row_at(number).item], self.reader.path):
                report = self.read_tensors(table, options)
            self._count(report)
            for number in report["unread"]:
                self._read_odd_record(self._target_of(reads, row_at(number)))
        else:
            self._read_targets((self._target_of(reads, row) for row in reads.rows()), options)

    def _overlap(self, reads: PackedReads) -> float:
        """If the other ranks of this node want as much as this one."""
        group = resolved(None)
        ranks = ranks_of_this_node(1 if group is None else dist.get_world_size(group))
        if ranks == 1:
            return 1
        return ranks * reads.bytes_read_alone(self.reader.verify) / max(1, stored_bytes(self.metadata))

    def _target_of(self, reads: PackedReads, row: ReadRow) -> _Target:
        record = Record(
            reads.description.names[row.item], row.file, row.offset, row.length, row.crc, row.dtype, row.chunk_size
        )
        tensor = reads.target(row.item, row.dest_offset, row.lengths).detach()
        return self._target(record, row.storage_offset, row.lengths, tensor, None)

    # --- What any planner planned on metadata

    def _run_items(self, items: Sequence[ReadItem], sharing: SharedReading | None) -> tuple[int, int]:
        sorts: list[_Items] = []

        def sort() -> PackedReads | None:
            sorts.append(self._sorted(items))
            packed = self._packed(sorts[0].tensors, object_records())
            self._begin_filling(None if packed is None else packed.description)
            return packed

        def object_records() -> list[Record]:
            return [self._record(item, info) for item, info in sorts[0].objects]

        packed = sort() if sharing is None else self._share(sharing, sort, object_records)
        (of,) = sorts
        records = object_records()
        for (item, _), (_, data) in zip(of.objects, self._objects(records), strict=True):
            self.set_object(item, data)
        if packed is not None:
            self.read_packed(packed)
        else:
            self._read_targets((self._resolved(item, info) for item, info in of.tensors), self.options)
        if of.transformed:
            self._read_transformed(of.transformed)
        tensors = sum(item.type == LoadItemType.TENSOR for item in items)
        return tensors, len(items) - tensors

    def _sorted(self, items: Sequence[ReadItem]) -> _Items:
        of = _Items()
        for item in items:
            info = self._info(item)
            if info.relative_path not in self._looked_at:
                self._look_at(info.relative_path, item.storage_index.fqn)
            if info.transform_descriptors:
                of.transformed.append(item)
            elif item.type == LoadItemType.BYTE_IO:
                of.objects.append((item, info))
            else:
                of.tensors.append((item, info))
        self._check_coverage(items)
        return of

    def _packed(self, tensors: Sequence[tuple[ReadItem, StorageInfo]], objects: Sequence[Record]) -> PackedReads | None:
        """What other ranks may read, where the planner lets tensors be filled in any order."""
        if not resolves_views(self.planner):
            return None
        placed = []
        for item, info in tensors:
            record, tensor = self._resolved_item(item, info)
            placed.append(PlacedItem(item, tensor, record))
        placed.sort(key=lambda entry: (entry.record.file, entry.record.offset))
        return item_reads(self.planner, placed, objects, list(self.path_index))

    def _record(self, item: ReadItem, info: StorageInfo) -> Record:
        key = item.storage_index.fqn
        return Record(key, self._file(info, key), info.offset, info.length, crc_of(info))

    def _resolved(self, item: ReadItem, info: StorageInfo) -> _Target:
        record, tensor = self._resolved_item(item, info)
        if engine.overlapping([tensor]):
            raise _overlaps(record.key)
        bump_versions([tensor])
        return self._target(record, item.storage_offsets, item.lengths, tensor, item)

    def _resolved_item(self, item: ReadItem, info: StorageInfo) -> tuple[Record, torch.Tensor]:
        record = self._record(item, info)
        record.dtype, record.sizes = self.chunk(item.storage_index)
        tensor = self.planner.resolve_tensor(item).detach()
        self.check_fit(item, tensor, record.dtype)
        return record, tensor

    # --- What metadata says, checked

    def _check_coverage(self, items: Sequence[ReadItem]) -> None:
        """That what is planned fills the tensors: stock planners do not notice a chunk that metadata lacks."""
        if isinstance(self.planner, OurLoadPlanner) or not isinstance(self.planner, DefaultLoadPlanner):
            return
        planned: dict[str, int] = {}
        for item in items:
            if item.type != LoadItemType.BYTE_IO:
                key = item.dest_index.fqn
                planned[key] = planned.get(key, 0) + item.lengths.numel()
        for key, value in self.planner.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(key)
            if isinstance(stored, TensorStorageMetadata) and planned.get(key, 0) != wanted_elements(value):
                raise not_all_there(key)

    def _info(self, item: ReadItem) -> StorageInfo:
        key = item.storage_index.fqn
        info = self.metadata.storage_data.get(item.storage_index)
        if info is None:
            raise CorruptCheckpointError(
                f"{key}: the metadata of {self.reader.path} does not say where it is stored",
                key=key,
                file=self.reader.path,
            )
        return checked_place(info, key)

    def _file(self, info: StorageInfo, key: str) -> int:
        index = self.path_index.get(info.relative_path)
        return self._add_file(info.relative_path, key) if index is None else index

    def _look_at(self, name: str, key: str) -> None:
        check_relative(name, key)
        self._looked_at[name] = None
        self.reader.seen.look(os.path.join(self.reader.directory, name))

    def _add_file(self, name: str, key: str) -> int:
        self._look_at(name, key)
        index = self.path_index[name] = len(self.paths)
        self.paths.append(os.path.join(self.reader.directory, name))
        return index

    def chunk(self, index: MetadataIndex) -> tuple[torch.dtype, torch.Size]:
        """Dtype and shape of the stored chunk that an item reads from."""
        stored = self.metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(stored, TensorStorageMetadata):
            raise CorruptCheckpointError(
                f"{index.fqn}: the metadata of {self.reader.path} holds no tensor of that name",
                key=index.fqn,
                file=self.reader.path,
            )
        chunks = stored.chunks
        chunk = chunks[index.index] if index.index is not None and 0 <= index.index < len(chunks) else None
        if chunk is None or chunk.offsets != index.offset:
            by_offset = self.chunk_index.get(index.fqn)
            if by_offset is None:
                by_offset = self.chunk_index[index.fqn] = {tuple(chunk.offsets): chunk for chunk in chunks}
            offset = tuple(index.offset) if index.offset is not None else (0,) * len(stored.size)
            chunk = by_offset.get(offset)
            if chunk is None:
                raise CorruptCheckpointError(
                    f"{index.fqn}: the metadata of {self.reader.path} has no chunk at {offset}",
                    key=index.fqn,
                    file=self.reader.path,
                )
        return stored.properties.dtype, chunk.sizes

    # --- Objects

    def _objects(self, records: list[Record]) -> Iterator[tuple[Record, bytes]]:
        """Each object's bytes, checked."""
        known = self._objects_of_all
        own = iter(self._read_whole([record for row, record in enumerate(records) if row not in known]))
        for row, record in enumerate(records):
            data = known[row] if row in known else next(own)
            self._check_archive(data, record, whole=True)
            yield record, data

    def set_object(self, item: ReadItem, data: bytes) -> None:
        """Builds an object and gives it to the planner."""
        key = item.storage_index.fqn
        if not self.reader.weights_only and not self.takes_objects:
            self.planner.load_bytes(item, io.BytesIO(data))
            return
        value = objects.load(data, weights_only=self.reader.weights_only, key=key)
        if self.takes_objects:
            self.planner.set_object(item, value)  # type: ignore[attr-defined]
        else:
            # Stock planners load bytes without any restriction: they get bytes of our own making.
            self.planner.load_bytes(item, io.BytesIO(objects.dump(value, key, tells=False)))

    def _read_whole(self, records: list[Record]) -> list[bytes]:
        if not records:
            return []
        self._check_ranges(records)
        table = engine.int_table()
        for record in records:
            table.extend((record.file, record.offset, record.length))
        with engine.named_errors(lambda row: records[row].key, self.reader.path):
            return _C.read_objects(self.paths, table, self.options)

    def _check_ranges(self, records: list[Record]) -> None:
        """Before memory is taken for them."""
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
        """That an archive is sound and, where the checksum in metadata is of the `whole`, the one that was saved."""
        damage = _C.check_archive(data, self.reader.verify)
        if not damage and whole and self.reader.verify and record.crc not in (-1, _C.crc32(data)):
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

    def read_tensors(self, table: bytes | array[int], options: _C.Options | None = None) -> dict[str, Any]:
        """The one call of the engine that reads them, from files of either kind. Raises `_C.EngineError`."""
        options = options or self.options
        if self.reader.safetensors is None:
            return _C.read_tensors(self.paths, table, self.reader.verify, options)
        through_cache = options is self.cached_options
        reads = self._safetensors.get(through_cache)
        if reads is None:
            reads = self._safetensors[through_cache] = _C.SafetensorsReads(self.reader.verify, options)
        return reads.read_tensors(self.paths, table)

    def _read_targets(self, targets: Iterator[_Target], options: _C.Options) -> None:
        def read(group: _Group) -> dict[str, Any]:
            with engine.named_errors(lambda row: group.targets[row].key, self.reader.path):
                return self.read_tensors(group.table, options)

        for group, report in overlap(_groups(targets), read):
            self._settle(group, report)

    def _target(
        self,
        record: Record,
        storage_offset: Sequence[int],
        lengths: Sequence[int],
        tensor: torch.Tensor,
        item: ReadItem | None,
    ) -> _Target:
        if tensor.dtype == record.dtype and engine.is_host_memory(tensor):
            return _Target(record, storage_offset, lengths, tensor, tensor, item)
        if not engine.can_be_filled(tensor):
            raise CheckpointError(
                f"{record.key}: the tensor to load into has no memory: its storage was freed or is too small"
            )
        host = torch.empty(tensor.shape, dtype=record.dtype, device="cpu")
        return _Target(record, storage_offset, lengths, tensor, host, item)

    def check_fit(self, item: ReadItem, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Raises `IncompatibleStateError` if what is stored does not fit the tensor that the planner resolved."""
        key = item.dest_index.fqn
        if tensor.shape != item.lengths:
            raise IncompatibleStateError(key, f"shape {tuple(tensor.shape)}", f"shape {tuple(item.lengths)}")
        if tensor.dtype != dtype and not self.allow_cast:
            hint = f"dtype {dtype} (LoadPlanner(allow_cast=True) casts)"
            raise IncompatibleStateError(key, f"dtype {tensor.dtype}", hint)

    def _count(self, report: dict[str, Any]) -> None:
        self.count_read(report)
        self.bytes += report["needed_bytes"]

    def count_read(self, report: dict[str, Any]) -> None:
        """Of what was read, whoever it is for."""
        for name in self.totals:
            self.totals[name] += report[name]
        self.unverified += report["unverified_bytes"]

    def _settle(self, group: _Group, report: dict[str, Any]) -> None:
        self._count(report)
        unread: list[int] = report["unread"]
        for row in unread:
            self._read_odd_record(group.targets[row])
        for target in group.targets:
            if target.host is not target.tensor:
                target.tensor.copy_(target.host)
            if target.item is not None:
                self.planner.commit_tensor(target.item, target.tensor)
        bump_versions([target.tensor for target in group.targets])

    def read_odd_piece(
        self, key: str, record: Sequence[int], sizes: Sequence[int], start: Sequence[int], piece: torch.Tensor
    ) -> None:
        """Fills `piece` with what starts at `start` in a chunk of `sizes`; `record`: file, offset, length, CRC-32 and
        dtype code of one that the engine left unread."""
        file, offset, length, crc, code = record
        stored = Record(key, file, offset, length, crc, engine.CODE_DTYPES[code], sizes)
        self._read_odd_record(_Target(stored, start, piece.shape, piece, piece, None))

    def _read_odd_record(self, target: _Target) -> None:
        """A record that is not a plain contiguous tensor: stock DCP keeps strides and conjugation, for instance."""
        record, key = target.record, target.key
        self.fallbacks += 1
        (data,) = self._read_whole([record])
        if not _C.archive_has_checksums(data):
            self.unverified += target.host.nbytes
        self._check_archive(data, record, whole=False)  # also unverified loads: it differs from what was expected
        path = self.paths[record.file]
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise CorruptCheckpointError(
                f"{key}: the record at offset {record.offset} of {path} cannot be read: {error}",
                key=key,
                file=path,
                offset=record.offset,
            ) from error
        if not isinstance(tensor, torch.Tensor) or tensor.shape != torch.Size(record.sizes):
            found = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise CorruptCheckpointError(
                f"{key}: metadata promises shape {tuple(record.sizes)}, the record at offset {record.offset} of {path} "
                f"holds {found}",
                key=key,
                file=path,
                offset=record.offset,
            )
        if self.reader.verify and record.crc >= 0 and record.crc != crc_of_values(tensor):  # only ours tell it
            raise CorruptCheckpointError(
                f"{key}: the record at offset {record.offset} of {path} holds other values than were saved",
                key=key,
                file=path,
                offset=record.offset,
            )
        if tensor.dtype != record.dtype and not self.allow_cast:
            name = key if target.item is None else target.item.dest_index.fqn
            raise IncompatibleStateError(name, f"dtype {record.dtype}", f"dtype {tensor.dtype}")
        for dim, (start, length) in enumerate(zip(target.storage_offset, target.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        target.host.copy_(tensor)

    # --- Records that passed a stream transform of stock DCP (compression): its own reader knows them

    def _read_transformed(self, items: list[ReadItem]) -> None:
        stock = FileSystemReader(self.reader.path)
        stock.storage_data = self.metadata.storage_data
        try:
            stock.read_data(LoadPlan(items), _TransformedPlanner(self)).wait()  # type: ignore[arg-type]
        except CheckpointError:
            raise
        except Exception as error:
            names = ", ".join(item.storage_index.fqn for item in items[:3])
            raise CheckpointError(
                f"{names}: stored through a stream transform (compression) that cannot be undone here: "
                f"{type(error).__name__}: {error}"
            ) from error


def _overlaps(key: str) -> CheckpointError:
    return CheckpointError(
        f"{key}: several elements of the tensor to load into are the same memory (it is expanded, or overlaps itself): "
        "load into a clone of it",
        key=key,
    )


def _groups(targets: Iterator[_Target]) -> Iterator[_Group]:
    """Cuts what this rank reads into groups, by number, and by bytes where targets need host memory of their own
    until they are filled, which two groups have at a time."""
    budget = settings.number("arena_bytes") // 2
    group, held = _Group(), 0
    for target in targets:
        record, host = target.record, target.host
        code = engine.dtype_code(record.dtype, record.key)
        group.table.extend(
            (record.file, record.offset, record.length, record.crc, code, len(record.sizes), *record.sizes)
        )
        group.table.extend((*target.storage_offset, *target.lengths, host.data_ptr(), *host.stride()))
        group.targets.append(target)
        if host is not target.tensor:
            held += host.nbytes
        if held >= budget or len(group.targets) == GROUP_TENSORS:
            yield group
            group, held = _Group(), 0
    if group.targets:
        yield group


class _TransformedPlanner:
    """Stands for the planner while stock DCP reads: what it loads passes our checks first."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.commit_tensor = load.planner.commit_tensor

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        tensor = self.load.planner.resolve_tensor(item)
        dtype, _ = self.load.chunk(item.storage_index)
        self.load.check_fit(item, tensor, dtype)
        self.load.bytes += tensor.nbytes
        return tensor

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        self.load.set_object(item, value.getvalue())
