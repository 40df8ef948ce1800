"""Writes one file from begin to end by its layout: tensors at known offsets, and format bytes between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .._engine import _C
from .._engine.errors import named_errors
from .._engine.options import direct_io_setting, engine_options
from .._storage.open_storage import storage_at
from .._storage.pending import PendingFile
from ..errors import CheckpointError
from .pipeline import PAGE, Batch, Buffers, FormatBytes, Piece, Segment, memory_of, pieces_of, transfer
from .plan import Output
from .source import Source

Create = Callable[[Callable[[str], _C.FileWriter]], _C.FileWriter]


class Layout:
    """Describes a file for its format, a base class."""

    bodies: Sequence[tuple[Output, int]]  #: all tensors, and the offsets of their first bytes, in rising order
    length: int  #: bytes of the file
    has_head = False  #: whether `head` gives bytes

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
    """Writes a file into the folder `path`: its content is durable, its directory entry is not yet. A file without a
    name appears as `path` when it is complete and durable, or not at all, as every file in an object store does."""
    if not storage_at(path).renames:
        _write_object(file, os.path.join(path, file.name) if file.name else path, source, buffers)
    elif file.name:
        _write(path, lambda make: make(os.path.join(path, file.name)), file.layout(), source, buffers)
    else:
        with PendingFile(path) as pending:
            _write(pending.directory, pending.create, file.layout(), source, buffers)
            pending.commit()


def _write_object(file: OutputFile, url: str, source: Source, buffers: Buffers) -> None:
    """An object is sent in order. Where its head holds checksums of the tensors, these are read twice."""
    layout = file.layout()
    if not layout.has_head:
        _write(url, lambda make: make(url), layout, source, buffers)
        return
    written, buffers.written = buffers.written, None
    transfer(_segments(layout, buffers.most_bytes), source, _Summed(layout), buffers)
    buffers.written = written
    sent = _HeadFirst(file.layout(), layout.head())

    def check() -> None:
        if not sent.is_unchanged():
            raise CheckpointError(f"what becomes {url} has changed while it was converted", path=url)

    _write(url, lambda make: make(url), sent, source, buffers, check)


def _write(
    directory: str,
    create: Create,
    layout: Layout,
    source: Source,
    buffers: Buffers,
    check: Callable[[], None] = lambda: None,
) -> None:
    """`create` calls the function that it gets with the file's path. `check` is called before the file is complete, and
    may raise."""
    with named_errors(str, directory, layout.length):
        storage_at(directory).check_space(layout.length)
        options = engine_options(None, direct_io_setting("auto"))
        writer = create(lambda name: _C.FileWriter.exactly(name, layout.length, options, False))
        transfer(_segments(layout, buffers.most_bytes), source, _Streamed(layout, writer), buffers)
        check()
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


class _HeadFirst(Layout):
    """A layout whose head is known before the rest is written."""

    def __init__(self, layout: Layout, head: bytes) -> None:
        self._layout = layout
        self._head = head
        self.bodies, self.length = layout.bodies, layout.length

    def add_checksum(self, piece: Piece, address: int) -> None:
        self._layout.add_checksum(piece, address)

    def format_bytes(self, number: int) -> bytes:
        content = self._layout.format_bytes(number)
        return self._head + content[len(self._head) :] if number == 0 else content

    def is_unchanged(self) -> bool:
        """Whether the head is that of the tensors that were written. Called after all of them."""
        return self._layout.head() == self._head


class _Summed:
    """Takes the checksums of all pieces, and writes nothing."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def prepare(self, batch: Batch) -> None:
        for placed in batch.segments:
            if isinstance(placed.segment, Piece):
                self._layout.add_checksum(placed.segment, placed.target.data_ptr())

    def write(self, batch: Batch) -> None: ...


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
