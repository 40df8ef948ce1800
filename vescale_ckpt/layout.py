"""Names of files in a checkpoint directory, and the life of that directory: space, commit, clean-up.

A data file belongs to a checkpoint if a metadata file names it. No save ever writes to a name that exists, so the
checkpoint that is there stays whole until `.metadata` is replaced by one rename; what nothing names any more is removed
after that, and before the next save.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import logging
import os
import posixpath
import re
import secrets
import stat
import time
import weakref
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import PurePosixPath
from typing import BinaryIO
from urllib.parse import quote, unquote_to_bytes

from torch.distributed.checkpoint.metadata import Metadata

from . import _C, engine, export_names, metadata_file, other_formats
from .errors import CheckpointError, UntrustedCheckpointError
from .one_place import is_token
from .rows import MOST_BYTES
from .stock import DEFAULT_SUFFIX, StorageInfo

logger = logging.getLogger(__name__)

METADATA_NAME = ".metadata"
INDEX_SUFFIX = ".index"
_METADATA_BEGINNING = 1 << 20  # bytes that are looked at before all of a larger file is read
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # not blocking: a FIFO of that name would wait for a writer
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_OUR_DATA_FILE = re.compile(r"__\d+_[0-9a-f]{8}(_\d+)?" + re.escape(DEFAULT_SUFFIX))
_PART = re.compile(r"(?<=_[0-9a-f]{8})_\d+" + re.escape(DEFAULT_SUFFIX))
_METADATA_FILE = re.compile(r"(__\d+)?" + re.escape(METADATA_NAME))
GRACE_SECONDS = 24 * 3600.0  # after which files of a save are left over, where there are no locks to tell
_MOST_NAMES = 10_000  # of directories that are remembered as durable
_COMMIT_SECONDS = 600.0  # a commit writes one small file: what is older is left over
_TEMPORARY_FILE = re.compile(r"(__\d+)?" + re.escape(METADATA_NAME) + rf"({re.escape(INDEX_SUFFIX)})?\.tmp.*")


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


def metadata_name(rank: int | None) -> str:
    """`.metadata`, or that of one rank where ranks save without collectives."""
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


def has_metadata(directory: str, rank: int | None) -> bool:
    return os.path.lexists(os.path.join(directory, metadata_name(rank)))


def new_token() -> str:
    """What tells the data files of one save of a rank from all others: ranks need not agree on names, because metadata
    carries them."""
    return secrets.token_hex(4)


def data_name(rank: int, token: str, part: int | None = None) -> str:
    """The name of a rank's data file, or of one of several."""
    middle = "" if part is None else f"_{part}"
    return f"__{rank}_{token}{middle}{DEFAULT_SUFFIX}"


def is_of_a_save(name: str) -> bool:
    """Whether a save that died may have left a file of that name."""
    ours = _OUR_DATA_FILE.fullmatch(name) or _TEMPORARY_FILE.fullmatch(name)
    return ours is not None or name == METADATA_NAME + INDEX_SUFFIX


def is_data_file(name: str) -> bool:
    """Whether it is named as saves of ours name their data files."""
    return _OUR_DATA_FILE.fullmatch(name) is not None


def metadata_ranks(directory: str) -> list[int | None]:
    """Whose metadata the directory holds: [None] for that of all ranks, else ranks that saved without collectives."""
    names = [name for name in os.listdir(directory) if _METADATA_FILE.fullmatch(name)]
    if METADATA_NAME in names:
        return [None]
    return [*sorted(int(name[2 : -len(METADATA_NAME)]) for name in names)]


def make_directory(directory: str) -> None:
    """Creates the directory and makes its name durable, and those of all directories above it that it creates. Raises
    `CheckpointError` if that cannot be done."""
    if os.path.isdir(directory):
        return
    directory = local_path(directory)
    made = [directory]
    while (above := os.path.dirname(made[-1])) != made[-1] and not os.path.isdir(above):
        made.append(above)
    try:
        os.makedirs(directory, exist_ok=True)
        for level in reversed(made):
            _sync_name(level)
    except OSError as error:
        raise engine.of_system(error, directory) from error
    except _C.EngineError as error:
        raise engine.translate(error, str, directory, 0) from None


def make_name_durable(directory: str, holds_one: bool) -> None:
    """Makes durable that the directory is there: whoever made it may not have. Once in a process for each directory
    that holds a checkpoint (`holds_one`). One that does not may have been removed and made anew since, by anybody: it
    has the same number then on many file systems."""
    directory = local_path(directory)
    status = os.stat(directory)
    if not holds_one or (directory, status.st_dev, status.st_ino) not in _durable_names:
        _sync_name(directory)


