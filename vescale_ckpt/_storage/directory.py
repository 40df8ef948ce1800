"""A directory of a checkpoint, an export or a manager: what everything above asks of a storage, and where it is local.

A storage needs to give: names in any order, files that appear whole, and writes that are seen by reads that follow. Its
users rename nothing and lock nothing themselves. Large files the engine reads and writes, by their paths.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from .._engine import _C
from .._engine.errors import named_system_errors
from ..errors import UntrustedCheckpointError
from . import locks
from .locks import LOCK_NAME, READ, FileLock

logger = logging.getLogger(__name__)

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_BEGINNING = 1 << 20  # bytes that are looked at before all of a larger file is read
_MOST_NAMES = 10_000  # of directories that are remembered as durable
_SET_ASIDE = ".deleting"

CheckBeginning = Callable[[bytes, int], None]  # of a file's first bytes, and how long it is; raises if it is unsound
IsTaken = contextlib.AbstractContextManager["bool | None"]


class Stat(NamedTuple):
    """What a storage knows of a file without reading it."""

    size: int  #: bytes
    modified_ns: int  #: when it was last written to
    identity: tuple[int, ...]  #: changes when it is written to, and when another takes its name
    changed_ns: int  #: when that, or how it is named, changed last
    is_file: bool
    is_folder: bool

    @classmethod
    def of(cls, found: os.stat_result) -> Stat:
        identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        is_file, is_folder = stat.S_ISREG(found.st_mode), stat.S_ISDIR(found.st_mode)
        return cls(found.st_size, found.st_mtime_ns, identity, found.st_ctime_ns, is_file, is_folder)


class Directory(ABC):
    """A directory, which need not exist. Unless they say something else, methods raise OSError, FileNotFoundError for
    what is missing, and `_C.EngineError` where the engine writes. They may be called from any thread."""

    path: str  #: as messages name it, and the engine takes it

    # --- What is there

    @abstractmethod
    def names(self) -> list[str]:
        """Of files and folders, in no order."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Names of folders, links left out. None if the directory is missing."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is something of that name. Cheaper than `names`. Raises nothing."""

    @abstractmethod
    def stat(self, name: str = "") -> Stat:
        """Of a file; without a name, of what is at `path`."""

    # --- Small files

    @abstractmethod
    def read(self, name: str, check: CheckBeginning | None = None) -> bytes:
        """All of a file. Raises OSError for what is no regular file, too.

        `check` looks at the beginning of a large file before memory is taken for the rest, and at how long it claims to
        be. Raises what `check` raises, and `UntrustedCheckpointError` if the file claims bytes that nobody wrote.
        """

    @abstractmethod
    def read_range(self, name: str, begin: int, length: int) -> tuple[Stat, bytes]:
        """The bytes from `begin` on, which counts from the end where it is negative, and what the file was that they
        are of. Fewer bytes where the file is shorter."""

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Writes a whole file, in place of one that has the name. It appears all at once, and is durable."""

    @abstractmethod
    def remove(self, name: str) -> bool:
        """Removes a file. Whether there was one."""

    @abstractmethod
    def add_name(self, name: str, other: str) -> None:
        """Gives the content of a file a second name, which is free. Where that is not possible, raises."""

    # --- The directory itself

    @abstractmethod
    def make(self) -> None:
        """Makes it if it is missing, durably, with the directories above it. Raises `CheckpointError`."""

    @abstractmethod
    def make_durable(self, holds_one: bool) -> None:
        """Makes durable that the directory is there: whoever made it may not have. Once in a process for each directory
        that holds a checkpoint (`holds_one`)."""

    @abstractmethod
    def sync(self) -> None:
        """Makes durable which names there are."""

    # --- Others who use it

    @abstractmethod
    def share(self, name: str = LOCK_NAME) -> FileLock | None:
        """Keeps the directory from being removed while the file `name` is read; without a name, while a save goes on,
        for which it is made if it is missing.

        None if nobody can tell who uses what, or there is no such file. For a save raises `CheckpointError`.
        """

    @abstractmethod
    def alone(self, held: Iterable[str], tested: Iterable[str]) -> IsTaken:
        """A context: whether nobody else uses the directory, told by the files that loads (`held`) and saves (`tested`)
        lock. Nobody begins to as long as it lasts. None: nobody can tell."""

    # --- Folders in it

    @abstractmethod
    def set_aside(self, name: str) -> None:
        """Begins to remove a folder: nobody finds anything under its name any more."""

    @abstractmethod
    def erase_set_aside(self, is_one: Callable[[str], bool], first: str) -> None:
        """Removes the folders that were set aside, by anybody, with names for which `is_one`: the file `first` goes
        before all others, durably. So what is interrupted is a whole folder or one without `first`. Failures are
        logged."""


