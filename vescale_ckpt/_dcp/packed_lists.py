"""Holds a save's plans and results, and a load's reads, for DCP, which sees them as its lists of items.

DCP passes plans and results between calls and ranks without reading them. Code that reads them, such as a stock storage
writer, gets DCP's own items.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from .._engine import _C
from .._engine.dtype_codes import CODE_DTYPES, dtype_code
from .._engine.rows import LOCATION_ROW, OBJECT, SHARD, TENSOR, words
from .._engine.torch_private import StorageInfo
from .._plan.global_plan import GlobalPlan, Locations, PlanAnswer, PlanRequest
from .._plan.local_plan import LocalPlan, cut
from .._plan.planner import pack_paths
from .._plan.read_plan import ReadRow, Reads
from .._state.chunk_rows import ShardChunk, packed_row
from .._state.chunks import Chunk
from ..errors import CheckpointError


class LazyList(Sequence[Any]):
    """Looks like one of DCP's lists of items, which is built at the first access. Pickles as a list."""

    def _build(self) -> list[Any]:
        raise NotImplementedError

    @cached_property
    def built(self) -> list[Any]:
        return self._build()

    def __getitem__(self, index: Any) -> Any:
        return self.built[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.built)

    def __len__(self) -> int:
        return len(self.built)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.built,)


# --- Saves


@dataclass(frozen=True)
class PackedSavePlan(SavePlan):
    """A plan without items: what a rank sends to the coordinator, or what it gets back."""

    request: PlanRequest | None = None
    answer: PlanAnswer | None = None


def request_of(plan: SavePlan) -> PlanRequest:
    """What a rank sends to the coordinator, of which the plan may be another planner's."""
    if isinstance(plan, PackedSavePlan):
        assert plan.request is not None
        return plan.request
    return PlanRequest(inventory=pack_items(plan.items), paths=pack_paths(plan.planner_data), of_items=True)


class SavePlans(list[SavePlan]):
    """The coordinator's answers to all ranks. Its storage writer reads `planned`, the global plan of the answers."""

    def __init__(self, answers: Sequence[SavePlan], planned: GlobalPlan) -> None:
        super().__init__(answers)
        self.planned = planned


class PackedItems(LazyList):
    """A rank's local plan. Looks like `list[WriteItem]`."""

    def __init__(self, plan: LocalPlan) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def _build(self) -> list[WriteItem]:
        inventory = self.plan.state.items
        return [_write_item(inventory[item], *piece) for item, *piece in self.plan.rows()]

    @cached_property
    def _rows(self) -> dict[MetadataIndex, int]:
        return {item.index: row for row, item in enumerate(self.built)}

    def resolve(self, index: MetadataIndex) -> Any:
        """Returns the value of an item of this plan: a tensor, a view of a part of one, or an object."""
        if index.offset is None:
            return self.plan.state.objects[index.fqn]
        return self.plan.tensor(self._rows[index])


def _write_item(item: tuple[Any, ...], dim: int, start: int, length: int) -> WriteItem:
    name, kind, dtype, requires_grad, _, shape, offset, size = item
    if kind == OBJECT:
        return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
    if dim >= 0:
        offset, size = cut(offset, size, dim, start, length)
    chunk = Chunk(TENSOR if kind == TENSOR and size == shape else SHARD, requires_grad, offset, size)
    return item_of_chunk(name, chunk, CODE_DTYPES[dtype], shape)


def item_of_chunk(key: str, chunk: Chunk, dtype: torch.dtype, shape: tuple[int, ...]) -> WriteItem:
    """DCP's item of a chunk of a tensor of that shape."""
    offset, size = torch.Size(chunk.offset), torch.Size(chunk.size)
    return WriteItem(
        index=MetadataIndex(key, offset),
        type=WriteItemType.TENSOR if chunk.kind == TENSOR else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offset, size),
            properties=TensorProperties(dtype=dtype, requires_grad=chunk.requires_grad),
            size=torch.Size(shape),
        ),
    )


class PackedResults(LazyList):
    """The locations of what a rank has written. Looks like `list[WriteResult]` on that rank."""

    def __init__(self, locations: Locations, items: PackedItems | None = None) -> None:
        self.locations = locations
        self._of = items

    def __len__(self) -> int:
        return len(self.locations.table) // 8 // LOCATION_ROW

    def _build(self) -> list[WriteResult]:
        if self._of is None:
            raise CheckpointError("packed results of another rank can only be used together with their plan")
        return write_results(self._of, self.locations)

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedResults, (self.locations,)


def write_results(items: Sequence[WriteItem], locations: Locations) -> list[WriteResult]:
    """DCP's results of items, in the order of their rows."""
    table, files = words(locations.table).tolist(), locations.files
    return [
        _write_result(item.index, files, *table[row * LOCATION_ROW : (row + 1) * LOCATION_ROW])
        for row, item in enumerate(items)
    ]


def _write_result(
    index: MetadataIndex, names: Sequence[str], file: int, offset: int, length: int, crc: int
) -> WriteResult:
    info = StorageInfo(names[file], offset, length)
    if crc >= 0:
        info.crc = crc  # type: ignore[attr-defined]  # .metadata holds it, and loads compare it with the data
    return WriteResult(index, length, info)


def locations_of(results: Sequence[WriteResult]) -> Locations:
    """The locations in a rank's results."""
    if isinstance(results, PackedResults):
        return results.locations
    names: dict[str, int] = {}
    table = array("q")
    for result in results:
        info = result.storage_data
        file = names.setdefault(info.relative_path, len(names))
        table.extend((file, info.offset, info.length, getattr(info, "crc", -1)))
    return Locations(table.tobytes(), list(names))


def pack_items(items: Sequence[WriteItem]) -> bytes:
    """Makes the inventory of another planner's plan. Raises `CheckpointError` for a dtype without a code."""
    rows = []
    for item in items:
        data = item.tensor_data
        if data is None:
            rows.append(packed_row(OBJECT, 0, False, 0, ShardChunk((), (), ()), ()))
            continue
        sizes, dtype = data.chunk.sizes, data.properties.dtype
        kind = TENSOR if item.type == WriteItemType.TENSOR else SHARD
        code = dtype_code(dtype, item.index.fqn)
        piece = ShardChunk(data.chunk.offsets, sizes, ())
        rows.append(packed_row(kind, code, bool(data.properties.requires_grad), dtype.itemsize, piece, data.size))
    return _C.pack_inventory([item.index.fqn for item in items], rows, 0)


# --- Loads


class PackedReads(LazyList):
    """Looks like `list[ReadItem]` on the rank that planned it. Pickles as an empty list, because the coordinator
    decides nothing about reads."""

    def __init__(self, reads: Reads) -> None:
        self.reads = reads

    def _build(self) -> list[ReadItem]:
        reads = self.reads
        return [*map(self._tensor_item, reads.tensors()), *(self._object_item(row.item) for row in reads.objects())]

    def _tensor_item(self, row: ReadRow) -> ReadItem:
        name, chunk = self.reads.stored_chunk(row)
        return ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(name, self.reads.state.items[row.item][6], row.item),
            dest_offsets=torch.Size(row.dest_offset),
            storage_index=MetadataIndex(name, chunk),
            storage_offsets=torch.Size(row.storage_offset),
            lengths=torch.Size(row.lengths),
        )

    def _object_item(self, item: int) -> ReadItem:
        index, nothing = MetadataIndex(self.reads.state.names[item]), torch.Size([0])
        return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ()
