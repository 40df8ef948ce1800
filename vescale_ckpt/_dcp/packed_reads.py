"""`PackedReads` shows DCP the reads of this package as its list of `ReadItem`s."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from .._plan.read_plan import ReadRow, Reads
from .lazy_list import LazyList


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