def directory_at(path: str) -> Directory:
    """The directory that a checked path names (see `local_path`)."""
    return LocalDirectory(path)


def stat_of(path: str) -> Stat:
    """Of one file or directory. Raises OSError."""
    return directory_at(path).stat()


def is_folder(path: str) -> bool:
    try:
        return stat_of(path).is_folder
    except OSError:
        return False


def is_file(path: str) -> bool:
    try:
        return stat_of(path).is_file
    except OSError:
        return False


class LocalDirectory(Directory):
    """On a file system that this machine has mounted."""

    def __init__(self, path: str) -> None:
        self.path = path

    def names(self) -> list[str]:
        return os.listdir(self.path)

    def folders(self) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def has(self, name: str) -> bool:
        return os.path.lexists(self._at(name))

    def stat(self, name: str = "") -> Stat:
        return Stat.of(os.stat(self._at(name) if name else self.path))

    def read(self, name: str, check: CheckBeginning | None = None) -> bytes:
        path = self._at(name)
        with open(os.open(path, READ), "rb") as file:
            size = _checked(os.fstat(file.fileno()), path).size
            if check is not None and size > _BEGINNING:
                check(file.read(_BEGINNING), size)
                _check_no_hole(file.fileno(), size, path)
                file.seek(0)
            return file.read()

    def read_range(self, name: str, begin: int, length: int) -> tuple[Stat, bytes]:
        path = self._at(name)
        with open(os.open(path, READ), "rb", buffering=0) as file:
            found = _checked(os.fstat(file.fileno()), path)
            at = begin if begin >= 0 else max(0, found.size + begin)
            return found, os.pread(file.fileno(), min(length, max(0, found.size - at)), at)

    def write(self, name: str, content: bytes) -> None:
        _C.commit_file(self.path, name, content)

    def remove(self, name: str) -> bool:
        return _C.remove_file(self._at(name))

    def add_name(self, name: str, other: str) -> None:
        _C.link_file(self._at(name), self._at(other))

    def make(self) -> None:
        if os.path.isdir(self.path):
            return
        made = [self.path]
        while (above := os.path.dirname(made[-1])) != made[-1] and not os.path.isdir(above):
            made.append(above)
        with named_system_errors(self.path):
            os.makedirs(self.path, exist_ok=True)
            for level in reversed(made):
                _sync_name(level)

    def make_durable(self, holds_one: bool) -> None:
        # One that holds none may have been removed and made anew since, by anybody: it has the same number then on many
        # file systems.
        status = os.stat(self.path)
        if not holds_one or (self.path, status.st_dev, status.st_ino) not in _durable_names:
            _sync_name(self.path)

    def sync(self) -> None:
        _C.sync_directory(self.path)

    def share(self, name: str = LOCK_NAME) -> FileLock | None:
        path = self._at(name)
        return locks.share_made(path, self.make) if name == LOCK_NAME else locks.share(path)

    def alone(self, held: Iterable[str], tested: Iterable[str]) -> IsTaken:
        return locks.alone(self.path, held, tested)

    def set_aside(self, name: str) -> None:
        # A rename: what is under the name is whole or not there, whenever this ends.
        os.rename(self._at(name), self._at(name + _SET_ASIDE))

    def erase_set_aside(self, is_one: Callable[[str], bool], first: str) -> None:
        found = [name for name in self.folders() if name.endswith(_SET_ASIDE)]
        found = [self._at(name) for name in found if is_one(name.removesuffix(_SET_ASIDE))]
        if not found:
            return
        try:
            self.sync()  # or a crash might bring the old name back, to what is half erased
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
                if error.errno != errno.ENOENT:  # two who erase the same
                    logger.warning("cannot remove %s now: %s", path, error)

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)


