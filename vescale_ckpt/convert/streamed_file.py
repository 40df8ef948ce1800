"""Writes one file from begin to end for a sink: tensors at known offsets, and format bytes between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from .._engine import _C
from .._engine.errors import check_space, named_errors
from .._engine.options import direct_io_setting, engine_options
from .._storage.pending import PendingFile
from .pipeline import PAGE, Batch, Buffers, FormatBytes, Piece, Segment, memory_of, pieces_of, transfer
from .plan import Output
from .source import Source

Create = Callable[[Callable[[str], _C.FileWriter]], _C.FileWriter]


@dataclass(frozen=True)
class Body:
    """A tensor in the file."""

    output: Output
    file_offset: int


class Layout(Protocol):
    """Describes a file for its format."""

    @property
    def bodies(self) -> Sequence[Body]:
        """All tensors, in the order of their offsets."""

    @property
    def length(self) -> int:
        """Bytes of the file."""

    def add_checksum(self, piece: Piece, address: int) -> None:
        """Takes the checksum of a piece, whose bytes in memory are those to be written. Pieces come in order."""

    def format_bytes(self, number: int) -> bytes:
        """The bytes before the body `number`; after the last body, those at the end. Called after `add_checksum` of
        all pieces before them."""

    def head(self) -> bytes:
        """The first bytes of the file, called last. They replace those that `format_bytes` gave."""


def write_whole_file(path: str, layout: Layout, source: Source, buffers: Buffers) -> None:
    """Writes a file that appears under its name when it is complete and durable, or not at all."""
    with PendingFile(path) as file:
        write_file(file.directory, file.create, layout, source, buffers)
        file.commit()


def write_file_in(directory: str, name: str, layout: Layout, source: Source, buffers: Buffers) -> None:
    """Writes a file into a pending folder. Its content is durable, its directory entry is not yet."""
    write_file(directory, lambda make: make(os.path.join(directory, name)), layout, source, buffers)


def write_file(directory: str, create: Create, layout: Layout, source: Source, buffers: Buffers) -> None:
    """Writes a file. `create` calls the function that it gets with the file's path."""
    with named_errors(str, directory, layout.length):
        check_space(directory, layout.length)
        options = engine_options(None, direct_io_setting("auto"))
        writer = create(lambda name: _C.FileWriter.exactly(name, layout.length, options, False))
        transfer(_segments(layout, buffers.most_bytes), source, _Streamed(layout, writer), buffers)
        writer.finish_bytes(layout.head(), sync=True)


def _segments(layout: Layout, most_bytes: int) -> Iterator[Segment]:
    at = 0
    for number, body in enumerate(layout.bodies):
        yield from _format_bytes(number, at, body.file_offset, most_bytes)
        yield from pieces_of(body.output, most_bytes, body.file_offset)
        at = body.file_offset + body.output.bytes
    yield from _format_bytes(len(layout.bodies), at, layout.length, most_bytes)


def _format_bytes(number: int, begin: int, end: int, most_bytes: int) -> Iterator[FormatBytes]:
    for start in range(begin, end, most_bytes):
        yield FormatBytes(number, start - begin, min(end, start + most_bytes) - begin, start)


class _Streamed:
    """Writes batches in whole pages. The rest of a batch is written with the next one."""

    def __init__(self, layout: Layout, writer: _C.FileWriter) -> None:
        self._layout = layout
        self._writer = writer
        self._rest = b""  # bytes after the last whole page

    def prepare(self, batch: Batch) -> None:
        for placed in batch.segments:
            segment = placed.segment
            if isinstance(segment, Piece):
                self._layout.add_checksum(segment, placed.target.data_ptr())
            else:
                content = self._layout.format_bytes(segment.number)[segment.begin : segment.end]
                memory_of(placed.target)[:] = content

    def write(self, batch: Batch) -> None:
        image = memory_of(batch.buffer)
        image[: len(self._rest)] = self._rest
        last = batch.segments[-1] if batch.segments else None
        end = 0 if last is None else last.at + last.target.nbytes
        whole = end if batch.last else end // PAGE * PAGE
        self._rest = bytes(image[whole:end])
        if whole:
            self._writer.write_bytes(batch.buffer.data_ptr(), whole, batch.file_offset)
