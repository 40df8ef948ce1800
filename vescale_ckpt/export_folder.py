"""The folder of an export: its files while they are written, and clean-up. For the rank that coordinates.

Files have temporary names until all of them are complete and durable; `export_commit` makes them the folder's model.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time

from . import _C, engine, layout
from .export_commit import IndexOf, check_replaceable, give_names, replace_model
from .export_names import (
    INDEX_NAME,
    file_names,
    is_model_file,
    is_temporary_index,
    temporary_name,
    token_of,
)

logger = logging.getLogger(__name__)

_COMMIT_SECONDS = 600.0  # after which an index, which is written at once, is left over


class ExportFolder:
    """One export. The files exist, as long as they will be; `commit` makes them the model of the folder, `discard`
    removes what was not committed."""

    def __init__(self, directory: str, sizes: list[int], names: list[str] | None = None) -> None:
        """Makes files of so many bytes each, and removes what exports that died have left. Raises `StorageFullError`,
        `CheckpointError`. `names`: None for those of a model."""
        self.directory = directory
        self.names = file_names(len(sizes)) if names is None else names
        self.token = ""
        self._files: list[str] = []  # paths of those that no model has yet
        self._lock: layout.FileLock | None = None
        needed = sum(sizes)
        with engine.named_system_errors(directory, needed):
            if names is None:
                check_replaceable(directory)
            _remove_leftovers(directory)
            engine.check_space(directory, needed)
            try:
                self._begin(sizes[0])
                for name, size in zip(self.names[1:], sizes[1:], strict=True):
                    self._make(name, size)
            except BaseException:
                self.discard()
                raise

    def _begin(self, size: int) -> None:
        """Makes the first file, whose lock stands for the whole export."""
        for attempts_left in (2, 1, 0):
            self.token = layout.new_token()
            self._files.clear()
            self._make(self.names[0], size)
            try:
                self._lock = layout.lock(self._files[0])
                return
            except layout.TakenForLeftoverError:  # by another export's clean-up, between its making and its marking
                if not attempts_left:
                    raise

    def _make(self, name: str, size: int) -> None:
        path = os.path.join(self.directory, temporary_name(name, self.token))
        _C.reserve_file(path, size)
        self._files.append(path)

    def commit(self, heads: list[bytes], index: IndexOf, sync: bool) -> None:
        """Completes the files with what stands at their start and makes them the model, durably. `index`: of files with
        the names that they get."""
        self.complete(heads, sync)
        replace_model(self.directory, self._files, index)

    # --- The same in steps, for ranks that have a file each

    def complete(self, heads: list[bytes], sync: bool) -> None:
        with engine.named_system_errors(self.directory):
            for path, head in zip(self._files, heads, strict=True):
                _C.write_head(path, head, sync)

    def make_way(self) -> None:
        """Removes the model that is there: readers take all files in a folder, and would mix the two."""
        with engine.named_system_errors(self.directory):
            layout.make_name_durable(self.directory, holds_one=False)
            _C.remove_file(os.path.join(self.directory, INDEX_NAME))
            for name in os.listdir(self.directory):
                if is_model_file(name):
                    _C.remove_file(os.path.join(self.directory, name))
            _C.sync_directory(self.directory)

    def give_names(self) -> None:
        with engine.named_system_errors(self.directory):
            give_names(self.directory, self._files, self.names)
            self._files.clear()
            _C.sync_directory(self.directory)

    def discard(self) -> None:
        """May be called again, and after `commit`."""
        for path in reversed(self._files):  # the locked one last
            with contextlib.suppress(_C.EngineError):
                _C.remove_file(path)
        self._files.clear()
        if self._lock is not None:
            self._lock.release()
        self._lock = None


def _remove_leftovers(directory: str) -> None:
    """Failures are no matter but for the space: leftovers are no model."""
    exports: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory)):
            if (token := token_of(name)) is not None:
                exports.setdefault(token, []).append(os.path.join(directory, name))
            elif is_temporary_index(name):
                _remove_if_old(os.path.join(directory, name))
    for paths in exports.values():
        try:
            _remove_if_over(paths)
        except OSError as error:
            logger.warning("a leftover of an export is kept: %s", error)


def _remove_if_over(paths: list[str]) -> None:
    """Removes these files of one export if nobody writes them: the first is locked as long as somebody does."""
    first, *others = paths
    with layout.abandoned(first, layout.GRACE_SECONDS, others) as free:
        if free:
            for path in reversed(paths):
                os.unlink(path)


def _remove_if_old(path: str) -> None:
    if time.time() - os.stat(path).st_mtime > _COMMIT_SECONDS:
        os.unlink(path)
