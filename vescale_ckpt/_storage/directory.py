"""`Directory` is the storage of checkpoints, exports and managers; `directory_at` chooses its kind by the path.

A storage must give names in any order, files that appear whole, and reads that see all earlier writes. Its users do not
rename or lock anything themselves. The engine reads and writes large files by their paths.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath
from typing import NamedTuple, TypeVar
from urllib.parse import quote, unquote_to_bytes

from .._engine import _C
from .._engine.errors import check_space, named_system_errors, of_system
from ..errors import UntrustedCheckpointError
from . import locks, urls
from .locks import LOCK_NAME, READ, FileLock
from .siblings import in_sibling
from .use_notes import UseNote

logger = logging.getLogger(__name__)

#: Of the names of marks. They are named like temporary files of a checkpoint's metadata, so that clean-ups find them.
MARK_PREFIX = ".metadata.tmp.place."

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
BEGINNING_BYTES = 1 << 20  #: that are checked before the rest of a larger file is read
_STALE_ATTEMPTS = 3  # more, at a file that other machines keep replacing
_MOST_NAMES = 10_000  # directories that are remembered as durable
_SET_ASIDE = ".deleting"

Found = TypeVar("Found")
CheckBeginning = Callable[[bytes, int], None]  # of a file's first bytes and its size; raises if the file is unsound
IsTaken = contextlib.AbstractContextManager["bool | None"]


class Stat(NamedTuple):
    """What a storage knows about a file without reading it."""

    size: int  #: bytes
    modified_ns: int  #: when it was last written to
    identity: tuple[int, ...]  #: changes when the file is written to or replaced
    changed_ns: int  #: when its content or name was last changed
    is_file: bool
    is_folder: bool

    @classmethod
    def of(cls, found: os.stat_result) -> Stat:
        identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        is_file, is_folder = stat.S_ISREG(found.st_mode), stat.S_ISDIR(found.st_mode)
        return cls(found.st_size, found.st_mtime_ns, identity, found.st_ctime_ns, is_file, is_folder)


class Directory:
    """A directory on a file system that this machine has mounted. It need not exist. Any thread may call its methods.

    Unless a method says otherwise, it raises OSError (FileNotFoundError for a missing file), and `_C.EngineError` if it
    writes through the engine.
    """

    is_remote = False  #: whether it is in an object store

    def __init__(self, path: str) -> None:
        self.path = path  #: as messages name it, and the engine takes it

    # --- What is there

    def names(self) -> list[str]:
        """The names of files and folders, in any order."""
        return self._asked(lambda: os.listdir(self.path))

    def folders(self) -> list[str]:
        """The names of folders, without links. Empty if the directory is missing."""
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def has(self, name: str) -> bool:
        """Whether a file or folder has that name. Cheaper than `names`. Raises nothing on a file system."""
        try:
            self._asked(lambda: os.lstat(self._at(name)))
        except (OSError, ValueError):
            return False
        return True

    def stat(self, name: str = "") -> Stat:
        """The `Stat` of a file; without a name, that of `path` itself."""
        return Stat.of(self._asked(lambda: os.stat(self._at(name) if name else self.path)))

    def sizes(self) -> dict[str, int]:
        """The lengths of files, as far as they come with one request for all; a file may be missing. None on a file
        system, where to ask for one costs little."""
        return {}

    # --- Small files

    def read(self, name: str, check: CheckBeginning | None = None) -> bytes:
        """The content of a file. Raises OSError also if it is no regular file.

        `check` gets the beginning and the size of a large file before memory for the rest is allocated. Raises what
        `check` raises, and then `UntrustedCheckpointError` if the file has holes.
        """
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
        """`length` bytes from `begin` on, and the `Stat` of the file that was read. A negative `begin` counts from the
        end. Fewer bytes if the file is shorter."""
        return self._asked(lambda: self._read_range(self._at(name), begin, length))

    def _read_range(self, path: str, begin: int, length: int) -> tuple[Stat, bytes]:
        with open(os.open(path, READ), "rb", buffering=0) as file:
            found = _checked(os.fstat(file.fileno()), path)
            at = begin if begin >= 0 else max(0, found.size + begin)
            return found, os.pread(file.fileno(), min(length, max(0, found.size - at)), at)

    def write(self, name: str, content: bytes) -> None:
        """Writes a whole file, atomically and durably. Replaces a file of that name."""
        _C.commit_file(self.path, name, content)

    def commit(self, name: str, content: bytes, overwrite: bool) -> None:
        """Writes the file that makes a save the checkpoint of the directory, as `write` does. With `overwrite=False` an
        object store raises FileExistsError if there is one by now; a file system replaces it."""
        self.write(name, content)

    def check_exclusive_commits(self) -> None:
        """Raises `CheckpointError` if `commit` cannot keep what `overwrite=False` promises, as an object store without
        conditional requests: asked before anything is sent. Does nothing on a file system."""

    def remove(self, name: str) -> bool:
        """Removes a file. Returns whether it was there."""
        return _C.remove_file(self._at(name))

    def remove_all(self, names: Iterable[str]) -> None:
        """Removes files, in any order; some may be missing."""
        for name in names:
            self.remove(name)

    def add_name(self, name: str, other: str) -> None:
        """Gives a file a second name, which must be free. Raises if the storage cannot do that."""
        _C.link_file(self._at(name), self._at(other))

    # --- Whether ranks use one directory

    def leave_mark(self, name: str) -> None:
        """Makes an empty file, which must be missing before. It is not durable."""
        os.close(os.open(self._at(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def keep_mark(self, name: str) -> None:
        """Makes an empty file unless it is there, sets its time, and makes it durable."""
        path, made = self._at(name), False
        with contextlib.suppress(FileExistsError):
            self.leave_mark(name)
            made = True
        os.utime(path)
        status = os.stat(path)
        if made or (path, status.st_dev, status.st_ino) not in _durable_names:  # its maker may have died
            self.sync()
            _note_durable(path, status)

    def sees_mark(self, name: str) -> bool:
        """Whether the directory holds the file now, without what a client may have cached. Raises nothing."""
        # Each look opens the directory: then the client of a network file system asks its server about it again.
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            os.stat(name, dir_fd=descriptor)
        except OSError:
            return False
        else:
            return True
        finally:
            os.close(descriptor)

    # --- The directory itself

    def make(self) -> None:
        """Makes the directory and those above it durably, if they are missing. Raises `CheckpointError`."""
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
        """Makes the directory's own name durable, in case its maker did not. `holds_one`: whether it holds a
        checkpoint; then it is synced only once in a process."""
        # A directory without a checkpoint may have been removed and made anew by another process. On many file systems
        # it then has the same inode number.
        status = os.stat(self.path)
        if not holds_one or (self.path, status.st_dev, status.st_ino) not in _durable_names:
            _sync_name(self.path)

    def sync(self) -> None:
        """Makes the names in the directory durable."""
        _C.sync_directory(self.path)

    def check_space(self, needed: int) -> None:
        """Raises `StorageFullError` if there is no room for so many bytes. Call it within `named_errors`."""
        check_space(self.path, needed)

    # --- Others who use it

    def share(self, name: str = LOCK_NAME) -> FileLock | None:
        """A lock that keeps the directory from being removed while the file `name` is read. Without a name, it is the
        lock of a save: then the directory is made if it is missing.

        None if the storage has no locks, or there is no such file. For a save it raises `CheckpointError`.
        """
        path = self._at(name)
        return locks.share_made(path, self.make) if name == LOCK_NAME else locks.share(path)

    def alone(self, held: Iterable[str], tested: Iterable[str]) -> IsTaken:
        """A context that gives whether nobody else uses the directory; None if the storage has no locks. While it
        lasts, no new use begins. `held`: the files that loads lock; `tested`: those that saves lock."""
        return locks.alone(self.path, held, tested)

    # --- Those who name its data files from elsewhere, as delta saves do

    def use(self, mark: str) -> FileLock | UseNote | None:
        """Notes that a save may come to name files of the directory, which has the file `mark`. None if there is no
        such file, if somebody is removing files there, or on a file system without locks, where the mark's time
        counts."""
        return self.share(mark)

    def unused(self, mark: str, grace_seconds: float) -> contextlib.AbstractContextManager[bool]:
        """A context that gives whether no save may come to name files of the directory; none begins to while it lasts.
        `grace_seconds`: after which users count as dead where there are no locks. Raises OSError."""
        return locks.abandoned(self._at(mark), grace_seconds)

    # --- Folders in it

    def set_aside(self, name: str, first: str) -> None:
        """Begins the removal of a folder: takes away its name, at once. `first`: see `erase_set_aside`."""
        # By a rename: at every instant the folder is whole under its name, or has lost the name.
        os.rename(self._at(name), self._at(name + _SET_ASIDE))

    def erase_set_aside(self, is_one: Callable[[str], bool], first: str) -> None:
        """Removes all folders that were set aside, by any process, and whose names satisfy `is_one`. The file `first`
        is removed before all others, durably: an interrupted removal leaves a whole folder or one without `first`.
        Failures are logged."""
        found = [name for name in self.folders() if name.endswith(_SET_ASIDE)]
        found = [self._at(name) for name in found if is_one(name.removesuffix(_SET_ASIDE))]
        if not found:
            return
        try:
            self.sync()  # else a crash might bring back the old name of a half erased folder
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
                if error.errno != errno.ENOENT:  # another process erases it, too
                    logger.warning("cannot remove %s now: %s", path, error)

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _asked(self, look: Callable[[], Found]) -> Found:
        """The result of `look`, which raises OSError. The client of a network file system may say that a file is
        missing which another machine has made, or that one is stale which another machine has replaced. Then `look` is
        called again, after the client was made to ask its server."""
        attempts = {errno.ENOENT: 1, errno.ESTALE: _STALE_ATTEMPTS}
        while True:
            try:
                return look()
            except OSError as error:
                left = attempts.get(error.errno or 0, 0)
                if not left:
                    raise
                attempts[error.errno or 0] = left - 1
                _ask_server(self.path)


def _ask_server(directory: str) -> None:
    """Opens the directory: then the client of a network file system asks its server about it again."""
    with contextlib.suppress(OSError):
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def directory_at(path: str) -> Directory:
    """The directory at a path that `checkpoint_path` returned."""
    if urls.is_url(path):
        from .object_store import ObjectDirectory  # an extra, imported by those who need it

        return ObjectDirectory(path)
    return Directory(path)


def stat_of(path: str) -> Stat:
    """The `Stat` of one file or directory. Raises OSError."""
    return directory_at(path).stat()


def is_folder(path: str) -> bool:
    """Whether there is a folder. Raises `CheckpointError` if an object store cannot tell."""
    found = _stat_if_there(path)
    return found is not None and found.is_folder


def is_file(path: str) -> bool:
    """Whether there is a file. Raises `CheckpointError` if an object store cannot tell."""
    found = _stat_if_there(path)
    return found is not None and found.is_file


def _stat_if_there(path: str) -> Stat | None:
    try:
        return stat_of(path)
    except OSError as error:
        if urls.is_url(path) and not isinstance(error, FileNotFoundError):
            raise of_system(error, path) from error
        return None


def _checked(status: os.stat_result, path: str) -> Stat:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return Stat.of(status)


def _read_some(file: io.FileIO, most: int, path: str) -> bytes:
    """The next bytes of a file; none at its end. A system that says that a read would block makes Python return None,
    and a buffered file fewer bytes: a network file system may say so, as files are opened not to wait for a FIFO."""
    found = file.read(most)
    if found is None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)
    return found


def _check_no_hole(descriptor: int, size: int, path: str) -> None:
    """Raises if a large file has holes: its size may exceed what was ever written to it."""
    try:
        hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
    except OSError:  # the file system does not report holes
        hole = size
    if hole < size:
        raise UntrustedCheckpointError(
            f"{path} is no sound metadata: it claims {size:,} bytes, but has a hole at {hole:,}", path=path
        )


_durable_names: set[tuple[str, int, int]] = set()  # synced paths, with device and inode


def _sync_name(directory: str) -> None:
    """Syncs the directory above this one. If that may not be opened, syncs this one: for a new directory, most file
    systems write its name, too."""
    try:
        _C.sync_directory(os.path.dirname(directory.rstrip(os.sep) or os.sep))
    except _C.EngineError as error:
        if error.errno not in (errno.EACCES, errno.EPERM):
            raise
        _C.sync_directory(directory)
    _note_durable(directory, os.stat(directory))


def _note_durable(path: str, status: os.stat_result) -> None:
    if len(_durable_names) >= _MOST_NAMES:
        _durable_names.clear()
    _durable_names.add((path, status.st_dev, status.st_ino))


def checkpoint_path(path: str | os.PathLike[str]) -> str:
    """`path` as an absolute path, because the working directory may change while a save runs, or as the URL of an
    object store. Raises ValueError if it is none of these, nor a `file://` URL, and `CheckpointError` if the package
    for object stores is missing."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise ValueError(f"a checkpoint's path is text, not {text!r}")
    if not text:
        raise ValueError("a path is wanted, not an empty text (the working directory is '.')")
    if "\0" in text:
        raise ValueError(f"{text!r} is no path")
    urls.check_no_secret(text)
    if urls.is_url(text):
        from . import object_clients

        object_clients.obstore()
        return urls.normal(text)
    if (url := _URL.match(text)) is not None:
        text = _path_of_url(text, url[1].lower())
    if os.path.isabs(text):
        return text
    try:
        joined = os.path.join(os.getcwd(), text)
    except OSError as error:
        raise ValueError(f"{text}: the working directory is gone, so give an absolute path: {error}") from error
    # A path with ".." is not normalized: after a link, ".." means the directory above the link's target.
    return joined if os.pardir in text.split(os.sep) else os.path.normpath(joined)


