"""The page cache: drop it and prove it, or fill it; and what kind of file system lies under a directory."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
RESIDENT_LIMIT = 0.01  # a load counts as cold up to this fraction of its pages in memory
DROP_ATTEMPTS = 5

_libc = ctypes.CDLL(None, use_errno=True)


class StillResidentError(RuntimeError):
    """Files stayed in memory, so what would be measured is not a cold load."""


def file_system_of(directory: Path) -> str:
    """Type of the file system that holds ``directory``, as the kernel names it."""
    resolved = directory.resolve()
    best, name = Path(), "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].replace("\\040", " "))
        if resolved.is_relative_to(mount) and len(mount.parts) >= len(best.parts):
            best, name = mount, after.split()[0]
    return name


def resident_fraction(directory: Path) -> float:
    """Fraction of the pages of all files under ``directory`` that are in memory, asked of mincore(2)."""
    resident, total = 0, 0
    for path in _files_under(directory):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
            size = len(mapped)
            pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
            failed = _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
            if failed:
                code = ctypes.get_errno()
                raise OSError(code, f"mincore: {os.strerror(code)}", str(path))
        resident += int((pages & 1).sum())
        total += pages.size
    return resident / total if total else 0.0


def prepare(directory: Path, *, warm: bool) -> float:
    """Makes loads of all files under ``directory`` warm or cold, and returns the fraction that is in memory."""
    if file_system_of(directory) in MEMORY_FILE_SYSTEMS:
        return resident_fraction(directory)
    return fill(directory) if warm else drop(directory)


def drop(directory: Path) -> float:
    """Drop all files under ``directory`` from memory, and return the fraction that stayed.

    Raises ``StillResidentError`` where that is more than ``RESIDENT_LIMIT``.
    """
    fraction = 1.0
    for attempt in range(DROP_ATTEMPTS):
        time.sleep(0.1 * attempt)
        os.sync()
        for path in _files_under(directory):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
        if os.geteuid() == 0:
            Path("/proc/sys/vm/drop_caches").write_text("1\n")
        fraction = resident_fraction(directory)
        if fraction <= RESIDENT_LIMIT:
            return fraction
    raise StillResidentError(f"{fraction:.1%} of the files under {directory} stayed in memory")


def fill(directory: Path) -> float:
    """Read all files under ``directory`` into the page cache, and return the fraction that is there."""
    piece = bytearray(2**20)
    for path in _files_under(directory):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    return resident_fraction(directory)


def _files_under(directory: Path) -> Iterator[Path]:
    """Files that hold anything (an empty file has no page to map)."""
    return (path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
