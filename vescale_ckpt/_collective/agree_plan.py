"""Makes the plan of a save together with all ranks, or agrees with them to reuse the cached plan."""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Any

from .._engine import _C
from .._plan.global_plan import GlobalPlan, PlanAnswer, PlanRequest
from .._plan.local_plan import LocalPlan
from .._plan.planner import Flat, Planner, Planning
from .._ranks.message import pack, unpack
from .._ranks.shared_directory import (
    NO_NUMBER,
    MarkerFile,
    SeparateDirectoriesError,
    check_nodes,
    identity,
    separate_directories,
)
from .._ranks.steps import Steps
from .._state.per_rank import set_rank
from .._state.state import State
from ..errors import CheckpointError
from ..settings import PLACEMENTS

#: A rank's local plan, and on the coordinator the plan of all ranks.
Planned = tuple[LocalPlan, GlobalPlan | None]


class CollectivePlan:
    """The planning of one save: first `describe` (local), then `make` (collective). Used once.

    Args:
        marker: checks that all ranks write to the same directory; None: no check.
        on_devices: whether replicas on devices are compared, too.
    """

    def __init__(
        self, steps: Steps, planner: Planner, marker: MarkerFile | None = None, *, on_devices: bool = True
    ) -> None:
        self._steps = steps
        self._exchange = steps.exchange
        self._marker = marker
        self._planner = planner
        self._on_devices = on_devices
        self.reused: bool | None = None  #: whether `make` used a plan of an earlier save
        self._flat: Flat
        self._planning: Planning | None = None
        self._request = PlanRequest()  # empty: the request of a rank that has an error

    def describe(self, state: dict[str, Any]) -> State:
        """Raises `CheckpointError` with the key of a value that cannot be described."""
        with set_rank(self._exchange.rank, self._exchange.size):
            self._flat = self._planner.flatten(state)
        return self._describe(self._flat)

    def leave_out(self, keys: Collection[str]) -> None:
        """Excludes `keys` from what this rank saves. Called after `describe` and before `make`."""
        values, paths, structure = self._flat
        self._describe(({key: value for key, value in values.items() if key not in keys}, paths, structure))

    def _describe(self, flat: Flat) -> State:
        exchange, state = self._exchange, self._planner.describe_all(*flat)
        self._planning = Planning(self._planner, state, exchange.is_coordinator, exchange.ranks)
        self._request = self._planning.request(self._on_devices)
        return state

    def make(self) -> Planned:
        """Plans the save; collective. Raises on all ranks if any rank has an error."""
        try:
            same_plan, number = self._vote()
            if self._marker is not None and self._exchange.size > 1:
                self._check_shared_directory(self._marker, number)
        finally:
            if self._marker is not None:
                self._marker.remove()
        assert self._planning is not None
        self.reused = same_plan
        return self._plan(self._planning, self._request, same_plan)

    def _check_shared_directory(self, marker: MarkerFile, number: int) -> None:
        """Raises on all ranks if they do not write to the same directory. With a folder per node, only ranks of one
        node must share it. `number`: identifies the marker file that the coordinator created in the directory."""
        steps, local = self._steps, self._planner.placement == "local"
        if local:
            of_all = steps.gather(lambda: identity(marker.directory), "gather places")
            if of_all is not None:
                steps.take(check_nodes, marker.directory, of_all)
        else:
            steps.take(marker.look, number, self._exchange.rank)
        try:
            steps.raise_together("compare places")
        except SeparateDirectoriesError as raised:
            if local:
                raise
            raise separate_directories(raised.path, sorted(getattr(raised, "failures", raised.ranks))) from None
        marker.note_shared()

    def _vote(self) -> tuple[bool, int]:
        """One all-reduce. Returns whether all ranks have cached the same plan and their replicas are equal, and the
        number of the coordinator's marker file."""
        request, steps = self._request, self._steps
        kept = request.position == self._exchange.rank
        low, high = struct.unpack("<qq", request.plan_id if kept else bytes(16))
        placement = PLACEMENTS.index(self._planner.placement)
        number = NO_NUMBER if self._marker is None else self._marker.number
        ours = (int(steps.error is None), int(kept), low, ~low, high, ~high)
        votes = self._exchange.agree((*ours, placement, ~placement, number), steps.phase("agree"), [request.check])
        fine, all_kept, low, not_low, high, not_high, least, not_most, number, differs = votes
        if not fine:
            steps.raise_together("plan")
        if least != ~not_most:
            raise CheckpointError(f"ranks ask for different placements (here: {self._planner.placement!r})")
        same_plan = all_kept and low == ~not_low and high == ~not_high
        return bool(same_plan and not differs), number

    def _plan(self, planning: Planning, request: PlanRequest, same: bool) -> Planned:
        steps, planner, rank = self._steps, self._planner, self._exchange.rank
        planned: GlobalPlan | None = None
        if same:
            if self._exchange.is_coordinator:
                planned = planner.kept_plan(request.plan_id)
            return planning.accept(PlanAnswer(request.plan_id, rank)), planned

        def message() -> tuple[bytes, ...]:
            # A request without an inventory only names a cached plan, which other ranks do not have.
            full = planning.full_request(self._on_devices) if request.inventory is None else request
            assert isinstance(full.inventory, bytes)
            return *_C.inventory_parts(full.inventory), full.paths, full.structure.encode(), full.digests, full.replicas

        gathered = steps.gather_distinct(message, _MESSAGE_PARTS, "gather plans")
        answers = None
        if gathered is not None:
            made = steps.take(lambda: planner.plan_all(list(map(_request_of, gathered))))
            if made is not None:
                planned, _ = made
                answers = [
                    pack(planned.plan_id, planned.plan.local_plan(rank), planned.plan.holders(rank))
                    for rank in range(self._exchange.size)
                ]
        steps.raise_together("plan")
        plan_id, local_plan, holders = unpack(self._exchange.scatter(answers, steps.phase("scatter plans")))
        return planning.accept(PlanAnswer(plan_id, rank, local_plan, holders)), planned


_MESSAGE_PARTS = 8


def _request_of(message: list[bytes]) -> PlanRequest:
    """Returns a rank's request. Ranks share the objects of equal inventory parts, so the parts are not concatenated:
    that would copy them for each rank."""
    head, rows, numbers, names, paths, structure, digests, replicas = message
    inventory, text = (head, rows, numbers, names), structure.decode()
    return PlanRequest(inventory=inventory, paths=paths, structure=text, digests=digests, replicas=replicas)
