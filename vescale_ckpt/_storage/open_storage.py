"""Opens the storage of a path for all callers, whatever kind it is, and asks it about single files."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from typing import TypeVar

from .._engine import _C
from .._engine.engine_errors import of_system
from ..errors import CorruptCheckpointError, UntrustedCheckpointError
from . import paths
from .file_system import FileSystem
from .storage import Stat, Storage

logger = logging.getLogger(__name__)

Found = TypeVar("Found")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def checkpoint_path(path: str | os.PathLike[str]) -> str:
    """Returns `path` as an absolute path or as the URL of an object store. A relative path is resolved now, because the
    working directory may change while a save runs. Raises ValueError if `path` is no path and no URL of an object
    store, and `CheckpointError` if the package for object stores is missing."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise ValueError(f"expected a checkpoint's path as text, got {text!r}")
    if not text:
        raise ValueError("expected a path, got an empty text (the working directory is '.')")
    if "\0" in text:
        raise ValueError(f"{text!r} is no path")
    if text.startswith("~"):
        raise ValueError(
            f"{text!r}: a shell expands ~, and Python does not: give os.path.expanduser({text!r}), or ./~..."
        )
    paths.check_no_secret(text)
    if paths.is_url(text):
        path = paths.normal(text)
        _import_store(path)
        return path
    if (url := _URL.match(text)) is not None:
        scheme = url[1].lower()
        if scheme in paths.SCHEMES:
            # `pathlib.Path` leaves one slash of the two; or the scheme has capital letters.
            raise ValueError(f"{text}: write {scheme}://{text[len(scheme) + 1 :].lstrip('/')}, as text")
        raise ValueError(
            f"{text}: no storage for {scheme}:// is built in; local paths, written alone, and "
            f"{', '.join(f'{name}://' for name in paths.SCHEMES)} are"
        )
    if os.path.isabs(text):
        return text
    try:
        joined = os.path.join(os.getcwd(), text)
    except OSError as error:
        raise ValueError(f"{text}: the working directory is gone, so give an absolute path: {error}") from error
    # A path with ".." must stay as it is: after a link, ".." means the directory above the link's target.
    return joined if os.pardir in text.split(os.sep) else os.path.normpath(joined)


def storage_at(path: str) -> Storage:
    """Returns the storage at a path that `checkpoint_path` returned."""
    return _import_store(path)(path) if paths.is_url(path) else FileSystem(path)


def _import_store(url: str) -> type[Storage]:
    """Returns the class for a URL, whose module needs an extra and tells the engine how to read such files. Raises
    `CheckpointError` if the extra is missing."""
    from . import object_clients, object_store

    object_clients.obstore()
    return object_store.ObjectStore


def stat_of(path: str) -> Stat:
    """The `Stat` of one file or directory. Raises OSError."""
    return storage_at(path).stat()


def is_folder(path: str) -> bool:
    """Whether there is a folder. Raises `CheckpointError` if the storage is away."""
    found = _stat_if_there(path)
    return found is not None and found.is_folder


def is_file(path: str) -> bool:
    """Whether there is a file. Raises `CheckpointError` if the storage is away."""
    found = _stat_if_there(path)
    return found is not None and found.is_file


def size_in(folder: str, name: str) -> int | None:
    """The length of a file; None if there is none. Raises as `is_file` does."""
    found = _stat_if_there(os.path.join(folder, name))
    return found.size if found is not None and found.is_file else None


def _stat_if_there(path: str) -> Stat | None:
    storage = storage_at(path)
    try:
        return storage.stat()
    except OSError as error:
        if storage.is_away(error):
            raise of_system(error, path) from error
        return None


# --- Reads that fail


def is_inconclusive(number: int | None, path: str) -> bool:
    """Whether a read of `path` that failed with this errno says nothing about the file: it may be sound, damaged or
    missing."""
    # An error without an errno does not come from the system: bytes came, and are wrong.
    return bool(number) and storage_at(path).is_inconclusive(number or 0)


def read_twice(path: str, read: Callable[[], Found]) -> Found:
    """Returns what `read` returns. If `read` raises an error of damage, and the storage of `path` may give other bytes
    at a second request, calls it again: a bit may have changed on the way, or a sound file has replaced the old one."""
    try:
        return read()
    except (CorruptCheckpointError, UntrustedCheckpointError, _C.EngineError) as error:
        storage = storage_at(path)
        if not storage.rereads or (isinstance(error, _C.EngineError) and error.kind not in ("corrupt", "invalid")):
            raise
        logger.warning("%s seems to be damaged, and is read again: %s", path, error)
    storage.drop_caches()
    return read()
