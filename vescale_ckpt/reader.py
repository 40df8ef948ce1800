"""`StorageReader`: DCP's plug point for loading, backed by the C++ engine."""

from __future__ import annotations

import io
import os
import time
import uuid
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from . import _C, engine, layout, objects, settings
from .errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleStateError,
    UntrustedCheckpointError,
)
from .load_planner import LoadPlanner as OurLoadPlanner
from .load_planner import not_all_there, wanted_elements
from .overlap import GROUP_TENSORS, overlap
from .pause import garbage_collector_paused
from .settings import DirectIO
from .stats import LoadStats
from .stock import StorageInfo


class StorageReader(DcpStorageReader):
    """Reads DCP checkpoints, ours and torch's of any version, at the speed of the disk, and verifies what it reads.

    Args:
        path: the checkpoint's directory. A path or a `file://` URL.
        thread_count: worker threads; None: `VESCALE_CKPT_THREADS`.
        verify: False skips checksums of data (never the checks of sizes, paths and pickles).
        weights_only: False lets objects run code while they are loaded, for checkpoints you trust.
        direct_io: "auto" goes past the page cache unless the file is in it, False never does, True raises where it
            cannot.

    Errors (inside DCP's `CheckpointException` under `dcp.load`): `CorruptCheckpointError`, `IncompatibleStateError`
    for a target of another dtype (unless the planner is `LoadPlanner(allow_cast=True)`), `UntrustedCheckpointError`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        thread_count: int | None = None,
        verify: bool = True,
        weights_only: bool = True,
        direct_io: DirectIO = "auto",
    ) -> None:
        super().__init__()
        if thread_count is not None and thread_count < 1:
            raise ValueError(f"thread_count={thread_count}: at least 1 is wanted")
        self.path = layout.local_path(path)
        self.thread_count = thread_count
        self.verify = verify
        self.weights_only = weights_only
        self.direct_io = engine.direct_io_setting(direct_io)
        self.last_stats: LoadStats | None = None
        self._load_id = uuid.uuid4().hex
        self._metadata: Metadata | None = None
        self._metadata_error: CheckpointError | None = None

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
        self._metadata = None
        self._metadata_error = None
        self._load_id = uuid.uuid4().hex

    @property
    def checkpoint_id(self) -> str:
        return self.path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        # DCP asks for `.metadata`, swallows whatever goes wrong, asks for the rank's own file, and then only says that
        # there is no metadata. So that the true error arrives it is kept, and raised at the next call. And a damaged
        # `.metadata` must not let an older one of a rank pass for it.
        rank = kwargs.get("rank")
        if rank is not None and self._metadata_error is not None and layout.has_metadata(self.path, None):
            return Metadata({})
        try:
            metadata = layout.read_metadata(self.path, rank)
        except CheckpointError as error:
            if rank is None:
                self._metadata_error = error
                raise
            if self._metadata_error is None or layout.has_metadata(self.path, rank):
                raise
            return Metadata({})
        self._metadata_error = None
        if not isinstance(metadata.storage_meta, StorageMeta):
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._metadata_error is not None:
            raise self._metadata_error
        if not isinstance(metadata.storage_data, dict):
            raise CorruptCheckpointError(
                f"the metadata of {self.path} does not say where anything is stored",
                key=None,
                file=self.path,
            )
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._metadata is None:
            raise CheckpointError("read_data was called before set_up_storage_reader")
        with garbage_collector_paused():
            _Load(self, self._metadata, planner).run(plan.items)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _crc(info: StorageInfo) -> int:
    """CRC-32 of a tensor's bytes or of an object's archive, if metadata has it; else -1."""
    crc = getattr(info, "crc", -1)
    return crc if type(crc) is int and 0 <= crc < 1 << 32 else -1


@dataclass
class _Target:
    """A tensor to fill, from where, and the host memory that is filled: its own where the engine can use that."""

    item: ReadItem
    info: StorageInfo
    tensor: torch.Tensor
    host: torch.Tensor

    @property
    def key(self) -> str:
        return self.item.storage_index.fqn


@dataclass
class _Group:
    """Tensors that are read together, and their rows in the engine's table."""

    targets: list[_Target] = field(default_factory=list)
    table: array[int] = field(default_factory=engine.int_table)


