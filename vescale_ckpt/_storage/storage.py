"""`Storage` reads, writes, lists, removes and locks the files of one folder for all that handle checkpoints.

Files appear whole, and reads see all earlier writes. Users of a storage do not rename or lock anything themselves, and
do not ask what kind it is. The engine reads and writes large files by their paths.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, NamedTuple, TypeGuard

from .._engine import _C

#: Names of marker files begin with this. Clean-ups find them as temporary files of a checkpoint's metadata.
MARKER_PREFIX = ".metadata.tmp.place."
LOCK_NAME = ".lock"  #: a save locks this file in its directory before it writes anything
#: Errors of `overwrite=False` end with this if no checkpoint was there when the save began.
COMMITTED_MEANWHILE = ": another job committed it meanwhile"
BEGINNING_BYTES = 1 << 20  #: bytes of a larger file that are checked before the rest is read

CheckBeginning = Callable[[bytes, int], None]  # takes a file's first bytes and its size; raises if the file is unsound


class Stat(NamedTuple):
    """What a storage knows about a file without reading it."""

    size: int  #: bytes
    modified_ns: int  #: when it was last written to
    identity: tuple[int, ...]  #: it changes when the file is written to or replaced
    changed_ns: int  #: when its content or name was last changed
    is_file: bool
    is_folder: bool

    @classmethod
    def of(cls, found: os.stat_result) -> Stat:
        identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        is_file, is_folder = stat.S_ISREG(found.st_mode), stat.S_ISDIR(found.st_mode)
        return cls(found.st_size, found.st_mtime_ns, identity, found.st_ctime_ns, is_file, is_folder)


class Lease:
    """Keeps files from being removed until it is released, or its process dies. As a context it is released at the end.

    This class itself keeps nothing: it stands for a lease where there are no locks.
    """

    def release(self) -> None:
        """May be called again."""

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        self.release()


class Storage(ABC):
    """One folder, which need not exist. Any thread may call its methods.

    Unless a method says otherwise, it raises OSError (FileNotFoundError for a missing file), and `_C.EngineError` if it
    writes through the engine.
    """

    by_requests: ClassVar[bool]  #: each question or read is a request; no page cache
    can_be_away: ClassVar[bool]  #: it may not answer for a while; files that cannot be read then may still exist
    rereads: ClassVar[bool]  #: bytes that seem damaged may be sound when they are read again
    has_locks: ClassVar[bool]  #: a lock shows that the writer of a file lives; otherwise only the file's age does
    renames: ClassVar[bool]  #: files and folders are written under temporary names, then renamed in one step

    def __init__(self, path: str) -> None:
        self.path = path  #: messages and the engine use it

    @property
    def store(self) -> str | None:
        """The root of the object store: if ranks see each other's files in one folder of it, then in all. None for a
        file system."""
        return None

    def check_mounted(self, what: str, instead: str) -> None:
        """Raises `CheckpointError` with the advice `instead` if other programs cannot open the files by their paths, so
        that `what` cannot be in this storage."""
        return

    def limit_wait(self, seconds: int) -> AbstractContextManager[None]:
        """A context in which requests of this thread time out after so many seconds, where there are requests."""
        return nullcontext()

    # --- What is there

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of files and folders, in any order."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Returns the names of folders, without links. Empty if the folder is missing."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether a file or folder has that name; that a client of a network file system has none is not taken from its
        cache. Cheaper than `names`. Raises nothing but `CheckpointError`, if the storage does not answer: all later
        calls would wait as long again."""

    @abstractmethod
    def stat(self, name: str = "") -> Stat:
        """Returns the `Stat` of a file; without a name, that of the folder."""

    def sizes(self) -> dict[str, int]:
        """Returns {file name: length}, as far as one request tells. A file may be missing in it."""
        return {}

    @abstractmethod
    def age(self, modified_ns: int, enough: float) -> float:
        """Returns the seconds since a time that `stat` gave, by the storage's clock. A result below `enough` is only a
        bound: the age is below `enough`."""

    @abstractmethod
    def is_inconclusive(self, number: int) -> bool:
        """Whether a read that failed with this errno says nothing about the file."""

    def is_away(self, error: BaseException) -> TypeGuard[OSError]:
        """Whether the error says that the storage does not answer now: what was asked for may exist."""
        return self.can_be_away and isinstance(error, OSError) and not isinstance(error, FileNotFoundError)

    # --- Reads

    @abstractmethod
    def read(self, name: str, check: CheckBeginning | None = None) -> bytes:
        """Returns the content of a file. Raises OSError also if it is no regular file.

        `check` gets the beginning and the size of a large file before memory for the rest is allocated. Errors of
        `check` pass through. With `check`, raises `UntrustedCheckpointError` if the file has holes.
        """

    @abstractmethod
    def read_range(self, name: str, begin: int, length: int) -> tuple[Stat, bytes]:
        """Returns the `Stat` of the file, and `length` bytes of it from `begin` on; fewer if the file is shorter. A
        negative `begin` counts from the end."""

    def drop_caches(self) -> None:
        """Makes the next reads see the present files, without caches of this process, in a storage that `rereads`."""
        return

    # --- Writes

    @abstractmethod
    def make(self) -> None:
        """Makes the folder and all folders above it, durably, if files need a folder. Raises `CheckpointError`."""

    def check_space(self, needed: int) -> None:
        """Raises `StorageFullError` if the storage reports less room than so many bytes. Call it within
        `named_errors`."""
        return

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Writes a whole file, atomically and durably. Replaces a file of that name."""

    def pending(self, name: str) -> _C.PendingFile | None:
        """Returns a file for `commit`, to which the engine writes before. None: `commit` needs the bytes."""
        return None

    @abstractmethod
    def commit(self, name: str, content: bytes | _C.PendingFile, overwrite: bool) -> None:
        """Writes the file that makes a save the checkpoint of the folder, as `write` does. The folder's own name is
        durable afterwards, too. With `overwrite=False` it raises FileExistsError if the file exists: of several that
        commit at once one succeeds."""

    @abstractmethod
    def check_exclusive_commits(self) -> None:
        """Raises `CheckpointError` if `commit` cannot keep the promise of `overwrite=False` in this storage. A save
        calls it before it sends anything."""

    def rename(self, name: str, to: str) -> None:
        """Gives a file another name, and replaces a file of that name. Only a storage that `renames` can do it."""
        raise NotImplementedError(f"{self.path}: files cannot be renamed")

    @abstractmethod
    def sync(self, name: str = "") -> None:
        """Makes the names in the folder durable; with `name`, the content of that file."""

    # --- Removals

    @abstractmethod
    def remove(self, name: str) -> bool:
        """Removes a file. Returns whether it existed, as far as the storage tells."""

    def remove_all(self, names: Iterable[str]) -> None:
        """Removes files. A storage with locks keeps the given order. Files may be missing."""
        for name in names:
            self.remove(name)

    @abstractmethod
    def remove_folder(self, name: str) -> None:
        """Removes a folder with as much of its content as it can. Of a link it removes only the link."""

    @abstractmethod
    def set_aside(self, name: str, first: str) -> None:
        """Begins the removal of a folder: it loses its name in one step. `first`: see `erase_set_aside`."""

    @abstractmethod
    def erase_set_aside(self, is_one: Callable[[str], bool], first: str) -> None:
        """Removes all folders that any process has set aside and whose names satisfy `is_one`. Removes the file `first`
        before all others, durably: an interrupted removal leaves a whole folder or one without `first`. Logs
        failures."""

    # --- Whether ranks use one folder

    @abstractmethod
    def make_marker(self, name: str) -> None:
        """Makes an empty marker file, without a sync. Raises OSError if it exists."""

    # --- Others who use it

    def lock(self, name: str) -> Lease:
        """Locks a file or folder while it is written, if the storage has locks. Raises `TakenForOrphanError` if a
        clean-up removed it, `CheckpointError` if it cannot be opened."""
        return Lease()

    @abstractmethod
    def lock_if_abandoned(
        self, names: Sequence[str], locked: str | None, grace_seconds: float
    ) -> AbstractContextManager[bool]:
        """A context that gives whether the writer of the files is gone. `locked`: the file that the writer keeps
        locked; None if it locks none. Without locks, the writer counts as gone if the files were not modified for
        `grace_seconds`."""

    def share(self, name: str = LOCK_NAME) -> Lease:
        """Keeps the folder from being removed while a load reads the file `name`. Without a name, keeps it for a save,
        and makes the folder if it is missing.

        It keeps nothing if the storage has no locks, or the file is missing. Raises `CheckpointError` only for a save.
        """
        return Lease()

    def lock_exclusively(self, held: Iterable[str], tested: Iterable[str]) -> AbstractContextManager[bool | None]:
        """A context that gives whether nobody else uses the folder; None if the storage has no locks. No new use begins
        while it lasts. `held`: the files that loads lock. `tested`: the files that saves lock."""
        return nullcontext(None)
