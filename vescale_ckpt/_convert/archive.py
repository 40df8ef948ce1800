"""Reads and lays out the zip archives of torch.save and numpy, for conversions."""

from __future__ import annotations

import errno
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from .._engine import _C
from ..errors import CheckpointError, CorruptCheckpointError
from .pipeline import Piece
from .plan import Output
from .streamed_file import Layout

#: What zipfile and its decompressors raise for damage. RuntimeError, which `damage_named` adds, means encryption.
_DAMAGE = (zipfile.BadZipFile, EOFError, struct.error, NotImplementedError, zlib.error, lzma.LZMAError, ValueError)
_LOCAL = struct.Struct("<4s22xHH")


@dataclass(frozen=True)
class Entry:
    """An entry of an archive."""

    name: str
    offset: int  #: of its first byte in the archive file, whether compressed or not
    bytes: int  #: uncompressed
    crc: int  #: CRC-32 of the uncompressed bytes
    stored: bool  #: whether it is stored without compression


@contextmanager
def damage_named(path: str) -> Iterator[None]:
    """A context that turns errors of Python's zipfile into errors of this package."""
    try:
        yield
    except CheckpointError:
        raise
    except (*_DAMAGE, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # EINVAL: negative offset
            raise CheckpointError(f"cannot read {path}: {error}", path=path, errno=error.errno) from error
        raise CorruptCheckpointError(f"{path}: {error}", key=None, file=path) from error


def entries(path: str) -> list[Entry]:
    """All entries, in the order of the archive's directory. Raises `CorruptCheckpointError` if it is no archive."""
    with damage_named(path), zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        return [
            _entry(info, file.seek(info.header_offset), file.read(_LOCAL.size), path) for info in archive.infolist()
        ]


def _entry(info: zipfile.ZipInfo, at: int, header: bytes, path: str) -> Entry:
    magic, name, extra = _LOCAL.unpack(header)
    if magic != b"PK\3\4":
        raise CorruptCheckpointError(f"{path}: no entry at offset {at}", key=None, file=path, offset=at)
    stored = info.compress_type == zipfile.ZIP_STORED
    return Entry(info.filename, at + _LOCAL.size + name + extra, info.file_size, info.CRC, stored)


@dataclass(frozen=True)
class Member:
    """An entry to write: bytes, and then perhaps a tensor."""

    name: str
    head: bytes
    output: Output | None = None


class ArchiveLayout(Layout):
    """The layout of an uncompressed archive. The checksums of tensors are added while the tensors are written."""

    def __init__(self, root: str, members: Sequence[Member]) -> None:
        bodies = []
        at = 0
        for content, output in _format_bytes(root, members, lambda output: 0):
            at += len(content)
            if output is not None:
                bodies.append((output, at))
                at += output.bytes
        self.bodies, self.length = bodies, at
        self._crcs: list[tuple[Output, int]] = []
        self._stream = _format_bytes(root, members, self._crc)
        self._current = b""
        self._number = -1

    def add_checksum(self, piece: Piece, address: int) -> None:
        crc = _C.crc32_of_memory(address, piece.bytes)
        if self._crcs and self._crcs[-1][0] is piece.output:
            before = self._crcs.pop()[1]
            crc = _C.crc32_combine(before, crc, piece.bytes)
        self._crcs.append((piece.output, crc))

    def format_bytes(self, number: int) -> bytes:
        while self._number < number:
            self._current, _ = next(self._stream)
            self._number += 1
        return self._current

    def _crc(self, output: Output) -> int:
        of, crc = self._crcs.pop(0)
        assert of is output
        return crc


def _format_bytes(
    root: str, members: Sequence[Member], crc_of: Callable[[Output], int]
) -> Iterator[tuple[bytes, Output | None]]:
    """The archive's own bytes, each with the tensor that follows them, or None at the end."""
    archive = _C.ArchiveWriter(root)
    for member in members:
        output = member.output
        if output is None:
            archive.add(member.name, member.head)
            continue
        archive.begin(member.name, len(member.head) + output.bytes)
        yield archive.take() + member.head, output
        archive.end(_C.crc32_combine(_C.crc32(member.head), crc_of(output), output.bytes))
    archive.finish()
    yield archive.take(), None
