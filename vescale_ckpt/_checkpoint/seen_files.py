"""`SeenFiles` detects for loads that other programs change files while they are read.

Saves of this package never write to a file that exists. Stock DCP and most tools that write safetensors overwrite the
old files in place: a concurrent reader gets a mixture.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from .._storage.open_storage import stat_of, storage_at
from ..errors import CheckpointError


class SeenFiles:
    """The identities of files, recorded before they are read.

    `metadata`: the metadata file that names the files; it may be missing. It is recorded now, and checked if another
    package wrote one of the files. A later save of this package replaces only the metadata file, not the files.
    `is_written_once`: whether a file of that name is never written again in its format.
    """

    def __init__(self, metadata: str = "", is_written_once: Callable[[str], bool] = lambda name: False) -> None:
        self._metadata = metadata
        self._is_written_once = is_written_once
        self._seen: dict[str, tuple[int, ...] | None] = {}
        self.look(metadata)

    def look(self, path: str) -> None:
        """Records the identity of a file, unless it is recorded."""
        if path not in self._seen:
            # Reads of such an object ask for the version that was opened (its ETag), so nothing is asked for it here.
            is_pinned = self._is_written_once(os.path.basename(path)) and storage_at(path).by_requests
            self._seen[path] = None if is_pinned else _identity(path)

    def check(self, paths: Iterable[str]) -> None:
        """Raises `CheckpointError` if one of the files was changed or replaced since it was recorded."""
        paths = [*paths]
        if not all(self._is_written_once(os.path.basename(path)) for path in paths):
            paths.append(self._metadata)
        for path in paths:
            if (seen := self._seen.get(path)) is None:
                continue
            now = _identity(path)
            if now is None and self._is_written_once(os.path.basename(path)):
                continue  # a later save removed the file; nobody overwrote it before
            if seen != now:
                raise CheckpointError(
                    f"{path} was changed while it was read: something else writes to this checkpoint. Load it again "
                    "when that is done",
                    path=path,
                )


def _identity(path: str) -> tuple[int, ...] | None:
    try:
        return stat_of(path).identity
    except OSError:  # the code that reads the file raises the error
        return None
