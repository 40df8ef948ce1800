"""Locks local files and folders by `flock` for the processes that write, read or remove them.

The locks end with their process. Some file systems have no locks, and some have locks that other machines do not see
(`mounts`). There the functions return None, unless a process of this machine has locked the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator

from .._engine.live_objects import LiveObjects
from ..errors import CheckpointError
from . import urls
from .clock import seconds_since
from .mounts import locks_reach_others

LOCK_NAME = ".lock"  #: the file that a save locks in its directory before it writes anything
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  #: not blocking: opening a FIFO would wait for a writer
_REMOVAL_SECONDS = 10.0  # to wait for the removal of a directory, which holds the locks for one rename
_REMOVAL_POLL_SECONDS = 0.005
_COMMIT_SECONDS = 60.0  # to wait for the commit of another export, which takes some renames and syncs
_COMMIT_POLL_SECONDS = 0.02


class FileLock:
    """Marks a file as in use, until it is released or the process dies.

    `directory`: that of the save that writes the file. None: not released by `drop_dead_locks`.
    """

    def __init__(self, directory: str | None, descriptor: int) -> None:
        self.directory = directory
        self._descriptor = descriptor
        _held.add(self)

    def release(self) -> None:
        """May be called again."""
        _held.discard(self)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    __del__ = release


_held: LiveObjects[FileLock] = LiveObjects()  # by this process


def _release_after_fork() -> None:
    for held in _held:  # the locks are the parent's, and must end with it
        held.release()


os.register_at_fork(after_in_child=_release_after_fork)


class TakenForLeftoverError(CheckpointError):
    """The clean-up of another writer removed a file before it was locked."""


def lock(path: str) -> FileLock | None:
    """Marks a file or folder as being written. Returns None if the file system has no locks, and for object stores,
    which have none. Raises `TakenForLeftoverError` if another process removed it, `CheckpointError` if it cannot be
    opened."""
    if urls.is_url(path):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise CheckpointError(f"cannot open {path} to lock it: {error}", path=path, errno=error.errno) from error
        raise TakenForLeftoverError(f"{path} was removed while it was written: {error}", path=path) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        taken = os.fstat(descriptor).st_nlink == 0
    except BlockingIOError:
        taken = True
    except OSError:
        os.close(descriptor)
        return None
    if taken:
        os.close(descriptor)
        raise TakenForLeftoverError(f"{path} was taken for a leftover by another save in this directory", path=path)
    return FileLock(os.path.dirname(os.path.abspath(path)), descriptor)


def drop_dead_locks(directory: str) -> None:
    """Releases the locks of saves of this process into the directory that failed. The traceback of such a save's error
    keeps the writer alive, and so the lock. Every rank calls it, because the coordinator cleans up for all."""
    if not urls.is_url(directory) and any(held.directory == os.path.abspath(directory) for held in _held):
        gc.collect()


def try_lock_alone(descriptor: int) -> bool | None:
    """Locks the file exclusively. False if another process has locked it; None if the file system has no locks, or
    other machines do not see them."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True if locks_reach_others(os.fstat(descriptor)) else None


@contextlib.contextmanager
def abandoned(marked: str, grace_seconds: float, others: Iterable[str] = ()) -> Iterator[bool]:
    """A context that gives whether the writer of a file or folder, which locks `marked` while it writes, is gone. The
    file stays locked within the context: a writer that has just made it and now locks it sees that it was taken.

    Without locks in the file system, it gives whether `marked` and `others` were not modified for `grace_seconds`.
    Raises OSError if `marked` cannot be opened.
    """
    descriptor = _open_to_lock(marked)
    try:
        alone = try_lock_alone(descriptor)
        if alone is None:
            touched = max([os.fstat(descriptor).st_mtime, *(os.stat(path).st_mtime for path in others)])
            directory = os.path.dirname(os.path.abspath(marked))
            alone = seconds_since(touched, directory, grace_seconds) >= grace_seconds
        yield alone
    finally:
        os.close(descriptor)


def share(path: str) -> FileLock | None:
    """A lock that keeps the directory of a file from being removed while the file is read. None if the file system has
    no locks, or the file is missing."""
    try:
        descriptor = os.open(path, READ)
    except OSError:
        return None
    return _share(descriptor, path)


def share_made(path: str, make_directory: Callable[[], None]) -> FileLock | None:
    """Makes the file and its directory, and locks the directory against removal before a save writes to it.

    None if the file system has no locks. Raises `CheckpointError` if the file cannot be made, or another process keeps
    removing it.
    """
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while time.monotonic() < deadline:
        make_directory()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # removed since
            continue
        except OSError as error:
            raise CheckpointError(f"cannot make {path}: {error}", path=path, errno=error.errno) from error
        shared = _share(descriptor, path)
        if shared is not None or os.path.exists(path):
            return shared
    directory = os.path.dirname(path)
    raise CheckpointError(f"{directory} is being removed by another process", path=directory)


@contextlib.contextmanager
def alone(directory: str, held_names: Iterable[str], tested_names: Iterable[str]) -> Iterator[bool | None]:
    """A context that gives whether no process saves into the directory or loads from it. While it lasts, no save that
    locks the directory and no load that locks one of `held_names` begins. `tested_names` may be more files than a
    process may open: each is locked for an instant only.

    None: the file system has no locks.
    """
    with contextlib.ExitStack() as held:
        answer: bool | None = True
        tested = set(tested_names)
        for name in (LOCK_NAME, *held_names, *tested):
            path = os.path.join(directory, name)
            try:
                flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_CREAT if name == LOCK_NAME else 0)
                descriptor = os.open(path, flags, 0o666)
            except OSError:  # another process removes it, or this one has no permission
                answer = False
                break
            with contextlib.ExitStack() as file:
                file.callback(os.close, descriptor)
                taken = try_lock_alone(descriptor)
                if taken is False or not _is_at(descriptor, path):
                    answer = False
                    break
                if taken is None:
                    answer = None
                if name not in tested:
                    held.push(file.pop_all())
        yield answer


@contextlib.contextmanager
def taking_turns(directory: str) -> Iterator[bool]:
    """A context that makes exports into one directory commit one after the other. It gives False if the file system has
    no locks. Raises `CheckpointError` if the other export takes too long."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    lock = FileLock(None, descriptor)
    try:
        until = time.monotonic() + _COMMIT_SECONDS
        while (mine := try_lock_alone(descriptor)) is False:
            if time.monotonic() > until:
                raise CheckpointError(f"another export has been finishing in {directory} for {_COMMIT_SECONDS:.0f} s")
            time.sleep(_COMMIT_POLL_SECONDS)
        yield mine is True
    finally:
        lock.release()


def _share(descriptor: int, path: str) -> FileLock | None:
    """Locks and takes over `descriptor`. None if there are no locks, or the path names another file by now."""
    lock = FileLock(None, descriptor)
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_REMOVAL_POLL_SECONDS)
            continue
        except OSError:
            break
        if _is_at(descriptor, path):
            return lock
        break
    lock.release()
    return None


def _open_to_lock(path: str) -> int:
    """Opens a file or folder for `try_lock_alone`. Raises OSError."""
    try:
        # NFS gives exclusive locks only to those who may write.
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise
        return os.open(path, READ)  # a folder, or not ours


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False
