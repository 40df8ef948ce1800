"""`StorageWriter`: DCP's plug point for saving, backed by the C++ engine."""

from __future__ import annotations

import io
import os
import time
import uuid
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from . import _C, engine, layout, metadata_file, objects, packed, settings
from .errors import CheckpointError, StorageFullError
from .lazy_metadata import LazyMetadata
from .overlap import GROUP_TENSORS, overlap
from .packed import PackedItems, PackedResults, words, write_result
from .pause import garbage_collector_paused
from .settings import DirectIO
from .stats import SaveStats
from .stock import CURRENT_DCP_VERSION


class StorageWriter(DcpStorageWriter):
    """Writes a DCP checkpoint that every DCP reads, at the speed of the disk, checksummed and committed atomically.

    Args:
        path: the checkpoint's directory, made if missing. A path or a `file://` URL.
        format: "dcp", torch's own layout.
        thread_count: worker threads; None: `VESCALE_CKPT_THREADS`.
        single_file_per_rank: False writes each tensor and object to a file of its own, as DCP's option does.
        sync_files: False skips syncing data; a crash of the machine may then tear a committed checkpoint.
        overwrite: False raises if the directory holds a checkpoint.
        checksums: False leaves them out, and with them all verification.
        direct_io: "auto" goes past the page cache where the file system lets it, False never does, True raises where
            it cannot.

    One object may be used for many saves, one at a time: `dcp.save(state, storage_writer=w, checkpoint_id=path)`.
    It can be pickled between saves. `last_stats` tells what this rank's last save did.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "dcp",
        thread_count: int | None = None,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        overwrite: bool = True,
        checksums: bool = True,
        direct_io: DirectIO = "auto",
    ) -> None:
        super().__init__()
        if format != "dcp":
            raise ValueError(f"format={format!r}: only 'dcp' is known")
        if thread_count is not None and thread_count < 1:
            raise ValueError(f"thread_count={thread_count}: at least 1 is wanted")
        self.path = layout.local_path(path)
        self.thread_count = thread_count
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.overwrite = overwrite
        self.checksums = checksums
        self.direct_io = engine.direct_io_setting(direct_io)
        self.last_stats: SaveStats | None = None
        self._save_id = _new_id()
        self._rank = 0
        self._use_collectives = True
        self._superseded: set[str] = set()  # files that the metadata named which this save replaces
        self._lock: layout.FileLock | None = None  # marks this save's files as such

    # --- DCP's calls, in the order in which they come

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            layout.local_path(checkpoint_id)
        except ValueError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = layout.local_path(checkpoint_id)
        self._save_id = _new_id()

    @property
    def checkpoint_id(self) -> str:
        return self.path

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.path, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        rank = kwargs.get("rank")
        self._rank = 0 if rank is None else rank
        self._use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._unlock()  # the save before this one is over
        layout.drop_dead_locks(self.path)
        layout.make_directory(self.path)
        if not self.overwrite and layout.has_metadata(self.path, self._metadata_rank):
            raise CheckpointError(f"{self.path} holds a checkpoint already and overwrite=False", path=self.path)
        if not self._use_collectives and layout.has_metadata(self.path, None):
            raise CheckpointError(
                f"{self.path} holds a checkpoint that all ranks saved together, which loads would go on to find: "
                "ranks that save without collectives need a directory of their own",
                path=self.path,
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # No rank writes before this returns, so what nothing names is left from a save that died: without its space
        # this one might not fit.
        self._superseded = layout.named_files(self.path, self._metadata_rank)
        layout.remove_leftovers(self.path, only_rank=self._metadata_rank)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        with garbage_collector_paused():
            future.set_result(self._write(plan.items, planner))  # type: ignore[arg-type]  # looks like a list
        return future

    @garbage_collector_paused()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            planned = metadata.planned if isinstance(metadata, LazyMetadata) else None
            if planned is not None:
                places, names = zip(*map(_places, results), strict=True)
                content, index = planned.files(list(places), list(names), self.path, self._save_id)
                assert isinstance(metadata, LazyMetadata)
                if metadata.was_changed():  # by a writer derived from this one, say
                    self.commit(_with_changes(content, metadata), None)
                else:
                    self.commit(content, index)
                metadata.become(layout.read_metadata_of, self.path, self._metadata_rank, self._save_id)
            else:
                metadata.version = CURRENT_DCP_VERSION
                metadata.storage_data = {
                    result.index: result.storage_data for rank_results in results for result in rank_results
                }
                metadata.storage_meta = self.storage_meta()
                self.commit(metadata_file.dumps(metadata), None)
        finally:
            self.end()

    def end(self) -> None:
        """Committed or not, this save is over."""
        self._unlock()

    def commit(self, content: bytes, index: bytes | None) -> None:
        """Makes `content` the metadata of the directory, atomically and durably, and removes what it does not name."""
        with engine.named_errors(str, self.path):
            layout.commit(self.path, self._metadata_rank, content, index)
        layout.remove_leftovers(self.path, self._superseded, only_rank=self._metadata_rank)
        self._superseded = set()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    # --- Writing this rank's part

    @property
    def _metadata_rank(self) -> int | None:
        return None if self._use_collectives else self._rank

    def _write(self, items: Sequence[WriteItem], planner: SavePlanner) -> Sequence[WriteResult]:
        started = time.perf_counter()
        files: list[_DataFile] = []
        try:
            if self.single_file_per_rank and isinstance(items, PackedItems) and items.is_of(planner):
                tensors = items.count_tensors()
                results: Sequence[WriteResult] = self._write_packed(items, planner, files)
            else:
                tensors = sum(item.type != WriteItemType.BYTE_IO for item in items)
                results = self._write_items(items, planner, files)
            if self.sync_files and files:
                with engine.named_errors(str, self.path):
                    _C.sync_directory(self.path)
        except BaseException:
            self._unlock()
            for file in files:
                file.discard()
            raise
        self.last_stats = _sum_stats(files, time.perf_counter() - started, tensors, len(items) - tensors)
        return results

    def _write_items(
        self, items: Sequence[WriteItem], planner: SavePlanner, files: list[_DataFile]
    ) -> list[WriteResult]:
        tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
        objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
        if self.single_file_per_rank:
            parts = [(tensors, objects)] if items else []
        else:
            parts = [([item], []) for item in tensors] + [([], [item]) for item in objects]
        results: list[WriteResult] = []
        for number, (part_tensors, part_objects) in enumerate(parts):
            name = layout.new_data_name(self._rank, None if self.single_file_per_rank else number)
            file = self._open(name, array("q", [_body_bytes(item) for item in part_tensors]), files)
            placed = file.write_tensors(part_tensors, planner) + file.write_objects(part_objects, planner)
            for row, item in enumerate(part_tensors + part_objects):
                results.append(write_result(item.index, [name], 0, *placed[3 * row : 3 * row + 3]))
            file.finish()
        return results

    def _write_packed(self, items: PackedItems, planner: SavePlanner, files: list[_DataFile]) -> PackedResults:
        if not items:
            return PackedResults(b"", [], items)
        description = items.description
        name = layout.new_data_name(self._rank)
        if description.all_ready:
            table = items.write_table()
            file = self._open(name, _C.body_bytes(table), files)
            placed = file.write_table(table, items.key)
        else:  # copies are made of what the engine cannot use where it is, some at a time
            tensors = items[: items.count_tensors()]
            file = self._open(name, array("q", [_body_bytes(item) for item in tensors]), files)
            placed = file.write_tensors(tensors, planner)
        keys = items.objects()
        placed += file.write_contents([objects.dump(description.objects[key]) for key in keys], keys)
        file.finish()
        return PackedResults(packed.in_first_file(placed), [name], items)

    def _open(self, name: str, body_bytes: Any, files: list[_DataFile]) -> _DataFile:
        file = _DataFile(self, name, body_bytes)
        files.append(file)
        if len(files) == 1:
            self._lock = layout.lock(file.path)
        return file


class _DataFile:
    """One data file while it is written. Removed unless `finish` was reached and `discard` never called."""

    def __init__(self, writer: StorageWriter, name: str, body_bytes: Any) -> None:
        self.writer = writer
        self.name = name
        self.path = os.path.join(writer.path, name)
        self.length = 0
        self.stats: dict[str, int] = {}
        self.tensor_bytes = sum(memoryview(body_bytes).cast("B").cast("q"))
        self.needed = _C.expected_bytes(body_bytes)
        with engine.named_errors(str, writer.path, self.needed):
            free = _C.free_bytes(writer.path)
            if free < self.needed:
                raise StorageFullError(writer.path, self.needed, free)
            options = engine.options(writer.thread_count, writer.direct_io)
            self.file: _C.FileWriter | None = _C.FileWriter(self.path, body_bytes, options, writer.checksums)

    # What follows returns rows of offset, length and CRC-32.

    def write_table(self, table: Any, key_of: Callable[[int], str]) -> list[int]:
        assert self.file is not None
        with engine.named_errors(key_of, self.writer.path, self.needed):
            return words(self.file.write_tensors(table)).tolist()

    def write_tensors(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[int]:
        def write(group: _Group) -> list[int]:
            return self.write_table(group.table, lambda row: group.items[row].index.fqn)

        return [number for _, placed in overlap(_groups(items, planner), write) for number in placed]

    def write_objects(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[int]:
        contents = []
        for item in items:
            resolved = planner.resolve_data(item)
            if not isinstance(resolved, io.BytesIO):
                raise CheckpointError(
                    f"{item.index.fqn}: the planner resolved an object to {type(resolved).__name__}, not BytesIO"
                )
            contents.append(resolved.getvalue())
        return self.write_contents(contents, [item.index.fqn for item in items])

    def write_contents(self, contents: list[bytes], keys: list[str]) -> list[int]:
        if not contents:
            return []
        assert self.file is not None
        needed = self.needed + sum(map(len, contents))
        with engine.named_errors(keys.__getitem__, self.writer.path, needed):
            return words(self.file.write_objects(contents)).tolist()

    def finish(self) -> None:
        assert self.file is not None
        with engine.named_errors(str, self.writer.path, self.needed):
            self.length = self.file.finish(self.writer.sync_files)
        self.stats = self.file.stats()
        self.file = None  # closes it: there may be as many files as tensors
        if self.writer.direct_io is True and self.stats["uncached_bytes"] + self.stats["buffered_bytes"]:
            raise CheckpointError(
                f"direct_io=True, but {self.path} could not be written past the page cache "
                f"({engine.used_paths(self.stats)})"
            )

    def discard(self) -> None:
        self.file = None  # an unfinished file removes itself
        if os.path.exists(self.path):
            os.unlink(self.path)


@dataclass
class _Group:
    """Tensors that are written together. `tensors` keeps alive the memory that `table` points to."""

    items: list[WriteItem] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    table: array[int] = field(default_factory=engine.int_table)


def _groups(items: Sequence[WriteItem], planner: SavePlanner) -> Iterator[_Group]:
    """Cuts a rank's tensors into groups, by number, and by bytes where tensors are not the state's own memory: copies
    from a device and what a planner makes up live until they are written, two groups at a time."""
    budget = settings.number("arena_bytes") // 2
    makes_tensors = _makes_tensors(planner)
    group, held = _Group(), 0
    for item in items:
        tensor, own_memory = _resolve(planner, item)
        shape = tensor.shape
        dtype = engine.dtype_code(tensor.dtype, item.index.fqn)
        group.table.extend((dtype, tensor.data_ptr(), len(shape), *shape, *tensor.stride()))
        group.items.append(item)
        group.tensors.append(tensor)
        if own_memory or makes_tensors:
            held += tensor.nbytes
        if held >= budget or len(group.items) == GROUP_TENSORS:
            yield group
            group, held = _Group(), 0
    if group.items:
        yield group


def _resolve(planner: SavePlanner, item: WriteItem) -> tuple[torch.Tensor, bool]:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(
            f"{item.index.fqn}: the planner resolved a tensor to {type(tensor).__name__}", key=item.index.fqn
        )
    wanted = item.tensor_data.chunk.sizes if item.tensor_data is not None else None
    if tensor.shape != wanted:
        raise CheckpointError(
            f"{item.index.fqn}: the planner resolved a chunk of shape {tuple(wanted or ())} to {tuple(tensor.shape)}",
            key=item.index.fqn,
        )
    try:
        return engine.as_host_tensor(tensor)
    except CheckpointError as error:
        raise CheckpointError(f"{item.index.fqn}: {error}", key=item.index.fqn) from error


def _makes_tensors(planner: SavePlanner) -> bool:
    """Whether the planner may answer `resolve_data` with tensors that are not the state's own."""
    kind = type(planner)
    return not isinstance(planner, DefaultSavePlanner) or any(
        getattr(kind, name) is not getattr(DefaultSavePlanner, name)
        and not getattr(getattr(kind, name), "keeps_memory", False)
        for name in ("resolve_data", "lookup_object", "transform_object")
    )