def _checked(status: os.stat_result, path: str) -> Stat:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return Stat.of(status)


def _check_no_hole(descriptor: int, size: int, path: str) -> None:
    """That a file that claims to be large is not just that: it may be longer than what was ever written to it."""
    try:
        hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
    except OSError:  # no such question here
        hole = size
    if hole < size:
        raise UntrustedCheckpointError(
            f"{path} is no sound metadata: it claims {size:,} bytes, but has a hole at {hole:,}", path=path
        )


_durable_names: set[tuple[str, int, int]] = set()  # paths that were synced, and what they were


def _sync_name(directory: str) -> None:
    """Syncs the directory above this one. Where that may not be opened, this one: of one that is new, most file systems
    write the name, too."""
    try:
        _C.sync_directory(os.path.dirname(directory.rstrip(os.sep) or os.sep))
    except _C.EngineError as error:
        if error.errno not in (errno.EACCES, errno.EPERM):
            raise
        _C.sync_directory(directory)
    status = os.stat(directory)
    if len(_durable_names) >= _MOST_NAMES:
        _durable_names.clear()
    _durable_names.add((directory, status.st_dev, status.st_ino))


def local_path(path: str | os.PathLike[str]) -> str:
    """The file or directory that `path` names, as an absolute path: the working directory may change later, while a
    save goes on. Raises ValueError for what is no local path or `file://` URL."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise ValueError(f"a checkpoint's path is text, not {text!r}")
    if not text:
        raise ValueError("a path is wanted, not an empty text (the working directory is '.')")
    if "\0" in text:
        raise ValueError(f"{text!r} is no path")
    if (url := _URL.match(text)) is not None:
        text = _path_of_url(text, url[1].lower())
    if os.path.isabs(text):
        return text
    try:
        joined = os.path.join(os.getcwd(), text)
    except OSError as error:
        raise ValueError(f"{text}: the working directory is gone, so give an absolute path: {error}") from error
    # Not where a link may stand before "..": that of a link's target is meant.
    return joined if os.pardir in text.split(os.sep) else os.path.normpath(joined)


def _path_of_url(text: str, scheme: str) -> str:
    """Of a URL all parts count, or it is refused with what to write in its place."""
    if scheme != "file":
        raise ValueError(f"{text}: no storage for {scheme}:// is built in; local paths and file:// are")
    if not text[len("file:") :].startswith("//"):
        # What became of a URL as a `Path`, perhaps.
        raise ValueError(f"{text}: write file://{text[len('file:') :]}, as text, or the path alone")
    host, slash, rest = text[len("file://") :].partition("/")
    if host.lower() not in ("", "localhost"):
        raise ValueError(
            f"{text}: a file:// URL names {host!r} as a host here, not as a folder: write the path alone, {host}{slash}"
            f"{rest}, or file:// and an absolute path"
        )
    for mark in "?#":
        if mark in host + rest:
            raise ValueError(
                f"{text}: in a URL {mark!r} does not belong to the path: write the path alone, or {quote(mark)} for it"
            )
    path = os.fsdecode(unquote_to_bytes(slash + rest))
    if "\0" in path or not path:
        raise ValueError(f"{text} names no path")
    return path


def check_relative(name: object, key: str) -> str:
    """A data file's name as metadata gives it; raises `UntrustedCheckpointError` if it would leave the directory."""
    if not isinstance(name, str) or not name or "\0" in name or not name.isprintable():
        raise UntrustedCheckpointError(f"{key}: metadata gives {name!r} as the name of a data file", key=key)
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise UntrustedCheckpointError(
            f"{key}: metadata places it in {name!r}, outside of the checkpoint's directory", key=key
        )
    return name
