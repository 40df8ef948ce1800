"""`DurableStep` copies what the nodes have lost of a step from the durable place to a node, for `NodeTier`."""

from __future__ import annotations

import errno
import logging
import os

from .._checkpoint.native.step_order import path_of
from .._collective.node_files import DURABLE
from .._convert.transfer import Transfer
from .._ranks.send_files import Check
from .._storage.open_storage import size_in, storage_at
from .._storage.pending import PendingFile
from ..errors import CheckpointError, StorageFullError
from .remote_tier import RemoteTier

logger = logging.getLogger(__name__)

_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EDQUOT, errno.ENOSPC}


class DurableStep:
    """One step in the durable place, perhaps not committed there. Its files have the names that they have on nodes."""

    def __init__(self, tier: RemoteTier, step: int) -> None:
        self._tier = tier
        self._url = path_of(tier.url, step)
        self._path = path_of(tier.local, step)

    def size_of(self, name: str) -> int | None:
        """None, with a warning, also if the place cannot be read now."""
        try:
            return self._tier.ask(lambda: size_in(self._url, name), None)
        except (CheckpointError, OSError) as error:
            logger.warning("%s in %s does not count: %s", name, self._url, error)
            return None

    def fetch(self, name: str, check: Check) -> None:
        """As `DurableFiles` says."""
        try:
            copy_file(Transfer(0, None), os.path.join(self._url, name), os.path.join(self._path, name), check)
        except (CheckpointError, OSError) as error:
            if cannot_be_stored(error):
                raise
            raise CheckpointError(str(error), rank=DURABLE) from error


def copy_file(transfer: Transfer, source: str, path: str, check: Check = lambda path, name: None) -> None:
    """Copies a file to a folder that can rename, in place of one of this name. `check` is that of `send_files`."""
    with PendingFile(path) as pending:
        transfer.copy(source, "", pending.directory, pending.create)
        name = os.path.basename(path)
        check(pending.paths[0], name)
        pending.give_names([name], replace=True)
        pending.committed()
    storage_at(os.path.dirname(path)).sync()


def cannot_be_stored(error: CheckpointError | OSError) -> bool:
    """Whether a load has failed because a node cannot store files that it lacks. Equal on all ranks."""
    numbers = {getattr(one, "errno", None) for one in (error, getattr(error, "cause", None))}
    return isinstance(error, StorageFullError) or not numbers.isdisjoint(_NOT_WRITABLE)
