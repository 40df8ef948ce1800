"""Packs several byte strings into one message and unpacks them, for exchanges between ranks."""

from __future__ import annotations

import struct


def pack(*parts: bytes) -> bytes:
    return struct.pack(f"<q{len(parts)}q", len(parts), *map(len, parts)) + b"".join(parts)


def unpack(message: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<q", message)
    lengths = struct.unpack_from(f"<{count}q", message, 8)
    at, parts = 8 * (1 + count), []
    for length in lengths:
        parts.append(message[at : at + length])
        at += length
    return parts
