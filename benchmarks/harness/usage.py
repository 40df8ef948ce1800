"""Measures what one operation costs: seconds, processor time, memory, bytes moved."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Usage:
    """What one operation used, all threads of the process together; None is unknown."""

    seconds: float
    cpu_seconds: float | None = None
    peak_extra_bytes: int | None = None  #: peak resident memory less that before; mapped files count while mapped
    disk_bytes: int | None = None  #: moved to and from the storage
    call_bytes: int | None = None  #: moved by read and write calls, those that the page cache served included
    state_bytes: int | None = None  #: size of what was saved or loaded
    resident: float | None = None  #: fraction of the files in the page cache just before a load
    shared: float | None = None  #: fraction of a rank's bytes that another rank read, or that it read for another
    path: str | None = None  #: how the bytes went (direct, buffered, …), as the candidate reports it


def measure(operation: Callable[[], object]) -> Usage:
    """Runs `operation` and returns what it used."""
    synchronize()
    peak_is_known = _reset_peak()
    resident = _kibibytes_field("/proc/self/status", "VmRSS")
    moved = _moved_bytes()
    cpu = _cpu_seconds()
    start = time.perf_counter()
    operation()
    synchronize()
    seconds = time.perf_counter() - start
    cpu = _cpu_seconds() - cpu
    disk, calls = (
        None if before is None or after is None else after - before
        for before, after in zip(moved, _moved_bytes(), strict=True)
    )
    peak = max(0, _kibibytes_field("/proc/self/status", "VmHWM") - resident) if peak_is_known else None
    return Usage(seconds, cpu, peak, disk, calls)


def synchronize() -> None:
    """Waits for the device, where one is used."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def tidy() -> None:
    """Leaves no garbage and no free heap behind from what ran before."""
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def settle(directory: Path) -> None:
    """Leaves no work behind from what ran before, nor dirty pages of the file system of `directory`."""
    tidy()
    sync_file_system(directory)


def sync_file_system(directory: Path) -> None:
    with opened(directory) as descriptor:
        _libc.syncfs(descriptor)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A context that gives a descriptor of a file or directory, to read or sync it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def available_memory() -> int:
    """Returns the bytes that the kernel could give without swapping."""
    return _kibibytes_field("/proc/meminfo", "MemAvailable")


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _moved_bytes() -> tuple[int, int] | tuple[None, None]:
    """Returns the bytes that the storage and that calls have moved so far."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:  # some kernels do not count, and some containers hide it
        return None, None
    counters = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return counters["read_bytes"] + counters["write_bytes"], counters["rchar"] + counters["wchar"]


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5\n")
    except OSError:
        return False
    return True


def _kibibytes_field(path: str, field: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{path} has no field {field}")
