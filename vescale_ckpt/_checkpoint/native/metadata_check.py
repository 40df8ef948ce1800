"""Checks the bytes of `.metadata` files, and the checksum at their end, for readers and clean-ups. Needs no torch."""

from __future__ import annotations

import pickle
import struct

from ..._engine import _C
from ...errors import CorruptCheckpointError, UntrustedCheckpointError

TRAILER_BYTES = 16
TRAILER_MAGIC = b"VSCKMDT1"


def trailer(data: bytes, end: int) -> bytes:
    """Returns the trailer that this package writes behind the pickle, where unpicklers do not read: magic, low 32 bits
    of the pickle's length, its CRC-32. The pickle is the first `end` bytes of `data`."""
    return struct.pack("<8sII", TRAILER_MAGIC, end & 0xFFFFFFFF, _C.crc32(data, end))


def has_checksum(data: bytes) -> bool:
    """Whether `data` ends in the trailer that this package writes."""
    return data[-TRAILER_BYTES:].startswith(TRAILER_MAGIC)


def check_beginning(data: bytes, length: int, path: str) -> None:
    """Checks the first bytes of a `.metadata` file of `length` bytes, before memory is allocated for the rest. Raises
    as `loads` does."""
    wrong, end = _C.check_pickle(data)
    if not wrong and length > end + TRAILER_BYTES:
        raise CorruptCheckpointError(
            f"{path} is damaged: it has {length:,} bytes, its metadata ends after {end:,}", key=None, file=path
        )
    if wrong and not wrong.startswith("it ends"):
        check(data, path)


def check(data: bytes, path: str) -> None:
    """Checks the bytes of a `.metadata` file before anything is built from them. Raises as `loads` does."""
    wrong, end = _C.check_pickle(data)
    ends = len(data) - (TRAILER_BYTES if has_checksum(data) else 0)  # files of stock DCP have no checksum
    if (ends < len(data) and data[ends:] != trailer(data, ends)) or (not wrong and end != ends):
        raise CorruptCheckpointError(f"{path} is damaged: its checksum does not match", key=None, file=path)
    if wrong.startswith("it ends"):
        raise CorruptCheckpointError(f"{path} is truncated: {wrong}", key=None, file=path)
    if wrong and ends < len(data):  # it was written so
        raise UntrustedCheckpointError(f"{path} is no sound metadata: {wrong}", path=path)
    if wrong:
        reason = wrong if data.startswith(pickle.PROTO) else "it does not begin as a pickle"
        raise CorruptCheckpointError(f"{path} is damaged, or no metadata: {reason}", key=None, file=path)
