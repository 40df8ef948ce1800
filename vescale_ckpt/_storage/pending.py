"""Files and folders that appear whole or not at all: written under temporary names, locked meanwhile, then renamed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from .._engine import _C
from .._engine.errors import named_errors, named_system_errors
from . import leftovers, locks
from .directory import directory_at
from .leftovers import Leftover

logger = logging.getLogger(__name__)

Made = TypeVar("Made")
_TEMPORARY = re.compile(r"\.tmp\.\d+\.\d+")
_ASIDE = ".old"  # between a folder's own name and what temporary names end in
_ATTEMPTS = 3  # at making a file, where clean-ups of others take it before it is locked
_serial = itertools.count()


def make_locked(make: Callable[[], tuple[str, Made]]) -> tuple[Made, locks.FileLock | None]:
    """Makes a file or folder, and locks it. `make` returns its path and what else is to be kept of it; it is called
    again, for another name, if another writer's clean-up comes between."""
    for attempts_left in range(_ATTEMPTS - 1, -1, -1):
        path, made = make()
        try:
            lock = locks.lock(path)
            break
        except locks.TakenForLeftoverError:
            del made  # what it has open goes now, not with the error's traceback
            if not attempts_left:
                raise
    return made, lock


class Pending:
    """Files that one writer makes, or one folder. The first is locked as long as they are written, and stands for all.

    As a context: removed at its end, unless they were committed.
    """

    is_folder = False

    def __init__(self, directory: str) -> None:
        self.directory = directory  #: that they will belong to
        self.paths: list[str] = []  #: of those that are not committed
        self._lock: locks.FileLock | None = None

    def begin(self, make: Callable[[], tuple[str, Made]]) -> Made:
        """Makes the first file, and locks it, as `make_locked` does."""

        def noted() -> tuple[str, Made]:
            path, made = make()
            self.paths = [path]
            return path, made

        made, self._lock = make_locked(noted)
        return made

    def give_names(self, names: Sequence[str]) -> None:
        """Renames the files, without making that durable. `paths` tells where they are, whatever happens."""
        for number, name in enumerate(names):
            path = os.path.join(self.directory, name)
            _C.rename_file(self.paths[number], path)
            self.paths[number] = path

    def committed(self) -> None:
        """The files belong to the directory."""
        self.paths = []

    def discard(self) -> None:
        """Removes what was not committed. May be called again."""
        try:
            for path in reversed(self.paths):  # the locked one last
                with contextlib.suppress(_C.EngineError):
                    leftovers.remove_entry(path, self.is_folder)
        finally:
            self.paths = []
            if self._lock is not None:
                self._lock.release()
            self._lock = None

    def __enter__(self: PendingT) -> PendingT:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()


PendingT = TypeVar("PendingT", bound=Pending)


class PendingFile(Pending):
    """The file `path` while it is written beside itself, as `{path}.tmp.{pid}.{n}`. What saves that died have left of
    it is removed when the next one begins."""

    def __init__(self, path: str) -> None:
        super().__init__(os.path.dirname(path) or ".")
        self.path = path

    def create(self, make: Callable[[str], Made]) -> Made:
        """What `make` returns, given the name of a file that it creates."""
        leftovers.remove(Leftover([path], path, leftovers.SMALL_FILE_GRACE) for path in _temporary_ones(self.path))

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
    """The folder `path` while it is filled beside itself, as `{path}.tmp.{pid}.{n}`.

    Old and new folder change names in one step where the file system can (RENAME_EXCHANGE). Where it cannot the old one
    is set aside first, so that for an instant nothing has the name: who is killed there leaves both, which `put_back`
    mends. What writers that died have left of it is removed when the next one begins.
    """

    is_folder = True

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/") or path
        super().__init__(os.path.dirname(self.path) or ".")

    @property
    def temporary(self) -> str:
        """Where all ranks put their files."""
        return self.paths[0]

    def make(self) -> None:
        """By one rank."""
        above = directory_at(self.directory)
        above.make()
        with named_system_errors(self.directory):
            above.make_durable(holds_one=False)
            found = list(_temporary_ones(self.path))
            if os.path.lexists(self.path):  # else what was set aside is all that there is
                found += _temporary_ones(self.path + _ASIDE)
            leftovers.remove(Leftover([path], path, leftovers.NEVER, are_folders=True) for path in found)
            self.begin(self._make)

    def _make(self) -> tuple[str, None]:
        temporary = temporary_name(self.path)
        os.mkdir(temporary)
        return temporary, None

    def commit(self) -> None:
        """All files in it are complete and durable: gives it its name. What had it before is removed after that."""
        temporary = self.temporary
        with named_system_errors(self.directory):
            _C.sync_directory(temporary)
            old = ""
            if not os.path.lexists(self.path):
                _C.rename_file(temporary, self.path)
            elif _C.exchange_names(temporary, self.path):
                old = temporary
            else:
                old = self._replace_in_two_steps(temporary)
            self.committed()
            _C.sync_directory(self.directory)
        if old:
            with contextlib.suppress(_C.EngineError):
                leftovers.remove_entry(old, True)  # what a link leads to is somewhere else, and stays

    def _replace_in_two_steps(self, temporary: str) -> str:
        """Returns what the old folder is called then."""
        aside = temporary_name(self.path + _ASIDE)
        # Not left over as long as this goes on.
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


def put_back(path: str) -> None:
    """If somebody was killed between setting the folder `path` aside and giving its name to another: undoes that. Where
    the file system has no locks, nobody knows whether he was; then it goes back, too, and who lives raises."""
    path = path.rstrip("/") or path
    if os.path.lexists(path):
        return
    for aside in sorted(_temporary_ones(path + _ASIDE)):
        with named_system_errors(path), locks.abandoned(aside, 0.0) as free:
            if not free:
                continue
            _C.rename_file(aside, path)
            _C.sync_directory(os.path.dirname(path) or ".")
        logger.warning("%s was being replaced when the conversion died: what was there is back", path)
        return


def new_token() -> str:
    """A part of the names of one set of files that tells them from those of every other writer."""
    return secrets.token_hex(4)


def temporary_name(path: str) -> str:
    """Of a file or folder while it is written beside the place that it will have."""
    return f"{path}.tmp.{os.getpid()}.{next(_serial)}"


def _temporary_ones(path: str) -> Iterator[str]:
    """What has such a name, of this process or another. Ends where the directory cannot be read."""
    directory, name = os.path.dirname(path) or ".", os.path.basename(path)
    with contextlib.suppress(OSError):
        for found in os.listdir(directory):
            if found.startswith(name) and _TEMPORARY.fullmatch(found, len(name)):
                yield os.path.join(directory, found)
