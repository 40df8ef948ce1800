"""Reads tensors that are stored uncompressed in files, for the sources of torch.save's and numpy's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from .._engine import _C
from .._engine.errors import named_errors
from .._engine.options import direct_io_setting, engine_options
from .._engine.rows import int_table
from .._read.seen_files import SeenFiles
from .._state.tensor_table import narrowed
from ..errors import CorruptCheckpointError
from .source import Read, TensorInfo

_CHECK_BYTES = 16 << 20  # read at a time to verify an area


@dataclass(frozen=True)
class Area:
    """A range of bytes of a file that has one checksum."""

    file: int
    offset: int
    bytes: int
    crc: int  #: CRC-32; -1 if there is none


@dataclass(frozen=True)
class RawTensor:
    """Where a tensor is stored."""

    info: TensorInfo
    offset: int  #: of its first byte in the file
    area: Area  #: the area that contains it
    mapped: torch.Tensor | None = None  #: the tensor mapped to memory, if it is not stored contiguously


class RawFiles:
    """Reads boxes of raw tensors. A whole area is verified after it is read. If only a part is read, its area is
    verified once, before.

    Contiguous tensors are read without mapping the file: in mapped memory a truncated file or a failing disk would kill
    the process (SIGBUS).
    """

    def __init__(self, paths: Sequence[str], where: str) -> None:
        self.paths = list(paths)
        self._where = where
        self._options = engine_options(None, direct_io_setting("auto"))
        self._sound: set[Area] = set()
        self._seen = SeenFiles()
        for path in self.paths:
            self._seen.look(path)

    def location(self, tensor: RawTensor) -> tuple[str, int, int]:
        """The path, offset and length of a tensor's bytes."""
        return self.paths[tensor.area.file], tensor.offset, tensor.info.bytes

    def read(self, reads: Sequence[Read], tensor_of: Callable[[str], RawTensor]) -> None:
        table, keys = int_table(), []
        whole: list[tuple[Read, Area]] = []
        for read in reads:
            tensor, length = tensor_of(read.key), read.target.nbytes
            area = tensor.area
            if length == 0:
                continue
            if tensor.mapped is not None:
                self.verify(area, read.key)
                read.target.copy_(narrowed(tensor.mapped, read.offsets, read.target.shape).detach())
                continue
            offset = tensor.offset + byte_offset(tensor.info, read.offsets)
            if (offset, length) != (area.offset, area.bytes):
                self.verify(area, read.key)
            else:
                whole.append((read, area))
            table.extend((area.file, offset, length, read.target.data_ptr()))
            keys.append(read.key)
        self._read(table, keys)
        for read, area in whole:
            if area.crc >= 0:
                self._compare(_C.crc32_of_memory(read.target.data_ptr(), area.bytes), area, read.key)
        self._seen.check(self.paths)

    def verify(self, area: Area, key: str) -> None:
        """Raises `CorruptCheckpointError` if the bytes of an area do not match its checksum. Once for each area."""
        if area.crc < 0 or area in self._sound:
            return
        buffer = torch.empty(min(area.bytes, _CHECK_BYTES), dtype=torch.uint8, device="cpu")
        crc = 0
        for start in range(0, area.bytes, _CHECK_BYTES):
            length = min(_CHECK_BYTES, area.bytes - start)
            row = (area.file, area.offset + start, length, buffer.data_ptr())
            self._read(int_table(row), [key])
            crc = _C.crc32_combine(crc, _C.crc32_of_memory(buffer.data_ptr(), length), length)
        self._compare(crc, area, key)
        self._sound.add(area)

    def _compare(self, crc: int, area: Area, key: str) -> None:
        if crc != area.crc:
            path = self.paths[area.file]
            raise CorruptCheckpointError(
                f"{key}: CRC-32 of the {area.bytes:,} bytes at offset {area.offset} of {path} is {crc:08x}, not "
                f"{area.crc:08x}",
                key=key,
                file=path,
                offset=area.offset,
            )

    def _read(self, table: Sequence[int], keys: Sequence[str]) -> None:
        with named_errors(lambda row: keys[row], self._where):
            _C.read_bytes(self.paths, table, self._options)


def byte_offset(info: TensorInfo, offsets: Sequence[int]) -> int:
    """Bytes before the element at `offsets`."""
    elements = sum(offset * prod(info.shape[dim + 1 :]) for dim, offset in enumerate(offsets))
    return elements * info.dtype.itemsize
