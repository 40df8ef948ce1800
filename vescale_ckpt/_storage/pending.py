"""Writes files and folders under temporary names and renames them when complete, for exports and conversions."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from .._engine import _C
from .._engine.engine_errors import named_errors, named_system_errors
from . import locks, orphans
from .file_system import FileSystem, as_existing
from .open_storage import storage_at
from .orphans import Orphan
from .storage import Lease

logger = logging.getLogger(__name__)

Made = TypeVar("Made")
_TEMPORARY = re.compile(r"\.tmp\.\d+\.\d+(\.[0-9a-f]{8})?")  # csrc/io/commit.h appends the machine
_ASIDE, _COPY = ".old", ".copy"  # they stand between a folder's own name and the temporary ending
_ATTEMPTS = 3  # a clean-up of another process may remove a new file before it is locked
_serial = itertools.count()


def make_locked(make: Callable[[], tuple[str, Made]]) -> tuple[Made, Lease]:
    """Makes a file or folder and locks it. `make` returns its path and an object for the caller. It is called again,
    for another name, if the clean-up of another writer removes the file before it is locked."""
    for attempts_left in range(_ATTEMPTS - 1, -1, -1):
        path, made = make()
        try:
            lock = storage_at(os.path.dirname(path)).lock(os.path.basename(path))
            break
        except locks.TakenForOrphanError:
            del made  # closes its files now: the error's traceback would keep them open
            if not attempts_left:
                raise
    return made, lock


class Pending:
    """The files that one writer makes, or one folder. The first path is locked while they are written. Its lock counts
    for all of them.

    As a context, it removes at its end all paths that were not committed.
    """

    def __init__(self, directory: str) -> None:
        storage_at(directory).check_mounted(
            "a file or folder that is written under another name first, and renamed,",
            "Write it to a local path. A checkpoint of DCP's layout is copied from there (vescale-ckpt copy)",
        )
        self.directory = directory
        self.storage = FileSystem(directory)
        self.paths: list[str] = []  #: the paths that are not committed yet
        self._lock = Lease()

    def begin(self, make: Callable[[], tuple[str, Made]]) -> Made:
        """Makes the first file and locks it, as `make_locked` does."""

        def noted() -> tuple[str, Made]:
            path, made = make()
            self.paths = [path]
            return path, made

        made, self._lock = make_locked(noted)
        return made

    def give_names(self, names: Sequence[str], replace: bool) -> None:
        """Renames the files, without a sync. After an error, too, `paths` has the current paths. Without `replace`
        raises FileExistsError if there is a file of such a name."""
        for number, name in enumerate(names):
            path = os.path.join(self.directory, name)
            with as_existing(path):
                (_C.rename_file if replace else _C.rename_if_free)(self.paths[number], path)
            self.paths[number] = path

    def committed(self) -> None:
        """Notes that the files belong to the directory now."""
        self.paths = []

    def discard(self) -> None:
        """Removes the paths that were not committed. May be called again."""
        try:
            for path in reversed(self.paths):  # the locked path comes last
                with contextlib.suppress(_C.EngineError):
                    self._remove(path)
        finally:
            self.paths = []
            self._lock.release()

    def _remove(self, path: str) -> None:
        """Removes one of the paths. Raises `_C.EngineError`."""
        self.storage.remove(os.path.basename(path))

    def __enter__(self: PendingT) -> PendingT:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


PendingT = TypeVar("PendingT", bound=Pending)


class PendingFile(Pending):
    """The file `path`, which is written as `{path}.tmp.{pid}.{n}`. The next `create` removes such files of processes
    that died."""

    def __init__(self, path: str) -> None:
        super().__init__(os.path.dirname(path) or ".")
        self.path = path

    def create(self, make: Callable[[str], Made]) -> Made:
        """Calls `make` with the path of the file to create, and returns its result."""
        orphans.remove(Orphan([path], path, orphans.SMALL_FILE_GRACE) for path in temporary_ones(self.path))

        def named() -> tuple[str, Made]:
            temporary = temporary_name(self.path)
            return temporary, make(temporary)

        return self.begin(named)

    def commit(self) -> None:
        """Renames the file to `path`, durably. The file must be complete and synced."""
        with named_errors(str, self.directory):
            _C.move_into_place(self.paths[0], self.directory, self.path)
        self.committed()


class PendingFolder(Pending):
    """The folder `path`, which is filled as `{path}.tmp.{pid}.{n}`.

    The commit exchanges the names of old and new folder in one step if the file system can (RENAME_EXCHANGE). Otherwise
    it renames the old folder first, so that for an instant no folder has the name. A process killed in that instant
    leaves both folders; `put_back` repairs that. The next `make` removes the folders of processes that died.
    """

    def __init__(self, path: str, *, resumes: bool = False) -> None:
        """`resumes`: takes over the folder, with its content, that a dead process has begun for the same path. Takes
        over none if the file system has no locks."""
        self.path = path.rstrip("/") or path
        super().__init__(os.path.dirname(self.path) or ".")
        self._resumes = resumes

    @property
    def temporary(self) -> str:
        """The folder into which all ranks write their files."""
        return self.paths[0]

    def make(self) -> None:
        """Makes the folder. One rank calls it."""
        self.storage.make()
        with named_system_errors(self.directory):
            self.storage.make_durable(holds_one=False)
            found = self._orphans()
            orphans.remove(Orphan([path], path, orphans.NEVER, are_folders=True) for path in found)
            self.begin(self._make)
            if self._resumes:
                others = (path for path in temporary_ones(self.path + _COPY) if path != self.temporary)
                orphans.remove(Orphan([path], path, orphans.NEVER, are_folders=True) for path in others)

    def _orphans(self) -> Iterator[str]:
        """Returns the folders that other processes have made for this path. A living process keeps its folder
        locked."""
        yield from temporary_ones(self.path)
        if not self._resumes:
            yield from temporary_ones(self.path + _COPY)
        if os.path.lexists(self.path):  # otherwise the old folder that was set aside is the only copy
            yield from temporary_ones(self.path + _ASIDE)

    def _make(self) -> tuple[str, None]:
        temporary = temporary_name(self.path + _COPY if self._resumes else self.path)
        for found in temporary_ones(self.path + _COPY) if self._resumes else ():
            with contextlib.suppress(OSError, _C.EngineError), locks.lock_if_abandoned(found, orphans.NEVER) as is_free:
                if is_free:
                    _C.rename_file(found, temporary)
                    return temporary, None
        os.mkdir(temporary)
        return temporary, None

    def commit(self) -> None:
        """Renames the folder to `path`, durably, and then removes the folder that had this name. All files in it must
        be complete and durable."""
        temporary = self.temporary
        with named_system_errors(self.directory):
            _C.sync_directory(temporary)
            old = ""
            if not os.path.lexists(self.path):
                _C.rename_file(temporary, self.path)
            elif _exchanges_names(self.path) and _C.exchange_names(temporary, self.path):
                old = temporary
            else:
                old = self._replace_in_two_steps(temporary)
            self.committed()
            _C.sync_directory(self.directory)
        if old:
            with contextlib.suppress(_C.EngineError):
                self._remove(old)  # removes only the link if it is one

    def _remove(self, path: str) -> None:
        self.storage.remove_folder(os.path.basename(path))

    def _replace_in_two_steps(self, temporary: str) -> str:
        """Renames the old folder away, then the new one to `path`. Returns the new path of the old folder."""
        aside = temporary_name(self.path + _ASIDE)
        # The lock keeps clean-ups from taking the old folder for an orphan.
        lock = Lease() if os.path.islink(self.path) else self.storage.lock(os.path.basename(self.path))
        try:
            _C.rename_file(self.path, aside)
            try:
                _C.sync_directory(self.directory)
                _C.rename_file(temporary, self.path)
            except _C.EngineError:
                _C.rename_file(aside, self.path)
                raise
        finally:
            lock.release()
        return aside


def _exchanges_names(path: str) -> bool:
    """Whether the file system exchanges names. Tries it with two files beside `path`, because some FUSE mounts report
    success and rename the first file over the second."""
    files = temporary_name(path), temporary_name(path)
    try:
        for file in files:
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        before = [os.stat(file).st_ino for file in files]
        return _C.exchange_names(*files) and [os.stat(file).st_ino for file in files] == before[::-1]
    except OSError:
        return False
    finally:
        for file in files:
            with contextlib.suppress(_C.EngineError):
                _C.remove_file(file)


def put_back(path: str) -> None:
    """Renames the old folder back to `path`, if a process was killed between the two renames of a commit.

    Without locks in the file system the other process may still be alive. Then the folder is renamed back, too, and the
    commit of the other process raises.
    """
    path = path.rstrip("/") or path
    if os.path.lexists(path):
        return
    for aside in sorted(temporary_ones(path + _ASIDE)):
        with named_system_errors(path), locks.lock_if_abandoned(aside, 0.0) as free:
            if not free:
                continue
            _C.rename_file(aside, path)
            _C.sync_directory(os.path.dirname(path) or ".")
        logger.warning("%s was being replaced when the conversion died: the old folder is back", path)
        return


def new_token() -> str:
    """Returns a random part of file names, different for every writer."""
    return secrets.token_hex(4)


def temporary_name(path: str) -> str:
    """Returns a path beside `path` under which a file or folder is written."""
    return f"{path}.tmp.{os.getpid()}.{next(_serial)}"


def final_name(name: str) -> str | None:
    """Returns the final name that belongs to a name of `temporary_name`. None for other names."""
    own = _own_name(name)
    return None if own is None else own.removesuffix(_ASIDE).removesuffix(_COPY)


def is_begun_copy(name: str) -> bool:
    """Whether the name is that of a folder which a later process resumes."""
    return (_own_name(name) or "").endswith(_COPY)


def _own_name(name: str) -> str | None:
    """Returns a name without its temporary ending. None if it has none."""
    found = _TEMPORARY.search(name)
    return name[: found.start()] if found is not None and found.end() == len(name) else None


def temporary_ones(path: str) -> Iterator[str]:
    """Returns the paths with temporary names for `path`, of any process. Empty if the directory cannot be read."""
    directory, name = os.path.dirname(path) or ".", os.path.basename(path)
    if not storage_at(directory).renames:
        return
    with contextlib.suppress(OSError):
        for found in os.listdir(directory):
            if found.startswith(name) and _TEMPORARY.fullmatch(found, len(name)):
                yield os.path.join(directory, found)
