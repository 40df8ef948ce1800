"""Room for a benchmark: a folder that is gone afterwards, and enough disk and memory."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness.page_cache import MEMORY_FILE_SYSTEMS, file_system_of
from benchmarks.harness.usage import available_memory
from vescale_ckpt.errors import CheckpointError, StorageFullError


class BenchmarkError(CheckpointError):
    """Nothing more can be measured; what was measured before counts."""


class WrongContentsError(BenchmarkError):
    """A candidate loaded something else than was saved."""


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
    """A new folder below `parent`, removed at the end. In the context SIGTERM ends the process as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(
            prefix="vescale-ckpt-bench-", dir=parent, ignore_cleanup_errors=True
        ) as folder:
            yield Path(folder)
    finally:
        signal.signal(signal.SIGTERM, before)
