"""`NodeWork` does what nodes do with a step beside saving it, for managers with a folder of each node.

Steps go to other nodes (`NodeCopies`) and to the durable place (`NodeUploads`) while training goes on, one step at a
time. Before each save all ranks vote which of both take the step, and the coordinator decides what all nodes remove.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from .. import settings
from .._checkpoint.native.step_order import Branch
from .._collective.node_files import leaders_of
from .._engine import _C
from .._ranks.exchange import Exchange
from .._ranks.node import node_of_this_process
from .._ranks.shared_directory import NO_NUMBER, MarkerFile, SeparateDirectoriesError
from .._storage.open_storage import storage_at
from ..errors import CheckpointError
from .branch_tracker import BranchTracker
from .clean_up import clean_up_part
from .node_copies import NodeCopies
from .node_table import Removal
from .node_tier import NodeTier, WholeStep
from .node_uploads import NodeUploads
from .remote_tier import RemoteTier
from .retention import Retention
from .running_save import RunningSave

logger = logging.getLogger(__name__)


def find_nodes(exchange: Exchange, durable: RemoteTier) -> NodeTier | None:
    """Returns the tier on the nodes if each node has a folder `durable.local` of its own, and None if all ranks see
    one. All ranks call it together. Raises on all ranks if only some of them see one."""
    root, phase = durable.local, f"finding the nodes that share {durable.local}"
    node = node_of_this_process()
    least, not_most = exchange.agree((node, ~node), phase)
    if least == ~not_most:
        return None
    leaders, marker = leaders_of(exchange, phase), MarkerFile(root)
    leads, failure = leaders[exchange.rank] == exchange.rank, None
    try:
        if leads:
            try:
                storage_at(root).make()
                marker.make()
            except (CheckpointError, _C.EngineError, OSError) as error:
                failure = error  # if other nodes have made theirs, saves raise it
        made = leads and failure is None
        (first,) = exchange.agree((exchange.rank if made else exchange.size,), phase)
        if first == exchange.size:
            exchange.fail_together(failure, phase)
        (number,) = exchange.agree((marker.number if exchange.rank == first else NO_NUMBER,), phase)

        def look() -> int:
            with suppress(SeparateDirectoriesError):
                if made and exchange.rank != first:
                    marker.look(number, exchange.rank)
                    return 1
            return 0

        (seeing,) = exchange.agree((), phase, [exchange.together(look, phase)])
    finally:
        marker.remove()
    others = len(set(leaders)) - 1
    if seeing not in (0, others):
        raise CheckpointError(
            f"local: {seeing + 1} of {others + 1} nodes see one folder {root}: expected one that all nodes share, or "
            "one of each",
            path=root,
        )
    return None if seeing else NodeTier(root, leaders, durable)


class NodeWork:
    """What one rank's node does with the steps of a manager. The other arguments are those of `CheckpointManager`."""

    def __init__(
        self,
        nodes: NodeTier,
        exchange: Exchange,
        durable: RemoteTier,
        retention: Retention,
        *,
        process_group: dist.ProcessGroup | None,
        timeout: float | None,
        local_max_bytes: int | None,
        upload_bytes_per_second: int,
        durable_interval_steps: int | None,
        copies: int,
        copy_bytes_per_second: int,
    ) -> None:
        self._nodes = nodes
        self._rank = exchange.rank
        self._durable = durable
        self._retention = retention
        self._local_max_bytes = local_max_bytes
        self._durable_interval_steps = durable_interval_steps
        self._copies = min(copies, len(set(nodes.leaders)) - 1)
        if self._copies < copies and exchange.is_coordinator:
            logger.warning("copies=%d: %d nodes are left, so each file gets %d", copies, self._copies + 1, self._copies)
        has_limit = retention.max_to_keep is not None or local_max_bytes is not None
        nodes.begin(exchange, retention, has_limit)
        self.uploads: NodeUploads | None = None  #: of the lowest rank of each node
        self.copies: NodeCopies | None = None
        self._uploads_are_idle = self._copies_are_idle = True  # those of all nodes
        # On the coordinator: the last save, its branch and metric, and what it supersedes.
        self._saving: tuple[RunningSave, Branch, float | None, Removal] | None = None
        self._left: set[int] = set()  # what is to go from this node's folder, if nothing uses it
        self._saved_last: int | None = None
        if nodes.leads(self._rank):
            self.uploads = NodeUploads(
                nodes.root, durable.url, retention, upload_bytes_per_second, nodes.leaders, self._rank,
                settings.timeout(timeout), self._clean_up,
            )  # fmt: skip
        if self._copies:
            self.copies = NodeCopies(
                nodes.root, nodes.leaders, self._copies, process_group, timeout, copy_bytes_per_second
            )

    def votes(self) -> list[int]:
        """Whether uploads and copies of this rank are idle before a save. `decide` takes the minima over all ranks."""
        return [int(worker is None or worker.is_idle()) for worker in (self.uploads, self.copies)]

    def decide(self, votes: Sequence[int]) -> None:
        self._uploads_are_idle, self._copies_are_idle = map(bool, votes)

    def plan(
        self, running: RunningSave, metric: float | None, branches: BranchTracker
    ) -> tuple[Branch, list[int], Any]:
        """On the coordinator, before a save: its branch, the steps that it abandons, and what all nodes remove when it
        has committed, for `prepare`."""
        table, step = self._nodes.table, running.step
        if self._saving is not None and self._saving[0].is_durable():
            table.note_saved(self._saving[0].step, *self._saving[1:])
        sent = None
        if self.copies is not None:
            sent = self.copies.last
            if self.copies.complete is not None:
                table.note_copied(self.copies.complete, self._copies)
        branch, abandoned = branches.branch_of(step)
        removal = table.removal(step, branch, metric, self._retention, self._copies, sent)
        if step in table.rows:
            table.rows[step].survives = min(table.rows[step].survives, 0)  # its files are superseded
        self._saving = running, branch, metric, removal
        left = removal.oldest_first if self._local_max_bytes is not None else []
        return branch, abandoned, {**removal.as_json(), "oldest_first": left}

    def prepare(self, running: RunningSave, removal: Any) -> None:
        """Before a save of all nodes. Reserves copies and uploads, which begin when it has ended. Raises if the folder
        cannot be written."""
        running.superseded = Removal(**removal)
        self._left.discard(running.step)
        if self.copies is not None:
            self.copies.forget(running.step)
        if self._nodes.leads(self._rank):
            self._nodes.write_run()  # each time: the folder may be another one
        self._durable.write_run(shares_local=False)

    def begin(self, running: RunningSave) -> None:
        """Reserves copies and uploads for a save of all nodes. They begin when it has ended."""
        for worker, is_idle in (
            (self.uploads, self._uploads_are_idle and self._is_due(running.step)), (self.copies, self._copies_are_idle)
        ):  # fmt: skip
            if worker is not None and is_idle:  # all nodes take the same step
                worker.reserve()
                running.on_end.append(worker.begin_step)

    def committed(self, running: RunningSave) -> None:
        """Cleans up this node's folder, by one of its ranks."""
        self._saved_last = running.step
        if running.is_coordinator:
            going = running.superseded
            self._left |= {*going.steps}
            self._clean_up({*going.uneven}, going.oldest_first, running.step)

    def _clean_up(self, *args: Any) -> None:
        clean_up_part(self._nodes.root, self._left, self._local_max_bytes, *args)

    def restored(self, step: WholeStep) -> None:
        """Makes a step that was restored from the nodes durable, if it is due, and gives it its copies again: the job
        before may have been stopped, and a node may be new."""
        self._saving = None  # the table was made anew, and decides anew what goes
        self._left.clear()
        if step.files is None:
            return
        if self.uploads is not None and self._is_due(step.number):
            self.uploads.begin_step(step.number, step.files.first_with(self._rank))
        if self.copies is not None:
            self.copies.begin_step(step.number)

    def end(self, seconds: float) -> None:
        """Takes care that the last step is durable and has its copies. Waits for the copies, at most so long."""
        if self.uploads is not None and self._saved_last is not None:
            self.uploads.begin_step(self._saved_last)  # it may be on the nodes alone
        if self.copies is not None and not self.copies.end_with(self._saved_last, seconds):
            logger.warning("the last step in %s has fewer copies on other nodes than wanted", self._nodes.root)

    def _is_due(self, step: int) -> bool:
        """Whether a step becomes durable."""
        return self._durable_interval_steps is None or step % self._durable_interval_steps == 0
