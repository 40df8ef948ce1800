"""Finds room for a benchmark: a folder that is gone afterwards, whatever happens, and enough disk and memory."""

from __future__ import annotations

import fcntl
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.harness.page_cache import MEMORY_FILE_SYSTEMS, file_system_of
from benchmarks.harness.usage import available_memory
from vescale_ckpt.errors import CheckpointError, StorageFullError

_PREFIX = "vescale-ckpt-bench-"
_MARKER = ".vescale-ckpt-bench"  # locked as long as the benchmark that made the folder lives
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class BenchmarkError(CheckpointError):
    """Nothing more can be measured; what was measured before counts."""


def check_room(directory: Path, on_disk: int, in_memory: int) -> None:
    """Raises `StorageFullError` or `BenchmarkError` unless so many bytes fit the disk of `directory` and the memory."""
    if file_system_of(directory) in MEMORY_FILE_SYSTEMS:
        in_memory += on_disk
    free = shutil.disk_usage(directory).free
    if free < on_disk:
        raise StorageFullError(str(directory), on_disk, free)
    free = available_memory()
    if free < in_memory:
        raise BenchmarkError(f"expected {in_memory:,} bytes of free memory, got {free:,}")


@contextmanager
def working_folder(parent: Path) -> Iterator[Path]:
    """A new folder below `parent`, removed at the end. So are those of benchmarks that were killed.

    In the context SIGTERM and SIGHUP end the process as Ctrl-C does.
    """
    for marker in parent.glob(f"{_PREFIX}*/{_MARKER}"):
        with suppress(OSError), open(marker) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(marker.parent)
    with _ended_by_signals():
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            new = folder / f"{_MARKER}.new"
            with open(new, "w") as file:
                with suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                    new.rename(folder / _MARKER)
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {}
    for number in _ENDING:
        with suppress(ValueError):  # not the main thread
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
