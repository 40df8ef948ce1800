"""Holds a save's plans and results for DCP as tables of integers, which DCP sees as its lists of items.

DCP passes plans and results between calls and ranks without reading them. Code that reads them, such as a stock storage
writer, gets DCP's own items.
"""

from __future__ import annotations

import secrets
import weakref
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .._engine import _C
from .._engine.dtype_codes import CODE_DTYPES, dtype_code
from .._engine.rows import LEAST_PIECE_BYTES, LOCATION_ROW, NO_LIMIT, OBJECT, PLAN_ROW, SHARD, TENSOR, Inventory, words
from .._engine.torch_private import StorageInfo
from .._state.chunk_rows import ShardChunk, packed_row
from .._state.describe import Description
from .._state.tensor_table import NOT_READY, narrowed
from .._state.watch import changed_meanwhile
from ..errors import CheckpointError
from ..settings import Placement

NOT_KEPT = bytes(16)  #: the id of plans that the coordinator does not keep, so that no rank refers to them later


@dataclass(frozen=True)
class PackedSavePlan(SavePlan):
    """The plan that a rank sends to the coordinator (its inventory), or gets back (its local plan). Either may be only
    the id of a plan that both have kept."""

    # These fields go to the coordinator.
    plan_id: bytes = b""
    position: int = -1  #: the local plan is for this one of the planned ranks
    inventory: Inventory | None = None  #: None: the inventory that plan `plan_id` was made from
    paths: bytes = b""  #: DCP's planner_data, packed
    structure: str = ""  #: `Structure.pack`: what the paths leave out
    digests: bytes = b""  #: a checksum of each object, in the order of the inventory
    replicas: bytes = b""  #: `replicas.offered_hashes`
    check: int = 0  #: `replicas.replica_sum`, if this is only an id
    checked: bool = True  #: whether `check` covers all chunks that are compared
    # These fields come from the coordinator.
    local_plan: bytes | None = None  #: None: the kept local plan
    holders: bytes = b""  #: with a local plan, `_C.GlobalPlan.holders`


class GlobalSavePlan:
    """The coordinator's plan of a save: which rank writes what, and all that metadata needs except record locations.

    Args:
        inventories, paths: one of each rank.
        hashes: hashes of each rank's chunks, to compare replicas (`replicas.offered_hashes`); empty: no comparison.
        pieces: whether several ranks may write a large tensor in pieces.
        kept: whether the coordinator keeps the plan for later saves.

    Raises `CheckpointError`, with the key and the ranks, if inventories do not fit together.
    """

    def __init__(
        self,
        inventories: Sequence[Inventory],
        paths: Sequence[bytes] = (),
        structure: str = "",
        placement: Placement = "lowest_rank",
        hashes: Sequence[bytes] = (),
        pieces: bool = False,
        kept: bool = False,
    ) -> None:
        self.inventories = inventories
        self.paths = paths
        self.structure = structure
        least = LEAST_PIECE_BYTES if pieces else NO_LIMIT
        try:
            self.plan = _C.GlobalPlan(inventories, placement, least, hashes=list(hashes))
        except _C.EngineError as error:
            raise CheckpointError(str(error)) from None
        # The id is random, not a hash of the inputs: equal inputs may give different plans, and all local plans must
        # belong to one plan.
        self.plan_id = secrets.token_bytes(16) if kept else NOT_KEPT

    def files(
        self,
        locations: list[bytes],
        names: list[list[str]],
        directory: str,
        save_id: str,
        target: _C.PendingFile | None = None,
    ) -> tuple[bytes, bytes]:
        """Makes the bytes of `.metadata` and of the index from the record locations and file names of each rank. With
        `target`, writes `.metadata` to it as it is made, and returns its last `TRAILER_BYTES` only."""
        return _C.checkpoint_files(
            self.catalog, locations, names, self.paths, directory, save_id, self.structure, target
        )

    @cached_property
    def catalog(self) -> _C.Catalog:
        return self.plan.catalog()


