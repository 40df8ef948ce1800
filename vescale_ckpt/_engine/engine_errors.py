"""Turns errors of the engine and of the operating system into errors of this package, for its callers."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import CheckpointError, CorruptCheckpointError, StorageFullError, UntrustedCheckpointError
from . import _C


@contextmanager
def named_errors(key_of: Callable[[int], str], path: str, needed: int = 0) -> Iterator[None]:
    """Turns the engine's errors into this package's; `key_of` names a row of the table at hand."""
    try:
        yield
    except _C.EngineError as error:
        raise translate(error, key_of, path, needed) from None


@contextmanager
def named_system_errors(path: str, needed: int = 0) -> Iterator[None]:
    """The same, and it turns OSError of Python calls, too. Code within must not call functions of the user."""
    try:
        with named_errors(str, path, needed):
            yield
    except OSError as error:
        raise of_system(error, path, needed) from error


def translate(error: _C.EngineError, key_of: Callable[[int], str], path: str, needed: int) -> CheckpointError:
    key = key_of(error.item) if error.item is not None else None
    prefix = f"{key}: " if key is not None else ""
    if error.kind == "full":
        return _full(path, needed, error.errno, str(error))
    if error.kind == "corrupt":
        return CorruptCheckpointError(f"{prefix}{error}", key=key, file=error.path, offset=error.offset)
    if error.kind == "invalid":
        return UntrustedCheckpointError(f"{prefix}{error}", key=key)
    missing = error.errno == 2 and error.kind == "io"
    if missing and str(error).startswith(("open", "read")):  # objects are not opened again for each load
        return CorruptCheckpointError(f"{prefix}data file is missing: {error}", key=key, file=error.path)
    return CheckpointError(f"{prefix}{error}", key=key, path=error.path, errno=error.errno)


def of_system(error: OSError, path: str, needed: int = 0) -> CheckpointError:
    """The error to raise for an error of the operating system in `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return _full(path, needed, error.errno, str(error))
    where = error.filename if isinstance(error.filename, str) else path
    text = str(error) if error.filename is not None else f"{path}: {error}"
    return CheckpointError(text, path=where, errno=error.errno)


def _full(path: str, needed: int, number: int, cause: str) -> StorageFullError:
    """The error that names what is used up: bytes, a quota, inodes, or the allowed size of a file."""
    try:
        while not os.path.lexists(path) and os.path.dirname(path) != path:  # it is not made yet
            path = os.path.dirname(path)
        space = os.statvfs(path)
        free, no_files = space.f_bavail * space.f_frsize, space.f_files > 0 and space.f_favail == 0
    except OSError:
        free, no_files = 0, False
    what = ""
    if number == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        own = "the file system allows no larger ones" if limit < 0 else f"the limit is {limit:,} bytes (ulimit -f)"
        what = f"a file in {path} would be too large: {own}. Raise the limit, or save smaller files"
    elif number == errno.EDQUOT:
        what = f"the quota of bytes or files is used up in {path} (see quota -s)"
    elif no_files:
        what = f"no room in {path} for another file: its file system has no inodes left, whatever bytes are free"
    return StorageFullError(path, needed, free, cause, what)
