"""The page cache: makes loads cold, and proves it, or warm."""

from __future__ import annotations

from pathlib import Path

from vescale_ckpt._bench import page_cache
from vescale_ckpt._bench.page_cache import (
    MEMORY_FILE_SYSTEMS,
    StillResidentError,
    file_system_of,
    files_under,
    resident_fraction,
)

__all__ = ["MEMORY_FILE_SYSTEMS", "StillResidentError", "drop", "file_system_of", "fill", "prepare"]


def prepare(directory: Path, *, warm: bool) -> float:
    """Makes loads of all files under ``directory`` warm or cold, and returns the fraction that is in memory."""
    if file_system_of(directory) in MEMORY_FILE_SYSTEMS:
        return resident_fraction(directory)
    return fill(directory) if warm else drop(directory)


def drop(directory: Path) -> float:
    """Drop all files under ``directory`` from memory, and return the fraction that stayed."""
    return page_cache.drop(directory, whole_cache=True)


def fill(directory: Path) -> float:
    """Read all files under ``directory`` into the page cache, and return the fraction that is there."""
    piece = bytearray(2**20)
    for path in files_under(directory):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    return resident_fraction(directory)
