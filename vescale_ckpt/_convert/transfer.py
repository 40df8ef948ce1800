"""`Transfer` copies files for `vescale-ckpt copy`, with a CRC-32 of what was read, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .._checkpoint.check_records import Progress
from .._engine import _C
from .._engine.engine_errors import named_errors
from .._engine.options import direct_io_setting, engine_options
from .._engine.overlap import overlap
from .._engine.rows import int_table
from .._storage.open_storage import stat_of
from ..errors import CheckpointError
from .batches import Buffers


@dataclass
class CopyReport:
    """What a copy did."""

    path: str  #: where the copy is
    seconds: float = 0.0
    files: int = 0
    bytes: int = 0  #: sum over all files
    resumed_files: int = 0  #: files that were complete when the copy began
    resumed_bytes: int = 0
    unverified_bytes: int = 0  #: bytes of tensors without checksums: only compared with what was read
    left_out: list[str] = field(default_factory=list)  #: names in the source that do not belong to the checkpoint


class Made(NamedTuple):
    """A file of a copy."""

    name: str  #: in the folder of the copy
    length: int
    crc: int | None  #: CRC-32 of what was read; None if it was not


class Transfer:
    """Copies files and reads them back, in bounded memory, and tells of its progress."""

    def __init__(
        self,
        total: int,
        progress: Progress | None,
        bytes_per_second: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` is called between pieces, and may raise."""
        self.done = 0
        self.total = total
        self._progress = progress
        self._buffers = Buffers()
        self._check = check
        self._options = engine_options(None, direct_io_setting("auto"), bytes_per_second=bytes_per_second)

    def moved(self, count: int) -> None:
        self.done = min(self.total, self.done + count)
        if self._progress is not None:
            self._progress(self.done, self.total)

    def copy(
        self, source: str, name: str, directory: str, create: Callable[[Callable[[str], _C.FileWriter]], _C.FileWriter]
    ) -> Made:
        """Copies a file durably. `create` calls the function that it gets with the path. Raises `CheckpointError` if
        the file changes meanwhile."""
        before = stat_of(source)
        with named_errors(str, directory, before.size):
            writer = create(lambda path: _C.FileWriter(path, before.size, self._options, False))

            def write(piece: _Piece) -> int:
                writer.write_bytes(int_table([piece.buffer.data_ptr(), piece.bytes]), piece.offset)
                return _C.crc32_of_memory(piece.buffer.data_ptr(), piece.bytes)

            crc = self._through(source, before.size, write)
            writer.finish_bytes(b"", sync=True)
        if stat_of(source).identity != before.identity:
            raise CheckpointError(f"{source} was changed while it was copied", path=source)
        return Made(name, before.size, crc)

    def crc_of(self, path: str, length: int) -> int:
        """The CRC-32 of a file."""
        return self._through(path, length, lambda piece: _C.crc32_of_memory(piece.buffer.data_ptr(), piece.bytes))

    def _through(self, path: str, length: int, use: Callable[[_Piece], int]) -> int:
        """Calls `use`, which returns a CRC-32, with the pieces of a file. Returns the CRC-32 of all."""
        crc = 0
        for piece, found in overlap(self._pieces(path, length), use):
            crc = _C.crc32_combine(crc, found, piece.bytes)
            self._buffers.give_back(piece.buffer)
            self.moved(piece.bytes)
        return crc

    def _pieces(self, path: str, length: int) -> Iterator[_Piece]:
        for offset in range(0, length, self._buffers.bytes):
            self._check()
            piece = _Piece(self._buffers.take(), offset, min(self._buffers.bytes, length - offset))
            with named_errors(lambda _: os.path.basename(path), path):
                _C.read_bytes([path], int_table((0, offset, piece.bytes, piece.buffer.data_ptr())), self._options)
            yield piece


@dataclass(frozen=True)
class _Piece:
    """A range of a file, in memory."""

    buffer: torch.Tensor
    offset: int
    bytes: int
