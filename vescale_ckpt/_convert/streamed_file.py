"""Writes one file from begin to end by its layout: tensors at known offsets, and format bytes between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .._engine import _C
from .._engine.errors import check_space, named_errors
from .._engine.options import direct_io_setting, engine_options
from .._storage.pending import PendingFile
from .pipeline import PAGE, Batch, Buffers, FormatBytes, Piece, Segment, memory_of, pieces_of, transfer
from .plan import Output
from .source import Source

Create = Callable[[Callable[[str], _C.FileWriter]], _C.FileWriter]


class Layout:
    """Describes a file for its format, a base class."""

    bodies: Sequence[tuple[Output, int]]  #: all tensors, and the offsets of their first bytes, in rising order
    length: int  #: bytes of the file

    def add_checksum(self, piece: Piece, address: int) -> None:
        """Takes the checksum of a piece, whose bytes in memory are those to be written. Pieces come in order."""

    def format_bytes(self, number: int) -> bytes:
        """The bytes before the body `number`; after the last body, those at the end. Called after `add_checksum` of
        all pieces before them."""
        raise NotImplementedError

    def head(self) -> bytes:
        """The first bytes of the file, called last. They replace those that `format_bytes` gave."""
        return b""


@dataclass(frozen=True)
class OutputFile:
    """A file to write."""

    name: str  #: in its folder; empty if the destination is one file
    bytes: int  #: of its tensors
    layout: Callable[[], Layout]


@dataclass(frozen=True)
class Files:
    """All files of a conversion, and a last step in their folder after they are written."""

    files: list[OutputFile]
    finish: Callable[[str], None] | None = None  #: called with the folder; None if there is nothing more to do

    @classmethod
    def one(cls, outputs: Sequence[Output], layout: Callable[[], Layout]) -> Files:
        """The destination is one file."""
        return cls([OutputFile("", sum(output.bytes for output in outputs), layout)])


def write_file(file: OutputFile, path: str, source: Source, buffers: Buffers) -> None:
    """Writes a file into the pending folder `path`: its content is durable, its directory entry is not yet. A file
    without a name appears as `path` when it is complete and durable, or not at all."""
    if file.name:
        _write(path, lambda make: make(os.path.join(path, file.name)), file.layout(), source, buffers)
        return
    with PendingFile(path) as pending:
        _write(pending.directory, pending.create, file.layout(), source, buffers)
        pending.commit()


def _write(directory: str, create: Create, layout: Layout, source: Source, buffers: Buffers) -> None:
    """`create` calls the function that it gets with the file's path."""
    with named_errors(str, directory, layout.length):
        check_space(directory, layout.length)
        options = engine_options(None, direct_io_setting("auto"))
        writer = create(lambda name: _C.FileWriter.exactly(name, layout.length, options, False))
        transfer(_segments(layout, buffers.most_bytes), source, _Streamed(layout, writer), buffers)
        writer.finish_bytes(layout.head(), sync=True)


def _segments(layout: Layout, most_bytes: int) -> Iterator[Segment]:
    at = 0
    for number, (output, offset) in enumerate(layout.bodies):
        yield from _format_bytes(number, at, offset, most_bytes)
        yield from pieces_of(output, most_bytes, offset)
        at = offset + output.bytes
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
