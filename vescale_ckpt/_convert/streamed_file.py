"""Writes one file from begin to end: what a library writes to a stream, or tensors at the offsets of a layout."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

import torch

from .._checkpoint.checkpoint import Checkpoint
from .._engine import _C
from .._engine.errors import named_errors
from .._engine.options import direct_io_setting, engine_options
from .._storage.open_storage import storage_at
from .._storage.pending import PendingFile
from ..errors import CheckpointError
from .pipeline import PAGE, Batch, Buffers, FormatBytes, Piece, Segment, memory_of, pieces_of, transfer
from .plan import Output

#: Calls the function that it gets with the path of a file to create.
Create = Callable[[Callable[[str], _C.FileWriter]], _C.FileWriter]
#: Writes the content of a file into a folder or store, and syncs it.
Write = Callable[[str, Create, Checkpoint, Buffers], None]

#: Writes the content of a file to a stream.
Save = Callable[[IO[bytes], Checkpoint], None]

_LIBRARY_BYTES = 64 << 10  # more than what a library writes beside each tensor, for reserving space


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
    write: Write


@dataclass(frozen=True)
class Files:
    """All files of a conversion, and a last step in their folder after they are written."""

    files: list[OutputFile]
    finish: Callable[[str], None] | None = None  #: called with the folder; None if there is nothing more to do

    @classmethod
    def streamed(cls, outputs: Sequence[Output], save: Save) -> Files:
        """The destination is one file, which `save` writes to a stream."""
        return cls.one(outputs, streamed(outputs, save))

    @classmethod
    def one(cls, outputs: Sequence[Output], write: Write) -> Files:
        """The destination is one file."""
        return cls([OutputFile("", sum(output.bytes for output in outputs), write)])


def write_file(file: OutputFile, path: str, source: Checkpoint, buffers: Buffers) -> None:
    """Writes a file into the folder `path`: its content is durable, its directory entry is not yet. A file without a
    name appears as `path` when it is complete and durable, or not at all, as every file in an object store does."""
    if not storage_at(path).renames:
        url = os.path.join(path, file.name) if file.name else path
        file.write(url, lambda make: make(url), source, buffers)
    elif file.name:
        file.write(path, lambda make: make(os.path.join(path, file.name)), source, buffers)
    else:
        with PendingFile(path) as pending:
            file.write(pending.directory, pending.create, source, buffers)
            pending.commit()


# --- Files that a library writes


def streamed(outputs: Sequence[Output], save: Save) -> Write:
    """The content is what `save` writes to a stream."""
    estimate = _LIBRARY_BYTES + sum(output.bytes + _LIBRARY_BYTES for output in outputs)

    def write(directory: str, create: Create, source: Checkpoint, buffers: Buffers) -> None:
        with named_errors(str, directory, estimate):
            stream = _Stream(_begin(directory, create, estimate), buffers)
            try:
                save(cast(IO[bytes], stream), source)
            finally:
                stream.raise_error()
            stream.finish()

    return write


class _Stream(io.RawIOBase):
    """A file object, to write only: what fills a buffer goes to the file.

    The first error is kept, and all that comes after it is dropped: libraries would hide it behind errors of their own.
    """

    def __init__(self, writer: _C.FileWriter, buffers: Buffers) -> None:
        self._writer = writer
        self._buffers = buffers
        self._buffer = buffers.take()
        self._filled, self._sent = 0, 0
        self._error: Exception | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        start = 0
        while start < len(content) and self._error is None:
            count = min(len(content) - start, len(self._buffer) - self._filled)
            memory_of(self._buffer)[self._filled : self._filled + count] = content[start : start + count]
            self._filled, start = self._filled + count, start + count
            if self._filled == len(self._buffer):
                self._send()
        return len(content)

    def _send(self) -> None:
        try:
            if self._filled:
                self._writer.write_bytes(self._buffer.data_ptr(), self._filled, self._sent)
        except Exception as error:
            self._error = error
        if self._buffers.written is not None:
            self._buffers.written(self._filled)
        self._sent, self._filled = self._sent + self._filled, 0
        self._buffers.give_back(self._buffer)
        self._buffer = self._buffers.take()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Writes the rest. The file is durable then."""
        self._send()
        self.raise_error()
        self._writer.finish_bytes(b"", sync=True)


def read_whole(output: Output, source: Checkpoint) -> torch.Tensor:
    """Reads all of an output into memory of its own."""
    stored = torch.empty(output.shape, dtype=output.stored_dtype, device="cpu")
    source.read([*output.reads((0,) * len(output.shape), stored)])
    return stored.to(output.dtype)


def _begin(directory: str, create: Create, length: int) -> _C.FileWriter:
    storage_at(directory).check_space(length)
    options = engine_options(None, direct_io_setting("auto"))
    return create(lambda name: _C.FileWriter.exactly(name, length, options, False))


# --- Files by their layout


def laid_out(layout: Callable[[], Layout]) -> Write:
    """The content is that of a layout, in bounded memory."""

    def write(directory: str, create: Create, source: Checkpoint, buffers: Buffers) -> None:
        if not storage_at(directory).renames:
            _write_object(directory, create, layout, source, buffers)
        else:
            _write(directory, create, layout(), source, buffers)

    return write


def _write_object(url: str, create: Create, layout: Callable[[], Layout], source: Checkpoint, buffers: Buffers) -> None:
    """An object is sent in order. Where its head holds checksums of the tensors, these are read twice."""
    summed = layout()
    written, buffers.written = buffers.written, None
    transfer(_segments(summed, buffers.most_bytes), source, _Summed(summed), buffers)
    buffers.written = written
    sent = _HeadFirst(layout(), summed.head())

    def check() -> None:
        if not sent.is_unchanged():
            raise CheckpointError(f"what becomes {url} has changed while it was converted", path=url)

    _write(url, create, sent, source, buffers, check)


def _write(
    directory: str,
    create: Create,
    layout: Layout,
    source: Checkpoint,
    buffers: Buffers,
    check: Callable[[], None] = lambda: None,
) -> None:
    """`check` is called before the file is complete, and may raise."""
    with named_errors(str, directory, layout.length):
        writer = _begin(directory, create, layout.length)
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