def _path_of_url(text: str, scheme: str) -> str:
    """The path of a URL. Raises ValueError with advice for every part of a URL that it cannot honour."""
    if scheme in urls.SCHEMES:
        # What went through `pathlib.Path` has one slash; or the scheme has capital letters.
        raise ValueError(f"{text}: write {scheme}://{text[len(scheme) + 1 :].lstrip('/')}, as text")
    if scheme != "file":
        raise ValueError(
            f"{text}: no storage for {scheme}:// is built in; local paths, file:// and "
            f"{', '.join(f'{name}://' for name in urls.SCHEMES)} are"
        )
    if not text[len("file:") :].startswith("//"):
        # A URL that went through `pathlib.Path` looks like this.
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
    """A data file's name as metadata gives it; raises `UntrustedCheckpointError` if it would leave the directory,
    other than to a data file of a checkpoint beside it."""
    if not isinstance(name, str) or not name or "\0" in name or not name.isprintable():
        raise UntrustedCheckpointError(f"{key}: metadata gives {name!r} as the name of a data file", key=key)
    path = PurePosixPath(name)
    if (path.is_absolute() or ".." in path.parts) and in_sibling(name) is None:
        raise UntrustedCheckpointError(
            f"{key}: metadata places it in {name!r}, outside of the checkpoint's directory", key=key
        )
    return name
