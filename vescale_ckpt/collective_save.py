"""One save of all ranks: agree, plan where needed, write, commit. Over exchanges of our own."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult

from .application import saved_form
from .collective_plan import CollectivePlan
from .exchange import Exchange
from .gate import Gate
from .message import pack, unpack
from .node import node_of_this_process
from .packed import GlobalSavePlan, PackedItems, PackedResults
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

    def begin(self, state: Mapping[str, Any], error: BaseException | None = None, gated: bool = False) -> bool:
        """Decides with the other ranks what each will write. False: DCP has made the save, to which packed plans mean
        nothing here. `error`: why this rank cannot take part. `gated`: devices are not waited for. Raises on all ranks
        if one has failed."""
        values: dict[str, Any] = {}
        # Ranks that save to different places, or are a save apart, are told so.
        plan = CollectivePlan(self.exchange, self.planner, self._doing, on_devices=not gated)
        try:
            if error is not None:
                raise error
            self.writer = self._make_writer()
            values = saved_form(state)
            self._set_up_writer()
            values = self._describe(plan, values)
        except Exception as failure:
            error = failure
        planned = plan.make(error)
        if planned is None:
            dcp_save(values, storage_writer=self.writer, planner=self.planner, process_group=self.process_group)
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
        """Writes and commits. Raises on all ranks if one has failed: nothing is committed then."""
        try:
            self._write_and_commit()
        finally:
            self.writer.end()
        assert self.writer.last_stats is not None
        return self.writer.last_stats

    def _make_writer(self) -> StorageWriter:
        return StorageWriter(self.path, overwrite=self.overwrite)

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
        if self.placement == "local":
            self._commit_on_nodes(planned, results_of_all)
        elif results_of_all is not None:
            assert planned is not None
            self._keep_error(self._commit, planned, results_of_all)
        self.exchange.fail_together(self.error, self._phase("commit"))

    def _commit(self, planned: GlobalSavePlan, results: list[_Result]) -> None:
        self.writer.commit(*self._files(planned, results, 0))

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
            self._keep_error(self.writer.commit, *unpack(mine))

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
