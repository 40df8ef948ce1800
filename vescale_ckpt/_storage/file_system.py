"""`FileSystem` keeps checkpoints in a folder of a mounted file system for `Storage`."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from .._engine import _C
from .._engine.engine_errors import named_system_errors
from ..errors import CheckpointError, StorageFullError, UntrustedCheckpointError
from . import locks
from .locks import READ
from .storage import BEGINNING_BYTES, LOCK_NAME, CheckBeginning, Lease, Stat, Storage

logger = logging.getLogger(__name__)

_STALE_ATTEMPTS = 3  # other machines may keep replacing a file
_MOST_NAMES = 10_000  # this many directories are remembered as durable
_SET_ASIDE = ".deleting"
# These errors mean that there is no such file, or nothing that could be a file of a checkpoint.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ANSWERS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)

Found = TypeVar("Found")


class FileSystem(Storage):
    """A folder on a file system that this machine has mounted."""

    by_requests = can_be_away = rereads = False
    has_locks = renames = True

    # --- What is there

    def names(self) -> list[str]:
        return self._asked(lambda: os.listdir(self.path))

    def folders(self) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def has(self, name: str) -> bool:
        try:
            self._asked(lambda: os.lstat(self._at(name)))
        except (OSError, ValueError):
            return False
        return True

    def stat(self, name: str = "") -> Stat:
        return Stat.of(self._asked(lambda: os.stat(self._at(name) if name else self.path)))

    def age(self, modified_ns: int, enough: float) -> float:
        return locks.seconds_since(modified_ns / 1e9, self.path, enough)

    def is_inconclusive(self, number: int) -> bool:
        return number not in _ANSWERS

    # --- Reads

    def read(self, name: str, check: CheckBeginning | None = None) -> bytes:
        return self._asked(lambda: self._read(self._at(name), check))

    def _read(self, path: str, check: CheckBeginning | None) -> bytes:
        with open(os.open(path, READ), "rb", buffering=0) as file:
            size = _checked(os.fstat(file.fileno()), path).size
            pieces = []
            if check is not None and size > BEGINNING_BYTES:
                pieces.append(_read_some(file, BEGINNING_BYTES, path))
                check(pieces[0], size)
                _check_no_hole(file.fileno(), size, path)
            while piece := _read_some(file, max(1, size - sum(map(len, pieces))), path):
                pieces.append(piece)
            return b"".join(pieces)

    def read_range(self, name: str, begin: int, length: int) -> tuple[Stat, bytes]:
        return self._asked(lambda: self._read_range(self._at(name), begin, length))

    def _read_range(self, path: str, begin: int, length: int) -> tuple[Stat, bytes]:
        with open(os.open(path, READ), "rb", buffering=0) as file:
            found = _checked(os.fstat(file.fileno()), path)
            at = begin if begin >= 0 else max(0, found.size + begin)
            return found, os.pread(file.fileno(), min(length, max(0, found.size - at)), at)

    # --- Writes

    def make(self) -> None:
        if os.path.isdir(self.path):
            return
        made = [self.path]
        while (above := os.path.dirname(made[-1])) != made[-1] and not os.path.isdir(above):
            made.append(above)
        with named_system_errors(self.path):
            try:
                os.makedirs(self.path, exist_ok=True)
            except OSError as error:
                if error.errno in _FULL:
                    raise
                above = next((level for level in (*made, above) if os.path.lexists(level)), above)
                why = error.strerror if os.path.isdir(above) else f"{above} is no folder"
                raise CheckpointError(
                    f"the folder {self.path} cannot be made: {why}", path=self.path, errno=error.errno
                ) from error
            try:
                for level in reversed(made):
                    _sync_name(level)
            except BaseException:
                for level in made:  # so that the next call makes and syncs them again
                    with contextlib.suppress(OSError):
                        os.rmdir(level)
                raise

    def make_durable(self, holds_one: bool) -> None:
        """Makes the directory's own name durable, in case its maker did not. `holds_one`: whether the directory holds a
        checkpoint; then it is synced only once in a process."""
        # Another process may have removed and remade a directory without a checkpoint. On many file systems the new one
        # has the same inode number.
        status = os.stat(self.path)
        if not holds_one or (self.path, status.st_dev, status.st_ino) not in _durable_names:
            _sync_name(self.path)

    def sync(self, name: str = "") -> None:
        if name:
            _C.write_head(self._at(name), b"", True)
        else:
            _C.sync_directory(self.path)

    def check_space(self, needed: int) -> None:
        free = _C.free_bytes(self.path)
        if free is not None and free < needed:
            raise StorageFullError(self.path, needed, free)

    def write(self, name: str, content: bytes) -> None:
        _C.commit_file(self.path, name, content)

    def pending(self, name: str) -> _C.PendingFile:
        return _C.PendingFile(self.path, name)

    def commit(self, name: str, content: bytes | _C.PendingFile, overwrite: bool) -> None:
        self.make_durable(holds_one=self.has(name))
        with contextlib.nullcontext() if overwrite else as_existing(self._at(name)):
            if isinstance(content, bytes):
                _C.commit_file(self.path, name, content, overwrite)
            else:
                content.commit(overwrite)

    def check_exclusive_commits(self) -> None:
        """Does nothing: a file system that has hard links keeps the promise, and on others a commit looks first."""

    # --- Removals

    def remove(self, name: str) -> bool:
        return _C.remove_file(self._at(name))

    def remove_folder(self, name: str) -> None:
        path = self._at(name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            _C.remove_file(path)

    def rename(self, name: str, to: str) -> None:
        _C.rename_file(self._at(name), self._at(to))

    def set_aside(self, name: str, first: str) -> None:
        # With a rename the folder is whole under its name at every instant, or has lost the name.
        os.rename(self._at(name), self._at(name + _SET_ASIDE))

    def erase_set_aside(self, is_one: Callable[[str], bool], first: str) -> None:
        found = [name for name in self.folders() if name.endswith(_SET_ASIDE)]
        found = [self._at(name) for name in found if is_one(name.removesuffix(_SET_ASIDE))]
        if not found:
            return
        try:
            self.sync()  # a crash before it might bring back the old name of a half erased folder
        except _C.EngineError as error:
            logger.warning("cannot remove %s now: %s", ", ".join(found), error)
            return
        for path in found:
            try:
                if os.path.lexists(os.path.join(path, first)):
                    os.unlink(os.path.join(path, first))
                    _C.sync_directory(path)
                shutil.rmtree(path)
            except (OSError, _C.EngineError) as error:
                if error.errno != errno.ENOENT:  # ENOENT: another process erases the folder, too
                    logger.warning("cannot remove %s now: %s", path, error)

    # --- Whether ranks use one directory

    def make_marker(self, name: str) -> None:
        os.close(os.open(self._at(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    # --- Others who use it

    def lock(self, name: str) -> Lease:
        return locks.lock(self._at(name)) or Lease()

    @contextlib.contextmanager
    def lock_if_abandoned(self, names: Sequence[str], locked: str | None, grace_seconds: float) -> Iterator[bool]:
        others = [self._at(name) for name in names if name != locked]
        if locked is not None:
            with locks.lock_if_abandoned(self._at(locked), grace_seconds, others) as is_over:
                yield is_over
        else:
            yield not grace_seconds or locks.are_older(others, grace_seconds)

    def share(self, name: str = LOCK_NAME) -> Lease:
        path = self._at(name)
        return (locks.share_made(path, self.make) if name == LOCK_NAME else locks.share(path)) or Lease()

    def lock_exclusively(self, held: Iterable[str], tested: Iterable[str]) -> AbstractContextManager[bool | None]:
        return locks.lock_exclusively(self.path, held, tested)

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _asked(self, look: Callable[[], Found]) -> Found:
        """Returns the result of `look`, which may raise OSError. The client of a network file system may report a file
        as missing that another machine has made, or as stale that another machine has replaced. Then the directory is
        opened, which makes the client ask its server again, and `look` is called again."""
        attempts = {errno.ENOENT: 1, errno.ESTALE: _STALE_ATTEMPTS}
        while True:
            try:
                return look()
            except OSError as error:
                left = attempts.get(error.errno or 0, 0)
                if not left:
                    raise
                attempts[error.errno or 0] = left - 1
                with contextlib.suppress(OSError):
                    os.close(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


@contextlib.contextmanager
def as_existing(path: str) -> Iterator[None]:
    """Raises FileExistsError for an error of the engine which says that `path` exists."""
    try:
        yield
    except _C.EngineError as error:
        if error.errno != errno.EEXIST:
            raise
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None


def _checked(status: os.stat_result, path: str) -> Stat:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return Stat.of(status)


def _read_some(file: io.FileIO, most: int, path: str) -> bytes:
    """Returns the next bytes of a file; none at its end. Raises BlockingIOError if the read would block: a network file
    system may report that for a file that was opened with O_NONBLOCK, and Python then returns None."""
    found = file.read(most)
    if found is None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)
    return found


def _check_no_hole(descriptor: int, size: int, path: str) -> None:
    """Raises if a large file has holes: its size may exceed what was ever written to it."""
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
    except OSError:  # the file system does not report holes
        hole = size
    os.lseek(descriptor, position, os.SEEK_SET)  # the caller reads on from there
    if hole < size:
        raise UntrustedCheckpointError(
            f"{path} is no sound metadata: its length is {size:,} bytes, but it has a hole at {hole:,}", path=path
        )


_durable_names: set[tuple[str, int, int]] = set()  # path, device and inode of each synced directory


def _sync_name(directory: str) -> None:
    """Syncs the directory above this one. If this process may not open that, syncs this one: most file systems then
    write the name of a new directory, too."""
    try:
        _C.sync_directory(os.path.dirname(directory.rstrip(os.sep) or os.sep))
    except _C.EngineError as error:
        if error.errno not in (errno.EACCES, errno.EPERM):
            raise
        _C.sync_directory(directory)
    if len(_durable_names) >= _MOST_NAMES:
        _durable_names.clear()
    status = os.stat(directory)
    _durable_names.add((directory, status.st_dev, status.st_ino))
