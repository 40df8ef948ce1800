"""`CollectiveSave` runs one save with all ranks, in any format: agree on a plan, write, commit."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from .. import settings
from .._dcp.save_planner import SavePlanner
from .._dcp.storage_writer import StorageWriter
from .._engine.errors import of_system
from .._plan.save_plan import GlobalSavePlan, PackedItems, PackedResults
from .._ranks.exchange import Exchange
from .._ranks.shared_directory import DirectoryMark
from .._state.application import saved_form
from .._state.per_rank import counted
from .._write.local_plan import write_packed
from .._write.native_save import new_save_id
from .._write.optimizer_gate import Gate
from .._write.rank_files import FileOptions, RankFiles
from .._write.snapshot import StagedPlan
from ..reports import SaveStats
from .agree_plan import CollectivePlan


class RankSave(Protocol):
    """What a save of any format has on a rank."""

    def begin(self) -> None: ...
    def end(self) -> None: ...


class CollectiveSave(ABC):
    """One save of this rank. All ranks take each step, or none: a rank with an error keeps it until the next exchange,
    where all ranks raise.

    The steps are `begin`, `stage` if the save is asynchronous, and `finish`, which any thread may call.

    Args:
        path: of the directory, absolute.
        doing: names the save in errors and phases; equal on all ranks.
    """

    def __init__(self, exchange: Exchange, planner: SavePlanner, path: str, doing: str, overwrite: bool) -> None:
        self.exchange = exchange
        self.planner = planner
        self.path = path
        self.overwrite = overwrite
        self.placement = planner.placement
        self.save_id = new_save_id()
        self.error: BaseException | None = None
        self.staged_plan: StagedPlan | None = None
        self.stats: SaveStats | None = None  # of this rank, set after writing
        self._doing = doing
        self._items: PackedItems | None = None
        self._of_all: GlobalSavePlan | None = None
        self._mark: DirectoryMark | None = None
        self._committed = False  # by this rank

    def begin(self, state: Mapping[str, Any], error: BaseException | None = None, gated: bool = False) -> bool:
        """Plans with the other ranks what each will write. Returns False if the save is already complete: it was made
        by plans of DCP's items, because the planner or a value of the state does not allow packed plans. `error`: why
        this rank cannot take part. `gated`: do not wait for devices. Raises on all ranks if one has failed."""
        values: dict[str, Any] = {}
        plan: CollectivePlan | None = None
        try:
            if error is not None:
                raise error
            self._save = self._new_save()
            self._mark = self._directory_mark()
            # From `doing` and the token it detects ranks that are at different saves or in different directories.
            plan = CollectivePlan(self.exchange, self.planner, self._doing, self._mark, on_devices=not gated)
            values = saved_form(state)
            self._set_up()
            values = self._describe(plan, values)
        except Exception as failure:
            error = failure
        if plan is None:
            plan = CollectivePlan(self.exchange, self.planner, self._doing, on_devices=not gated)
        planned = plan.make(error)
        if planned is None:
            self._save_by_items(values)
            return False
        self._items, self._of_all = planned.items, planned.of_all
        return True

    def stage(self, gate: Gate | None) -> None:
        """Copies what this rank will write. Afterwards the state may change, except for what a gate still guards."""
        assert self._items is not None
        try:
            self.staged_plan = StagedPlan(self._files(), self._items, gate)
        except Exception as error:
            self.error = error

    def release_state(self) -> None:
        """Drops references to the state, which may be large: the planner outlives the save."""
        self.planner.forget_state()
        self._items = None

    def finish(self) -> SaveStats:
        """Writes and commits. Raises on all ranks if one has failed. Nothing is committed then, unless the error is a
        timeout whose `committed` says that it may be."""
        try:
            self._write_and_commit()
        finally:
            self._save.end()
        assert self.stats is not None
        return self.stats

    # --- What depends on the format

    @abstractmethod
    def _new_save(self) -> RankSave:
        """This rank's save in the format."""

    @abstractmethod
    def _clean_up(self) -> None:
        """Removes leftovers, on the coordinator. No rank writes before the plan is made."""

    @abstractmethod
    def _files(self) -> RankFiles:
        """The files that this rank writes to. Called once, after planning."""

    @abstractmethod
    def _writer(self) -> StorageWriter:
        """A storage writer with the same options, for a save in the steps of `dcp.save`."""

    @abstractmethod
    def _write_and_commit(self) -> None: ...

    def _directory_mark(self) -> DirectoryMark | None:
        """The token that checks for one common directory. None if ranks need not write to one directory."""
        return DirectoryMark(self.path)

    def _describe(self, plan: CollectivePlan, values: dict[str, Any]) -> dict[str, Any]:
        """Describes the state to `plan`. Returns the values to save if DCP has to plan them."""
        plan.describe(values, StorageMeta(checkpoint_id=self.path, save_id=self.save_id))
        return values

    # --- Steps of all formats

    def _options(self) -> FileOptions:
        return FileOptions(self.path, self.exchange.rank)

    def _set_up(self) -> None:
        exchange = self.exchange
        settings.check()
        self._save.begin()
        if exchange.is_coordinator:
            self._clean_up()
            if self._mark is not None and exchange.size > 1 and self.placement != "local":
                self._leave_mark(self._mark)

    def _leave_mark(self, mark: DirectoryMark) -> None:
        try:
            mark.leave()
        except OSError as error:
            raise of_system(error, mark.directory) from None

    def _phase(self, step: str) -> str:
        return f"{self._doing}: {step}"

    def _write(self) -> PackedResults:
        if self.error is not None:
            raise self.error
        if self.staged_plan is not None:
            results, self.stats = self.staged_plan.write()
        else:
            assert self._items is not None
            results, self.stats = write_packed(self._files(), self._items)
        return results

    def _commit_in_doubt(self) -> AbstractContextManager[None]:
        return self.exchange.commit_in_doubt(lambda: self._committed)

    def _commit(self, step: Callable[..., None], *arguments: Any) -> None:
        """Takes the step that commits. Raises before it if the other ranks may have timed out already."""
        self.exchange.may_commit()
        step(*arguments)
        self._committed = True

    # --- A save of DCP's items, in the steps of `dcp.save`

    def _save_by_items(self, values: dict[str, Any]) -> None:
        """Saves in the steps of `dcp.save`, over this package's exchanges for their timeouts and errors."""
        exchange, writer, planner = self.exchange, self._writer(), self.planner
        plan: Any = None
        metadata: Metadata | None = None
        try:
            writer.set_up_storage_writer(exchange.is_coordinator, rank=exchange.rank, use_collectives=True)
            with counted(exchange.rank, exchange.size):
                planner.set_up_planner(values, writer.storage_meta(), exchange.is_coordinator)
                plan = writer.prepare_local_plan(planner.create_local_plan())
        except Exception as error:
            self.error = error
        plans = self._gather(plan, "gather plans")
        answers: list[bytes] | None = None
        if plans is not None:
            try:
                plans, metadata = planner.create_global_plan(plans)
                plans = writer.prepare_global_plan(plans)
                answers = [b"", *map(pickle.dumps, plans[1:])]
            except Exception as error:
                self.error = error
        exchange.fail_together(self.error, self._phase("plan"))
        answer = exchange.scatter(answers, self._phase("scatter plans"))
        results: Any = None
        try:
            plan = pickle.loads(answer) if plans is None else plans[0]
            written = writer.write_data(planner.finish_plan(plan), planner)
            written.wait()
            results, self.stats = written.value(), writer.last_stats
        except Exception as error:
            self.error = error
        of_all = self._gather(results, "write")
        with self._commit_in_doubt():
            if of_all is not None:
                assert metadata is not None
                self._keep_error(self._commit, writer.finish, metadata, of_all)
            exchange.fail_together(self.error, self._phase("commit"))

    def _gather(self, mine: Any, step: str) -> list[Any] | None:
        """The objects of all ranks, on the coordinator. None on other ranks, and if a rank has an error instead."""
        message = b""
        try:
            if self.error is None:
                message = b"." if self.exchange.is_coordinator else pickle.dumps(mine)
        except Exception as error:
            self.error = error
        gathered = self.exchange.gather(message, self._phase(step))
        if gathered is None or not all(gathered):
            return None
        return [mine, *map(pickle.loads, gathered[1:])]

    def _keep_error(self, step: Callable[..., None], *arguments: Any) -> None:
        try:
            step(*arguments)
        except Exception as error:
            self.error = error