_durable_names: set[tuple[str, int, int]] = set()  # paths that were synced, and what they were


def _sync_name(directory: str) -> None:
    """Syncs the directory above this one. Where that may not be opened, this one: of one that is new, most file systems
    write the name, too."""
    try:
        _C.sync_directory(os.path.dirname(directory))
    except _C.EngineError as error:
        if error.errno not in (errno.EACCES, errno.EPERM):
            raise
        _C.sync_directory(directory)
    status = os.stat(directory)
    if len(_durable_names) >= _MOST_NAMES:
        _durable_names.clear()
    _durable_names.add((directory, status.st_dev, status.st_ino))


def read_metadata(directory: str, rank: int | None = None) -> Metadata:
    """Reads and checks the metadata of the checkpoint in a directory.

    Raises `CheckpointError` if there is none, `CorruptCheckpointError`, `UntrustedCheckpointError`.
    """
    return metadata_file.loads(metadata_bytes(directory, rank), os.path.join(directory, metadata_name(rank)))


def metadata_bytes(directory: str, rank: int | None) -> bytes:
    """What is in the metadata file, not looked at. Raises as `read_metadata`."""
    path = os.path.join(directory, metadata_name(rank))
    try:
        with open(os.open(path, _READ), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UntrustedCheckpointError(f"{path} is not a regular file", path=path)
            if status.st_size > _METADATA_BEGINNING:
                _check_large_metadata(file, status.st_size, path)
            return file.read()
    except FileNotFoundError:
        what = "is no directory" if not os.path.isdir(directory) else f"has no {metadata_name(rank)}"
        why = "not a checkpoint, or one whose save did not finish"
        if export_names.holds_unfinished_export(directory):
            why = "it holds an export that did not finish"
        elif advice := other_formats.advice_for_directory(directory):
            why = f"not a checkpoint; {advice}"
        elif (last := _last_of_manager(directory)) is not None:
            why = (
                f"it holds the checkpoints of a CheckpointManager, of which {last} was saved last: give the path of one"
            )
        raise CheckpointError(
            f"{directory} {what}: {why}",
            path=directory,
            errno=errno.ENOENT,
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}", path=path, errno=error.errno) from error


def _check_large_metadata(file: BinaryIO, size: int, path: str) -> None:
    """That a file that claims to be large is not just that, before memory is taken for it: a file may be longer than
    what was ever written to it. Leaves the file at its beginning."""
    metadata_file.check_beginning(file.read(_METADATA_BEGINNING), size, path)
    try:
        hole = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
    except OSError:  # no such question here
        hole = size
    if hole < size:
        raise UntrustedCheckpointError(
            f"{path} is no sound metadata: it claims {size:,} bytes, but has a hole at {hole:,}", path=path
        )
    file.seek(0)


def _last_of_manager(directory: str) -> str | None:
    """The newest checkpoint in the directory of a manager, if it is one."""
    from . import step_directories, step_order  # they know of checkpoints, which are here

    try:
        last = step_order.SavedOrder(directory).last
    except OSError:
        return None
    return None if last is None else step_directories.path_of(directory, last)


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


def checked_place(info: object, key: str) -> StorageInfo:
    """Where metadata says that something is stored, its name not looked at; raises `UntrustedCheckpointError` if it
    says nothing of the kind."""
    if type(info) is not StorageInfo or type(getattr(info, "relative_path", None)) is not str:
        raise UntrustedCheckpointError(f"{key}: metadata does not name a file for it", key=key)
    for name in ("offset", "length"):
        number = getattr(info, name, None)
        if type(number) is not int or not 0 <= number < MOST_BYTES:
            raise UntrustedCheckpointError(f"{key}: metadata gives {number!r} as its {name}", key=key)
    return info


def crc_of(info: StorageInfo) -> int:
    """The CRC-32 that our saves add to it, -1 if it has none."""
    crc = getattr(info, "crc", -1)
    return crc if type(crc) is int and 0 <= crc < 1 << 32 else -1


def metadata_mark(directory: str) -> str:
    """Tells the metadata of one save from that of another: its length and end, which holds a checksum; empty if there
    is none. Raises OSError if it cannot be read."""
    try:
        with open(os.open(os.path.join(directory, METADATA_NAME), _READ), "rb") as file:
            status = os.fstat(file.fileno())
            end = _end_of(file.fileno(), status.st_size)
    except FileNotFoundError:
        return ""
    # Files of stock DCP have no checksum: a copy on another disk passes for another.
    known = "" if end.startswith(metadata_file.TRAILER_MAGIC) else f":{status.st_mtime_ns}"
    return f"{status.st_size}:{end.hex()}{known}"


def _end_of(descriptor: int, length: int) -> bytes:
    return os.pread(descriptor, metadata_file.TRAILER_BYTES, max(0, length - metadata_file.TRAILER_BYTES))


def read_index(directory: str, rank: int | None = None) -> _C.Index | None:
    """The index of the checkpoint in a directory, if it has one that belongs to its metadata and is sound."""
    path = os.path.join(directory, metadata_name(rank))
    try:
        return _matching(_C.Index.open(path + INDEX_SUFFIX), path)
    except (OSError, _C.EngineError):
        return None


def index_bytes(directory: str) -> bytes | None:
    """What is in the index's file, all of it checked. None as of `read_index`."""
    path = os.path.join(directory, METADATA_NAME)
    try:
        with open(os.open(path + INDEX_SUFFIX, _READ), "rb") as file:
            data = file.read()
        return None if _matching(_C.Index.from_bytes(data, path + INDEX_SUFFIX), path) is None else data
    except (OSError, _C.EngineError):
        return None


def _matching(index: _C.Index, metadata_path: str) -> _C.Index | None:
    with open(os.open(metadata_path, _READ), "rb") as file:
        length = os.fstat(file.fileno()).st_size
        end = _end_of(file.fileno(), length)
    return index if index.matches(end, length) else None


def read_metadata_of(directory: str, rank: int | None, save_id: str) -> Metadata:
    """The metadata that one save committed. Raises `CheckpointError` if it is not there any more."""
    metadata = read_metadata(directory, rank)
    if metadata.storage_meta is None or metadata.storage_meta.save_id != save_id:
        raise CheckpointError(f"the checkpoint in {directory} was replaced by a later save", path=directory)
    return metadata


def commit(directory: str, rank: int | None, metadata: bytes, index: bytes | None) -> None:
    """Makes `metadata` the checkpoint of the directory, atomically and durably, with its index beside it."""
    name = metadata_name(rank)
    make_name_durable(directory, holds_one=has_metadata(directory, rank))
    if index is not None:  # first: it counts for nothing without the metadata it belongs to
        _C.commit_file(directory, name + INDEX_SUFFIX, index)
    _C.commit_file(directory, name, metadata)
    if index is None:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(directory, name + INDEX_SUFFIX))


