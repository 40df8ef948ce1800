"""Moves tensors of a view to a file in batches, for all formats: reading, converting and writing overlap."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch

from .. import settings
from .._checkpoint.checkpoint import Read, cut
from .._checkpoint.view import View
from .._engine.overlap import overlap
from .._engine.page_buffers import PageBuffers
from .plan import Output

PAGE = 4096
_AT_ONCE = 3  # batches: one is read, one is converted, one is written
_ALIGNMENT = 64
_LARGE, _LARGE_AT = 2 << 20, 64  # a large tensor begins at this offset in a page: direct I/O needs it (docs/format.md)


@dataclass(frozen=True)
class Piece:
    """A box of an output: the whole output, or as much as fits the memory of a batch."""

    output: Output
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file_offset: int = -1  #: where its bytes lie; -1: the file decides

    @cached_property
    def bytes(self) -> int:
        return prod(self.sizes) * self.output.dtype.itemsize

    @cached_property
    def stored_bytes(self) -> int:
        """Additional memory for its elements in the stored dtype. 0 if it is not converted."""
        return prod(self.sizes) * self.output.stored_dtype.itemsize if self.output.converts else 0


@dataclass
class PlacedPiece:
    """A piece in the memory of its batch."""

    piece: Piece
    at: int  #: in the buffer
    target: torch.Tensor  #: it has the output's dtype
    stored: torch.Tensor  #: it has the stored dtype; `target` itself if nothing is converted


@dataclass
class Batch:
    """Some pieces in one buffer. Pieces with a file offset have the same distances in the buffer as in the file."""

    buffer: torch.Tensor
    file_offset: int = 0  #: where the buffer's first byte lies, a multiple of PAGE
    pieces: list[PlacedPiece] = field(default_factory=list)
    last: bool = False


class File(Protocol):
    """Receives the batches, in order."""

    def prepare(self, batch: Batch) -> None:
        """Computes checksums. The batch's tensors are already converted."""

    def write(self, batch: Batch) -> None: ...


class Buffers(PageBuffers):
    """Reusable memory for batches. All buffers together stay within the setting `memory_bytes`."""

    def __init__(self) -> None:
        super().__init__(max(2 * PAGE, settings.number("memory_bytes") // _AT_ONCE // PAGE * PAGE))
        self.written: Callable[[int], None] | None = None  #: called with the bytes of tensors that were written

    @property
    def most_bytes(self) -> int:
        """The largest piece, including the memory to convert it: at least one fits in a batch after any padding."""
        return self.bytes // 2 - PAGE


def memory_of(buffer: torch.Tensor) -> memoryview:
    """The bytes of a tensor of uint8."""
    array: Any = (ctypes.c_ubyte * buffer.numel()).from_address(buffer.data_ptr())
    array.owner = buffer  # keeps the buffer alive as long as the view
    return memoryview(array).cast("B")


def pieces_of(output: Output, most_bytes: int, file_offset: int = -1) -> Iterator[Piece]:
    """The pieces that make up an output, in order."""
    each = output.dtype.itemsize + (output.stored_dtype.itemsize if output.converts else 0)
    at = file_offset
    for offsets, sizes in cut(output.shape, max(1, most_bytes // each)):
        piece = Piece(output, offsets, sizes, at)
        yield piece
        at += piece.bytes if at >= 0 else 0


def transfer(pieces: Iterable[Piece], view: View, file: File, buffers: Buffers) -> None:
    """Moves all pieces from the view to the file. Raises their errors, after reading and writing have stopped."""

    def filled() -> Iterator[Batch]:
        for batch in _batches(pieces, buffers):
            view.read([Read(placed.piece.output.name, placed.piece.offsets, placed.stored) for placed in batch.pieces])
            yield batch

    def prepare(batch: Batch) -> None:
        for placed in batch.pieces:
            if placed.stored is not placed.target:
                placed.target.copy_(placed.stored)
        file.prepare(batch)

    def write(batch: Batch) -> None:
        file.write(batch)
        if buffers.written is not None:
            buffers.written(sum(placed.target.nbytes for placed in batch.pieces))
        buffer, batch.pieces = batch.buffer, []
        buffers.give_back(buffer)

    for _ in overlap((batch for batch, _ in overlap(filled(), prepare)), write):
        pass


def _batches(pieces: Iterable[Piece], buffers: Buffers) -> Iterator[Batch]:
    """Collects pieces into batches. The last batch is marked; without pieces it is empty."""
    batch: Batch | None = None
    end = 0  # end in the buffer of the pieces placed so far
    beside = 0  # bytes at the buffer's end that hold stored dtypes
    for piece in pieces:
        if batch is not None:
            at = _offset_behind(piece, end, batch)
            if at + piece.bytes + beside + piece.stored_bytes + _ALIGNMENT > buffers.bytes:
                yield batch
                batch = None
        if batch is None:
            batch, end, beside = Batch(buffers.take(), max(piece.file_offset, 0) // PAGE * PAGE), 0, 0
            at = _offset_behind(piece, end, batch)
        end, beside = _add(batch, piece, at, beside)
    batch = batch or Batch(buffers.take())
    batch.last = True
    yield batch


def _offset_behind(piece: Piece, end: int, batch: Batch) -> int:
    if piece.file_offset >= 0:
        return piece.file_offset - batch.file_offset
    if piece.bytes >= _LARGE:
        return (end - _LARGE_AT + PAGE - 1) // PAGE * PAGE + _LARGE_AT
    return (end + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def _add(batch: Batch, piece: Piece, at: int, beside: int) -> tuple[int, int]:
    """Places a piece. Returns the end of its bytes, and how many bytes at the buffer's end are taken now."""
    target = stored = _view(batch.buffer, at, piece.sizes, piece.output.dtype)
    if piece.output.converts:
        begin = (len(batch.buffer) - beside - piece.stored_bytes) // _ALIGNMENT * _ALIGNMENT
        stored = _view(batch.buffer, begin, piece.sizes, piece.output.stored_dtype)
        beside = len(batch.buffer) - begin
    batch.pieces.append(PlacedPiece(piece, at, target, stored))
    return at + piece.bytes, beside


def _view(buffer: torch.Tensor, at: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    length = prod(sizes) * dtype.itemsize
    if length == 0:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    return buffer[at : at + length].view(dtype).view(sizes)
