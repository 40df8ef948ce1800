"""`NodeWork` does what nodes do with a step beside saving it, for managers with a folder of each node.

Steps go to other nodes (`NodeCopies`) and to the durable place (`NodeUploads`) while training goes on, one step at a
time. Before each save all ranks vote: which of both take the step, and whether all nodes can save to their folders.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from .. import settings
from .._collective.node_files import leaders_of
from .._engine import _C
from .._ranks.exchange import Exchange
from .._ranks.node import node_of_this_process
from .._ranks.shared_directory import NO_NUMBER, MarkerFile, SeparateDirectoriesError
from .._storage.open_storage import storage_at
from ..errors import CheckpointError
from .clean_up import clean_up_part
from .node_copies import NodeCopies
from .node_health import NodeHealth
from .node_tier import NodeTier, WholeStep
from .node_uploads import NodeUploads
from .remote_tier import RemoteTier
from .retention import Retention
from .running_save import RunningSave

logger = logging.getLogger(__name__)


def find_nodes(exchange: Exchange, durable: RemoteTier) -> NodeTier | None:
    """Returns the tier on the nodes if each node has a folder `durable.local` of its own, and None if all ranks see
    one. All ranks call it together. Raises on all ranks if only some of them see one."""
    root, phase = durable.local, f"looking who shares {durable.local}"
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
            except (CheckpointError, _C.EngineError, OSError) as error:  # saves tell of it, if the node is alone
                failure = error
        made = leads and failure is None
        (first,) = exchange.agree((exchange.rank if made else exchange.size,), phase)
        if first == exchange.size:
            exchange.fail_together(failure, phase)
        (number,) = exchange.agree((marker.number if exchange.rank == first else NO_NUMBER,), phase)

        def look() -> int:
            if not made or exchange.rank == first:
                return 0
            with suppress(SeparateDirectoriesError):
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
        rank: int,
        durable: str,
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
        if copies >= (count := len(set(nodes.leaders))):
            raise ValueError(f"copies: expected at most {count - 1} on {count} nodes, got {copies}")
        self.can_save = True  #: whether all nodes can save to their folders
        self.saved_last: int | None = None  #: the step of the last save, if it went to the folders of all nodes
        self.uploads: NodeUploads | None = None  #: of the lowest rank of each node
        self.copies: NodeCopies | None = None
        self._nodes = nodes
        self._rank = rank
        self._durable = durable
        self._retention = retention
        self._local_max_bytes = local_max_bytes
        self._durable_interval_steps = durable_interval_steps
        self._is_upload_due = (
            False  # whether the next step that is saved while no node uploads goes to the durable place
        )
        self._uploads_are_idle = self._copies_are_idle = True  # those of all nodes
        self._health: NodeHealth | None = None  # of this node's folder
        if nodes.leads(rank):
            self.uploads = NodeUploads(
                nodes.root, durable, retention, upload_bytes_per_second, nodes.leaders, rank,
                settings.timeout(timeout), self.clean_up,
            )  # fmt: skip
            self._health = NodeHealth(nodes.root, nodes.ranks_of(rank))
        if copies:
            self.copies = NodeCopies(nodes.root, nodes.leaders, copies, process_group, timeout, copy_bytes_per_second)

    def votes(self, step: int) -> list[int]:
        """What this rank says before a save. `decide` takes the least of what all ranks say."""
        if why_not := "" if self._health is None else self._health.why_not():
            logger.warning(
                "step %d goes to %s: this node cannot save to %s: %s", step, self._durable, self._nodes.root, why_not
            )
        none_is_owed = self.uploads is None or not self.uploads.is_owed
        idle = [worker is None or worker.is_idle() for worker in (self.uploads, self.copies)]
        return [*map(int, (not why_not, none_is_owed, *idle))]

    def decide(self, votes: Sequence[int]) -> None:
        can_save, none_is_owed, uploads_are_idle, copies_are_idle = map(bool, votes)
        self.can_save = can_save
        self._is_upload_due |= not none_is_owed
        self._uploads_are_idle, self._copies_are_idle = uploads_are_idle, copies_are_idle

    def begin(self, running: RunningSave) -> None:
        """Reserves copies and uploads for a save of all nodes that begins. They begin when it has ended."""
        if not self.can_save:
            self._is_upload_due = False  # the step itself goes to the durable place
            return
        self._is_upload_due |= self._is_due(running.step)
        if self._is_upload_due and self._uploads_are_idle:
            # All nodes take the same step. What is saved meanwhile stays on the nodes.
            self._is_upload_due = False
            if self.uploads is not None:
                self.uploads.reserve()
                running.on_end.append(self.uploads.begin_step)
        if self.copies is not None and self._copies_are_idle:
            self.copies.reserve()
            running.on_end.append(self.copies.begin_step)

    def ended(self, error: BaseException | None) -> None:
        """Notes how a save to the folders of all nodes has ended."""
        if self._health is not None:
            self._health.note(error)

    def clean_up(self, saved: int) -> None:
        """Cleans up this node's folder. `saved`: the step that was saved last."""
        copied = None if self.copies is None else self.copies.complete
        clean_up_part(self._nodes.root, self._retention, saved, copied, self._local_max_bytes)

    def restored(self, step: WholeStep) -> None:
        """Makes a step that was restored from the nodes durable, if it is due, and gives it its copies again: the job
        before may have been stopped, and a node may be new."""
        if step.files is None:
            return
        if self.uploads is not None and self._is_due(step.number):
            self.uploads.begin_step(step.number, step.files.first_with(self._rank))
        if self.copies is not None:
            self.copies.begin_step(step.number)

    def end(self) -> None:
        """Takes care that the last step is durable and has its copies."""
        if self.uploads is not None and self.saved_last is not None:
            self.uploads.end_with(self.saved_last)  # it may be on the nodes alone
        if self.copies is not None and not self.copies.end_with(self.saved_last):
            logger.warning("the last step in %s has fewer copies on other nodes than wanted", self._nodes.root)

    def _is_due(self, step: int) -> bool:
        """Whether a step becomes durable."""
        return self._durable_interval_steps is None or step % self._durable_interval_steps == 0