def _named_files(directory: str, rank: int | None) -> set[str]:
    index = read_index(directory, rank)
    if index is not None:
        with contextlib.suppress(_C.EngineError):  # damaged
            return {posixpath.normpath(path) for path in index.files}
    storage = read_metadata(directory, rank).storage_data
    values = storage.values() if isinstance(storage, dict) else ()
    paths = (getattr(info, "relative_path", None) for info in values)
    return {posixpath.normpath(path) for path in paths if isinstance(path, str)}


class FileLock:
    """Marks a file as in use, until it is released or the process dies: a data file of a save that goes on.

    `directory`: of that save; None for what `drop_dead_locks` has no business with.
    """

    def __init__(self, directory: str | None, descriptor: int) -> None:
        self.directory = directory
        self._descriptor = descriptor
        _held.add(self)

    def try_alone(self) -> bool | None:
        """As `try_lock_alone`."""
        return try_lock_alone(self._descriptor)

    def release(self) -> None:
        """May be called again."""
        _held.discard(self)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    __del__ = release


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()  # by this process


def _release_after_fork() -> None:
    for held in list(_held):  # they mark the parent's files, and would outlive the parent
        held.release()


os.register_at_fork(after_in_child=_release_after_fork)


class TakenForLeftoverError(CheckpointError):
    """Another save in the directory removed a data file that was not marked yet."""


def lock(path: str) -> FileLock | None:
    """Marks the data file of a save that is going on. Returns None where the file system has no locks. Raises
    `TakenForLeftoverError` if somebody removed the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TakenForLeftoverError(f"{path} was removed while it was written: {error}", path=path) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise TakenForLeftoverError(
            f"{path} was taken for a leftover by another save in this directory", path=path
        ) from None
    except OSError:
        os.close(descriptor)
        return None
    if os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        raise TakenForLeftoverError(f"{path} was taken for a leftover by another save in this directory", path=path)
    return FileLock(os.path.dirname(local_path(path)), descriptor)


def drop_dead_locks(directory: str) -> None:
    """Lets go of what this process locked for saves into the directory that failed: the writer of such a save, and
    with it the lock, lives on in the traceback of its error. Every rank does so: another one cleans up."""
    if any(held.directory == local_path(directory) for held in list(_held)):
        gc.collect()


def try_lock_alone(descriptor: int) -> bool | None:
    """Whether nobody else has locked the file. None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def abandoned(marked: str, grace_seconds: float, others: Iterable[str] = ()) -> Iterator[bool]:
    """Whether nobody writes a file (or fills a folder) any more that is marked as long as somebody does. It stays
    locked within, so that who has just made it and marks it meanwhile sees that it was taken.

    Where the file system has no locks: whether neither it nor `others`, which it stands for, were touched for so long.
    Raises OSError if it cannot be opened.
    """
    descriptor = os.open(marked, _READ)
    try:
        alone = try_lock_alone(descriptor)
        if alone is None:
            touched = max([os.fstat(descriptor).st_mtime, *(os.stat(path).st_mtime for path in others)])
            alone = time.time() - touched >= grace_seconds
        yield alone
    finally:
        os.close(descriptor)


