"""One save of all ranks: agree, plan where needed, write, commit. Over exchanges of our own."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from .application import saved_form
from .collective_plan import CollectivePlan
from .engine import of_system
from .exchange import Exchange
from .gate import Gate
from .message import pack, unpack
from .node import node_of_this_process
from .one_place import PlaceToken
from .per_rank import counted
from .save_plan import GlobalSavePlan, PackedItems, PackedResults
from .save_planner import SavePlanner
from .staged_part import StagedPart
from .stats import SaveStats
from .writer import StorageWriter


class CollectiveSave:
    """One save of this rank. Every step is taken by all ranks or by none: an error is kept until all know of it.

    `begin`, then `stage` if it is to go on in the background, then `finish`, which any thread may call.
    """

    def __init__(
        self,
        exchange: Exchange,
        planner: SavePlanner,
        path: str | os.PathLike[str],
        overwrite: bool,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.exchange = exchange
        self.planner = planner
        self.path = path
        self.overwrite = overwrite
        self.process_group = process_group
        self.placement = planner.placement
        self._doing = f"saving to {os.fspath(path)}"
        self.error: BaseException | None = None
        self.part: StagedPart | None = None
        self._items: PackedItems | None = None
        self._of_all: GlobalSavePlan | None = None
        self._place: PlaceToken | None = None
        self._committed = False  # by this rank

    def begin(self, state: Mapping[str, Any], error: BaseException | None = None, gated: bool = False) -> bool:
        """Decides with the other ranks what each will write. False: the save is made, by plans of DCP's items, because
        packed plans mean nothing to a planner or to something in the state. `error`: why this rank cannot take part.
        `gated`: devices are not waited for. Raises on all ranks if one has failed."""
        values: dict[str, Any] = {}
        plan: CollectivePlan | None = None
        try:
            if error is not None:
                raise error
            self.writer = self._make_writer()
            self._place = self._place_token()
            # Ranks that save to different places, or are a save apart, are told so.
            plan = CollectivePlan(self.exchange, self.planner, self._doing, self._place, on_devices=not gated)
            values = saved_form(state)
            self._set_up_writer()
            values = self._describe(plan, values)
        except Exception as failure:
            error = failure
        if plan is None:
            plan = CollectivePlan(self.exchange, self.planner, self._doing, on_devices=not gated)
        planned = plan.make(error)
        if planned is None:
            self._save_items(values)
            return False
        self._items, self._of_all = planned.items, planned.of_all
        return True

    def stage(self, gate: Gate | None) -> None:
        """Copies what this rank will write: afterwards the state may change, as far as no gate guards it."""
        assert self._items is not None
        try:
            self.part = StagedPart(self.writer, self._items, self.planner, gate)
        except Exception as error:
            self.error = error

    def let_go_of_state(self) -> None:
        """The state may be larger than what the process otherwise needs, and the planner lives on."""
        self.planner.forget_state()
        self._items = None

    def finish(self) -> SaveStats:
        """Writes and commits. Raises on all ranks if one has failed: nothing is committed then, unless the error is one
        of time and says otherwise."""
        try:
            self._write_and_commit()
        finally:
            self.writer.end()
        assert self.writer.last_stats is not None
        return self.writer.last_stats

    def _make_writer(self) -> StorageWriter:
        return StorageWriter(self.path, overwrite=self.overwrite)

    def _place_token(self) -> PlaceToken | None:
        """None where ranks need not write to one directory."""
        return PlaceToken(self.writer.path)

    def _describe(self, plan: CollectivePlan, values: dict[str, Any]) -> dict[str, Any]:
        """Returns what is saved, should DCP have to plan it."""
        plan.describe(values, self.writer.storage_meta())
        return values

    def _clean_up(self) -> None:
        self.writer.prepare_global_plan([])

    def _set_up_writer(self) -> None:
        exchange, writer = self.exchange, self.writer
        self.save_id = str(writer.storage_meta().save_id)
        writer.set_up_storage_writer(exchange.is_coordinator, rank=exchange.rank, use_collectives=True)
        writer.prepare_local_plan(SavePlan([]))
        if exchange.is_coordinator:
            self._clean_up()  # nobody writes before the plan is made
            if self._place is not None and exchange.size > 1 and self.placement != "local":
                self._leave_token(self._place)

    def _leave_token(self, place: PlaceToken) -> None:
        try:
            place.leave()
        except OSError as error:
            raise of_system(error, place.directory) from None

    def _phase(self, step: str) -> str:
        return f"{self._doing}: {step}"

    def _write(self) -> list[WriteResult] | PackedResults:
        if self.error is not None:
            raise self.error
        if self.part is not None:
            return self.part.write()
        assert self._items is not None
        return self.writer.write_data(SavePlan(self._items), self.planner).value()  # type: ignore[arg-type]

    def _write_and_commit(self) -> None:
        planned = self._of_all
        message = b""
        try:
            results = self._write()
            assert isinstance(results, PackedResults)
            node = _number(node_of_this_process())
            message = pack(node, results.places, *(name.encode() for name in results.names))
        except Exception as error:
            self.error = error
        gathered = self.exchange.gather(message, self._phase("write"))
        results_of_all = [_result(data) for data in gathered] if gathered is not None and all(gathered) else None
        with self._commit_in_doubt():
            if self.placement == "local":
                self._commit_on_nodes(planned, results_of_all)
            elif results_of_all is not None:
                assert planned is not None
                self._keep_error(self._commit_plan, planned, results_of_all)
            self.exchange.fail_together(self.error, self._phase("commit"))

    def _commit_in_doubt(self) -> AbstractContextManager[None]:
        return self.exchange.commit_in_doubt(lambda: self._committed)

    def _commit(self, step: Callable[..., None], *arguments: Any) -> None:
        """What makes the checkpoint: not after the other ranks have given up."""
        self.exchange.may_commit()
        step(*arguments)
        self._committed = True

    def _commit_plan(self, planned: GlobalSavePlan, results: list[_Result]) -> None:
        files = self._files(planned, results, 0)
        self._commit(self.writer.commit, *files)

    def _commit_on_nodes(self, planned: GlobalSavePlan | None, results: list[_Result] | None) -> None:
        """The first rank of each node commits there: metadata that names the node's own files."""
        contents: list[bytes] | None = None
        if self.exchange.is_coordinator:
            contents = [b""] * self.exchange.size
            if results is not None:
                assert planned is not None
                self._keep_error(self._fill_contents, contents, planned, results)
        mine = self.exchange.scatter(contents, self._phase("metadata"))
        if mine:
            self._keep_error(self._commit, self.writer.commit, *unpack(mine))

    def _fill_contents(self, contents: list[bytes], planned: GlobalSavePlan, results: list[_Result]) -> None:
        leaders: dict[int, int] = {}
        for rank, result in enumerate(results):
            leaders.setdefault(result.node, rank)
        for number, node in enumerate(sorted(leaders)):  # as plans number nodes
            contents[leaders[node]] = pack(*self._files(planned, results, number))

    def _files(self, planned: GlobalSavePlan, results: list[_Result], node: int) -> tuple[bytes, bytes]:
        return planned.files(
            [result.places for result in results],
            [result.names for result in results],
            self.writer.path,
            self.save_id,
            node,
        )

    # --- A save of DCP's items, in the steps of `dcp.save`

    def _save_items(self, values: dict[str, Any]) -> None:
        """Over our exchanges, for their bounds and their errors."""
        exchange, writer, planner = self.exchange, self.writer, self.planner
        plan: Any = None
        metadata: Metadata | None = None
        try:
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
            results = written.value()
        except Exception as error:
            self.error = error
        of_all = self._gather(results, "write")
        with self._commit_in_doubt():
            if of_all is not None:
                assert metadata is not None
                self._keep_error(self._commit, writer.finish, metadata, of_all)
            exchange.fail_together(self.error, self._phase("commit"))

    def _gather(self, mine: Any, step: str) -> list[Any] | None:
        """What every rank has, on the coordinator; None elsewhere, and if a rank has an error instead."""
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


@dataclass(frozen=True)
class _Result:
    """What a rank has written: where, in which files, and on which node."""

    node: int
    places: bytes
    names: list[str]


def _number(value: int) -> bytes:
    return struct.pack("<q", value)


def _result(message: bytes) -> _Result:
    node, places, *names = unpack(message)
    return _Result(struct.unpack("<q", node)[0], places, [name.decode() for name in names])
