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

_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Usage:
    """What one operation used, all threads of the process together.

    ``peak_extra_bytes`` is the peak resident memory less that before; mapped files count while they are
    mapped. None where the kernel does not let the peak be reset. ``disk_*`` are bytes asked of the storage,
    ``call_*`` those of read and write calls, which include what the page cache served and leave out what was
    mapped.
    """

    seconds: float
    cpu_seconds: float
    peak_extra_bytes: int | None
    disk_read_bytes: int
    disk_write_bytes: int
    call_read_bytes: int
    call_write_bytes: int


def settle() -> None:
    """Leave no work behind from what ran before: garbage, free heap, dirty pages."""
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
    os.sync()


def measure(operation: Callable[[], None]) -> Usage:
    """Run ``operation`` and say what it used."""
    peak_known = _reset_peak()
    resident = _status_bytes("VmRSS")
    moved = _io_counters()
    cpu = _cpu_seconds()
    start = time.perf_counter()
    operation()
    seconds = time.perf_counter() - start
    cpu = _cpu_seconds() - cpu
    moved = {name: value - moved[name] for name, value in _io_counters().items()}
    return Usage(
        seconds=seconds,
        cpu_seconds=cpu,
        peak_extra_bytes=max(0, _status_bytes("VmHWM") - resident) if peak_known else None,
        disk_read_bytes=moved["read_bytes"],
        disk_write_bytes=moved["write_bytes"],
        call_read_bytes=moved["rchar"],
        call_write_bytes=moved["wchar"],
    )


def available_memory() -> int:
    """Bytes that the kernel could give without swapping."""
    return _kibibytes_field(Path("/proc/meminfo"), "MemAvailable")


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _io_counters() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


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
