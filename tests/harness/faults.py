"""System calls of the engine that fail: in this process, and in those forked from it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import resource
from collections.abc import Iterator
from typing import Any
from unittest import mock

from vescale_ckpt._engine import _C


def inject(call: str, error: int, skip: int = 0, times: int = 1) -> None:
    """System calls of a kind fail from now on with this `errno`, but the first `skip`. A negative one is a signal that
    this process gets before the call, or behind it where it reads, writes or closes."""
    _C.inject_fault(call, error, skip, times)


def clear() -> None:
    _C.clear_faults()


def calls_seen(call: str) -> int:
    """How many calls of this kind were made since the last `inject`."""
    return _C.calls_seen(call)


@contextlib.contextmanager
def fault(call: str, error: int, skip: int = 0, times: int = 1) -> Iterator[None]:
    """System calls of a kind fail, but the first `skip`."""
    clear()
    inject(call, error, skip, times)
    try:
        yield
    finally:
        clear()


def no_locks() -> Any:
    """A context, which `start()` makes last for the rest of the test: the file system has no locks."""
    return mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, "no locks here"))


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """In it no file of this process grows beyond so many bytes: a write ends there, in the middle of what it is given,
    and the next one fails (EFBIG). Python ignores the signal."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
