"""Detects files that other programs change while a load reads them.

Saves of this package never write to a file that exists. Stock DCP overwrites the files of the checkpoint before in
place, and so do most tools that write safetensors: a concurrent reader gets a mixture.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from .._storage.open_storage import stat_of, storage_at
from ..errors import CheckpointError

_Identity = tuple[int, ...]


def _never(name: str) -> bool:
    return False


class SeenFiles:
    """The identities of files, recorded before they are read.

    `metadata`: the metadata file that names them; it may be missing. It is recorded now, and checked if one of the
    files is not of this package. Otherwise it is not checked: a later save replaces it, but changes no file that it
    named. `is_written_once` tells by the name of a file whether its format never writes to it again.
    """

    def __init__(self, metadata: str = "", is_written_once: Callable[[str], bool] = _never) -> None:
        self._metadata = metadata
        self._is_written_once = is_written_once
        self._seen: dict[str, _Identity | None] = {}
        self.look(metadata)

    def look(self, path: str) -> None:
        """Records the identity of a file, unless it is recorded."""
        if path not in self._seen:
            # Reads of an object ask for the one that was opened (its ETag), so a data file needs no look before.
            is_pinned = self._is_written_once(os.path.basename(path)) and storage_at(path).pins_data_files
            self._seen[path] = None if is_pinned else _identity(path)

    def check(self, paths: Iterable[str]) -> None:
        """Raises `CheckpointError` if one of the files was changed or replaced since it was recorded."""
        paths = [*paths]
        if not all(self._is_written_once(os.path.basename(path)) for path in paths):
            paths.append(self._metadata)
        for path in paths:
            if self._seen.get(path) is None:
                continue
            seen, now = self._seen.get(path), _identity(path)
            if now is None and self._is_written_once(os.path.basename(path)):
                continue  # removed after a later save: it was not overwritten before
            if seen is not None and seen != now:
                raise CheckpointError(
                    f"{path} was changed while it was read: something else writes to this checkpoint. Load it again "
                    "when that is done",
                    path=path,
                )


def _identity(path: str) -> _Identity | None:
    try:
        return stat_of(path).identity
    except OSError:  # the code that reads the file raises it
        return None
