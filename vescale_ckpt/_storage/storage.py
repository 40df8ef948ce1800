"""`Storage` is the interface to a folder of checkpoints: its verbs, and the facts in which kinds of storage differ.

Files have names in any order, appear whole, and reads see all earlier writes. Users of a storage do not rename or lock
anything themselves, and do not ask what kind it is. The engine reads and writes large files by their paths.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, NamedTuple, Protocol

#: Of the names of marks. They are named like temporary files of a checkpoint's metadata, so that clean-ups find them.
MARK_PREFIX = ".metadata.tmp.place."
LOCK_NAME = ".lock"  #: the file that a save locks in its directory before it writes anything
BEGINNING_BYTES = 1 << 20  #: that are checked before the rest of a larger file is read

CheckBeginning = Callable[[bytes, int], None]  # of a file's first bytes and its size; raises if the file is unsound


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


class Lease(Protocol):
    """Keeps files from being removed until it is released, or its process dies."""

    def release(self) -> None:
        """May be called again."""


class Storage(ABC):
    """One folder, which need not exist. Any thread may call its methods.

    Unless a method says otherwise, it raises OSError (FileNotFoundError for a missing file), and `_C.EngineError` if it
    writes through the engine.
    """

    by_requests: ClassVar[bool]  #: each look or read is a request, and no page cache helps
    can_be_away: ClassVar[bool]  #: it may not answer for a while: what cannot be read then must not count as missing
    rereads: ClassVar[bool]  #: bytes that seem damaged may be sound when they are read again
    pins_data_files: ClassVar[bool]  #: reads of a data file ask for the version of it that was opened first
    has_locks: ClassVar[bool]  #: a lock tells that the writer of a file lives; otherwise only the file's age does
    renames: ClassVar[bool]  #: files and folders are written under temporary names, and get their own in one step
    shares_files: ClassVar[bool]  #: several processes may write ranges of one file, in any order

    def __init__(self, path: str) -> None:
        self.path = path  #: as messages name it, and the engine takes it

    @abstractmethod
    def check_mounted(self, what: str, instead: str) -> None:
        """Raises `CheckpointError`, with the advice `instead`, if other programs and libraries cannot open the files by
        their paths: `what` cannot be in such a storage."""

    @abstractmethod
    def hurried(self, seconds: int) -> AbstractContextManager[None]:
        """A context in which a request of this thread is given up after so many seconds, where there are requests."""

    # --- What is there

    @abstractmethod
    def names(self) -> list[str]:
        """The names of files and folders, in any order."""

    @abstractmethod
    def folders(self) -> list[str]:
        """The names of folders, without links. Empty if the folder is missing."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether a file or folder has that name. Cheaper than `names`. Raises `CheckpointError` if the storage is
        away: all that follows would wait as long again. Otherwise it raises nothing."""

    @abstractmethod
    def stat(self, name: str = "") -> Stat:
        """The `Stat` of a file; without a name, that of the folder."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """The lengths of files, as far as they come with one request for all; a file may be missing."""

    @abstractmethod
    def age(self, modified_ns: int, enough: float) -> float:
        """Seconds since a time that `stat` gave, by the storage's clock. Of an age below `enough` it is only known that
        it is less."""

    @abstractmethod
    def says_nothing(self, number: int) -> bool:
        """Whether a read that failed with this errno leaves open what is there."""

    # --- Reads

    @abstractmethod
    def read(self, name: str, check: CheckBeginning | None = None) -> bytes:
        """The content of a file. Raises OSError also if it is no regular file.

        `check` gets the beginning and the size of a large file before memory for the rest is allocated. Raises what
        `check` raises, and then `UntrustedCheckpointError` if the file has holes.
        """

    @abstractmethod
    def read_range(self, name: str, begin: int, length: int) -> tuple[Stat, bytes]:
        """`length` bytes from `begin` on, and the `Stat` of the file that was read. A negative `begin` counts from the
        end. Fewer bytes if the file is shorter."""

    @abstractmethod
    def look_again(self) -> None:
        """Makes the next reads see what is there now, not what this process or machine has kept of it."""

    # --- Writes

    @abstractmethod
    def make(self) -> None:
        """Makes the folder and those above it durably, where files need a folder. Raises `CheckpointError`."""

    @abstractmethod
    def check_space(self, needed: int) -> None:
        """Raises `StorageFullError` if there is no room for so many bytes, as far as the storage tells. Call it within
        `named_errors`."""

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Writes a whole file, atomically and durably. Replaces a file of that name."""

    @abstractmethod
    def commit(self, name: str, content: bytes, overwrite: bool) -> None:
        """Writes the file that makes a save the checkpoint of the folder, as `write` does; the folder's own name is
        durable, too. With `overwrite=False` an object store raises FileExistsError if there is one by now; a file
        system replaces it."""

    @abstractmethod
    def check_exclusive_commits(self) -> None:
        """Raises `CheckpointError` if `commit` cannot keep here what `overwrite=False` promises of this kind of
        storage: asked before anything is sent."""

    @abstractmethod
    def sync(self, name: str = "") -> None:
        """Makes the names in the folder durable; with a name, the content of that file."""

    # --- Removals

    @abstractmethod
    def remove(self, name: str) -> bool:
        """Removes a file. Returns whether it was there, as far as the storage tells."""

    @abstractmethod
    def remove_all(self, names: Iterable[str]) -> None:
        """Removes files, where there are locks in the order given; some may be missing."""

    @abstractmethod
    def remove_folder(self, name: str) -> None:
        """Removes a folder with as much of its content as it can; of a link only the link."""

    @abstractmethod
    def set_aside(self, name: str, first: str) -> None:
        """Begins the removal of a folder: takes away its name, at once. `first`: see `erase_set_aside`."""

    @abstractmethod
    def erase_set_aside(self, is_one: Callable[[str], bool], first: str) -> None:
        """Removes all folders that were set aside, by any process, and whose names satisfy `is_one`. The file `first`
        is removed before all others, durably: an interrupted removal leaves a whole folder or one without `first`.
        Failures are logged."""

    @abstractmethod
    def abort_uploads(self, grace_seconds: float, *, dry_run: bool) -> list[str] | None:
        """Aborts the uploads of large files that began so long ago, which killed saves have left, and returns their
        URLs. None where they cannot be listed. Raises `CheckpointError`."""

    # --- Whether ranks use one folder

    @abstractmethod
    def leave_mark(self, name: str) -> None:
        """Makes an empty file, which must be missing before. It is not durable."""

    @abstractmethod
    def keep_mark(self, name: str) -> None:
        """Makes an empty file unless it is there, and makes it durable. Where only a file's age tells whether it is
        used, it gets the present time."""

    @abstractmethod
    def sees_mark(self, name: str) -> bool:
        """Whether the folder holds the file now, without what a client may have cached. Raises nothing."""

    # --- Others who use it

    @abstractmethod
    def lock(self, name: str) -> Lease | None:
        """Marks a file or folder as being written. None if the storage has no locks. Raises `TakenForOrphanError` if a
        clean-up removed it, `CheckpointError` if it cannot be opened."""

    @abstractmethod
    def abandoned(self, names: Sequence[str], locked: str | None, grace_seconds: float) -> AbstractContextManager[bool]:
        """A context that gives whether the writer of the files is gone. `locked`: the one of them that the writer keeps
        locked; None if it locks none. Without locks, files count that were not modified for `grace_seconds`."""

    @abstractmethod
    def share(self, name: str = LOCK_NAME) -> Lease | None:
        """Keeps the folder from being removed while the file `name` is read. Without a name, it is the lease of a save:
        then the folder is made if it is missing.

        None if the storage has no locks, or there is no such file. For a save it raises `CheckpointError`.
        """

    @abstractmethod
    def alone(self, held: Iterable[str], tested: Iterable[str]) -> AbstractContextManager[bool | None]:
        """A context that gives whether nobody else uses the folder; None if the storage has no locks. While it lasts,
        no new use begins. `held`: the files that loads lock; `tested`: those that saves lock."""

    # --- Those who name its data files from elsewhere, as delta saves do

    @abstractmethod
    def lease(self, mark: str, grace_seconds: float, *, make: bool) -> Lease | None:
        """Keeps the files of the folder from being removed, which has the file `mark`, while a save may come to name
        them. `make`: makes the file if it is missing; otherwise the answer is None then. `grace_seconds`: as for
        `unleased`. Raises `CheckpointError` if others go on removing files there."""

    @abstractmethod
    def unleased(self, mark: str, grace_seconds: float) -> AbstractContextManager[bool]:
        """A context that gives whether no save may come to name files of the folder; none begins to while it lasts.
        `grace_seconds`: after which a lease counts as one of a dead process where there are no locks."""
