"""Drops files from the page cache and proves it, so that a measured load is a cold one."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.usage import opened

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
RESIDENT_LIMIT = 0.01  #: a load counts as cold up to this fraction of its pages in memory
_ATTEMPTS = 5
_LOWEST_BITS = bytes(page & 1 for page in range(256))  # only that bit of mincore's bytes means anything

_libc = ctypes.CDLL(None, use_errno=True)


class StillResidentError(RuntimeError):
    """Files stayed in memory, so what would be measured is not a cold load."""


def file_system_of(directory: Path) -> str:
    """Type of the file system that holds `directory`, as the kernel names it."""
    resolved = directory.resolve()
    best, name = Path(), "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].replace("\\040", " "))
        if resolved.is_relative_to(mount) and len(mount.parts) >= len(best.parts):
            best, name = mount, after.split()[0]
    return name


def address_of(mapped: mmap.mmap) -> int:
    """Address of the first byte of a writable map, which must stay open as long as the address is used."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def resident_fraction(directory: Path) -> float:
    """Fraction of the pages of all files under `directory` that are in memory, asked of mincore(2)."""
    resident, total = 0, 0
    for path in files_under(directory):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
            pages = ctypes.create_string_buffer(-(-len(mapped) // mmap.PAGESIZE))
            if _libc.mincore(ctypes.c_void_p(address_of(mapped)), ctypes.c_size_t(len(mapped)), pages):
                code = ctypes.get_errno()
                raise OSError(code, f"mincore: {os.strerror(code)}", str(path))
            resident += pages.raw.translate(_LOWEST_BITS).count(1)
            total += len(pages)
    return resident / total if total else 0.0


def prepare(directory: Path, *, warm: bool) -> float:
    """Makes loads of all files under `directory` warm or cold, and returns the fraction of them that is in memory.

    Raises `StillResidentError` where files stayed there.
    """
    if file_system_of(directory) in MEMORY_FILE_SYSTEMS:
        return resident_fraction(directory)
    if not warm:
        return drop(directory)
    piece = bytearray(2**20)
    for path in files_under(directory):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    return resident_fraction(directory)


def drop(directory: Path) -> float:
    """Drops all files under `directory` from memory, and returns the fraction that stayed.

    Raises `StillResidentError` where that is more than `RESIDENT_LIMIT`.
    """
    fraction = 1.0
    for attempt in range(_ATTEMPTS):
        time.sleep(0.1 * attempt)
        for path in files_under(directory):
            drop_file(path)
        fraction = resident_fraction(directory)
        if fraction <= RESIDENT_LIMIT:
            return fraction
    raise StillResidentError(f"{fraction:.1%} of the files under {directory} stayed in memory")


def drop_file(path: Path) -> None:
    """Drops one file from memory. The kernel drops clean pages only, so the file is synced first."""
    with opened(path) as descriptor:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def files_under(directory: Path) -> Iterator[Path]:
    """Files that hold anything (an empty file has no page to map)."""
    return (path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