class _Load:
    """One call of read_data."""

    def __init__(self, reader: StorageReader, metadata: Metadata, planner: LoadPlanner) -> None:
        self.reader = reader
        self.metadata = metadata
        self.planner = planner
        self.options = engine.options(reader.thread_count, reader.direct_io)
        # Ours take the object itself, unless a subclass wants to decode the bytes.
        self.takes_objects = (
            isinstance(planner, OurLoadPlanner) and type(planner).load_bytes is OurLoadPlanner.load_bytes
        )
        self.allow_cast = bool(getattr(planner, "allow_cast", False))
        self.paths: list[str] = []
        self.path_index: dict[str, int] = {}
        self.chunk_index: dict[str, dict[Any, ChunkStorageMetadata]] = {}
        self.totals = dict.fromkeys(
            ("in_place_bytes", "slot_bytes", "direct_bytes", "uncached_bytes", "buffered_bytes"), 0
        )
        self.bytes = 0
        self.unverified = 0
        self.fallbacks = 0

    def run(self, items: list[ReadItem]) -> None:
        started = time.perf_counter()
        transformed, byte_items, tensor_items = [], [], []
        for item in items:
            info = self._info(item)
            if info.transform_descriptors:
                transformed.append(item)
            elif item.type == LoadItemType.BYTE_IO:
                byte_items.append((item, info))
            else:
                tensor_items.append((item, info))
        self._check_coverage(items)
        self._read_objects(byte_items)
        self._read_tensors(tensor_items)
        if transformed:
            self._read_transformed(transformed)
        if self.reader.direct_io is True and self.totals["uncached_bytes"] + self.totals["buffered_bytes"]:
            raise CheckpointError(
                f"direct_io=True, but {self.reader.path} could not be read past the page cache "
                f"({engine.used_paths(self.totals)})"
            )
        self.reader.last_stats = LoadStats(
            seconds=time.perf_counter() - started,
            tensors=sum(item.type == LoadItemType.TENSOR for item in items),
            objects=sum(item.type == LoadItemType.BYTE_IO for item in items),
            bytes=self.bytes,
            io_path=engine.used_paths(self.totals),
            verified=self.reader.verify,
            unverified_bytes=self.unverified,
            fallback_tensors=self.fallbacks,
            **self.totals,
        )

    # --- What metadata says, checked

    def _check_coverage(self, items: list[ReadItem]) -> None:
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
        info: StorageInfo | None = self.metadata.storage_data.get(item.storage_index)
        if info is None:
            raise CorruptCheckpointError(
                f"{key}: the metadata of {self.reader.path} does not say where it is stored",
                key=key,
                file=self.reader.path,
            )
        if type(info) is not StorageInfo or type(getattr(info, "relative_path", None)) is not str:
            raise UntrustedCheckpointError(f"{key}: metadata does not name a file for it", key=key)
        for name in ("offset", "length"):
            number = getattr(info, name, None)
            if type(number) is not int or not 0 <= number < 1 << 62:
                raise UntrustedCheckpointError(f"{key}: metadata gives {number!r} as its {name}", key=key)
        return info

    def _file(self, info: StorageInfo, key: str) -> int:
        index = self.path_index.get(info.relative_path)
        if index is None:
            name = layout.check_relative(info.relative_path, key)
            index = self.path_index[name] = len(self.paths)
            self.paths.append(os.path.join(self.reader.path, name))
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

    def _read_objects(self, items: list[tuple[ReadItem, StorageInfo]]) -> None:
        if not items:
            return
        table = engine.int_table()
        for item, info in items:
            table.extend((self._file(info, item.storage_index.fqn), info.offset, info.length))
        for (item, info), data in zip(items, self._read_ranges(items, table), strict=True):
            self._check_archive(data, item.storage_index.fqn, info, whole=True)
            self.set_object(item, data)

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
            self.planner.load_bytes(item, io.BytesIO(objects.dump(value)))

    def _read_ranges(self, items: list[tuple[ReadItem, StorageInfo]], table: Any) -> list[bytes]:
        self._check_ranges(items)
        with engine.named_errors(lambda row: items[row][0].storage_index.fqn, self.reader.path):
            return _C.read_objects(self.paths, table, self.options)

    def _check_ranges(self, items: list[tuple[ReadItem, StorageInfo]]) -> None:
        """Before memory is taken for them."""
        sizes: dict[str, int] = {}
        for item, info in items:
            key = item.storage_index.fqn
            path = self.paths[self._file(info, key)]
            if path not in sizes:
                try:
                    sizes[path] = os.stat(path).st_size
                except OSError as error:
                    raise CorruptCheckpointError(f"{key}: data file is missing: {error}", key=key, file=path) from error
            if info.offset + info.length > sizes[path]:
                raise CorruptCheckpointError(
                    f"{key}: file {path} is truncated: it has {sizes[path]} bytes, the object at offset "
                    f"{info.offset} needs {info.length}",
                    key=key,
                    file=path,
                    offset=info.offset,
                )

    def _check_archive(self, data: bytes, key: str, info: StorageInfo, *, whole: bool) -> None:
        """That an archive is sound and, where the checksum in metadata is of the `whole`, the one that was saved."""
        damage = _C.check_archive(data, self.reader.verify)
        if not damage and whole and self.reader.verify and _crc(info) not in (-1, _C.crc32(data)):
            damage = "it is not the object that was saved"
        if damage:
            path = self.paths[self.path_index[info.relative_path]]
            raise CorruptCheckpointError(
                f"{key}: {damage} (record of {info.length} bytes at offset {info.offset} of {path})",
                key=key,
                file=path,
                offset=info.offset,
            )

    # --- Tensors

    def _read_tensors(self, items: list[tuple[ReadItem, StorageInfo]]) -> None:
        def read(group: _Group) -> dict[str, Any]:
            with engine.named_errors(lambda row: group.targets[row].key, self.reader.path):
                return _C.read_tensors(self.paths, group.table, self.reader.verify, self.options)

        for group, report in overlap(self._groups(items), read):
            self._settle(group, report)

    def _groups(self, items: list[tuple[ReadItem, StorageInfo]]) -> Iterator[_Group]:
        """Cuts what this rank reads into groups, by number, and by bytes where targets need host memory of their own
        until they are filled, which two groups have at a time."""
        budget = settings.number("arena_bytes") // 2
        group, held = _Group(), 0
        for item, info in items:
            key = item.storage_index.fqn
            dtype, sizes = self.chunk(item.storage_index)
            target = self._target(item, info, dtype)
            host = target.host
            file, code = self._file(info, key), engine.dtype_code(dtype, key)
            group.table.extend((file, info.offset, info.length, _crc(info), code, len(sizes), *sizes))
            group.table.extend((*item.storage_offsets, *item.lengths, host.data_ptr(), *host.stride()))
            group.targets.append(target)
            if host is not target.tensor:
                held += host.nbytes
            if held >= budget or len(group.targets) == GROUP_TENSORS:
                yield group
                group, held = _Group(), 0
        if group.targets:
            yield group

    def _target(self, item: ReadItem, info: StorageInfo, dtype: torch.dtype) -> _Target:
        tensor = self.planner.resolve_tensor(item).detach()
        self.check_fit(item, tensor, dtype)
        if tensor.dtype == dtype and engine.is_host_memory(tensor):
            return _Target(item, info, tensor, tensor)
        if not engine.can_be_filled(tensor):
            raise CheckpointError(
                f"{item.dest_index.fqn}: the tensor to load into has no memory: its storage was freed or is too small"
            )
        return _Target(item, info, tensor, torch.empty(tensor.shape, dtype=dtype))

    def check_fit(self, item: ReadItem, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Raises `IncompatibleStateError` if what is stored does not fit the tensor that the planner resolved."""
        key = item.dest_index.fqn
        if tensor.shape != item.lengths:
            raise IncompatibleStateError(key, f"shape {tuple(tensor.shape)}", f"shape {tuple(item.lengths)}")
        if tensor.dtype != dtype and not self.allow_cast:
            hint = f"dtype {dtype} (LoadPlanner(allow_cast=True) casts)"
            raise IncompatibleStateError(key, f"dtype {tensor.dtype}", hint)

    def _settle(self, group: _Group, report: dict[str, Any]) -> None:
        for name in self.totals:
            self.totals[name] += report[name]
        self.bytes += report["needed_bytes"]
        self.unverified += report["unverified_bytes"]
        unread: list[int] = report["unread"]
        for row in unread:
            self._read_odd_record(group.targets[row])
        for target in group.targets:
            if target.host is not target.tensor:
                target.tensor.copy_(target.host)
            self.planner.commit_tensor(target.item, target.tensor)

    def _read_odd_record(self, target: _Target) -> None:
        """A record that is not a plain contiguous tensor: stock DCP keeps strides and conjugation, for instance."""
        item, info, key = target.item, target.info, target.key
        self.fallbacks += 1
        table = engine.int_table((self._file(info, key), info.offset, info.length))
        (data,) = self._read_ranges([(item, info)], table)
        if not _C.archive_has_checksums(data):
            self.unverified += target.host.nbytes
        self._check_archive(data, key, info, whole=False)  # also unverified loads: it differs from what was expected
        path = self.paths[self.path_index[info.relative_path]]
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise CorruptCheckpointError(
                f"{key}: the record at offset {info.offset} of {path} cannot be read: {error}",
                key=key,
                file=path,
                offset=info.offset,
            ) from error
        dtype, sizes = self.chunk(item.storage_index)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != sizes:
            found = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise CorruptCheckpointError(
                f"{key}: metadata promises shape {tuple(sizes)}, the record at offset {info.offset} of {path} "
                f"holds {found}",
                key=key,
                file=path,
                offset=info.offset,
            )
        if tensor.dtype != dtype and not self.allow_cast:
            raise IncompatibleStateError(item.dest_index.fqn, f"dtype {dtype}", f"dtype {tensor.dtype}")
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        target.host.copy_(tensor)

    # --- Records that passed a stream transform of stock DCP (compression): its own reader knows them

    def _read_transformed(self, items: list[ReadItem]) -> None:
        for item in items:
            layout.check_relative(self.metadata.storage_data[item.storage_index].relative_path, item.storage_index.fqn)
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


class _TransformedPlanner:
    """Stands for the planner while stock DCP reads: what it loads passes our checks first."""

    def __init__(self, load: _Load) -> None:
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
