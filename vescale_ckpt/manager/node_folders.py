"""`NodeFolders` saves into a folder of each node, for managers whose ranks do not all see one.

Steps go to other nodes (`NodeCopies`) and to the durable place (`NodeUploads`) while training goes on, one step at a
time. Before each save all ranks vote which of both take the step, and the coordinator decides what all nodes remove.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from .. import settings
from .._checkpoint.native.step_order import Branch, SavedOrder
from .._collective import start_save
from .._collective.handle import SaveHandle
from .._collective.node_files import leaders_of
from .._engine import _C
from .._fingerprint.fingerprint import Fingerprint, remove_fingerprint
from .._fingerprint.prove import prove_restored
from .._plan.planner import Planner
from .._ranks.exchange import Exchange
from .._ranks.groups import PerGroup
from .._ranks.node import node_of_this_process
from .._ranks.shared_directory import NO_NUMBER, MarkerFile, SeparateDirectoriesError
from .._storage.open_storage import storage_at
from .._write.node_layout import NodeLayout
from .._write.optimizer_gate import as_gate
from ..errors import CheckpointError
from .branch_tracker import BranchTracker
from .clean_up import clean_up_part
from .folders import Folders, is_passed_over
from .node_copies import NodeCopies
from .node_table import Removal, branch_of
from .node_tier import NodeTier, WholeStep
from .node_uploads import NodeUploads
from .retention import Retention
from .running_save import RunningSave
from .schedule import Ranks
from .tier import DurablePlace, Tier, cannot_be_stored

logger = logging.getLogger(__name__)

_planners = PerGroup(partial(Planner, "local"))


def find_nodes(exchange: Exchange, durable: DurablePlace) -> NodeTier | None:
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


class NodeFolders(Folders):
    """The folders of all nodes, each with what its ranks hold of a step."""

    durable: DurablePlace
    uploads: NodeUploads | None  #: of the lowest rank of each node

    def __init__(self, ranks: Ranks, retention: Retention, durable: DurablePlace, tier: Tier, nodes: NodeTier) -> None:
        super().__init__(ranks, retention, durable)
        exchange = ranks.exchange()
        self._nodes = nodes
        self._rank = exchange.rank
        self._tier = tier
        self._copies = min(tier.copies, len(set(nodes.leaders)) - 1)
        if self._copies < tier.copies and exchange.is_coordinator:
            logger.warning(
                "copies=%d: %d nodes are left, so each file gets %d", tier.copies, self._copies + 1, self._copies
            )
        nodes.begin(exchange, retention)
        self.copies: NodeCopies | None = None
        # On the coordinator: the last save, its branch and metric, and what it supersedes.
        self._saving: tuple[RunningSave, Branch, float | None, Removal] | None = None
        self._left: set[int] = set()  # what is to go from this node's folder, if nothing uses it
        self._saved_last: int | None = None
        self.writes_notes = nodes.leads(self._rank)
        if self.writes_notes:
            self.uploads = NodeUploads(
                self.root, durable.url, retention, tier, nodes.leaders, self._rank, settings.timeout(ranks.timeout),
                self._clean_up,
            )  # fmt: skip
        if self._copies:
            self.copies = NodeCopies(self.root, nodes.leaders, self._copies, ranks, tier.copy_bytes_per_second)
        self.branches = BranchTracker(self.root, lambda _: SavedOrder.of(nodes.table.branches))
        if exchange.is_coordinator:
            self.branches.look()

    # --- Finding and loading

    def latest(self, full: bool) -> int | None:
        exchange, phase = self._ranks.exchange(), "looking for the newest checkpoint"
        steps = self._nodes.steps(exchange, phase)
        return next((step.number for step in steps if not full or self._nodes.is_sound(step, exchange, phase)), None)

    def losses_survived(self) -> dict[int, int]:
        return self._nodes.losses_survived(self._ranks.exchange(), "counting the copies of each step")

    def best_step(self, name: str) -> int | None:
        self._nodes.look(self._ranks.exchange(), "looking for the best checkpoint", finds_whole=True)
        return super().best_step(name)

    def _values(self, name: str) -> dict[int, float | None]:
        rows = self._nodes.table.rows
        whole = {step: row.metric for step, row in rows.items() if row.survives >= 0}
        return whole | self._read_values(name, {*self.durable_steps()} - rows.keys())

    def _load(self, state: dict[str, Any], step: int | None, options: Mapping[str, Any]) -> int:
        """What is damaged is taken from another copy, and then from the durable place."""
        exchange, phase = self._ranks.exchange(), f"looking for a checkpoint in {self.root}"
        failure: CheckpointError | None = None
        held_back: int | None = None  # a step that is whole, but a node cannot store what it lacks
        for found in self._nodes.steps(exchange, phase, step):
            if held_back not in (None, found.number):
                break  # nothing older is taken in its place
            try:
                if found.files is None:
                    self._load_from(found.path, state, options)
                else:
                    self._load_from_nodes(found, state, exchange, options)
            except CheckpointError as error:  # all ranks get the same class and errno
                if cannot_be_stored(error):
                    held_back = found.number
                elif not is_passed_over(error):
                    raise
                failure = error
                self._pass_over(f"step {found.number} in {found.path} is passed over", error)
                continue
            self._go_on_from(found)
            return found.number
        if failure is not None:
            raise failure
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(
            f"{self.root} of all nodes and {self.durable.url} hold {which} that is whole", path=self.root
        )

    def _load_from_nodes(
        self, step: WholeStep, state: dict[str, Any], exchange: Exchange, options: Mapping[str, Any]
    ) -> None:
        files: dict[str, bytes] | None = options["extra_files"]
        if files is None and self.proves:
            files = {}
        self._nodes.load(step, state, exchange, self._ranks, **{**options, "extra_files": files})
        content = b"" if files is None else remove_fingerprint(files)
        if self.proves:  # no rank sees the files of all nodes, to locate what differs
            stored = Fingerprint.from_bytes(content, step.path)
            group, timeout = self._ranks.process_group, self._ranks.timeout
            prove_restored(stored, step.path, state, options, group, timeout, locates=False)

    def _go_on_from(self, step: WholeStep) -> None:
        """Makes a step that was restored from the nodes durable, if it is due, and gives it its copies again: the job
        before may have been stopped, and a node may be new."""
        self._saving = None  # the table was made anew, and decides anew what goes
        self._left.clear()
        if step.files is None:
            return
        if self.uploads is not None and self._becomes_durable(step.number):
            self.uploads.begin_step(step.number, step.files.first_with(self._rank))
        if self.copies is not None:
            self.copies.begin_step(step.number)

    # --- Saving

    def votes(self, step: int) -> list[int]:
        """Whether uploads and copies of this rank are idle, and take the step."""
        uploads = self.uploads is None or (self.uploads.is_idle() and self._becomes_durable(step))
        return [int(uploads), int(self.copies is None or self.copies.is_idle())]

    def _becomes_durable(self, step: int) -> bool:
        try:
            return bool(self._tier.becomes_durable(step))
        except Exception:  # of a user's rule: no reason that one rank alone does not save
            logger.exception("step %d is not copied to %s", step, self.durable.url)
            return False

    def reserve(self, running: RunningSave, votes: Sequence[int]) -> None:
        for worker, is_due in zip((self.uploads, self.copies), votes, strict=True):
            if worker is not None and is_due:  # all nodes take the same step
                worker.reserve()
                running.on_end.append(worker.begin_step)

    def prepare_save(self, state: Mapping[str, Any], async_checkpoint: bool) -> None:
        group, timeout = self._ranks.process_group, self._ranks.timeout
        start_save.prepare_save(state, _planners.of(group), async_checkpoint, group, timeout)

    def begin_save(self, running: RunningSave, state: Mapping[str, Any], **options: Any) -> SaveHandle:
        gate, extra_files = as_gate(options.pop("gate")), options.pop("extra_files")
        return start_save.start_save(
            running.path, running.path, state, lambda options: NodeLayout(options, extra_files),
            _planners.of(self._ranks.process_group), gate=gate, **options,
        )  # fmt: skip

    def committed(self, running: RunningSave) -> None:
        """Cleans up this node's folder, by one of its ranks."""
        self._saved_last = running.step
        if running.is_coordinator:
            going = running.superseded
            self._left |= {*going.steps}
            self._clean_up({*going.kept})

    def close(self, seconds: float) -> None:
        """Takes care that the last step is durable and has its copies."""
        if self.uploads is not None and self._saved_last is not None:
            self.uploads.begin_step(self._saved_last)  # it may be on the nodes alone
        if self.copies is not None and not self.copies.end_with(self._saved_last, seconds):
            logger.warning("the last step in %s has fewer copies on other nodes than wanted", self.root)

    def _prepare(self, running: RunningSave, metrics: dict[str, float] | None, phase: str) -> list[int]:
        """The coordinator decides on the branch, and on what all nodes remove when the save has committed."""
        metric = (metrics or {}).get(self._retention.best or "")
        branch, abandoned, removal = self._ranks.from_coordinator(lambda: self._plan(running, metric), phase)
        self._ranks.exchange().together(
            lambda: self._prepare_here(running, metrics, branch_of(branch), Removal(**removal)), phase
        )
        return list(abandoned)

    def _plan(self, running: RunningSave, metric: float | None) -> tuple[Branch, list[int], Any]:
        table, step = self._nodes.table, running.step
        if self._saving is not None and self._saving[0].is_durable():
            table.note_saved(self._saving[0].step, *self._saving[1:])
        sent = None
        if self.copies is not None:
            sent = self.copies.last
            if self.copies.complete is not None:
                table.note_copied(self.copies.complete, self._copies)
        branch, abandoned = self.branches.branch_of(step)
        removal = table.removal(step, branch, metric, self._retention, self._copies, sent)
        if step in table.rows:
            table.rows[step].survives = min(table.rows[step].survives, 0)  # its files are superseded
        self._saving = running, branch, metric, removal
        return branch, abandoned, asdict(removal)

    def _prepare_here(
        self, running: RunningSave, metrics: dict[str, float] | None, branch: Branch, removal: Removal
    ) -> None:
        """Raises if the folder cannot be written."""
        running.superseded = removal
        self._left.discard(running.step)
        if self.copies is not None:
            self.copies.forget(running.step)
        if self.writes_notes:
            self._nodes.write_run()  # each time: the folder may be another one
        self.durable.write_run(shares_local=False)
        running.prepare(metrics, branch)

    def _clean_up(self, spared: Collection[int] = ()) -> None:
        clean_up_part(self.root, self._left, spared)