def _remove_unless_locked(directory: str, name: str) -> bool:
    """Removes a data file unless the save that it is part of goes on. Without locks only after a day.

    Raises `CheckpointError` if a metadata file cannot be read.
    """
    path = os.path.join(directory, name)
    leader = os.path.join(directory, _PART.sub(rf"_0{DEFAULT_SUFFIX}", name))  # of several files a save locks the first
    with contextlib.ExitStack() as held:
        try:
            free = held.enter_context(abandoned(leader if os.path.exists(leader) else path, GRACE_SECONDS))
        except OSError:
            return False
        # Its save may have committed, and then let go of it, since names were read.
        if not free or name in _named_by_any(directory):
            return False
        os.unlink(path)
        return True


def named_files(directory: str, rank: int | None) -> set[str]:
    """Data files that one metadata file of the directory names: none if it is not there or cannot be read."""
    if not has_metadata(directory, rank):
        return set()
    try:
        return _named_files(directory, rank)
    except CheckpointError:
        return set()


def _named_by_any(directory: str) -> set[str]:
    """Data files that some metadata file of the directory names now. Raises `CheckpointError` if one cannot be read."""
    named: set[str] = set()
    for name in os.listdir(directory):
        if _METADATA_FILE.fullmatch(name):
            rank = None if name == METADATA_NAME else int(name[2 : -len(METADATA_NAME)])
            named |= _named_files(directory, rank)
    return named


def _may_be_committing(temporary: str) -> bool:
    """Whether the process that a temporary file names may still rename it: another one, alive on this machine."""
    match = re.search(r"\.tmp\.(\d+)\.", temporary)
    if match is None or int(match[1]) == os.getpid():
        return False
    return os.path.exists(f"/proc/{match[1]}")


def remove_leftovers(
    directory: str, superseded: AbstractSet[str] = frozenset(), only_rank: int | None = None
) -> list[str]:
    """Removes what no metadata file of the directory names, and returns it: files of saves that died, and `superseded`
    ones, which the metadata before the last commit named.

    Files of a save that goes on, in another process or rank, are locked and stay. Removes nothing if a metadata file
    cannot be read, for then nobody knows what it names. With `only_rank`, only that rank's files. Failures are logged:
    a leftover does no harm.
    """
    try:
        return _remove_leftovers(directory, superseded, only_rank)
    except Exception as error:  # a committed save must not fail by it
        logger.warning("leftovers in %s are kept, because they cannot be looked for: %r", directory, error)
        return []


def _remove_leftovers(directory: str, superseded: AbstractSet[str], only_rank: int | None) -> list[str]:
    names = os.listdir(directory)
    mine = None if only_rank is None else (f"__{only_rank}_", f"__{only_rank}.")
    candidates = [
        name
        for name in names
        if (name in superseded or _OUR_DATA_FILE.fullmatch(name) or _TEMPORARY_FILE.fullmatch(name))
        and (mine is None or name.startswith(mine))
    ]
    if not candidates:
        return []
    try:
        named = _named_by_any(directory)
    except CheckpointError as error:
        logger.warning("leftovers in %s are kept, because %s", directory, error)
        return []
    removed = []
    for name in candidates:
        if name in named:
            continue
        path = os.path.join(directory, name)
        try:
            if name in superseded:
                os.unlink(path)
            elif _TEMPORARY_FILE.fullmatch(name):
                may_be_in_use = is_token(name) or _may_be_committing(name)  # by another save in this directory
                if may_be_in_use and time.time() - os.stat(path).st_mtime < _COMMIT_SECONDS:
                    continue
                os.unlink(path)
            elif not _remove_unless_locked(directory, name):
                continue
            removed.append(name)
        except CheckpointError as error:
            logger.warning("leftover %s is kept, because %s", path, error)
        except OSError as error:
            if error.errno != errno.ENOENT:
                logger.warning("cannot remove leftover %s: %s", path, error)
    if removed:
        logger.info("removed %d leftover files from %s", len(removed), directory)
    return removed
