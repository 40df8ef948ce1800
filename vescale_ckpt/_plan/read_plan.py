"""Holds what a rank reads in a load as tables of integers, with the tensors that are filled."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .._engine import _C
from .._engine.dtype_codes import CODE_DTYPES
from .._engine.rows import ITEM_BYTES, OBJECT, OBJECT_ROW, words
from .._state.shared_targets import replaced_targets
from .._state.state import State
from .._state.tensor_table import narrowed


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
class Reads:
    """The reads of one rank in a load."""

    state: State  #: of the tensors to fill
    rows: bytes  #: reads of tensors: rows of `LoadPlan.reads`
    object_rows: bytes  #: rows of `LoadPlan.objects`
    files: list[str]  #: the files that the rows name by number

    @classmethod
    def of_plan(cls, state: State, plan: _C.LoadPlan) -> Reads:
        """The reads of a plan, without those into tensors whose memory a later key fills, too."""
        reads = cls(state, plan.reads, plan.objects, plan.files)
        left_out = replaced_targets(state, reads.stored_alike)
        return reads.without(left_out) if left_out else reads

    def split(self, is_apart: Callable[[torch.Tensor], bool]) -> tuple[bytes, bytes]:
        """Splits the rows of tensors into two tables: first targets that are not `is_apart`, then targets that are."""
        tables = bytearray(), bytearray()
        for row in self._raw_rows():
            tensor, _ = self.state.source(row[0])
            tables[is_apart(tensor)].extend(row.cast("B"))
        return bytes(tables[0]), bytes(tables[1])

    def without(self, names: Container[str]) -> Reads:
        """Returns the same reads without those into the tensors of `names`."""
        rows = [row for row in self._raw_rows() if self.state.names[row[0]] not in names]
        return replace(self, rows=b"".join(row.tobytes() for row in rows))

    def stored_alike(self, name: str, other: str) -> bool:
        """Whether the tensors of two keys are certainly stored with equal bytes: in the same records, or in records
        with equal checksums."""
        stored: dict[str, list[tuple[int, ...]]] = {name: [], other: []}
        for row in self._raw_rows():
            if (key := self.state.names[row[0]]) in stored:
                stored[key].append(tuple(row[1:]))
        (rows, others), at_crc = map(sorted, stored.values()), 3
        if rows == others:
            return True
        known = all(row[at_crc] != -1 and not _has_header_crc(*row[2:]) for row in rows)
        return known and sorted(row[at_crc:] for row in rows) == sorted(row[at_crc:] for row in others)

    def bytes_read_alone(self, verify: bool) -> int:
        """Estimates how many bytes this rank reads for its tensors if no other rank reads for it."""
        return _C.bytes_read_alone(self.rows, self.files, verify)

    def tensors(self) -> Iterator[ReadRow]:
        for row in self._raw_rows():
            item, file, offset, length, crc, dtype, ndim = row[:7]
            shapes = [tuple(row[7 + i * ndim : 7 + (i + 1) * ndim]) for i in range(4)]
            yield ReadRow(item, file, offset, length, crc, CODE_DTYPES[dtype], *shapes)

    def _raw_rows(self) -> Iterator[memoryview]:
        rows, at = words(self.rows), 0
        while at < len(rows):
            end = at + 7 + 4 * rows[at + 6]
            yield rows[at:end]
            at = end

    def count_tensors(self) -> int:
        kinds = _C.inventory_kinds(self.state.inventory)
        return len(kinds) - kinds.count(OBJECT)

    def read_table(self) -> tuple[bytes, bytes, list[int]]:
        """Returns the engine's table of the reads, the device of each row (-1: host memory), and the indices of the
        reads that are not in the table because the engine cannot fill their targets, or not fast."""
        return self.state.for_engine.read_table(self.rows)

    def objects(self) -> Iterator[ReadRow]:
        table = words(self.object_rows)
        for at in range(0, len(table), OBJECT_ROW):
            item, file, offset, length, crc = table[at : at + OBJECT_ROW]
            yield ReadRow(item, file, offset, length, crc)

    def stored_chunk(self, row: ReadRow) -> tuple[str, tuple[int, ...]]:
        """Name and offset of the stored chunk that a row reads; an object has no offset."""
        places = zip(self.state.items[row.item][6], row.dest_offset, row.storage_offset, strict=True)
        return self.state.names[row.item], tuple(begin + inside - skipped for begin, inside, skipped in places)

    def target(self, item: int, dest_offset: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        tensor, local_offset = self.state.source(item)
        return narrowed(tensor, [a + b for a, b in zip(local_offset, dest_offset, strict=True)], lengths)


def _has_header_crc(length: int, crc: int, dtype: int, dims: int, *lists: int) -> bool:
    """Whether a record is a tensor's bytes alone, as in safetensors files: its CRC-32 is that of the file's header."""
    return length == math.prod(lists[:dims]) * ITEM_BYTES[dtype]