class SavePlans(list[SavePlan]):
    """The coordinator's answers to all ranks. Its storage writer reads `planned`, the global plan of the answers."""

    def __init__(self, answers: Sequence[SavePlan], planned: GlobalSavePlan) -> None:
        super().__init__(answers)
        self.planned = planned


class LazyList(Sequence[Any]):
    """A sequence whose items are built at the first access. Pickles as a list."""

    _built: list[Any] | None = None

    def _build(self) -> list[Any]:
        raise NotImplementedError

    def _items(self) -> list[Any]:
        if self._built is None:
            self._built = self._build()
        return self._built

    def __getitem__(self, index: Any) -> Any:
        return self._items()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items())

    def __len__(self) -> int:
        return len(self._items())

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self._items()),)


class PackedItems(LazyList):
    """A rank's local plan: items of its inventory, or pieces of them. Looks like `list[WriteItem]`."""

    def __init__(self, planner: object, description: Description, local_plan: bytes) -> None:
        self._planner = weakref.ref(planner)  # the planner holds this plan: a cycle would keep the model in memory
        self.description = description
        self.local_plan = local_plan
        self._tensors: int | None = None
        self._rows: dict[MetadataIndex, tuple[int, int, int, int]] = {}

    def is_of(self, planner: object) -> bool:
        return self._planner() is planner

    def __len__(self) -> int:
        return len(self.local_plan) // 8 // PLAN_ROW

    def objects(self) -> list[str]:
        """The keys of the objects in the plan. Their rows come last."""
        names = self.description.names
        return [names[item] for item in words(self.local_plan)[self.count_tensors() * PLAN_ROW :: PLAN_ROW]]

    def key(self, row: int) -> str:
        return self.description.names[words(self.local_plan)[row * PLAN_ROW]]

    def count_tensors(self) -> int:
        if self._tensors is None:
            kinds = _C.inventory_kinds(self.description.inventory)
            if OBJECT in kinds:
                self._tensors = sum(kinds[item] != OBJECT for item in words(self.local_plan)[::PLAN_ROW])
            else:
                self._tensors = len(self)
        return self._tensors

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` with the key of a tensor that changed after the state was described."""
        if not (changed := self.description.changed()):
            return
        for item in words(self.local_plan)[: self.count_tensors() * PLAN_ROW : PLAN_ROW]:
            if self.description.tensor_index(item) in changed:
                raise changed_meanwhile(self.description.names[item])

    def write_table(self, rows: Sequence[int] | None = None) -> bytes:
        """Returns the engine's table of all tensors in the plan, or of `rows`. The engine must be able to read all of
        them in place."""
        return self.description.for_engine.write_table(self._part(rows))

    def copy_table(self, rows: Sequence[int] | None = None) -> tuple[bytes, bytes]:
        """Returns the same for a snapshot of tensors in host memory or on CUDA devices, and the device of each row (-1:
        the host)."""
        return self.description.for_engine.copy_table(self._part(rows))

    def ready_rows(self) -> bytes:
        """Returns the flag of `TensorReads.ready` for each row of a tensor."""
        return self.description.for_engine.ready_rows(self._part(None))

    def _part(self, rows: Sequence[int] | None) -> bytes:
        """The local plan of these rows; None: of all tensors."""
        rows = range(self.count_tensors()) if rows is None else rows
        if isinstance(rows, range):
            return self.local_plan[rows.start * PLAN_ROW * 8 : rows.stop * PLAN_ROW * 8]
        numbers = words(self.local_plan)
        return b"".join([numbers[row * PLAN_ROW : (row + 1) * PLAN_ROW] for row in rows])

    def body_bytes(self) -> bytes:
        """Returns the bytes of each tensor in the plan, as 64-bit integers."""
        if NOT_READY not in self.description.ready:
            return _C.body_bytes(self.copy_table()[0])
        return body_bytes(self[: self.count_tensors()]).tobytes()

    def _build(self) -> list[WriteItem]:
        inventory = self.description.items
        local_plan = words(self.local_plan)
        built = []
        for row in range(0, len(local_plan), PLAN_ROW):
            item, dim, start, length = local_plan[row : row + PLAN_ROW]
            write_item = _write_item(inventory[item], dim, start, length)
            self._rows[write_item.index] = item, dim, start, length
            built.append(write_item)
        return built

    def resolve(self, index: MetadataIndex) -> Any:
        """Returns the value of an item of this plan: a tensor, a view of a part of one, or an object."""
        self._items()
        item, dim, start, length = self._rows[index]
        description = self.description
        if index.offset is None:
            return description.objects[description.names[item]]
        tensor, local_offset = description.source(item)
        offset, size = list(local_offset), list(description.items[item][7])
        if dim >= 0:
            offset[dim] += start
            size[dim] = length
        return narrowed(tensor, offset, size)


def _write_item(item: tuple[Any, ...], dim: int, start: int, length: int) -> WriteItem:
    name, kind, dtype, requires_grad, _, shape, offset, size = item
    if kind == OBJECT:
        return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
    if dim >= 0:
        offset = (*offset[:dim], offset[dim] + start, *offset[dim + 1 :])
        size = (*size[:dim], length, *size[dim + 1 :])
    whole = kind == TENSOR and size == shape
    return WriteItem(
        index=MetadataIndex(name, offset),
        type=WriteItemType.TENSOR if whole else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(size)),
            properties=TensorProperties(dtype=CODE_DTYPES[dtype], requires_grad=requires_grad),
            size=torch.Size(shape),
        ),
    )


def body_bytes(items: Sequence[WriteItem]) -> array[int]:
    """Returns the bytes of each tensor. Raises `CheckpointError` for an item without tensor data."""
    sizes = array("q")
    for item in items:
        data = item.tensor_data
        if data is None:
            raise CheckpointError(f"{item.index.fqn}: its write item has no tensor data", key=item.index.fqn)
        sizes.append(data.chunk.sizes.numel() * data.properties.dtype.itemsize)
    return sizes


class PackedResults(LazyList):
    """The record locations of a rank's local plan. Looks like `list[WriteResult]` on the rank that wrote."""

    def __init__(
        self,
        locations: bytes,
        names: list[str],
        items: PackedItems | None = None,
        votes: tuple[list[int], list[int]] | None = None,
    ) -> None:
        self.locations = locations
        self.names = names
        self.votes = votes  #: `Timeline.votes` of the writing rank
        self._of = items

    def __len__(self) -> int:
        return len(self.locations) // 8 // LOCATION_ROW

    def _build(self) -> list[WriteResult]:
        if self._of is None:
            raise CheckpointError("packed results of another rank can only be used together with their plan")
        locations = words(self.locations)
        return [
            write_result(item.index, self.names, *locations[row * LOCATION_ROW : (row + 1) * LOCATION_ROW])
            for row, item in enumerate(self._of)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedResults, (self.locations, self.names, None, self.votes)


def write_result(
    index: MetadataIndex, names: Sequence[str], file: int, offset: int, length: int, crc: int
) -> WriteResult:
    info = StorageInfo(names[file], offset, length)
    if crc >= 0:
        info.crc = crc  # type: ignore[attr-defined]  # .metadata holds it, and loads compare it with the data
    return WriteResult(index, length, info)


def pack_items(items: Sequence[WriteItem]) -> bytes:
    """Makes the inventory of another planner's plan. Raises `CheckpointError` for a dtype without a code."""
    rows = []
    for item in items:
        data = item.tensor_data
        if data is None:
            rows.append(packed_row(OBJECT, 0, False, 1, ShardChunk((), (), ()), ()))
            continue
        sizes, dtype = data.chunk.sizes, data.properties.dtype
        kind = TENSOR if item.type == WriteItemType.TENSOR else SHARD
        code = dtype_code(dtype, item.index.fqn)
        piece = ShardChunk(data.chunk.offsets, sizes, ())
        rows.append(packed_row(kind, code, bool(data.properties.requires_grad), dtype.itemsize, piece, data.size))
    return _C.pack_inventory([item.index.fqn for item in items], rows, 0)
