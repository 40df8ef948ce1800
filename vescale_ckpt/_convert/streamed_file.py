"""Writes the files of a conversion under their names, and what a library writes to a stream into one."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

import torch

from .._checkpoint.checkpoint import Read
from .._checkpoint.view import View
from .._engine import _C
from .._engine.engine_errors import named_errors
from .._engine.options import direct_io_setting, engine_options
from .._engine.rows import int_table
from .._storage.open_storage import storage_at
from .._storage.pending import PendingFile
from .batches import Buffers, memory_of
from .plan import Output

#: Calls the function that it gets with the path of a file to create.
Create = Callable[[Callable[[str], _C.FileWriter]], _C.FileWriter]
#: Writes the content of a file into a folder, and syncs it.
Write = Callable[[str, Create, View, Buffers], None]

_LIBRARY_BYTES = 64 << 10  # more than what a library writes beside each tensor, for reserving space


@dataclass(frozen=True)
class OutputFile:
    """A file to write."""

    name: str  #: in its folder; empty if the destination is one file
    bytes: int  #: bytes of its tensors
    write: Write


@dataclass(frozen=True)
class Files:
    """All files of a conversion, and a last step in their folder after they are written."""

    files: list[OutputFile]
    finish: Callable[[str], None] | None = None  #: called with the folder; None if there is nothing more to do

    @classmethod
    def one(cls, outputs: Sequence[Output], write: Write) -> Files:
        """The destination is one file."""
        return cls([OutputFile("", sum(output.bytes for output in outputs), write)])


def write_file(file: OutputFile, path: str, view: View, buffers: Buffers) -> None:
    """Writes a file into the folder `path`: its content is durable, its directory entry is not yet. A file without a
    name appears as `path` when it is complete and durable, or not at all."""
    if file.name:
        file.write(path, lambda make: make(os.path.join(path, file.name)), view, buffers)
    else:
        with PendingFile(path) as pending:
            file.write(pending.directory, pending.create, view, buffers)
            pending.commit()


# --- Files that a library writes


def streamed(outputs: Sequence[Output], save: Callable[[IO[bytes], View], None]) -> Write:
    """The content is what `save` writes to a stream."""
    estimate = _LIBRARY_BYTES + sum(output.bytes + _LIBRARY_BYTES for output in outputs)

    def write(directory: str, create: Create, view: View, buffers: Buffers) -> None:
        with named_errors(str, directory, estimate):
            stream = _Stream(begin(directory, create, estimate), buffers)
            try:
                save(cast(IO[bytes], stream), view)
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
                self._writer.write_bytes(int_table([self._buffer.data_ptr(), self._filled]), self._sent)
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


def read_whole(output: Output, view: View) -> torch.Tensor:
    """Reads all of an output into memory of its own."""
    stored = torch.empty(output.shape, dtype=output.stored_dtype, device="cpu")
    view.read([Read(output.name, (0,) * len(output.shape), stored)])
    return stored.to(output.dtype)


def begin(directory: str, create: Create, length: int) -> _C.FileWriter:
    """Begins a file of `length` bytes. Raises `StorageFullError`."""
    storage_at(directory).check_space(length)
    options = engine_options(None, direct_io_setting("auto"))
    return create(lambda name: _C.FileWriter(name, length, options, False))
