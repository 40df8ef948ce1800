"""Whether files stay what they are while they are read.

Saves of ours never write to a file that exists. Stock DCP writes over the files of the checkpoint before, in place, and
so do most tools that write safetensors: who reads meanwhile gets something of both.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from .._native.names import is_data_file
from .._storage.directory import stat_of
from ..errors import CheckpointError

_Identity = tuple[int, ...]


class SeenFiles:
    """Files as they were when they were first looked at, before anything was read of them.

    `metadata`: the file that says what is in them, which is looked at now; it need not be there. It counts for files
    that are not ours: a later save of ours takes its place and leaves what it named alone.
    """

    def __init__(self, metadata: str = "") -> None:
        self._metadata = metadata
        self._seen: dict[str, _Identity | None] = {}
        self.look(metadata)

    def look(self, path: str) -> None:
        """Notes what the file is now, unless that is noted."""
        if path not in self._seen:
            self._seen[path] = _identity(path)

    def check(self, paths: Iterable[str]) -> None:
        """Raises `CheckpointError` if one of them is not the file that it was."""
        paths = [*paths]
        if not all(is_data_file(os.path.basename(path)) for path in paths):
            paths.append(self._metadata)
        for path in paths:
            seen, now = self._seen.get(path), _identity(path)
            if now is None and is_data_file(os.path.basename(path)):
                continue  # removed after a later save: what was read of it cannot have been written over
            if seen is not None and seen != now:
                raise CheckpointError(
                    f"{path} was changed while it was read: something else writes to this checkpoint. Load it again "
                    "when that is done",
                    path=path,
                )


def _identity(path: str) -> _Identity | None:
    try:
        return stat_of(path).identity
    except OSError:  # told by who reads it
        return None
