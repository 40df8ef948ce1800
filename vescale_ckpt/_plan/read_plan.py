"""Holds a rank's load plan as tables of integers that DCP sees as its list of `ReadItem`s."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from .._engine import _C
from .._engine.dtype_codes import CODE_DTYPES
from .._engine.rows import ITEM_BYTES, OBJECT, OBJECT_ROW, words
from .._state.describe import Description
from .._state.tensor_table import narrowed
from .lazy_list import LazyList


@dataclass(frozen=True)
class ReadRow:
    """One read of a part of a stored chunk into a part of an item's chunk, or of an object."""

    item: int
    file: int
    offset: int  #: position of the record in the file
    length: int  #: length of the record
    crc: int  #: CRC-32; -1 if metadata has none
    dtype: torch.dtype = torch.uint8
    chunk_size: tuple[int, ...] = ()
    storage_offset: tuple[int, ...] = ()  #: within the chunk
    lengths: tuple[int, ...] = ()
    dest_offset: tuple[int, ...] = ()  #: within the item's chunk


@dataclass(frozen=True)
class ItemReads:
    """The reads of DCP's items, in the form of `_C.LoadPlan`."""

    reads: bytes
    objects: bytes
    files: list[str]


PlannedReads = _C.LoadPlan | ItemReads


class PackedReads(LazyList):
    """The reads of a rank. Looks like `list[ReadItem]` on that rank; pickles as an empty list."""

    def __init__(
        self, planner: object, description: Description, plan: PlannedReads, reads: bytes | None = None
    ) -> None:
        self.planner = weakref.ref(planner)
        self.description = description
        self.plan = plan
        self.reads = plan.reads if reads is None else reads  #: reads of tensors: rows of `LoadPlan.reads`

    def with_reads(self, reads: bytes) -> PackedReads:
        """Returns the same plan with `reads` as its rows of tensors."""
        planner = self.planner()
        assert planner is not None
        return PackedReads(planner, self.description, self.plan, reads)

    def split(self, is_apart: Callable[[torch.Tensor], bool]) -> tuple[bytes, bytes]:
        """Splits the rows of tensors into two tables: first targets that are not `is_apart`, then targets that are."""
        tables = bytearray(), bytearray()
        for row in self._raw_rows():
            tensor, _ = self.description.source(row[0])
            tables[is_apart(tensor)].extend(row.cast("B"))
        return bytes(tables[0]), bytes(tables[1])

    def without(self, names: Container[str]) -> PackedReads:
        """Returns the same plan without reads into the tensors of `names`."""
        rows = [row for row in self._raw_rows() if self.description.names[row[0]] not in names]
        return self.with_reads(b"".join(row.tobytes() for row in rows))

    def stored_alike(self, name: str, other: str) -> bool:
        """Whether the tensors of two keys are certainly stored with equal bytes: in the same records, or in records
        with equal checksums."""
        stored: dict[str, list[tuple[int, ...]]] = {name: [], other: []}
        for row in self._raw_rows():
            if (key := self.description.names[row[0]]) in stored:
                stored[key].append(tuple(row[1:]))
        (rows, others), at_crc = map(sorted, stored.values()), 3
        if rows == others:
            return True
        known = all(row[at_crc] != -1 and not _has_header_crc(*row[2:]) for row in rows)
        return known and sorted(row[at_crc:] for row in rows) == sorted(row[at_crc:] for row in others)

    def bytes_read_alone(self, verify: bool) -> int:
        """Estimates how many bytes this rank reads for its tensors if no other rank reads for it."""
        return _C.bytes_read_alone(self.reads, self.plan.files, verify)

    def _build(self) -> list[ReadItem]:
        return [self.item(row) for row in self.rows()] + [self.object_item(row.item) for row in self.objects()]

    def rows(self) -> Iterator[ReadRow]:
        for row in self._raw_rows():
            item, file, offset, length, crc, dtype, ndim = row[:7]
            shapes = [tuple(row[7 + i * ndim : 7 + (i + 1) * ndim]) for i in range(4)]
            yield ReadRow(item, file, offset, length, crc, CODE_DTYPES[dtype], *shapes)

    def _raw_rows(self) -> Iterator[memoryview]:
        reads, at = words(self.reads), 0
        while at < len(reads):
            end = at + 7 + 4 * reads[at + 6]
            yield reads[at:end]
            at = end

    def count_tensors(self) -> int:
        kinds = _C.inventory_kinds(self.description.inventory)
        return len(kinds) - kinds.count(OBJECT)

    def read_table(self) -> tuple[bytes, bytes, list[int]]:
        """Returns the engine's table of the reads, the device of each row (-1: host memory), and the indices of the
        reads that are not in the table because the engine cannot fill their targets, or not fast."""
        return self.description.for_engine.read_table(self.reads)

    def objects(self) -> Iterator[ReadRow]:
        table = words(self.plan.objects)
        for at in range(0, len(table), OBJECT_ROW):
            item, file, offset, length, crc = table[at : at + OBJECT_ROW]
            yield ReadRow(item, file, offset, length, crc)

    def target(self, item: int, dest_offset: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        tensor, local_offset = self.description.source(item)
        return narrowed(tensor, [a + b for a, b in zip(local_offset, dest_offset, strict=True)], lengths)

    def item(self, row: ReadRow) -> ReadItem:
        name, offset = self.description.names[row.item], self.description.items[row.item][6]
        chunk = [a + b - c for a, b, c in zip(offset, row.dest_offset, row.storage_offset, strict=True)]
        return ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(name, offset, row.item),
            dest_offsets=torch.Size(row.dest_offset),
            storage_index=MetadataIndex(name, chunk),
            storage_offsets=torch.Size(row.storage_offset),
            lengths=torch.Size(row.lengths),
        )

    def object_item(self, item: int) -> ReadItem:
        index, nothing = MetadataIndex(self.description.names[item]), torch.Size([0])
        return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ()


def _has_header_crc(length: int, crc: int, dtype: int, dims: int, *lists: int) -> bool:
    """Whether a record is a tensor's bytes alone, as in safetensors files: its CRC-32 is that of the file's header."""
    return length == math.prod(lists[:dims]) * ITEM_BYTES[dtype]
