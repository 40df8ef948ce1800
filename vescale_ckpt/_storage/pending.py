"""Writes files and folders under temporary names and renames them when complete, for exports and conversions."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeVar

from .._engine import _C
from .._engine.engine_errors import named_errors, named_system_errors
from . import locks, orphans
from .file_system import FileSystem
from .open_storage import storage_at
from .orphans import Orphan
from .storage import Lease

logger = logging.getLogger(__name__)

Made = TypeVar("Made")
_TEMPORARY = re.compile(r"\.tmp\.\d+\.\d+(\.[0-9a-f]{8})?")  # the machine: csrc/io/commit.h
_ASIDE, _COPY = ".old", ".copy"  # between a folder's own name and the temporary ending
_ATTEMPTS = 3  # to make a file that clean-ups of other processes remove before it is locked
_serial = itertools.count()


def make_locked(make: Callable[[], tuple[str, Made]]) -> tuple[Made, Lease | None]:
    """Makes a file or folder and locks it. `make` returns its path and an object for the caller. It is called again,
    for another name, if the clean-up of another writer removes the file before it is locked."""
    for attempts_left in range(_ATTEMPTS - 1, -1, -1):
        path, made = make()
        try:
            lock = storage_at(os.path.dirname(path)).lock(os.path.basename(path))
            break
        except locks.TakenForOrphanError:
            del made  # closes what it has open now; the error's traceback would keep it
            if not attempts_left:
                raise
    return made, lock


class Pending:
    """The files that one writer makes, or one folder. The first path is locked while they are written; its lock marks
    all of them.

    As a context, it removes at its end what was not committed.
    """

    def __init__(self, directory: str) -> None:
        storage_at(directory).check_mounted(
            "a file or folder that is written under another name first, and renamed,",
            "Write it to a local path. A checkpoint of DCP's layout is copied from there (vescale-ckpt copy)",
        )
        self.directory = directory  #: that they will belong to
        self.storage = FileSystem(directory)
        self.paths: list[str] = []  #: not committed yet
        self._lock: Lease | None = None

    def begin(self, make: Callable[[], tuple[str, Made]]) -> Made:
        """Makes the first file, and locks it, as `make_locked` does."""

        def noted() -> tuple[str, Made]:
            path, made = make()
            self.paths = [path]
            return path, made

        made, self._lock = make_locked(noted)
        return made

    def give_names(self, names: Sequence[str]) -> None:
        """Renames the files, not durably. `paths` has the current paths also after an error."""
        for number, name in enumerate(names):
            path = os.path.join(self.directory, name)
            _C.rename_file(self.paths[number], path)
            self.paths[number] = path

    def taking_turns(self) -> AbstractContextManager[bool]:
        """A context that makes those who commit into one directory do so one after the other. It gives False if the
        file system has no locks. Raises `CheckpointError` if the other one takes too long."""
        return locks.taking_turns(self.directory)

    def committed(self) -> None:
        """Notes that the files belong to the directory now."""
        self.paths = []

    def discard(self) -> None:
        """Removes what was not committed. May be called again."""
        try:
            for path in reversed(self.paths):  # the locked one last
                with contextlib.suppress(_C.EngineError):
                    self._remove(path)
        finally:
            self.paths = []
            if self._lock is not None:
                self._lock.release()
            self._lock = None

    def _remove(self, path: str) -> None:
        """Removes one of the paths. Raises `_C.EngineError`."""
        self.storage.remove(os.path.basename(path))

    def __enter__(self: PendingT) -> PendingT:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()


PendingT = TypeVar("PendingT", bound=Pending)


class PendingFile(Pending):
    """The file `path` while it is written as `{path}.tmp.{pid}.{n}`. Such files of processes that died are removed when
    the next one is made."""

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
        """The file is complete and synced: gives it its name, durably."""
        with named_errors(str, self.directory):
            _C.move_into_place(self.paths[0], self.directory, self.path)
        self.committed()


class PendingFolder(Pending):
    """The folder `path` while it is filled as `{path}.tmp.{pid}.{n}`.

    The commit exchanges the names of old and new folder in one step if the file system can (RENAME_EXCHANGE). Otherwise
    it renames the old folder first, so that for an instant no folder has the name. A process killed in that instant
    leaves both folders; `put_back` repairs that. Folders of processes that died are removed when the next one is made.
    """

    def __init__(self, path: str, *, resumes: bool = False) -> None:
        """`resumes`: takes over the folder that a process which died has begun for the same path, with what is in it.
        Where the file system has no locks, none is taken over."""
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
        """The folders that other processes have made for this path; those that are alive keep theirs locked."""
        yield from temporary_ones(self.path)
        if not self._resumes:
            yield from temporary_ones(self.path + _COPY)
        if os.path.lexists(self.path):  # otherwise an old folder that was set aside is the only one left
            yield from temporary_ones(self.path + _ASIDE)

    def _make(self) -> tuple[str, None]:
        temporary = temporary_name(self.path + _COPY if self._resumes else self.path)
        for found in temporary_ones(self.path + _COPY) if self._resumes else ():
            with contextlib.suppress(OSError, _C.EngineError), locks.abandoned(found, orphans.NEVER) as is_free:
                if is_free:
                    _C.rename_file(found, temporary)
                    return temporary, None
        os.mkdir(temporary)
        return temporary, None

    def commit(self) -> None:
        """Gives the folder its name, durably. All files in it must be complete and durable. The folder that had the
        name is removed afterwards."""
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
                self._remove(old)  # of a link only the link

    def _remove(self, path: str) -> None:
        self.storage.remove_folder(os.path.basename(path))

    def _replace_in_two_steps(self, temporary: str) -> str:
        """Returns the new path of the old folder."""
        aside = temporary_name(self.path + _ASIDE)
        # The lock keeps clean-ups from taking the old folder for an orphan.
        mark = None if os.path.islink(self.path) else locks.lock(self.path)
        try:
            _C.rename_file(self.path, aside)
            try:
                _C.sync_directory(self.directory)
                _C.rename_file(temporary, self.path)
            except _C.EngineError:
                _C.rename_file(aside, self.path)
                raise
        finally:
            if mark is not None:
                mark.release()
        return aside


def _exchanges_names(path: str) -> bool:
    """Whether the file system exchanges names. Tried with two files beside `path`: some FUSE mounts report success and
    rename the first over the second."""
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
    """Gives the old folder its name `path` back, if a process was killed between the two renames of a commit.

    Without locks in the file system the other process may still be alive. The folder is put back in that case, too;
    then the commit of the other process raises.
    """
    path = path.rstrip("/") or path
    if os.path.lexists(path):
        return
    for aside in sorted(temporary_ones(path + _ASIDE)):
        with named_system_errors(path), locks.abandoned(aside, 0.0) as free:
            if not free:
                continue
            _C.rename_file(aside, path)
            _C.sync_directory(os.path.dirname(path) or ".")
        logger.warning("%s was being replaced when the conversion died: what was there is back", path)
        return


def new_token() -> str:
    """A random part of file names, different for every writer."""
    return secrets.token_hex(4)


def temporary_name(path: str) -> str:
    """The path of a file or folder while it is written, beside its final `path`."""
    return f"{path}.tmp.{os.getpid()}.{next(_serial)}"


def final_name(name: str) -> str | None:
    """The name that a file or folder would have got that is named as `temporary_name` does. None for other names."""
    own = _own_name(name)
    return None if own is None else own.removesuffix(_ASIDE).removesuffix(_COPY)


def is_begun_copy(name: str) -> bool:
    """Whether a folder is named as one that resumes."""
    return (_own_name(name) or "").endswith(_COPY)


def _own_name(name: str) -> str | None:
    """What stands before a temporary ending. None if there is none."""
    found = _TEMPORARY.search(name)
    return name[: found.start()] if found is not None and found.end() == len(name) else None


def temporary_ones(path: str) -> Iterator[str]:
    """The paths with temporary names for `path`, of any process. Empty if the directory cannot be read."""
    directory, name = os.path.dirname(path) or ".", os.path.basename(path)
    if not storage_at(directory).renames:
        return
    with contextlib.suppress(OSError):
        for found in os.listdir(directory):
            if found.startswith(name) and _TEMPORARY.fullmatch(found, len(name)):
                yield os.path.join(directory, found)
