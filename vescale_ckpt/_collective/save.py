"""`Save` runs one collective save, in any layout: agree on a plan, write, commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from .. import settings
from .._engine.engine_errors import named_system_errors
from .._engine.rows import words
from .._observe.timeline import Timeline, phase
from .._plan.global_plan import GlobalPlan
from .._plan.local_plan import LocalPlan
from .._plan.planner import Planner
from .._ranks.exchange import Exchange
from .._ranks.groups import check_alone_on_purpose
from .._ranks.rendezvous import FirstWord
from .._ranks.shared_directory import MarkerFile
from .._ranks.steps import Steps
from .._ranks.store_thread import StoreGoneError
from .._state.application import saved_form
from .._write.layout import Layout
from .._write.optimizer_gate import Gate
from .._write.rank_save import RankSave
from .._write.snapshot import StagedPlan
from ..errors import CheckpointError, SaveCancelledError
from ..reports import JobStats, SaveStats
from .agree_plan import CollectivePlan

# The values of the write-once cell that decides commit versus cancel: the first one written wins.
_COMMIT, _FAILED, _CANCELLED_BY = "commit", "failed", "cancelled by rank "


class Save:
    """This rank's part of one save. Each step is collective: all ranks take it, or none.

    The steps are `begin`, `stage` if the save is asynchronous, and `finish`, which any thread may call. `release_state`
    follows the last of them on the training thread.

    Args:
        path: the absolute path of the directory.
        layout: creates the layout. Its errors count as errors of the first step.
        timeline: records this save. Its `doing` is equal on all ranks.
    """

    def __init__(
        self, exchange: Exchange, planner: Planner, path: str, layout: Callable[[], Layout], timeline: Timeline
    ) -> None:
        self.exchange = exchange
        self.planner = planner
        self.path = path
        self.timeline = timeline
        self.steps = Steps(exchange, timeline.doing)
        self.staged_plan: StagedPlan | None = None
        self.stats: SaveStats | None = None  # this rank's, set after writing
        self._make_layout = layout
        self._layout: Layout  # from the first step on
        self._job: JobStats | None = None
        self._plan_reused: bool | None = None
        self._plan: LocalPlan | None = None
        self._of_all: GlobalPlan | None = None
        self._committed = False  # whether this rank has committed
        self._given_up: CheckpointError | None = None  # why this rank stopped writing
        self._fate: FirstWord  # of the save, once it is planned

    @property
    def _by_node(self) -> bool:
        """Whether each node has its own folder."""
        return self.planner.placement == "local"

    def begin(self, state: Mapping[str, Any], error: BaseException | None = None, gated: bool = False) -> None:
        """Plans with the other ranks what each writes. Raises on all ranks if any rank has an error.

        `error`: why this rank cannot take part. `gated`: do not wait for devices."""
        with phase("plan"):
            # By `doing` and the marker, ranks detect that they are at different saves or in different directories.
            marker = MarkerFile(self.path, self.exchange.kept)
            plan = CollectivePlan(self.steps, self.planner, marker, on_devices=not gated)
            self.steps.error = error
            self.steps.take(self._prepare, state, plan, marker)
            self._plan, self._of_all = plan.make()
            self._plan_reused = plan.reused
        try:
            with phase("plan", "lay out the files"):
                self._layout.place(self.steps, self._plan, self._of_all)
        except BaseException:
            self._layout.end()
            raise
        self._fate = self.exchange.first_word()  # even if synchronous here: other ranks may be asynchronous

    def _prepare(self, state: Mapping[str, Any], plan: CollectivePlan, marker: MarkerFile) -> None:
        """Prepares the directory on this rank and describes the state."""
        settings.check()
        check_alone_on_purpose()
        exchange, layout = self.exchange, self._make_layout()
        self._layout = layout
        values = layout.values(saved_form(state), exchange.is_coordinator)
        layout.begin(exchange.is_coordinator)
        if exchange.is_coordinator and exchange.size > 1 and not self._by_node:
            with named_system_errors(self.path):
                marker.make()
        if left_out := layout.left_out(plan.describe(values)):
            plan.leave_out(left_out)

    def stage(self, gate: Gate | None) -> None:
        """Copies what this rank writes. Afterwards the state may change, except for tensors that a gate still
        guards."""
        assert self._plan is not None
        with phase("snapshot"):
            self.staged_plan = self.steps.take(StagedPlan, RankSave(self._layout), self._plan, gate)
        self.timeline.progress = None if self.staged_plan is None else self.staged_plan.progress

    def release_state(self) -> None:
        """Drops references to the state, which may be large, while the save continues in the background."""
        self._plan = None

    def finish(self) -> SaveStats:
        """Writes and commits; collective. Raises on all ranks if any rank has failed. In that case nothing is
        committed, unless the error is a timeout whose `committed` is not False."""
        with self.timeline.here():
            try:
                self._write_and_commit()
            except SaveCancelledError as error:  # on all ranks; those that were not writing still have their files
                self._layout.discard(error)
                self.exchange.agree([1], self.steps.phase("remove the files"))
                raise self._cancelled(error.cancelled_by) from None
            finally:
                self._layout.end()
            return self._end()

    # --- Cancelling

    def cancel(self) -> bool:
        """Makes `finish` raise `SaveCancelledError` on all ranks. This rank stops writing soon, others learn of it at
        the commit. Returns False if the commit has begun, or the save has ended. Any thread may call it. Raises
        `StoreGoneError` if the store does not answer."""
        return self._follow(self._fate.say(f"{_CANCELLED_BY}{self.exchange.rank}"))

    def abandon(self) -> None:
        """Makes `finish` fail soon on all ranks, unless the commit has begun. Any thread may call it."""
        error = CheckpointError(f"{self.timeline.doing}: given up, because the process ends", path=self.path)
        self._give_up(self._given_up or error)

    def _give_up(self, error: CheckpointError) -> None:
        self._given_up = error
        if self.staged_plan is not None:
            self.staged_plan.cancel()

    def _check_not_given_up(self) -> None:
        """Raises the error of `_give_up`, even if that was called before anything was running that could be
        cancelled."""
        if self._given_up is not None:
            self._layout.discard(self._given_up)
            raise self._given_up

    def _cancelled(self, rank: int) -> SaveCancelledError:
        text = f"{self.timeline.doing}: rank {rank} has cancelled it: nothing is committed"
        return SaveCancelledError(text, path=self.path, cancelled_by=rank)

    def _follow(self, fate: str) -> bool:
        """Stops this rank if `fate`, the decided outcome, is a cancellation. Returns whether it is."""
        cancelled = fate.startswith(_CANCELLED_BY)
        if cancelled:
            self._give_up(self._cancelled(int(fate.removeprefix(_CANCELLED_BY))))
        return cancelled

    def _settle_fate(self) -> None:
        """Decides the outcome before other ranks learn of an error of this rank: if the save was cancelled first, the
        cancellation becomes the error; otherwise the save can no longer be cancelled."""
        if self.steps.error is not None:
            with suppress(StoreGoneError):
                self._follow(self._fate.say(_FAILED))
            if isinstance(self._given_up, SaveCancelledError):
                self.steps.error = self._given_up

    # --- Writing

    def _write_and_commit(self) -> None:
        self._settle_fate()
        self._layout.join_ranks(self.steps, self._is_in_one_table())
        messages = self.steps.gather(self._write, "write")
        with self.exchange.commit_in_doubt(lambda: self._committed, self._by_node):
            with phase("commit"):
                self._commit_all(messages)
            self._raise_or_sum_up()

    def _is_in_one_table(self) -> bool:
        if self.staged_plan is not None:
            return self.staged_plan.in_one_table
        return self._plan is not None and self._plan.state.all_ready

    def _write(self) -> bytes:
        """Writes this rank's part. Returns the message for the coordinator."""
        if self.staged_plan is not None:
            self.stats = self.staged_plan.write()
            self._check_not_given_up()
        else:
            assert self._plan is not None
            layout, plan = self._layout, self._plan
            total = cache(lambda: sum(words(plan.body_bytes())))  # rarely needed
            self.timeline.progress = lambda: (layout.progress(), total())
            self.stats = RankSave(layout).write(plan)
        return self._layout.message()

    def _commit_all(self, messages: list[bytes] | None) -> None:
        """Commits on the coordinator, or on the first rank of each node. `messages`: those of all ranks, on the
        coordinator; None if a rank has an error."""
        contents: list[tuple[bytes, ...]] | None = None
        if messages is not None and self._of_all is not None:
            contents = self.steps.take(self._layout.contents, self._of_all, messages)
        if mine := self._layout.hand_out(self.steps, contents):
            self.steps.take(self._commit, mine)

    def _commit(self, content: Sequence[bytes]) -> None:
        """Commits. Raises before it commits if the other ranks may have timed out."""
        self._check_not_given_up()
        if self._follow(self._fate.say(_COMMIT, self.exchange.timeout)):
            self._check_not_given_up()
        self.exchange.may_commit()
        self._layout.commit(*content)
        self._committed = True

    def _raise_or_sum_up(self) -> None:
        """Raises on all ranks if any rank has an error; otherwise shares the job's statistics."""
        self._settle_fate()
        votes = self.timeline.votes(0 if self.stats is None else self.stats.bytes)
        self._job = self.timeline.job(self.steps.raise_together("commit", *votes))

    def _end(self) -> SaveStats:
        assert self.stats is not None
        timed = self.timeline.with_times(self.stats, self._job)
        self.stats = replace(timed, plan_reused=self._plan_reused)
        self.timeline.end(self.stats)
        return self.stats
