"""Makes one plan of a save with all ranks, or agrees with them on the plan that they have kept."""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta

from .._dcp.save_planner import SavePlanner
from .._plan.save_plan import GlobalSavePlan, PackedItems, PackedSavePlan
from .._ranks.exchange import Exchange
from .._ranks.message import pack, unpack
from .._ranks.shared_directory import (
    NO_NUMBER,
    DirectoryMark,
    SeparateDirectoriesError,
    check_nodes,
    identity,
    separate_directories,
)
from .._state.describe import Description
from .._state.per_rank import counted
from ..errors import CheckpointError
from ..settings import PLACEMENTS


@dataclass(frozen=True)
class Planned:
    """A rank's local plan, and on the coordinator the plan of all ranks."""

    items: PackedItems
    of_all: GlobalSavePlan | None


class CollectivePlan:
    """One planning. First `describe`, without other ranks, then `make`, with all ranks. Used once."""

    def __init__(
        self,
        exchange: Exchange,
        planner: SavePlanner,
        doing: str,
        mark: DirectoryMark | None = None,
        *,
        on_devices: bool = True,
    ) -> None:
        """`mark`: finds out whether all ranks write to one directory; None: not checked. `on_devices`: whether
        replicas on devices are compared, too."""
        self._exchange = exchange
        self._mark = mark
        self._planner = planner
        self._doing = doing
        self._on_devices = on_devices
        self._error: BaseException | None = None
        self.description: Description | None = None
        self._local: PackedSavePlan | None = None
        self._number = NO_NUMBER  # of the token that the coordinator has left in the directory

    def describe(self, state: dict[str, Any], storage_meta: StorageMeta | None) -> None:
        planner = self._planner
        with counted(self._exchange.rank, self._exchange.size):
            planner.set_up_planner(state, storage_meta, self._exchange.is_coordinator)
        self._describe()

    def leave_out(self, keys: Collection[str]) -> None:
        """Called after `describe`: this rank saves none of these keys."""
        planner = self._planner
        planner.state_dict = {key: value for key, value in planner.state_dict.items() if key not in keys}
        self._describe()

    def _describe(self) -> None:
        planner = self._planner
        self.description = planner.describe() if planner.packs() else None
        self._local = None if self.description is None else planner.local_plan(self.description, self._on_devices)

    def make(self, error: BaseException | None) -> Planned | None:
        """Plans with all ranks. None on all ranks if one of them cannot use packed plans. `error`: why this rank cannot
        take part; all ranks raise then."""
        self._error = error
        try:
            same_plan, all_pack = self._vote()
            self._check_shared_directory()
        finally:
            if self._mark is not None:
                self._mark.remove()
        if not all_pack:
            return None
        assert self._local is not None
        return self._plan(self._local, same_plan)

    def _check_shared_directory(self) -> None:
        """Raises on all ranks if they do not write to one directory. With placement="local" only the ranks of a node
        must."""
        exchange, mark = self._exchange, self._mark
        if mark is None or exchange.size == 1:
            return
        error: Exception | None = None
        try:
            mine = b""
            if self._planner.placement == "local":
                mine = identity(mark.directory)
            else:
                mark.look(self._number, exchange.rank)
        except (OSError, CheckpointError) as raised:
            error = raised
        if self._planner.placement == "local":
            of_all = exchange.gather(mine, self._phase("gather places"))
            if of_all is not None and all(of_all):
                try:
                    check_nodes(mark.directory, of_all)
                except SeparateDirectoriesError as raised:
                    error = raised
        try:
            exchange.fail_together(error, self._phase("compare places"))
        except SeparateDirectoriesError as raised:
            if self._planner.placement == "local":
                raise
            raise separate_directories(raised.path, sorted(getattr(raised, "failures", raised.ranks))) from None

    def _phase(self, step: str) -> str:
        return f"{self._doing}: {step}"

    def _vote(self) -> tuple[bool, bool]:
        """Agrees in one reduction. Returns whether all ranks have kept the same plan and have equal replicas of what it
        splits; and whether all ranks can use packed plans."""
        local = self._local
        kept = local is not None and local.inventory is None and local.position == self._exchange.rank
        plan_id = local.plan_id if local is not None and kept else bytes(16)
        low, high = struct.unpack("<qq", plan_id)
        placement = PLACEMENTS.index(self._planner.placement)
        number = NO_NUMBER if self._mark is None else self._mark.number
        checked, check = (local.checked, local.check) if local is not None else (True, 0)
        ours = (int(self._error is None), int(local is not None), int(kept), low, ~low, high, ~high, int(checked))
        votes = self._exchange.agree((*ours, placement, ~placement, number), self._phase("agree"), [check])
        fine, all_pack, all_kept, low, not_low, high, not_high, all_checked, least, not_most, place, differs = votes
        self._number = place
        if not fine:
            self._exchange.fail_together(self._error, self._phase("plan"))
        if least != ~not_most:
            raise CheckpointError(f"ranks ask for different placements (here: {self._planner.placement!r})")
        same_plan = all_kept and low == ~not_low and high == ~not_high
        return bool(same_plan and not (all_checked and differs)), bool(all_pack)

    def _plan(self, local: PackedSavePlan, same: bool) -> Planned:
        exchange, planner = self._exchange, self._planner
        assert self.description is not None
        planned: GlobalSavePlan | None = None
        if same:
            if exchange.is_coordinator:
                planned = planner.kept_plan(local.plan_id)
            return Planned(planner.accept(self.description, local), planned)
        message = b""
        try:
            if local.inventory is None:  # it names a kept plan that other ranks do not have
                local = planner.full_local_plan(self.description, self._on_devices)
            assert local.inventory is not None
            message = pack(local.inventory, local.paths, local.structure.encode(), local.digests, local.replicas)
        except Exception as error:
            self._error = error
        gathered = exchange.gather(message, self._phase("gather plans"))
        answers = None
        if gathered is not None and all(gathered):
            try:
                planned, _ = planner.global_plan_of([_local_plan(data) for data in gathered])
                ranks = range(exchange.size)
                answers = [pack(planned.plan_id, planned.plan.part(rank)) for rank in ranks]
            except Exception as error:
                self._error = error
        exchange.fail_together(self._error, self._phase("plan"))
        plan_id, part = unpack(exchange.scatter(answers, self._phase("scatter plans")))
        answer = PackedSavePlan([], plan_id=plan_id, position=exchange.rank, part=part)
        return Planned(planner.accept(self.description, answer), planned)


def _local_plan(message: bytes) -> PackedSavePlan:
    inventory, paths, structure, digests, replicas = unpack(message)
    return PackedSavePlan(
        [], inventory=inventory, paths=paths, structure=structure.decode(), digests=digests, replicas=replicas
    )
