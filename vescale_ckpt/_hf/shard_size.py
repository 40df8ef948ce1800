"""Parses sizes of files with units, for `max_shard_size`."""

from __future__ import annotations

import re

_UNITS = {"": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}


def shard_bytes(size: int | str) -> int:
    """The bytes of `size`: a number, or text with a unit: "5GB" (powers of 1000, as in Hugging Face), "5GiB" (of 1024).
    Raises ValueError for anything else, and for less than 1."""
    bytes_ = size if isinstance(size, int) and not isinstance(size, bool) else None
    if isinstance(size, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", size, re.IGNORECASE)):
        unit = _UNITS.get(found[2].upper() if found[2].upper() != "B" else "")
        bytes_ = None if unit is None else int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit
    if bytes_ is None or bytes_ < 1:
        raise ValueError(f"max_shard_size={size!r}: bytes, or text like '5GB' or '500MiB', are wanted")
    return bytes_
