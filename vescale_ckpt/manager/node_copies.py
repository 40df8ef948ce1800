"""`NodeCopies` sends each node's part of a step to other nodes while training goes on, for managers with `copies`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence

from .._checkpoint.native.file_names import METADATA_NAME
from .._checkpoint.native.native_checkpoint import NativeCheckpoint
from .._checkpoint.native.step_order import path_of
from .._collective.node_files import NodeFiles, Places, copies_of_each
from .._ranks.exchange import Exchange
from .._storage.open_storage import storage_at
from .background_work import BackgroundWork
from .node_tier import file_ends_of, read_small_files
from .schedule import Ranks

logger = logging.getLogger(__name__)


class NodeCopies(BackgroundWork[tuple[int, object]]):
    """The copies of one manager's steps on other nodes, one step at a time. Each rank has one.

    Args:
        leaders: for each rank the lowest rank of its node.
        copies: how many nodes beside one have each file. Replicas that nodes have saved count.
        bytes_per_second: most that each node sends; 0: no limit.
    """

    def __init__(self, root: str, leaders: Sequence[int], copies: int, ranks: Ranks, bytes_per_second: int) -> None:
        self._root = root
        self._leaders = leaders
        self._copies = copies
        self._ranks = ranks
        self._bytes_per_second = bytes_per_second
        self.last: int | None = None  #: the step that was sent last, or is sent now; equal on all ranks
        self.complete: int | None = None  #: the last step that has its copies; the coordinator asks for it
        self._sending: object = None  # identifies the step that is sent last, until it is saved again
        super().__init__("vescale_ckpt copies")

    def begin_step(self, step: int | None) -> None:
        """Sends a step in the background, as all ranks do. None: the save has failed for which this was reserved."""
        if step is not None:
            self.last = step
            self._sending = object()
            self._add((step, self._sending))
        self._is_reserved = False

    def forget(self, step: int) -> None:
        """The step is saved again: copies of its former content do not count."""
        if self.last == step:
            self._sending = None
        if self.complete == step:
            self.complete = None

    def end_with(self, step: int | None, seconds: float) -> bool:
        """Sends a step (None: none) when nothing else is sent, if that has not begun, as all ranks do. Waits for its
        end, and returns whether it has come."""
        until = time.monotonic() + seconds
        if self.wait(seconds) and step is not None and self.last != step:
            self.begin_step(step)
        return self.wait(max(0.0, until - time.monotonic()))

    def end_within(self, seconds: float) -> None:
        if not self.wait(seconds):
            logger.warning("the last step has fewer copies on other nodes than wanted: the process ends")

    def _do(self, work: tuple[int, object]) -> None:
        step, sending = work
        path, began = path_of(self._root, step), time.monotonic()
        try:
            # Clean-ups leave the step while it is sent.
            with storage_at(path).share(METADATA_NAME):
                self._send(path)
        except Exception as error:
            logger.warning("step %d has fewer copies on other nodes than wanted: %s", step, error)
        else:
            if sending is self._sending:
                self.complete = step
            logger.info("step %d has its copies on other nodes, after %.1f s", step, time.monotonic() - began)

    def _send(self, path: str) -> None:
        exchange, phase = (
            Exchange.of(self._ranks.process_group, self._ranks.timeout, "copies"),
            f"copying {path} to other nodes",
        )
        is_leader = self._leaders[exchange.rank] == exchange.rank

        storage = storage_at(path)
        checkpoint = exchange.together(lambda: NativeCheckpoint.by_metadata(path, None), phase)

        def own_files() -> bytes:
            # Other files are of an older attempt, left on a node that returned.
            ends = file_ends_of(path, read_small_files(path)) if is_leader else {}
            sizes = {name: storage.stat(name).size for name in ends.keys() & {*storage.names()}}
            mine = {name: size for name, size in sizes.items() if size >= ends[name]}
            return json.dumps(mine).encode()

        of_all = [*map(json.loads, exchange.share(exchange.together(own_files, phase), phase))]
        places: Places = {}
        for rank, files in enumerate(of_all):
            for name, length in files.items():
                places.setdefault(name, {})[rank] = length
        wanted = copies_of_each(places, sorted(set(self._leaders)), self._copies)
        files = NodeFiles(self._leaders, places)
        own = wanted.get(exchange.rank, set())
        files.bring(exchange, phase, checkpoint, own, bytes_per_second=self._bytes_per_second)
