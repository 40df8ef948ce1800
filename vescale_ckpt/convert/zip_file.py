"""Where the entries of a zip archive lie, as torch.save and numpy write them."""

from __future__ import annotations

import errno
import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import CheckpointError, CorruptCheckpointError

#: what zipfile and its decompressors raise for damage; RuntimeError is for what is encrypted
_DAMAGE = (zipfile.BadZipFile, EOFError, struct.error, NotImplementedError, zlib.error, lzma.LZMAError, ValueError)
_LOCAL = struct.Struct("<4s22xHH")


@dataclass(frozen=True)
class Entry:
    """A file in the archive."""

    name: str
    offset: int  #: of its first byte in the archive's file, compressed or not
    bytes: int  #: uncompressed
    crc: int  #: CRC-32 of these
    stored: bool  #: as it is, not compressed


@contextmanager
def damage_named(path: str) -> Iterator[None]:
    """What Python's zipfile says of damage, in this package's words."""
    try:
        yield
    except CheckpointError:
        raise
    except (*_DAMAGE, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # that is an offset before the file
            raise CheckpointError(f"cannot read {path}: {error}", path=path, errno=error.errno) from error
        raise CorruptCheckpointError(f"{path}: {error}", key=None, file=path) from error


def entries(path: str) -> list[Entry]:
    """All of them, as the directory has them. Raises `CorruptCheckpointError` for what is no such archive."""
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
