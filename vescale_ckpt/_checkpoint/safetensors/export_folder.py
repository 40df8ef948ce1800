"""Creates, commits and cleans up the files of an export in a safetensors folder, for the rank that coordinates.

Files have temporary names until all of them are complete and durable. `commit` then makes them the folder's model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..._engine import _C
from ..._engine.engine_errors import named_system_errors
from ..._storage import orphans
from ..._storage.open_storage import storage_at
from ..._storage.orphans import SAVE_GRACE, SMALL_FILE_GRACE, Orphan
from ..._storage.pending import Pending, new_token
from ..._storage.storage import MARKER_PREFIX
from .commit import IndexOf, check_replaceable, commit_files, names_in
from .model_names import (
    file_names,
    is_temporary_index,
    temporary_name,
    token_of,
)


def file_numbers(mapping: Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    """`fqn_to_index_mapping` as sorted pairs. Raises `ValueError` unless it maps texts to numbers from 1 on."""
    if mapping is None:
        return ()
    if not isinstance(mapping, Mapping) or not mapping:
        raise ValueError(f"fqn_to_index_mapping: expected a mapping of keys to numbers of files, got {mapping!r}")
    for key, number in mapping.items():
        if not isinstance(key, str) or type(number) is not int or number < 1:
            raise ValueError(f"fqn_to_index_mapping: expected a text and a number from 1 on, got {key!r}: {number!r}")
    return tuple(sorted(mapping.items()))


class ExportFolder:
    """One export. Its files exist with their final size; `commit` makes them the folder's model, `discard` removes them
    if they were not committed."""

    def __init__(self, directory: str, sizes: list[int]) -> None:
        """Creates files of `sizes` bytes, and removes files of exports that died. Raises `StorageFullError`,
        `CheckpointError`."""
        self.directory = directory
        self.token = ""
        self.files = Pending(directory)
        needed = sum(sizes)
        with named_system_errors(directory, needed):
            check_replaceable(directory)
            orphans.remove([*left_by_exports(directory), *_markers(directory)])
            self.files.storage.check_space(needed)
            first, *names = file_names(len(sizes))
            try:
                self.files.begin(lambda: self._make_first(first, sizes[0]))
                for name, size in zip(names, sizes[1:], strict=True):
                    self.files.paths.append(self._make(name, size))
            except BaseException:
                self.discard()
                raise

    def _make_first(self, name: str, size: int) -> tuple[str, None]:
        self.token = new_token()
        return self._make(name, size), None

    def _make(self, name: str, size: int) -> str:
        path = os.path.join(self.directory, temporary_name(name, self.token))
        _C.reserve_file(path, size)
        return path

    def commit(self, heads: list[bytes], index: IndexOf, sync: bool, overwrite: bool) -> None:
        """Writes the start of each file, `heads`, and makes the files the model, durably. `index` returns the index for
        the names that the files get. `overwrite`: as for `commit_files`."""
        with named_system_errors(self.directory):
            for path, head in zip(self.files.paths, heads, strict=True):
                _C.write_head(path, head, sync)
        commit_files(self.files, index, overwrite)

    def discard(self) -> None:
        """May be called again, and after `commit`."""
        self.files.discard()


def left_by_exports(directory: str) -> list[Orphan]:
    """Returns the files that dead exports may have left: their files, for which the lock of the first one counts, and
    indexes."""
    exports: dict[str, list[str]] = {}
    found: list[Orphan] = []
    for name in sorted(names_in(directory)):
        path = os.path.join(directory, name)
        if (token := token_of(name)) is not None:
            exports.setdefault(token, []).append(path)
        elif is_temporary_index(name):
            found.append(Orphan([path], None, SMALL_FILE_GRACE))
    return found + [Orphan(paths, paths[0], SAVE_GRACE) for paths in exports.values()]


def _markers(directory: str) -> list[Orphan]:
    """Returns the marker files in a folder, which saves of several ranks make and remove while they begin."""
    names = [name for name in storage_at(directory).names() if name.startswith(MARKER_PREFIX)]
    return [Orphan([os.path.join(directory, name)], None, SMALL_FILE_GRACE) for name in names]
