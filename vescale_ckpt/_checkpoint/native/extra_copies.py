"""`ExtraFiles` writes copies of a checkpoint's extra files beside its data files, for programs that do not load it.

The checkpoint itself holds the content of each file as an object, which loads read. A save that replaces a checkpoint
removes the copies that change before it commits, and writes the new ones afterwards. So a program that reads a copy
finds the one that belongs to the present checkpoint, or none. `vescale-ckpt repair` writes copies that are missing.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping

from ..._engine import _C
from ..._storage.open_storage import storage_at
from ..._storage.pending import final_name, temporary_ones
from ..._storage.storage import LOCK_NAME
from ...errors import CheckpointError
from . import file_names
from .metadata_check import TRAILER_BYTES
from .step_order import ORDER_NAME

logger = logging.getLogger(__name__)


def check_files(files: Mapping[str, bytes] | None) -> dict[str, bytes]:
    """Returns the files as bytes. Raises `TypeError` for a content that is not bytes, and `ValueError` for a name that
    no extra file may have."""
    if files is None:
        return {}
    if not isinstance(files, Mapping):
        raise TypeError(f"extra_files: expected a mapping of names to bytes, got {type(files).__name__}")
    result = {}
    for name, content in files.items():
        if not isinstance(name, str) or not _is_allowed(name):
            raise ValueError(f"extra_files: {name!r} cannot be the name of a file beside a checkpoint's own files")
        if not isinstance(content, (bytes, bytearray, memoryview)):
            raise TypeError(f"extra_files: {name}: expected bytes, got {type(content).__name__}")
        result[name] = bytes(content)
    return result


def _is_allowed(name: str) -> bool:
    if (
        not name
        or not name.isprintable()
        or "/" in name
        or name in (".", "..", LOCK_NAME, ORDER_NAME, file_names.METRICS_NAME)
    ):
        return False
    if len(os.fsencode(name)) > 200:  # a file system allows 255, and a temporary name is longer
        return False
    return not (
        file_names.is_of_a_save(name)
        or file_names.is_metadata_file(name)
        or name.endswith((file_names.DATA_SUFFIX, ".safetensors", file_names.INDEX_NAME))
        or final_name(name) is not None
    )


class ExtraFiles:
    """The copies of one save's extra files."""

    def __init__(self, path: str, files: Mapping[str, bytes]) -> None:
        self._path = path
        self._files = files
        self._withdrawn: dict[str, bytes] = {}

    def withdraw(self, before: Iterable[str]) -> None:
        """Removes the copies of the present checkpoint, which has files of the names `before`, that differ from those
        of this save. Call it before the commit. Raises OSError and `_C.EngineError`."""
        storage = storage_at(self._path)
        for name in dict.fromkeys((*self._files, *before)):
            if not storage.has(name):
                continue
            with contextlib.suppress(OSError):  # it may be a folder: `publish` reports that
                content = storage.read(name)
                if content == self._files.get(name):
                    continue
                self._withdrawn[name] = content
            storage.remove(name)
        if self._withdrawn:
            storage.sync()

    def put_back(self, length: int, end: bytes) -> None:
        """Writes the removed copies again after a commit that failed, of metadata of such a length and trailer. Logs
        errors. A commit that reported a failure may have succeeded: if the new metadata is there, or cannot be read,
        nothing is written."""
        try:
            found, its_end = storage_at(self._path).read_range(file_names.METADATA_NAME, -TRAILER_BYTES, TRAILER_BYTES)
            if (found.size, its_end) == (length, end):
                return
        except FileNotFoundError:
            pass
        except (OSError, CheckpointError):
            return
        for name, content in self._withdrawn.items():
            _write(self._path, name, content)

    def publish(self) -> None:
        """Writes the copies of this save, which has committed. Logs errors: loads do not need the copies."""
        storage = storage_at(self._path)
        for name, content in self._files.items():
            for left in temporary_ones(os.path.join(self._path, name)):
                if not file_names.may_be_in_use(os.path.basename(left)):
                    with contextlib.suppress(OSError, _C.EngineError):
                        storage.remove(os.path.basename(left))
            with contextlib.suppress(OSError, CheckpointError):
                if storage.has(name) and storage.read(name) == content:
                    continue
            _write(self._path, name, content)


def write_missing(path: str, files: Mapping[str, bytes], *, dry_run: bool = False) -> list[str]:
    """Writes the copies of a checkpoint's extra files that are missing or differ, and returns their names. `dry_run`:
    writes nothing, and returns the names only."""
    storage, written = storage_at(path), []
    for name, content in files.items():
        with contextlib.suppress(OSError):
            if storage.read(name) == content:
                continue
        if _is_allowed(name):  # the checkpoint may come from anybody
            written.append(name)
            if not dry_run:
                storage.write(name, content)
    return written


def _write(path: str, name: str, content: bytes) -> None:
    try:
        storage_at(path).write(name, content)
    except (OSError, _C.EngineError) as error:
        logger.error(
            "the checkpoint in %s is whole, but the copy of its extra file %s cannot be written: %s. `vescale-ckpt "
            "repair` writes it; loads with extra_files= do not need it",
            path,
            name,
            error,
        )
