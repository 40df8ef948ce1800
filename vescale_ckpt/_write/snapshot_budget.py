"""Computes the memory limit for the snapshots of a process, from the setting or from the free memory."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from .. import settings

_SHARE = 0.5  # of the free memory, because training allocates, too


def snapshot_bytes() -> int:
    """Returns the setting in bytes; if it is 0, half of the memory that was free at the first call, divided by the
    number of ranks on the machine."""
    wanted = settings.number("snapshot_bytes")
    return wanted if wanted else _found(os.getpid())


@functools.cache
def _found(_: int) -> int:
    return int(_SHARE * available_bytes() / settings.ranks_of_this_node(1))


def available_bytes() -> int:
    """Returns the bytes that this process can still allocate, within the limits of its control groups."""
    limits = [_of_the_machine()]
    limits += [left for left in map(_left_in, _control_groups()) if left is not None]
    return max(0, min(limits))


def _of_the_machine() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_groups() -> list[Path]:
    """Returns this process's control group and all its parents; each may set a limit."""
    root = Path("/sys/fs/cgroup")
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = root / controllers
        group = base / path.lstrip("/")
        found += [group, *(parent for parent in group.parents if parent.is_relative_to(base))]
    return found


def _left_in(group: Path) -> int | None:
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            return int((group / limit).read_text()) - _anonymous(group, int((group / used).read_text()))
        except (OSError, ValueError):  # the other cgroup version, or "max"
            continue
    return None


def _anonymous(group: Path, used: int) -> int:
    """Returns `used` less the page cache, which the kernel reclaims when memory is short."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return used
    cached = sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "active_file"))
    return max(0, used - cached)
