"""What one operation costs: time, CPU, memory, bytes moved."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_libc = ctypes.CDLL(None)


Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


@dataclass(frozen=True)
class Usage:
    """What one operation used, all threads of the process together; None is unknown.

    ``state_bytes`` is the size of what was saved or loaded. ``peak_extra_bytes`` is the peak resident memory less that
    before; mapped files count while they are mapped. ``disk_bytes`` went to and from the storage, ``call_bytes``
    through read and write calls, which include what the page cache served and leave out what was mapped. ``resident``
    is the fraction of the files in the page cache just before a load, ``shared`` that of the bytes needed by a rank
    that it had from another's reading, or read for another. ``path`` and ``stats`` are the candidate's own report.
    """

    seconds: float
    cpu_seconds: float | None = None
    peak_extra_bytes: int | None = None
    disk_bytes: int | None = None
    call_bytes: int | None = None
    state_bytes: int | None = None
    resident: float | None = None
    shared: float | None = None
    path: str | None = None
    stats: Plain = None


def tidy() -> None:
    """Leaves no garbage and no free heap behind from what ran before."""
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def settle() -> None:
    """Leaves no work behind from what ran before, also no dirty pages: those of all processes, which may take long."""
    tidy()
    os.sync()


def synchronize() -> None:
    """Waits for the device, where one is used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def measure(operation: Callable[[], object]) -> Usage:
    """Runs ``operation`` and tells what it used."""
    synchronize()
    peak_known = _reset_peak()
    resident = _status_bytes("VmRSS")
    disk, calls = _moved_bytes()
    cpu = _cpu_seconds()
    start = time.perf_counter()
    operation()
    synchronize()
    seconds = time.perf_counter() - start
    cpu = _cpu_seconds() - cpu
    disk_after, calls_after = _moved_bytes()
    return Usage(
        seconds=seconds,
        cpu_seconds=cpu,
        peak_extra_bytes=max(0, _status_bytes("VmHWM") - resident) if peak_known else None,
        disk_bytes=disk_after - disk,
        call_bytes=calls_after - calls,
    )


def available_memory() -> int:
    """Bytes that the kernel could give without swapping."""
    return _kibibytes_field(Path("/proc/meminfo"), "MemAvailable")


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _moved_bytes() -> tuple[int, int]:
    """Of the storage, and of calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counters = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return counters["read_bytes"] + counters["write_bytes"], counters["rchar"] + counters["wchar"]


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5\n")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    return _kibibytes_field(Path("/proc/self/status"), field)


def _kibibytes_field(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{path} has no field {field}")
