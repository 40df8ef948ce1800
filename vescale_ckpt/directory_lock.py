"""Who uses a checkpoint's directory: saves and loads share it, who removes it must be alone.

Loads lock `.metadata`, which is there; saves of a `CheckpointManager` lock `.lock`, which they make, because
`.metadata` comes last; and every save locks its data files (layout.lock). All are locks of `flock`, which end with
their process. Where the file system has none, nobody can tell.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from . import layout
from .errors import CheckpointError
from .layout import FileLock

LOCK_NAME = ".lock"
_PATIENCE = 10.0  # seconds: who removes a directory holds its locks for one rename
_PAUSE = 0.005


def while_reading(directory: str, rank: int | None) -> FileLock | None:
    """Keeps a checkpoint from being removed while it is read. None where there are no locks, or no checkpoint."""
    path = os.path.join(directory, layout.metadata_name(rank))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    return _share(descriptor, path)


def while_saving(directory: str) -> FileLock | None:
    """Makes the directory and keeps it from being removed while a save has yet to put its first file there.

    None where there are no locks. Raises `CheckpointError` if the directory cannot be made or somebody goes on removing
    it.
    """
    path = os.path.join(directory, LOCK_NAME)
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        layout.make_directory(directory)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # removed since
            continue
        except OSError as error:
            raise CheckpointError(f"cannot make {path}: {error}", path=path, errno=error.errno) from error
        lock = _share(descriptor, path)
        if lock is not None or os.path.exists(path):
            return lock
    raise CheckpointError(f"{directory} is being removed by another process", path=directory)


@contextmanager
def alone(directory: str) -> Iterator[bool | None]:
    """Whether nobody saves into the directory or loads from it. While the context lasts, no manager's save and no load
    of ours begins.

    None: the file system has no locks, so nobody knows.
    """
    with ExitStack() as held:
        answer: bool | None = True
        for name in _lock_files(directory):
            path = os.path.join(directory, name)
            try:
                flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_CREAT if name == LOCK_NAME else 0)
                descriptor = os.open(path, flags, 0o666)
            except OSError:  # somebody else removes it, or we may not
                answer = False
                break
            with ExitStack() as file:
                file.callback(os.close, descriptor)
                taken = layout.try_lock_alone(descriptor)
                if taken is False or not _is_at(descriptor, path):
                    answer = False
                    break
                if taken is None:
                    answer = None
                if not layout.is_data_file(name):  # of those there may be more than a process may have open
                    held.push(file.pop_all())
        yield answer


def _lock_files(directory: str) -> list[str]:
    try:
        names = os.listdir(directory)
    except OSError:
        names = []
    metadata = [layout.METADATA_NAME] if layout.METADATA_NAME in names else []
    return [LOCK_NAME, *metadata, *filter(layout.is_data_file, names)]


def _share(descriptor: int, path: str) -> FileLock | None:
    """Takes over `descriptor`. None if there are no locks, or the file is no longer what the path names."""
    lock = FileLock(None, descriptor)
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE)
            continue
        except OSError:
            break
        if _is_at(descriptor, path):
            return lock
        break
    lock.release()
    return None


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False
