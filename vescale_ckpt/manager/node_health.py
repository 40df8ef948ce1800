"""`NodeHealth` tells whether a node can save to its own folder, for managers that save elsewhere if not."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Sequence

from .._engine import _C
from .._observe.amounts import size
from .._storage.open_storage import storage_at
from ..errors import CheckpointError, StorageFullError

_PROBE_BYTES = 4096
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EDQUOT, errno.ENOSPC}


class NodeHealth:
    """The folder `root` of one node. The lowest of its ranks has one.

    Args:
        ranks: those of the node.
    """

    def __init__(self, root: str, ranks: Sequence[int]) -> None:
        self._root = root
        self._ranks = ranks
        self._needed = 0  # bytes for which there was no room
        self._failure = ""  # of the last save there; empty: it has not failed on this node

    def note(self, error: BaseException | None) -> None:
        """Notes how a save to the folders of all nodes has ended."""
        if error is None:
            self._needed = 0
        self._failure = ""
        failures: dict[int, str] = getattr(error, "failures", {})
        if isinstance(error, CheckpointError) and (isinstance(error, StorageFullError) or _numbers(error)):
            self._failure = next((text for rank, text in failures.items() if rank in self._ranks), "")
        if self._failure and isinstance(error, StorageFullError):
            self._needed = error.needed * len(self._ranks)

    def why_not(self) -> str:
        """Why the next save cannot go to the folder; empty: it can. After a failure of this node it does not go there
        once, and while there is no room."""
        try:
            storage_at(self._root).make()
            with tempfile.TemporaryFile(dir=self._root) as file:
                file.write(bytes(_PROBE_BYTES))
            free = _C.free_bytes(self._root)
        except (CheckpointError, OSError, _C.EngineError) as error:
            return str(error)
        if free is not None and free < self._needed:
            return f"about {size(self._needed)} needed, {size(free)} free"
        failure, self._failure = self._failure, ""
        return failure


def cannot_be_stored(error: CheckpointError | OSError) -> bool:
    """Whether a load has failed because a node cannot store files that it lacks. Equal on all ranks."""
    return isinstance(error, StorageFullError) or not _numbers(error).isdisjoint(_NOT_WRITABLE)


def _numbers(error: CheckpointError | OSError) -> set[int]:
    """Those of the operating system."""
    numbers = {getattr(one, "errno", None) for one in (error, getattr(error, "cause", None))}
    return {number for number in numbers if number is not None}
