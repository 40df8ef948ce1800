"""Reads and writes `.metadata.delta`, which tells later delta saves what bytes the records of a checkpoint hold.

docs/format.md describes the file. It belongs to the `.metadata` whose length and end it repeats, as the index does.
Only saves with `base=` read it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..._storage.open_storage import storage_at
from ...errors import CheckpointError
from .file_names import DELTA_NAME, METADATA_NAME
from .metadata_check import TRAILER_BYTES

ID_BYTES = 16
SEED_BYTES = 16
_MAGIC = b"VSDELTA1"
_HEAD = struct.Struct(f"<8sQ{TRAILER_BYTES}s{SEED_BYTES}sIQ")  # metadata's length and end, seed, files, rows
_NAME = struct.Struct("<I")
_ROW = struct.Struct(f"<{ID_BYTES}sIIQQ")
_SUM_BYTES = 32


class Row(NamedTuple):
    """The record of a chunk of a tensor."""

    id: bytes  #: hash of dtype, shape and bytes: docs/format.md, "Content ids"
    file: int  #: index into `DeltaTable.files`
    crc: int  #: CRC-32 of the bytes
    offset: int
    length: int


@dataclass(frozen=True)
class DeltaTable:
    """The records of a checkpoint that later saves may name."""

    seed: bytes  #: seed of the key that all ids are hashed with
    files: Sequence[str]  #: names relative to the checkpoint that the table belongs to
    packed: bytes  #: the rows in ascending order of ids

    @classmethod
    def of(cls, seed: bytes, files: Sequence[str], rows: Iterable[Row]) -> DeltaTable:
        return cls(seed, files, b"".join([_ROW.pack(*row) for row in sorted(rows)]))

    def rows(self) -> Iterator[Row]:
        return map(Row._make, _ROW.iter_unpack(self.packed))

    def find(self, id: bytes) -> Row | None:
        """Returns a record of that id, or None. Unpacks only this row: every rank has the rows of all and needs few."""
        width = _ROW.size
        at = width * bisect_left(
            range(len(self.packed) // width), id, key=lambda row: self.packed[row * width : row * width + ID_BYTES]
        )
        return Row(*_ROW.unpack_from(self.packed, at)) if self.packed[at : at + ID_BYTES] == id else None

    def pack(self, length: int, end: bytes) -> bytes:
        """The content of the file for a `.metadata` of such a length and trailer."""
        head = _HEAD.pack(_MAGIC, length, end, self.seed, len(self.files), len(self.packed) // _ROW.size)
        names = [name.encode() for name in self.files]
        parts = [head, *(_NAME.pack(len(name)) + name for name in names), self.packed]
        content = b"".join(parts)
        return content + hashlib.sha256(content).digest()

    @classmethod
    def unpack(cls, content: bytes) -> DeltaTable:
        """Raises ValueError if the content is damaged."""
        body, digest = content[:-_SUM_BYTES], content[-_SUM_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            raise ValueError("it is damaged: its checksum does not match")
        try:
            magic, _, _, seed, files, rows = _HEAD.unpack_from(body)
            if magic != _MAGIC:
                raise ValueError("it has a form that this version does not know")
            at, found = _HEAD.size, []
            for _ in range(files):
                (length,) = _NAME.unpack_from(body, at)
                at += _NAME.size + length
                found.append(body[at - length : at].decode())
            if len(body) - at != rows * _ROW.size:
                raise ValueError("it has another length than it says")
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"it is malformed: {error}") from error
        return cls(seed, found, body[at:])


def read(directory: str) -> DeltaTable:
    """The table of the checkpoint in a directory. Raises `CheckpointError` if it has none that is sound."""
    path = os.path.join(directory, DELTA_NAME)
    try:
        content = storage_at(directory).read(DELTA_NAME, lambda beginning, length: None)  # refuses files with holes
        if not _matches(directory, content):
            raise ValueError(f"it belongs to another {METADATA_NAME}")
        return DeltaTable.unpack(content)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {DELTA_NAME}: it was saved without base=", path=path) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}", path=path) from error


def belongs(directory: str) -> bool:
    """Whether the table in a directory is that of the metadata there. Raises OSError."""
    return _matches(directory, storage_at(directory).read_range(DELTA_NAME, 0, _HEAD.size)[1])


def _matches(directory: str, content: bytes) -> bool:
    try:
        found, end = storage_at(directory).read_range(METADATA_NAME, -TRAILER_BYTES, TRAILER_BYTES)
    except FileNotFoundError:
        return False
    if len(content) < _HEAD.size:
        return False
    _, length, trailer, *_ = _HEAD.unpack_from(content)
    return (found.size, end) == (length, trailer)


def rows_of_rank(locations: memoryview, ids: bytes, indices: Sequence[int], least_bytes: int) -> Iterator[Row]:
    """Yields the rows of one rank, without records below `least_bytes`. `locations`: file, offset, length and CRC-32 of
    each record that the rank has planned; tensors come first. `ids`: the ids of the tensors. `indices`: the index of
    each of the rank's files in the table."""
    for at in range(len(ids) // ID_BYTES):
        file, offset, length, crc = locations[4 * at : 4 * at + 4]
        if length >= least_bytes and crc >= 0:
            yield Row(ids[at * ID_BYTES : (at + 1) * ID_BYTES], indices[file], crc, offset, length)
