"""Moves tensors from a source to a file in batches: one is read while another is converted and a third is written."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch

from .. import settings
from .._engine.overlap import overlap
from .plan import Output, cut
from .source import Source

PAGE = 4096
_AT_ONCE = 3  # batches: one that is read, one that is converted, one that is written
_LARGE, _LARGE_AT, _ALIGNMENT = 2 << 20, 64, 64  # where in a page a large tensor may be written from (docs/format.md)


@dataclass(frozen=True)
class Piece:
    """A box of an output: all of it, or as much as there is memory for."""

    output: Output
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file_offset: int = -1  #: where its bytes go; -1: the file decides

    @cached_property
    def bytes(self) -> int:
        return prod(self.sizes) * self.output.dtype.itemsize

    @cached_property
    def stored_bytes(self) -> int:
        """Memory that it takes beside itself: as it is stored, if it is converted."""
        return prod(self.sizes) * self.output.stored_dtype.itemsize if self.output.converts else 0


@dataclass(frozen=True)
class FormatBytes:
    """Bytes of a file between tensors, told when all tensors before them are known."""

    number: int  #: by the file's own count
    begin: int
    end: int
    file_offset: int


Segment = Piece | FormatBytes


@dataclass
class PlacedSegment:
    """A part in the memory of its batch."""

    segment: Segment
    at: int  #: in the buffer
    target: torch.Tensor  #: of the output's dtype, or bytes
    stored: torch.Tensor  #: of the stored dtype: the same unless it is converted


@dataclass
class Batch:
    """Some parts in one buffer. Those of files that do not decide themselves lie there as in the file."""

    buffer: torch.Tensor
    file_offset: int = 0  #: of the buffer's first byte, a multiple of PAGE
    segments: list[PlacedSegment] = field(default_factory=list)
    last: bool = False


class File(Protocol):
    """What batches are written to, in order."""

    def prepare(self, batch: Batch) -> None:
        """Computes checksums and fills in the file's own bytes. The batch's tensors are as they will be written."""

    def write(self, batch: Batch) -> None: ...


class Buffers:
    """Memory for batches, used again and again. Together within the setting `convert_bytes`."""

    def __init__(self) -> None:
        self.bytes = max(2 * PAGE, settings.number("convert_bytes") // _AT_ONCE // PAGE * PAGE)
        self._free: list[torch.Tensor] = []

    @property
    def most_bytes(self) -> int:
        """Of a piece, with the memory to convert it: several fit in a batch, whatever lies between them."""
        return self.bytes // 2 - PAGE

    def take(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        memory = mmap.mmap(-1, self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zeros, on a page's border
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)


def memory_of(buffer: torch.Tensor) -> memoryview:
    """The bytes of a tensor of uint8."""
    array: Any = (ctypes.c_ubyte * buffer.numel()).from_address(buffer.data_ptr())
    array.owner = buffer  # lives as long as the view
    return memoryview(array).cast("B")


def pieces_of(output: Output, most_bytes: int, file_offset: int = -1) -> Iterator[Piece]:
    """All of an output, in order."""
    each = output.dtype.itemsize + (output.stored_dtype.itemsize if output.converts else 0)
    at = file_offset
    for offsets, sizes in cut(output.shape, max(1, most_bytes // each)):
        piece = Piece(output, offsets, sizes, at)
        yield piece
        at += piece.bytes if at >= 0 else 0


def transfer(segments: Iterable[Segment], source: Source, file: File, buffers: Buffers) -> None:
    """Moves all parts from the source to the file. Raises what they raise, after both have stopped."""

    def filled() -> Iterator[Batch]:
        for batch in _batches(segments, buffers):
            source.read(
                [
                    read
                    for placed in batch.segments
                    if isinstance(placed.segment, Piece)
                    for read in placed.segment.output.reads(placed.segment.offsets, placed.stored)
                ]
            )
            yield batch

    def prepare(batch: Batch) -> None:
        for placed in batch.segments:
            if placed.stored is not placed.target:
                placed.target.copy_(placed.stored)
        file.prepare(batch)

    def write(batch: Batch) -> None:
        file.write(batch)
        buffer, batch.segments = batch.buffer, []
        buffers.give_back(buffer)

    for _ in overlap((batch for batch, _ in overlap(filled(), prepare)), write):
        pass


def _batches(segments: Iterable[Segment], buffers: Buffers) -> Iterator[Batch]:
    """Cuts parts into batches. The last one is marked; if there are no parts it is empty."""
    batch: Batch | None = None
    end = 0  # of what is placed, from the buffer's begin on
    beside = 0  # bytes at the buffer's end for what is converted
    for segment in segments:
        if batch is not None:
            at = _offset_behind(segment, end, batch)
            size = segment.bytes if isinstance(segment, Piece) else segment.end - segment.begin
            stored = segment.stored_bytes if isinstance(segment, Piece) else 0
            if at + size + beside + stored + _ALIGNMENT > buffers.bytes:
                yield batch
                batch = None
        if batch is None:
            batch, end, beside = Batch(buffers.take(), max(segment.file_offset, 0) // PAGE * PAGE), 0, 0
            at = _offset_behind(segment, end, batch)
        end, beside = _add(batch, segment, at, beside)
    batch = batch or Batch(buffers.take())
    batch.last = True
    yield batch


def _offset_behind(segment: Segment, end: int, batch: Batch) -> int:
    if segment.file_offset >= 0:
        return segment.file_offset - batch.file_offset
    assert isinstance(segment, Piece)
    if segment.bytes >= _LARGE:
        return (end - _LARGE_AT + PAGE - 1) // PAGE * PAGE + _LARGE_AT
    return (end + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def _add(batch: Batch, segment: Segment, at: int, beside: int) -> tuple[int, int]:
    """Where its bytes end, and how many bytes at the buffer's end are taken then."""
    if isinstance(segment, FormatBytes):
        end = at + segment.end - segment.begin
        target = batch.buffer[at:end]
        batch.segments.append(PlacedSegment(segment, at, target, target))
        return end, beside
    target = stored = _view(batch.buffer, at, segment.sizes, segment.output.dtype)
    if segment.output.converts:
        begin = (len(batch.buffer) - beside - segment.stored_bytes) // _ALIGNMENT * _ALIGNMENT
        stored = _view(batch.buffer, begin, segment.sizes, segment.output.stored_dtype)
        beside = len(batch.buffer) - begin
    batch.segments.append(PlacedSegment(segment, at, target, stored))
    return at + segment.bytes, beside


def _view(buffer: torch.Tensor, at: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    length = prod(sizes) * dtype.itemsize
    if length == 0:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    return buffer[at : at + length].view(dtype).view(sizes)
