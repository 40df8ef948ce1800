"""`CollectiveSave` runs one save with all ranks, in any format: agree on a plan, write, commit."""

from __future__ import annotations

import logging
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from .._checkpoint.native import extra_copies
from .._dcp.save_planner import SavePlanner
from .._dcp.storage_writer import StorageWriter
from .._engine.errors import named_system_errors
from .._engine.rows import words
from .._observe.timeline import Timeline, phase
from .._plan.save_plan import GlobalSavePlan, PackedItems, PackedResults
from .._ranks.exchange import Exchange
from .._ranks.shared_directory import DirectoryMark
from .._state.application import saved_form
from .._state.extra_files import with_files
from .._state.per_rank import counted
from .._storage.open_storage import storage_at
from .._write.frozen import FrozenTensors
from .._write.local_plan import write_packed
from .._write.optimizer_gate import Gate
from .._write.rank_save import RankSave
from .._write.snapshot import StagedPlan
from ..reports import JobStats, SaveStats
from .agree_plan import CollectivePlan
from .steps import Steps

logger = logging.getLogger(__name__)


class CollectiveSave(ABC):
    """One save of this rank. All ranks take each step, or none.

    The steps are `begin`, `stage` if the save is asynchronous, and `finish`, which any thread may call. `release_state`
    comes after the last of them on the training thread.

    Args:
        path: of the directory, absolute.
        timeline: of this save. Its `doing` is equal on all ranks.
        extra_files: contents by name, to be saved as files and in the checkpoint. Those of the rank that commits count.
        base: the path of an older checkpoint, absolute: records of equal bytes are not written again.
        frozen: tensors that need not be read again, either. For a save with `base`.
        options: those of `StorageWriter`.
    """

    _kind: ClassVar[type[RankSave]]  # this rank's save in the format
    _save: RankSave

    def __init__(
        self,
        exchange: Exchange,
        planner: SavePlanner,
        path: str,
        timeline: Timeline,
        extra_files: Mapping[str, bytes] | None = None,
        base: str | None = None,
        frozen: FrozenTensors | None = None,
        **options: Any,
    ) -> None:
        self.exchange = exchange
        self.planner = planner
        self.path = path
        self.timeline = timeline
        self.steps = Steps(exchange, timeline.doing)
        self.staged_plan: StagedPlan | None = None
        self.stats: SaveStats | None = None  # of this rank, set after writing
        self._options = options
        self._extra_files = extra_files
        self._base = base
        self._frozen = frozen
        self._job: JobStats | None = None
        self._plan_reused: bool | None = None
        self._items: PackedItems | None = None
        self._of_all: GlobalSavePlan | None = None
        self._committed = False  # by this rank

    def begin(self, state: Mapping[str, Any], error: BaseException | None = None, gated: bool = False) -> bool:
        """Plans with the other ranks what each will write. Returns False if the save is already complete: it was made
        by plans of DCP's items, because the planner or a value of the state does not allow packed plans. `error`: why
        this rank cannot take part. `gated`: do not wait for devices. Raises on all ranks if one has failed."""
        with phase("plan"):
            return self._begin(state, error, gated)

    def _begin(self, state: Mapping[str, Any], error: BaseException | None, gated: bool) -> bool:
        mark = self._directory_mark()
        # From `doing` and the mark it detects ranks that are at different saves or in different directories.
        plan = CollectivePlan(self.steps, self.planner, mark, on_devices=not gated)
        self.steps.error = error
        values = self.steps.take(self._prepare, state, plan, mark)
        planned = plan.make()
        self._plan_reused = plan.reused
        if planned is None:
            assert values is not None
            if self._base is not None:
                logger.warning("%s: all is written, without the base: DCP planned the save", self.timeline.doing)
            self._save_by_items(values)
            return False
        self._items, self._of_all = planned
        self._take_base()
        return True

    def stage(self, gate: Gate | None) -> None:
        """Copies what this rank will write. Afterwards the state may change, except for what a gate still guards."""
        assert self._items is not None
        with phase("snapshot"):
            self.staged_plan = self.steps.take(StagedPlan, self._save, self._items, gate)
        self.timeline.progress = None if self.staged_plan is None else self.staged_plan.progress

    def release_state(self) -> None:
        """Drops references to the state, which may be large: the planner outlives the save."""
        self.planner.forget_state()
        self._items = None

    def finish(self) -> SaveStats:
        """Writes and commits. Raises on all ranks if one has failed. Nothing is committed then, unless the error is a
        timeout whose `committed` says that it may be."""
        with self.timeline.here():
            try:
                self._write_and_commit()
            finally:
                self._save.end()
            return self._end()

    # --- What depends on the format

    @abstractmethod
    def _message(self, results: PackedResults) -> bytes:
        """What the coordinator needs from this rank after writing."""

    @abstractmethod
    def _commit_all(self, messages: list[bytes] | None) -> None:
        """Commits. `messages`: on the coordinator, of all ranks; None on other ranks, and if a rank has an error."""

    def _take_base(self) -> None:
        """Decides with the other ranks which records of an older checkpoint may be named."""
        assert self._base is None

    def _directory_mark(self) -> DirectoryMark | None:
        """The token that checks for one common directory. None if ranks need not write to one directory."""
        return DirectoryMark(self.path)

    def _describe(self, plan: CollectivePlan, values: dict[str, Any]) -> dict[str, Any]:
        """Describes the state to `plan`. Returns the values to save if DCP has to plan them."""
        plan.describe(values, self._writer.storage_meta())
        return values

    # --- Steps of all formats

    def _prepare(self, state: Mapping[str, Any], plan: CollectivePlan, mark: DirectoryMark | None) -> dict[str, Any]:
        """Begins this rank's save and describes the state. Returns the values to save if DCP has to plan them."""
        exchange = self.exchange
        self._writer = StorageWriter(self.path, **self._options)
        given = extra_copies.checked(self._extra_files)
        self._writer.options = replace(self._writer.options, extra_files=given)
        self._writer.set_up_storage_writer(exchange.is_coordinator, rank=exchange.rank, use_collectives=True)
        self._save = self._kind(self._writer.options)
        # One rank gives them to the plan; where each node has a checkpoint of its own, the plan takes one rank of each.
        mine = given if exchange.is_coordinator or self.planner.placement == "local" else {}
        values = with_files(saved_form(state), mine)
        if self.planner.placement == "local":
            storage_at(self.path).check_mounted(
                "a checkpoint of each node (placement='local')", "Nodes share it: leave placement out"
            )
        self._save.begin()
        if exchange.is_coordinator:
            self._save.clean_up()  # no rank writes before the plan is made
            if mark is not None and exchange.size > 1 and self.planner.placement != "local":
                with named_system_errors(self.path):
                    mark.leave()
        return self._describe(plan, values)

    def _write_and_commit(self) -> None:
        of_all = self.steps.gather(lambda: self._message(self._write()), "write")
        with self.exchange.commit_in_doubt(lambda: self._committed):
            with phase("commit"):
                self._commit_all(of_all)
            self._raise_or_sum_up()

    def _raise_or_sum_up(self) -> None:
        """Raises on all ranks if one has an error. Else all learn what the job did."""
        votes = self.timeline.votes(0 if self.stats is None else self.stats.bytes)
        self._job = self.timeline.job(self.steps.raise_together("commit", *votes))

    def _end(self) -> SaveStats:
        assert self.stats is not None
        timed = self.timeline.with_times(self.stats, self._job)
        self.stats = replace(timed, plan_reused=self._plan_reused)
        self.timeline.end(self.stats)
        return self.stats

    def _write(self) -> PackedResults:
        if self.staged_plan is not None:
            results, self.stats = self.staged_plan.write()
        else:
            assert self._items is not None
            save, items = self._save, self._items
            total = cache(lambda: sum(words(items.body_bytes())))  # rarely asked for
            self.timeline.progress = lambda: (save.progress(), total())
            results, self.stats = write_packed(save, items)
        return results

    def _commit(self, step: Callable[..., None], *arguments: Any) -> None:
        """Takes the step that commits. Raises before it if the other ranks may have timed out already."""
        self.exchange.may_commit()
        step(*arguments)
        self._committed = True

    # --- A save of DCP's items, in the steps of `dcp.save`

    def _save_by_items(self, values: dict[str, Any]) -> None:
        """Saves in the steps of `dcp.save`, over this package's exchanges for their timeouts and errors."""
        exchange, steps, writer, planner = self.exchange, self.steps, self._writer, self.planner
        mine: Any = None  # the coordinator's own plan, and then its results
        metadata: Metadata | None = None

        def packed(value: Any) -> bytes:
            nonlocal mine
            mine = value
            return b"." if exchange.is_coordinator else pickle.dumps(value)

        def plan() -> bytes:
            with counted(exchange.rank, exchange.size):
                planner.set_up_planner(values, writer.storage_meta(), exchange.is_coordinator)
                planner.ranks = exchange.ranks
                return packed(writer.prepare_local_plan(planner.create_local_plan()))

        def plan_all(others: list[bytes]) -> list[bytes]:
            nonlocal mine, metadata
            plans, metadata = planner.create_global_plan([mine, *map(pickle.loads, others)])
            mine, *answers = writer.prepare_global_plan(plans)
            return [b"", *map(pickle.dumps, answers)]

        def write() -> bytes:
            local: SavePlan = pickle.loads(answer) if answer else mine
            results = writer.write_data(planner.finish_plan(local), planner).wait()
            self.stats = writer.last_stats
            return packed(results)

        def commit(others: list[bytes]) -> None:
            assert metadata is not None
            self._commit(writer.finish, metadata, [mine, *map(pickle.loads, others)])

        plans = steps.gather(plan, "gather plans")
        answers = steps.take(plan_all, plans[1:]) if plans is not None else None
        steps.raise_together("plan")
        answer = exchange.scatter(answers, steps.phase("scatter plans"))
        results = steps.gather(write, "write")
        with exchange.commit_in_doubt(lambda: self._committed):
            if results is not None:
                with phase("commit"):
                    steps.take(commit, results[1:])
            self._raise_or_sum_up()
        self._end()
