"""Loads the `ReadItem`s of a plan made by any DCP planner, located by the checkpoint's metadata."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from .._checkpoint.checkpoint import incomplete_tensor
from .._checkpoint.load_index import crc_of, located
from .._checkpoint.record_reader import Record, Target
from .._engine.dtype_codes import dtype_code
from .._engine.rows import int_table
from .._engine.tensor_checks import is_plain_tensor, overlapping
from .._engine.torch_private import StorageInfo
from .._engine.wrapper_tensors import is_wrapper
from .._load.load_packed import begin_reading, fill_packed
from .._load.rank_load import RankLoad, overlaps_itself
from .._plan.read_plan import Reads
from .._routes.broadcast_load import BroadcastLoad
from .._state import objects
from .._state.chunks import chunks_to_read, tells_chunks
from .._state.describe import Describer
from .._state.shared_targets import replaced_in_state
from ..errors import CheckpointError, CorruptCheckpointError, IncompatibleStateError
from ..reports import LoadStats


@dataclass(frozen=True)
class ItemTargets:
    """The targets of a load's items."""

    planner: LoadPlanner
    #: whether the tensors that the planner resolves are views of its state, which live for the whole load. Other
    #: planners may hand out memory item by item, and need `commit_tensor` called for each
    are_views: bool = False
    are_covered: bool = False  #: whether the planner has checked that its items fill the tensors
    #: takes an object with its key in the state; None: the planner takes its bytes
    put_object: Callable[[str, Any], None] | None = None


