"""Slower storage: a control group whose processes together read so many bytes a second from one disk, no matter how."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

MB = 10**6
_REMOVAL_SECONDS = 10.0  # a process that was just killed still counts for a moment


class UnavailableError(RuntimeError):
    """This machine, or this user, cannot do it."""


class StorageLimit:
    """Limits what processes read from one disk, all together: a control group, and the file that says how much."""

    def __init__(self, group: Path, file: str, entry: Callable[[int | None], str]) -> None:
        self._group = group
        self._file = group / file
        self._entry = entry

    def set(self, bytes_per_second: int | None) -> None:
        """From now on. None: as fast as it goes."""
        self._file.write_text(self._entry(bytes_per_second))

    def add(self, pids: Iterable[int]) -> None:
        """Limits these processes too, with all their threads."""
        for pid in pids:
            (self._group / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """After the last of the processes has ended."""
        deadline = time.monotonic() + _REMOVAL_SECONDS
        while True:
            try:
                self._group.rmdir()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


@contextlib.contextmanager
def storage_limit(directory: Path) -> Iterator[StorageLimit]:
    """A limit on the disk of ``directory``, off until it is set; its processes must end within the context.

    Raises UnavailableError where control groups cannot limit that disk, or are not ours to make.
    """
    limit = _made(directory)
    try:
        yield limit
    finally:
        limit.remove()


def _made(directory: Path) -> StorageLimit:
    device = disk_of(directory)
    root, first_version = _hierarchy()
    group = root / f"vescale-ckpt-benchmark-{os.getpid()}"
    if first_version:
        limit = StorageLimit(group, "blkio.throttle.read_bps_device", lambda rate: f"{device} {rate or 0}")
    else:
        limit = StorageLimit(group, "io.max", lambda rate: f"{device} rbps={rate or 'max'}")
    try:
        group.mkdir()
    except OSError as error:
        raise UnavailableError(f"storage cannot be limited: {error}") from error
    try:
        limit.set(None)
    except OSError as error:
        limit.remove()
        raise UnavailableError(f"storage cannot be limited: {error}") from error
    return limit


def disk_of(directory: Path) -> str:
    """``major:minor`` of the disk, of which the file system may have a partition."""
    number = directory.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        entry = Path("/sys/dev/block", device).resolve(strict=True)
    except OSError:
        raise UnavailableError(f"storage cannot be limited: {directory} is not on a disk of its own") from None
    return (entry.parent / "dev").read_text().strip() if (entry / "partition").exists() else device


def _hierarchy() -> tuple[Path, bool]:
    """Where groups are made that can limit disks, and whether they are of the first version of control groups."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount, (kind, _, options) = Path(before.split()[4]), after.split()[:3]
        if kind == "cgroup" and "blkio" in options.split(","):
            return mount, True
        if kind == "cgroup2" and "io" in (mount / "cgroup.controllers").read_text().split():
            try:
                (mount / "cgroup.subtree_control").write_text("+io")
            except OSError as error:
                raise UnavailableError(f"storage cannot be limited: {mount}: {error}") from error
            return mount, False
    raise UnavailableError("storage cannot be limited: no control groups for disks are mounted")
