"""Locks local files and folders by `flock` for the processes that write, read or remove them.

The kernel releases the locks of a process that ends. Some file systems have no locks, and some have locks that other
machines do not see. There the functions return None, unless a process of this machine has locked the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator

from .._engine.live_objects import LiveObjects
from ..errors import CheckpointError
from .storage import LOCK_NAME, Lease

READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  #: without O_NONBLOCK, opening a FIFO would wait for a writer
_REMOVAL_SECONDS = 10.0  # waits so long for the removal of a directory, which holds the locks for one rename
_REMOVAL_POLL_SECONDS = 0.005
_COMMIT_SECONDS = 60.0  # waits so long for the commit of another export, which takes some renames and syncs
_COMMIT_POLL_SECONDS = 0.02

_LOCAL_LOCKS = frozenset(
    {"fuse", "fuseblk", "9p", "virtiofs", "beegfs", "gpfs", "vboxsf", "afs", "orangefs", "pvfs2", "cifs", "smb3"}
)
#: The daemons of these file systems ask a server for locks.
_FUSE_WITH_LOCKS = frozenset({"fuse.juicefs", "fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs"})
_MOUNTS = "/proc/self/mountinfo"


class FileLock(Lease):
    """Marks a file as in use, until it is released or the process dies.

    `directory`: where the save writes the file. None: `drop_dead_locks` does not release the lock.
    """

    def __init__(self, directory: str | None, descriptor: int) -> None:
        self.directory = directory
        self._descriptor = descriptor
        _held.add(self)

    def release(self) -> None:
        _held.discard(self)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    __del__ = release


_held: LiveObjects[FileLock] = LiveObjects()  # the locks of this process


def _release_after_fork() -> None:
    for held in _held:  # the locks are the parent's, and must end with it
        held.release()


os.register_at_fork(after_in_child=_release_after_fork)


class TakenForOrphanError(CheckpointError):
    """The clean-up of another writer removed a file before it was locked."""


def lock(path: str) -> FileLock | None:
    """Marks a file or folder as being written. Returns None if the file system has no locks. Raises
    `TakenForOrphanError` if another process removed it, `CheckpointError` if it cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise CheckpointError(f"cannot open {path} to lock it: {error}", path=path, errno=error.errno) from error
        raise TakenForOrphanError(f"{path} was removed while it was written: {error}", path=path) from error
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
        raise TakenForOrphanError(f"{path} was taken for an orphan by another save in this directory", path=path)
    return FileLock(os.path.dirname(os.path.abspath(path)), descriptor)


def drop_dead_locks(directory: str) -> None:
    """Releases the locks of this process's failed saves into the directory. The traceback of such a save's error keeps
    its writer and so its lock alive. Every rank calls it, because the coordinator cleans up for all."""
    if any(held.directory == os.path.abspath(directory) for held in _held):
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
def lock_if_abandoned(marked: str, grace_seconds: float, others: Iterable[str] = ()) -> Iterator[bool]:
    """A context that gives whether the writer of a file or folder is gone. The writer locks `marked` while it writes.
    The file stays locked within the context: a writer that has just made it, and locks it now, sees that it was taken.

    Without locks in the file system, the context gives whether `marked` and `others` were not modified for
    `grace_seconds`.
    Raises OSError if `marked` cannot be opened.
    """
    descriptor = _open_to_lock(marked)
    try:
        alone = try_lock_alone(descriptor)
        if alone is None:
            alone = are_older([marked, *others], grace_seconds)
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
        except FileNotFoundError:  # another process has removed the directory since
            continue
        except OSError as error:
            raise CheckpointError(f"cannot make {path}: {error}", path=path, errno=error.errno) from error
        shared = _share(descriptor, path)
        if shared is not None or os.path.exists(path):
            return shared
    directory = os.path.dirname(path)
    raise CheckpointError(f"{directory} is being removed by another process", path=directory)


@contextlib.contextmanager
def lock_exclusively(directory: str, held_names: Iterable[str], tested_names: Iterable[str]) -> Iterator[bool | None]:
    """A context that gives whether no process saves into the directory or loads from it. While it lasts, no save that
    locks the directory begins, and no load that locks one of `held_names`. Each file of `tested_names` is locked for an
    instant only: they may be more files than a process may open.

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
def serialize_commits(directory: str) -> Iterator[bool]:
    """A context within which no other export commits into the directory. It gives False if the file system has no
    locks. Raises `CheckpointError` if the other export takes too long."""
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
        return os.open(path, READ)  # it is a folder, or this process may not write to it


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


# --- The age of files


def are_older(paths: Iterable[str], grace_seconds: float) -> bool:
    """Whether no file of `paths`, which lie in one directory, was modified for so long. Raises OSError."""
    status = {path: os.stat(path).st_mtime for path in paths}
    directory = os.path.dirname(os.path.abspath(next(iter(status))))
    return seconds_since(max(status.values()), directory, grace_seconds) >= grace_seconds


def seconds_since(modified: float, directory: str, enough: float) -> float:
    """Returns the seconds since the time `modified` of a file system's clock. The result is exact from `enough` on;
    below that only this machine's clock is asked. `directory`: a file is made in it for a moment, to learn the file
    system's time.

    Files on a shared disk have the time of its server or of the machine that wrote them. A machine whose clock is ahead
    would take the files of a running save for old ones. If no file can be made, this machine's clock counts.
    """
    here = time.time() - modified
    if here < enough:
        return here
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return min(here, os.fstat(file.fileno()).st_mtime - modified)
    except OSError:
        return here


# --- Which locks other machines see


def locks_reach_others(status: os.stat_result) -> bool:
    """Whether every machine that has mounted the file system sees a lock on this file or folder.

    True for file systems that one machine alone mounts, and for unknown types.
    """
    kind, options = _mount_of(status.st_dev)
    if kind in ("nfs", "nfs4"):
        # The server has the locks of files. Locks of folders stay with the client.
        has_server_locks = {"nolock", "local_lock=all", "local_lock=flock"}.isdisjoint(options)
        return has_server_locks and stat.S_ISREG(status.st_mode)
    if kind == "lustre":
        return "flock" in options
    if kind.startswith("fuse."):
        return kind in _FUSE_WITH_LOCKS
    return kind not in _LOCAL_LOCKS


@functools.lru_cache(maxsize=256)
def _mount_of(device: int) -> tuple[str, frozenset[str]]:
    """Type and options of the mounted file system with this device number."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                if before.split(" ", 3)[2] == wanted:
                    kind, _, options = after.rstrip("\n").split(" ", 2)
                    return kind, frozenset(options.split(","))
    except (OSError, ValueError, IndexError):
        pass
    return "", frozenset()
