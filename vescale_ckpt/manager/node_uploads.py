"""`NodeUploads` copies what each node has of a step to the durable place, for managers with a folder of each node.

The nodes meet in the durable place and nowhere else: each copies the files of its own ranks, and waits until the
coordinator has committed the step, which it does when all files are there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from .._checkpoint.native import metadata_file
from .._checkpoint.native.commit_metadata import Replaced, remove_orphans
from .._checkpoint.native.file_names import INDEX_NAME, METADATA_NAME, METRICS_NAME, NODE_MARKER, is_data_file
from .._checkpoint.native.native_checkpoint import NativeCheckpoint
from .._checkpoint.native.step_order import ORDER_NAME, path_of
from .._convert.transfer import CopyReport, Transfer
from .._storage.open_storage import is_file, size_in, stat_of, storage_at
from .._storage.storage import LOCK_NAME
from ..errors import CheckpointError, some
from .node_tier import file_ends_of, read_small_files
from .retention import Retention
from .tier import Tier, copy_file
from .uploads import Uploads

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds between two looks at what other nodes have copied


class NodeUploads(Uploads):
    """The uploads of one node, by the lowest of its ranks.

    Args:
        leaders: for each rank the lowest rank of its node.
        rank: this one.
        patience: seconds to wait for files of other nodes while none comes.
        remove_left: removes from this node's folder what could not be removed while it was copied.
    """

    def __init__(
        self,
        local: str,
        durable: str,
        retention: Retention,
        tier: Tier,
        leaders: Sequence[int],
        rank: int,
        patience: float,
        remove_left: Callable[[], None],
    ) -> None:
        super().__init__(local, durable, retention, tier)
        self._leaders = leaders
        self._rank = rank
        self._patience = patience
        self._remove_left = remove_left
        self._wanted: tuple[int | None, Collection[str] | None] = None, None  # the step to copy, and which files
        self._own: Collection[str] | None = None  # of the step that is copied

    def begin_step(self, step: int | None, own: Collection[str] | None = None) -> None:
        """Copies a step when nothing else is copied, as all nodes do. None: the save has failed for which this was
        reserved. `own`: the files that this node copies; None: those that its ranks have saved."""
        with self._changed:
            self._wanted = step, own
        if step is not None:
            self.begin()
        self._is_reserved = False

    def _next(self, tried: set[int]) -> int | None:
        step, self._own = self._wanted
        if step is None or step in tried or not storage_at(path_of(self.local, step)).has(METADATA_NAME):
            return None
        return None if self._is_sent(step) else step

    def _copy(self, source: str, url: str, report: CopyReport) -> None:
        """Copies this node's part, and returns when the step is committed. What was copied stays for the next copy."""
        storage_at(url).make()
        with storage_at(url).share():
            contents = read_small_files(source)
            ends = file_ends_of(source, contents)
            self._copy_files(source, url, ends, report)
            self._await_commit(url, ends, contents)

    def _copy_files(self, source: str, url: str, ends: Iterable[str], report: CopyReport) -> None:
        # Names of data files begin with the rank that wrote them, as the job that saved them numbered its ranks.
        of_ranks = tuple(f"__{rank}_" for rank, leader in enumerate(self._leaders) if leader == self._rank)
        own = [name for name in ends if (name.startswith(of_ranks) if self._own is None else name in self._own)]
        names = [name for name in own if is_file(os.path.join(source, name))]
        transfer = Transfer(0, None, self._tier.upload_bytes_per_second, self._check_stopped)
        for name in names + (_other_files(source) if self._rank == 0 else []):
            self._copy_file(transfer, source, url, name, report)

    def _copy_file(self, transfer: Transfer, source: str, url: str, name: str, report: CopyReport) -> None:
        self._check_stopped()
        path, size = os.path.join(url, name), stat_of(os.path.join(source, name)).size
        if is_data_file(name) and size_in(url, name) == size:  # no two saves give a file the same name
            report.resumed_files += 1
            report.resumed_bytes += size
            return
        if storage_at(url).renames:
            copy_file(transfer, os.path.join(source, name), path)
        else:
            transfer.copy(os.path.join(source, name), name, url, lambda make: make(path))
        report.files += 1
        report.bytes += size

    def _await_commit(self, url: str, ends: Mapping[str, int], contents: Mapping[str, bytes]) -> None:
        """Waits for the files of all nodes, which rank 0 then commits."""
        fingerprint = metadata_file.fingerprint_of(contents[METADATA_NAME])
        since, missing_before, pause = time.monotonic(), len(ends), _FIRST_PAUSE
        while metadata_file.metadata_fingerprint(url) != fingerprint:
            self._check_stopped()
            missing = [name for name, end in ends.items() if (size_in(url, name) or 0) < end]
            if not missing and self._rank == 0:
                self._commit(url, contents)
                return
            if len(missing) < missing_before:
                since, missing_before, pause = time.monotonic(), len(missing), _FIRST_PAUSE
            waited = time.monotonic() - since
            if waited > self._patience:
                what = f"files {some(missing)} have not come" if missing else "it was not committed"
                raise CheckpointError(f"{url} is not whole: {what} for {waited:.0f} s", path=url)
            self._stopped.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _commit(self, url: str, contents: Mapping[str, bytes]) -> None:
        storage = storage_at(url)
        superseded = Replaced.read(url).files
        if INDEX_NAME in contents:
            storage.write(INDEX_NAME, contents[INDEX_NAME])
        for name in (ORDER_NAME, METRICS_NAME):
            if name not in contents:  # an older save of the step may have left one
                storage.remove(name)
        storage.commit(METADATA_NAME, contents[METADATA_NAME], True)
        if superseded := superseded - NativeCheckpoint.by_index(url, None).named_files():
            remove_orphans(url, superseded)

    def _clean_up(self, step: int) -> None:
        if self._rank == 0:
            super()._clean_up(step)
        self._remove_left()


def _other_files(source: str) -> list[str]:
    """Files beside the checkpoint, as a model's configuration."""
    return [
        name
        for name in storage_at(source).names()
        if not name.startswith((METADATA_NAME, LOCK_NAME, NODE_MARKER, "__")) and is_file(os.path.join(source, name))
    ]
