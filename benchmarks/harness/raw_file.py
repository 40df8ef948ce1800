"""Measures the raw ceiling of a disk: as many bytes as a state holds, by direct I/O, with nothing else around it.

Some threads move pieces between one preallocated file and aligned buffers on huge pages. Contents do not matter, so
each thread writes and reads one buffer over and over: no checkpoint can need less.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness.page_cache import MEMORY_FILE_SYSTEMS, address_of, file_system_of

THREADS = 4
PIECE_BYTES = 8 * 2**20
HUGE_PAGE_BYTES = 2 * 2**20
ALIGNMENT = 4096
FILE_NAME = "ceiling.bin"

# Direct I/O is refused with EINVAL, at the open or at the first transfer.
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)

_libc = ctypes.CDLL(None, use_errno=True)

Transfer = Callable[[int, list[memoryview], int], int]


def huge_page_buffers(count: int, size: int) -> list[memoryview]:
    """`count` buffers of `size` bytes (a multiple of 2 MiB), on huge pages, filled with random bits."""
    arena = mmap.mmap(-1, count * size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    arena.madvise(mmap.MADV_HUGEPAGE)
    start = -address_of(arena) % HUGE_PAGE_BYTES
    slots = memoryview(arena)[start : start + count * size]
    slots[:] = random.Random(0).randbytes(count * size)
    return [slots[offset : offset + size] for offset in range(0, count * size, size)]


def preallocate(descriptor: int, size: int) -> None:
    """fallocate(2) itself: glibc's substitute would write zeros where the file system cannot preallocate."""
    if _libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, f"fallocate of {size} bytes: {os.strerror(code)}")


class RawFile:
    """Writes and reads one file of a directory at the speed of the hardware."""

    def __init__(self, *, buffered_reads: bool = False) -> None:
        self._buffers = huge_page_buffers(THREADS, PIECE_BYTES)
        self._buffered_reads = buffered_reads
        self._direct_refused = False
        self.path_taken = ""

    def write(self, directory: Path, size: int) -> None:
        """Write `size` bytes and make them durable."""
        self._direct_or_buffered(os.O_WRONLY | os.O_CREAT, directory, size, os.pwritev, direct=True)

    def read(self, directory: Path, size: int) -> None:
        """Read the `size` bytes that `write` left."""
        self._direct_or_buffered(os.O_RDONLY, directory, size, os.preadv, direct=not self._buffered_reads)

    def _direct_or_buffered(self, flags: int, directory: Path, size: int, transfer: Transfer, *, direct: bool) -> None:
        path = directory / FILE_NAME
        in_memory = file_system_of(directory) in MEMORY_FILE_SYSTEMS  # tmpfs takes O_DIRECT and copies
        if direct and not in_memory and not self._direct_refused:
            try:
                self._move(path, flags | os.O_DIRECT, size, transfer)
                self.path_taken = "direct"
                return
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                self._direct_refused = True
        self._move(path, flags, size, transfer)
        self.path_taken = "buffered, O_DIRECT was refused" if self._direct_refused else "buffered"

    def _move(self, path: Path, flags: int, size: int, transfer: Transfer) -> None:
        writing = bool(flags & os.O_WRONLY)
        padded = -(-size // ALIGNMENT) * ALIGNMENT  # direct I/O moves whole blocks
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
        try:
            if writing:
                preallocate(descriptor, padded)
            # One iterator for all threads: next() on a range is atomic under the GIL.
            offsets = iter(range(0, padded, PIECE_BYTES))
            with ThreadPoolExecutor(THREADS) as pool:
                workers = [
                    pool.submit(_move_pieces, descriptor, buffer, offsets, size, padded, transfer)
                    for buffer in self._buffers
                ]
            for worker in workers:
                worker.result()
            if writing:
                os.ftruncate(descriptor, size)
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)


def _move_pieces(
    descriptor: int, buffer: memoryview, offsets: Iterator[int], size: int, padded: int, transfer: Transfer
) -> None:
    for offset in offsets:
        position, end = offset, min(offset + PIECE_BYTES, padded)
        while position < min(end, size):
            moved = transfer(descriptor, [buffer[position - offset : end - offset]], position)
            if moved == 0:
                raise EOFError(f"{FILE_NAME} ends at byte {position} of {size}")
            position += moved