def _body_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    if data is None:
        raise CheckpointError(f"{item.index.fqn}: its write item has no tensor data", key=item.index.fqn)
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _places(results: Sequence[WriteResult]) -> tuple[bytes, list[str]]:
    """Where a rank wrote the rows of its part, and the names of its files."""
    if isinstance(results, PackedResults):
        return results.places, results.names
    names: dict[str, int] = {}
    table = array("q")
    for result in results:
        info = result.storage_data
        file = names.setdefault(info.relative_path, len(names))
        table.extend((file, info.offset, info.length, getattr(info, "crc", -1)))
    return table.tobytes(), list(names)


def _with_changes(content: bytes, changed: Metadata) -> bytes:
    metadata = metadata_file.loads(content, "the metadata of this save")
    metadata.state_dict_metadata = changed.state_dict_metadata
    metadata.planner_data = changed.planner_data
    metadata.storage_data = {**metadata.storage_data, **(changed.storage_data or {})}
    return metadata_file.dumps(metadata)


def _sum_stats(files: list[_DataFile], seconds: float, tensors: int, objects: int) -> SaveStats:
    names = ("in_place_bytes", "slot_bytes", "direct_bytes", "uncached_bytes", "buffered_bytes")
    total = {name: sum(file.stats[name] for file in files) for name in names}
    return SaveStats(
        seconds=seconds,
        tensors=tensors,
        objects=objects,
        bytes=sum(file.tensor_bytes for file in files),
        io_path=engine.used_paths(total),
        file_bytes=sum(file.length for file in files),
        **total,
    )


def _new_id() -> str:
    return uuid.uuid4().hex
