"""One save of all ranks: agree, plan where needed, write, commit. Over exchanges of our own."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from .errors import CheckpointError
from .exchange import Exchange
from .node import node_of_this_process
from .packed import GlobalSavePlan, PackedItems, PackedResults, PackedSavePlan
from .save_planner import SavePlanner
from .settings import PLACEMENTS
from .stats import SaveStats
from .writer import StorageWriter

# Asking a value whether it follows a protocol takes ten microseconds: of a flat dictionary, more than planning takes.
_NOT_STATEFUL = frozenset({torch.Tensor, torch.nn.Parameter, DTensor})


class CollectiveSave:
    """One save of this rank. Every step is taken by all ranks or by none: an error is kept until all know of it."""

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
        self.error: BaseException | None = None

    def run(self, state: Mapping[str, Any]) -> SaveStats:
        try:
            return self._run(state)
        finally:
            self.planner.forget_state()

    def _run(self, state: Mapping[str, Any]) -> SaveStats:
        local: PackedSavePlan | None = None
        values: dict[str, Any] = {}
        try:
            self.writer = StorageWriter(self.path, overwrite=self.overwrite)
            values = {
                key: value.state_dict() if type(value) not in _NOT_STATEFUL and isinstance(value, Stateful) else value
                for key, value in state.items()
            }
            local = self._prepare(values)
        except Exception as error:
            self.error = error
        same_plan, all_pack = self._vote(local)
        if not all_pack:
            dcp_save(values, storage_writer=self.writer, planner=self.planner, process_group=self.process_group)
        else:
            assert local is not None
            items, planned = self._plan(local, same_plan)
            try:
                self._write_and_commit(items, planned)
            finally:
                self.writer.end()
        assert self.writer.last_stats is not None
        return self.writer.last_stats

    def _phase(self, step: str) -> str:
        # Ranks that save to different places, or are a save apart, are told so.
        return f"saving to {os.fspath(self.path)}: {step}"

    def _prepare(self, state: dict[str, Any]) -> PackedSavePlan | None:
        exchange, writer, planner = self.exchange, self.writer, self.planner
        storage_meta = writer.storage_meta()
        self.save_id = str(storage_meta.save_id)
        writer.set_up_storage_writer(exchange.is_coordinator, rank=exchange.rank, use_collectives=True)
        planner.set_up_planner(state, storage_meta, exchange.is_coordinator)
        writer.prepare_local_plan(SavePlan([]))
        if exchange.is_coordinator:
            writer.prepare_global_plan([])  # cleans up: nobody writes before the vote
        self.description = planner.describe() if planner.packs() else None
        return None if self.description is None else planner.local_plan(self.description)

    def _vote(self, local: PackedSavePlan | None) -> tuple[bool, bool]:
        """Whether all ranks have one and the same plan, and whether all can do with packed plans. One reduction."""
        kept = local is not None and local.inventory is None and local.position == self.exchange.rank
        plan_id = local.plan_id if local is not None and kept else bytes(16)
        low, high = struct.unpack("<qq", plan_id)
        placement = PLACEMENTS.index(self.planner.placement)
        ours = (int(self.error is None), int(local is not None), int(kept), low, ~low, high, ~high)
        votes = self.exchange.agree((*ours, placement, ~placement), self._phase("agree"))
        fine, pack, all_kept, low, not_low, high, not_high, least, not_most = votes
        if not fine:
            self.exchange.fail_together(self.error, self._phase("plan"))
        if least != ~not_most:
            raise CheckpointError(f"ranks ask for different placements (here: {self.planner.placement!r})")
        return bool(all_kept) and low == ~not_low and high == ~not_high, bool(pack)

    def _plan(self, local: PackedSavePlan, same: bool) -> tuple[PackedItems, GlobalSavePlan | None]:
        exchange, planner = self.exchange, self.planner
        assert self.description is not None
        planned: GlobalSavePlan | None = None
        if same:
            if exchange.is_coordinator:
                planned = planner.kept_plan(local.plan_id)
            return planner.accept(self.description, local), planned
        message = b""
        try:
            if local.inventory is None:  # others have not what it names
                local = planner.full_local_plan(self.description)
            assert local.inventory is not None
            message = _pack(local.inventory, local.paths, local.digests)
        except Exception as error:
            self.error = error
        gathered = exchange.gather(message, self._phase("gather plans"))
        answers = None
        if gathered is not None and all(gathered):
            try:
                planned, _ = planner.global_plan_of([_local_plan(data) for data in gathered])
                ranks = range(exchange.size)
                answers = [_pack(planned.plan_id, planned.plan.part(rank)) for rank in ranks]
            except Exception as error:
                self.error = error
        exchange.fail_together(self.error, self._phase("plan"))
        plan_id, part = _unpack(exchange.scatter(answers, self._phase("scatter plans")))
        answer = PackedSavePlan([], plan_id=plan_id, position=exchange.rank, part=part)
        return planner.accept(self.description, answer), planned

    def _write_and_commit(self, items: PackedItems, planned: GlobalSavePlan | None) -> None:
        message = b""
        try:
            results = self.writer.write_data(SavePlan(items), self.planner).value()  # type: ignore[arg-type]
            assert isinstance(results, PackedResults)
            node = _number(node_of_this_process())
            message = _pack(node, results.places, *(name.encode() for name in results.names))
        except Exception as error:
            self.error = error
        gathered = self.exchange.gather(message, self._phase("write"))
        results_of_all = [_result(data) for data in gathered] if gathered is not None and all(gathered) else None
        if self.planner.placement == "local":
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
            self._keep_error(self.writer.commit, *_unpack(mine))

    def _fill_contents(self, contents: list[bytes], planned: GlobalSavePlan, results: list[_Result]) -> None:
        leaders: dict[int, int] = {}
        for rank, result in enumerate(results):
            leaders.setdefault(result.node, rank)
        for number, node in enumerate(sorted(leaders)):  # as plans number nodes
            contents[leaders[node]] = _pack(*self._files(planned, results, number))

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


# --- Messages: a few byte strings in one


def _pack(*parts: bytes) -> bytes:
    return struct.pack(f"<q{len(parts)}q", len(parts), *map(len, parts)) + b"".join(parts)


def _unpack(message: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<q", message)
    lengths = struct.unpack_from(f"<{count}q", message, 8)
    at, parts = 8 * (1 + count), []
    for length in lengths:
        parts.append(message[at : at + length])
        at += length
    return parts


def _number(value: int) -> bytes:
    return struct.pack("<q", value)


def _local_plan(message: bytes) -> PackedSavePlan:
    inventory, paths, digests = _unpack(message)
    return PackedSavePlan([], inventory=inventory, paths=paths, digests=digests)


def _result(message: bytes) -> _Result:
    node, places, *names = _unpack(message)
    return _Result(struct.unpack("<q", node)[0], places, [name.decode() for name in names])
