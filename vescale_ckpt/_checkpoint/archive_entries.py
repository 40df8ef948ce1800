"""Recognizes files of torch.save, and reads their archives by zipfile."""

from __future__ import annotations

import errno
import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from .._storage.open_storage import storage_at
from ..errors import CheckpointError, CorruptCheckpointError

#: zipfile and decompressors raise these for damage. `damage_named` adds RuntimeError, which means encryption.
_DAMAGE = (
    zipfile.BadZipFile,
    EOFError,
    struct.error,
    NotImplementedError,
    zlib.error,
    lzma.LZMAError,
    ValueError,
    OverflowError,
)
_ZIP = b"PK\3\4"
_LENGTH_BYTES = 8  # a safetensors file starts with so many bytes of any value; its header follows
_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_LOCAL = struct.Struct("<4s22xHH")
_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class Entry:
    """An entry of an archive."""

    name: str
    offset: int  #: position of its first byte in the archive file, compressed or not
    bytes: int  #: uncompressed length
    stored: bool  #: whether it is stored without compression


@contextmanager
def damage_named(path: str, key: str | None = None, offset: int = 0) -> Iterator[None]:
    """A context that turns errors of Python's readers into errors of this package."""
    try:
        yield
    except CheckpointError:
        raise
    except (*_DAMAGE, OSError, RuntimeError) as error:
        prefix = "" if key is None else f"{key}: "
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # EINVAL: negative offset
            raise CheckpointError(f"{prefix}cannot read {path}: {error}", path=path, errno=error.errno) from error
        raise CorruptCheckpointError(f"{prefix}{path}: {error}", key=key, file=path, offset=offset) from error


def open_archive(path: str) -> zipfile.ZipFile:
    """Opens an archive. Raises `CorruptCheckpointError` if it is none."""
    with damage_named(path):
        return zipfile.ZipFile(path)


def entries(archive: zipfile.ZipFile, path: str) -> list[Entry]:
    """All entries, in the order of the archive's directory."""
    with damage_named(path), open(path, "rb") as file:
        return [
            _entry(info, file.seek(info.header_offset), file.read(_LOCAL.size), path) for info in archive.infolist()
        ]


def _entry(info: zipfile.ZipInfo, at: int, header: bytes, path: str) -> Entry:
    magic, name, extra = _LOCAL.unpack(header)
    if magic != b"PK\3\4":
        raise CorruptCheckpointError(f"{path}: no entry at offset {at}", key=None, file=path, offset=at)
    stored = info.compress_type == zipfile.ZIP_STORED
    return Entry(info.filename, at + _LOCAL.size + name + extra, info.file_size, stored)


def verify_entry(archive: zipfile.ZipFile, entry: Entry, path: str, key: str | None) -> None:
    """Reads an entry. Raises `CorruptCheckpointError` if its bytes do not match its checksum."""
    with damage_named(path, key, entry.offset), archive.open(entry.name) as member:
        while member.read(_READ_BYTES):  # zipfile compares the checksum at the end
            pass


def advice_for_file(path: str) -> str:
    """The advice for a file of torch.save."""
    return f"{path} is a file of torch.save, which is no checkpoint to load: {_convert(path)}"


def is_archive(path: str) -> bool:
    """Whether a file is one of torch.save, by its first bytes. Raises OSError."""
    directory, name = os.path.split(path)
    _, begin = storage_at(directory).read_range(name, 0, _LENGTH_BYTES + 1)
    return begin.startswith(_ZIP) and begin[_LENGTH_BYTES:] != b"{"


def advice_for_directory(path: str) -> str | None:
    """The advice for a directory without a checkpoint that holds such files. None if it holds none."""
    with suppress(OSError):
        names = sorted(name for name in storage_at(path).names() if name.endswith(_SUFFIXES))
        if names:
            more = f" (and {len(names) - 1} more like it)" if len(names) > 1 else ""
            return f"it holds {names[0]}{more}, of another format: {_convert(os.path.join(path, names[0]))}"
    return None


def _convert(path: str) -> str:
    return f"vescale_ckpt.convert({path!r}, 'checkpoint', format='dcp') makes one that can be loaded"