class ItemLoad:
    """Loads a list of items."""

    def __init__(self, load: RankLoad, targets: ItemTargets) -> None:
        self._load = load
        self._checkpoint = load.checkpoint
        self._targets = targets
        self.planner = targets.planner
        # {key: {offset: chunk}} of tensors whose items give a wrong index of the chunk
        self._chunks: dict[str, dict[tuple[int, ...], ChunkStorageMetadata]] = {}
        # The items, by the way in which they are read.
        self._tensors: list[tuple[ReadItem, Record]] = []
        self._objects: list[tuple[ReadItem, Record]] = []

    def run(self, items: Sequence[ReadItem], broadcast: BroadcastLoad | None = None) -> LoadStats:
        """With `broadcast`, other ranks, which call this together, read some of it."""
        return self._load.run(lambda: self._read(items, broadcast))

    def _read(self, items: Sequence[ReadItem], broadcast: BroadcastLoad | None) -> tuple[int, int]:
        def begin() -> tuple[Reads | None, list[Record]]:
            self._check_coverage(items)
            self._sort(self._without_replaced(items))
            packed = self._packed() if self._targets.are_views else None
            state = None if packed is None else packed.state
            self._load.begin(state, getattr(self.planner, "state_dict", None))
            return packed, [record for _, record in self._objects]

        packed, contents = begin_reading(self._load, begin, broadcast)
        for (item, _), (_, data) in zip(self._objects, contents, strict=True):
            self.put_object(item, data)
        if packed is not None:
            fill_packed(self._load, packed)
        else:
            self._load.fill(self._target(item, record) for item, record in self._tensors)
        tensors = sum(item.type == LoadItemType.TENSOR for item in items)
        return tensors, len(items) - tensors

    def _sort(self, items: Sequence[ReadItem]) -> None:
        for item in items:
            key, info = item.storage_index.fqn, self._location(item.storage_index)
            record = Record(key, self._load.file(info.relative_path, key), info.offset, info.length, crc_of(info))
            if item.type == LoadItemType.BYTE_IO:
                self._objects.append((item, record))
            else:
                record.dtype, record.sizes = self._chunk(item.storage_index)
                self._tensors.append((item, record))

    def _without_replaced(self, items: Sequence[ReadItem]) -> Sequence[ReadItem]:
        """The items without those of tensors that are the same memory as a later one of the state."""
        state = getattr(self.planner, "state_dict", None)
        if not self._targets.are_views or not isinstance(state, dict):
            return items
        loaded = {item.dest_index.fqn for item in items if item.type != LoadItemType.BYTE_IO}

        def stored_as(key: str) -> list[tuple[Any, ...]]:
            of_key = [item for item in items if item.dest_index.fqn == key]
            found = []
            for item in of_key:
                info = self._location(item.storage_index)
                same_record = info.relative_path, info.offset
                crc = crc_of(info)
                box = tuple(item.storage_offsets), tuple(item.lengths), tuple(item.dest_offsets)
                found.append((self._chunk(item.storage_index), box, same_record if crc == -1 else crc))
            return found

        left_out = replaced_in_state(state, loaded, lambda key, other: stored_as(key) == stored_as(other))
        return [item for item in items if item.dest_index.fqn not in left_out] if left_out else items

    def _check_coverage(self, items: Sequence[ReadItem]) -> None:
        """Checks that the items fill the tensors: stock planners do not notice a chunk that metadata lacks."""
        if self._targets.are_covered or not isinstance(self.planner, DefaultLoadPlanner):
            return
        planned: dict[str, int] = {}
        for item in items:
            if item.type != LoadItemType.BYTE_IO:
                key = item.dest_index.fqn
                planned[key] = planned.get(key, 0) + item.lengths.numel()
        in_metadata = self._checkpoint.metadata.state_dict_metadata
        for key, value in self.planner.state_dict.items():
            stored = in_metadata.get(key)
            if isinstance(stored, TensorStorageMetadata) and planned.get(key, 0) != target_elements(key, value):
                raise incomplete_tensor(key)

    # --- What metadata says of an item

    def _location(self, index: MetadataIndex) -> StorageInfo:
        info = self._checkpoint.metadata.storage_data.get(index)
        return located(info, index.fqn, self._checkpoint.path)

    def _chunk(self, index: MetadataIndex) -> tuple[torch.dtype, torch.Size]:
        """Dtype and shape of a stored chunk."""
        key, path = index.fqn, self._checkpoint.path
        stored = self._checkpoint.metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            reason = f"{key}: the metadata of {path} holds no tensor of that name"
            raise CorruptCheckpointError(reason, key=key, file=path)
        chunks = stored.chunks
        chunk = chunks[index.index] if index.index is not None and 0 <= index.index < len(chunks) else None
        if chunk is None or chunk.offsets != index.offset:
            by_offset = self._chunks.get(key)
            if by_offset is None:
                by_offset = self._chunks[key] = {tuple(chunk.offsets): chunk for chunk in chunks}
            offset = tuple(index.offset) if index.offset is not None else (0,) * len(stored.size)
            chunk = by_offset.get(offset)
            if chunk is None:
                reason = f"{key}: the metadata of {path} has no chunk at {offset}"
                raise CorruptCheckpointError(reason, key=key, file=path)
        return stored.properties.dtype, chunk.sizes

    # --- Objects

    def put_object(self, item: ReadItem, data: bytes) -> None:
        """Unpickles an object and gives it to the planner."""
        key, put = item.storage_index.fqn, self._targets.put_object
        if not self._load.options.weights_only and put is None:
            self.planner.load_bytes(item, io.BytesIO(data))
            return
        value = objects.load(data, weights_only=self._load.options.weights_only, key=key)
        if put is not None:
            put(item.dest_index.fqn, value)
        else:
            # Stock planners unpickle bytes without restriction: they get a pickle that was made here.
            self.planner.load_bytes(item, io.BytesIO(objects.dump(value, key, tells=False)))

    # --- Tensors

    def _packed(self) -> Reads | None:
        """The items as tables, which other ranks can read for. Tensors and objects are each numbered from 0.

        None if one cannot be described.
        """
        placed = [(item, record, self.resolve(item, record.dtype)) for item, record in self._tensors]
        placed.sort(key=lambda entry: (entry[1].file, entry[1].offset))
        if not all(is_plain_tensor(tensor) for _, _, tensor in placed):  # the state's own tensors are not known here
            return None
        state = Describer().describe({str(number): tensor for number, (_, _, tensor) in enumerate(placed)})
        if state.other or len(state.names) != len(placed):
            return None
        table = int_table()
        for number, (item, of, _) in enumerate(placed):
            ndim = len(of.sizes)
            table.extend((number, of.file, of.offset, of.length, of.crc, dtype_code(of.dtype, of.key), ndim))
            table.extend(of.sizes)
            table.extend((*item.storage_offsets, *item.lengths, *[0] * ndim))
        object_table = int_table()
        for number, (_, of) in enumerate(self._objects):
            object_table.extend((number, of.file, of.offset, of.length, of.crc))
        state = replace(state, names=[record.key for _, record, _ in placed])
        return Reads(state, table.tobytes(), object_table.tobytes(), list(self._load.file_numbers))

    def resolve(self, item: ReadItem, dtype: torch.dtype) -> torch.Tensor:
        """The planner's tensor for an item. Raises `IncompatibleStateError` if what is stored does not fit it."""
        key = item.dest_index.fqn
        try:
            tensor = self.planner.resolve_tensor(item)
        except Exception as error:
            if not self._targets.are_views or isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{key}: the tensor to load into cannot be cut to {tuple(item.lengths)} at {tuple(item.dest_offsets)} "
                f"({type(error).__name__}: {error}): load it with the sharding that it was saved with",
                key=key,
            ) from error
        wrapper = is_wrapper(tensor)
        tensor = tensor if wrapper else tensor.detach()  # a class may copy inner tensors, and lose its dtype
        _check_fits(key, tensor, item.lengths, dtype, self._load.options.allow_cast or wrapper)
        self._load.view.check_cast(item.storage_index.fqn, dtype, tensor.dtype)
        return tensor

    def _target(self, item: ReadItem, record: Record) -> Target:
        tensor = self.resolve(item, record.dtype)
        if overlapping([tensor]):
            raise overlaps_itself(record.key)
        increment_version([tensor])
        again = None
        if self._targets.are_views and is_wrapper(tensor):
            again = partial(self.planner.resolve_tensor, item)
        commit = partial(self.planner.commit_tensor, item)
        return self._load.target(record, item.storage_offsets, tensor, commit, again)


def _check_fits(key: str, tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype, allow_cast: bool) -> None:
    """Raises `IncompatibleStateError` if what is stored does not fit the tensor that a planner gives for it."""
    if tensor.shape != shape:
        raise IncompatibleStateError(key, f"shape {tuple(tensor.shape)}", f"shape {tuple(shape)}")
    if tensor.dtype != dtype and not allow_cast:
        hint = f"dtype {dtype} (LoadPlanner(allow_cast=True) casts)"
        raise IncompatibleStateError(key, f"dtype {tensor.dtype}", hint)


def target_elements(key: str, value: Any) -> int:
    """The number of elements that this rank holds of a tensor, all of which a load must fill."""
    if tells_chunks(value, loading=True):
        return sum(math.prod(chunk.size) for chunk in chunks_to_read(key, value).chunks)
    if isinstance(value, DTensor):
        mesh_member = value.device_mesh.get_coordinate() is not None
        return value.to_local().numel() if mesh_member else 0
    if isinstance(value, ShardedTensor):
        return sum(shard.tensor.numel() for shard in value.local_shards())
    if hasattr(value, "__create_chunk_list__"):
        return sum(chunk.sizes.numel() for chunk in value.__create_chunk_list__())
    return int(value.numel())
