"""`Planner` plans the saves of a rank, one after another, and only if the form of the state has changed."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from .._engine import _C, torch_private
from .._engine.tensor_checks import holds_any
from .._engine.torch_types import sharded_tensor_type
from .._engine.wrapper_tensors import type_name
from .._ranks.node import node_of_this_process
from .._state import objects
from .._state.describe import Describer
from .._state.flatten import Flattener
from .._state.per_rank import this_rank, unwrap_per_rank
from .._state.state import State
from ..errors import CheckpointError
from ..settings import Placement
from . import replicas
from .global_plan import NOT_KEPT, GlobalPlan, PlanAnswer, PlanRequest
from .local_plan import LocalPlan

logger = logging.getLogger(__name__)

_MOST_NAMED = 5  # keys in a message
_MOST_PLANS = 4  # one planner may save so many forms of state in turn
INSTEAD = "save the tensors that it is made of, or leave it out"
#: Values under DCP's keys, and `State.paths` and `State.structure` of them.
Flat = tuple[dict[str, Any], dict[str, Any] | None, str]


class MadeFor(NamedTuple):
    """What a local plan depends on. The coordinator of another group does not have the global plan."""

    coordinates: bool  #: whether this rank coordinates
    ranks: tuple[int, ...] | None  #: the group's ranks, as the default group numbers them; None: not known
    inventory: bytes  #: the whole inventory, not a hash: it is compared byte by byte
    structure: str  #: `Structure.pack`: what the paths leave out
    paths: Mapping[str, Any] | None  #: path of each key in the state: DCP's planner_data


_Plan = TypeVar("_Plan")


class _LastPlans(dict[bytes, _Plan]):
    """The last `_MOST_PLANS` plans by the id of the global plan, in the order of last use."""

    def keep(self, plan_id: bytes, plan: _Plan) -> None:
        self.pop(plan_id, None)
        self[plan_id] = plan
        while len(self) > _MOST_PLANS:
            del self[next(iter(self))]


class PlanCache:
    """Local plans, and on the coordinator also global plans.

    All ranks put a plan when they use it, and a look-up changes no order. So the coordinator keeps every global plan of
    which some rank keeps its local plan.
    """

    def __init__(self) -> None:
        self.local_plans = _LastPlans[tuple[MadeFor, PlanAnswer]]()  # each answer with its local plan
        self.global_plans = _LastPlans[GlobalPlan]()
        self._is_planning = False

    def begin(self) -> None:
        if self._is_planning:  # the last save failed while it planned, and ranks may have kept different plans
            self.local_plans.clear()  # global plans stay, because other ranks may still name them
        self._is_planning = True

    def end(self) -> None:
        """Notes that this rank has accepted its local plan."""
        self._is_planning = False

    def local_plan(self, made_for: MadeFor) -> PlanAnswer | None:
        for made_then, kept in reversed(self.local_plans.values()):
            if made_then == made_for and (not made_for.coordinates or kept.plan_id in self.global_plans):
                return kept
        return None


class Planner:
    """Keeps plans, and what describes a state fast, from save to save. It plans one save at a time.

    Args:
        placement: which rank writes what several ranks hold; "local": one of each node.
        reuse_plans: whether plans are kept. If one rank does not keep plans, all ranks plan at each save.
    """

    def __init__(self, placement: Placement = "balanced", reuse_plans: bool = True) -> None:
        self.placement = placement
        self.reuse_plans = reuse_plans
        self.cache = PlanCache()
        self._flattener = Flattener()
        self._describer = Describer()

    def share_with(self, other: Planner) -> None:
        """Keeps plans together with `other` from now on. Only one of both may plan at a time."""
        self.cache, self._flattener, self._describer = other.cache, other._flattener, other._describer

    # --- On each rank

    def flatten(self, state: dict[str, Any], nested: bool = True, sharded: bool = True) -> Flat:
        """The first step of a save: the values under DCP's keys, and `paths` and `structure` of their `State`.

        `nested`: containers become dotted keys. `sharded`: ShardedTensors inside ShardedTensors become one."""
        self.cache.begin()
        paths, packed = None, ""
        if nested:
            flat, found, structure = self._flattener.flatten(state)
            values, paths = unwrap_per_rank(flat, found)
            packed = structure.pack()
            if structure.lost:
                _warn_of_lost_keys(tuple(".".join(map(str, path)) for path in structure.lost[:_MOST_NAMED]))
        else:
            values, _ = unwrap_per_rank(state, {})
        if sharded and holds_any(values, sharded_tensor_type()):
            values = torch_private.flatten_sharded_tensors(values)
        return values, paths, packed

    def describe(self, values: dict[str, Any], paths: dict[str, Any] | None, structure: str) -> State:
        state = self._describer.describe(values, node_of_this_process())
        state.paths, state.structure = paths, structure
        return state

    def describe_all(self, values: dict[str, Any], paths: dict[str, Any] | None, structure: str) -> State:
        """The same. Raises `CheckpointError` with the key of a value that needs DCP's own planning."""
        state = self.describe(values, paths, structure)
        for key, value in state.other.items():
            raise CheckpointError(
                f"{key}: a {type_name(value)} is neither a tensor of one shape, nor chunks of one, nor an object: "
                f"{INSTEAD}",
                key=key,
            )
        return state

    # --- On the coordinator

    def plan_all(self, requests: Sequence[PlanRequest]) -> tuple[GlobalPlan, bool]:
        """The plan for all ranks, and whether it is new to them. It is kept for later saves."""
        if (kept := self._kept_by_all(requests)) is not None:
            return kept, False
        full = [self._with_inventory(rank, request) for rank, request in enumerate(requests)]
        replicas.warn_of_objects(requests)
        planned = GlobalPlan(full, self.placement, self.reuse_plans)
        if found := {key: (one, other) for key, one, other in planned.plan.differences}:
            replicas.warn(found)
        if self.reuse_plans:
            self.cache.global_plans.keep(planned.plan_id, planned)
        return planned, True

    def _with_inventory(self, rank: int, request: PlanRequest) -> PlanRequest:
        if request.inventory is not None:
            return request
        if (kept := self.cache.global_plans.get(request.plan_id)) is None:
            raise CheckpointError(
                f"rank {rank} refers to a plan that the coordinator does not have: ranks took part in different "
                "saves with this planner. The next save plans afresh"
            )
        return replace(kept.request_of(request.position), replicas=request.replicas)

    def _kept_by_all(self, requests: Sequence[PlanRequest]) -> GlobalPlan | None:
        """The plan that all ranks have kept, each for its position. None if replicas differ now."""
        if sum(request.check for request in requests) % (1 << 64):
            return None
        named = {request.plan_id if request.position == rank else b"" for rank, request in enumerate(requests)}
        kept = self.cache.global_plans.get(named.pop()) if len(named) == 1 else None
        if kept is None or len(kept.inventories) != len(requests):
            return None
        return self.kept_plan(kept.plan_id)

    def kept_plan(self, plan_id: bytes) -> GlobalPlan:
        """The kept plan of all ranks with that id, which must be that of the coordinator's own local plan."""
        kept = self.cache.global_plans[plan_id]
        self.cache.global_plans.keep(plan_id, kept)
        return kept


class Planning:
    """The planning of one save on this rank: what it asks of the coordinator, and what it makes of the answer.

    Args:
        coordinates: whether this rank coordinates.
        ranks: the group's, as the default group numbers them; None: not known.
    """

    def __init__(self, planner: Planner, state: State, coordinates: bool, ranks: tuple[int, ...] | None) -> None:
        self.state = state
        self._cache, self._reuses = planner.cache, planner.reuse_plans
        self._made_for = MadeFor(coordinates, ranks, state.inventory, state.structure, state.paths)

    def request(self, on_devices: bool = True) -> PlanRequest:
        """What this rank sends: its inventory, or the name of the plan that it has kept for it. `on_devices`: whether
        replicas on devices are compared, too. That waits for the device."""
        kept = self._cache.local_plan(self._made_for)
        if kept is None:
            return self.full_request(on_devices)
        check = replicas.replica_sum(self.state, kept.holders, on_devices)
        return PlanRequest(kept.plan_id, kept.position, check=check)

    def full_request(self, on_devices: bool = True) -> PlanRequest:
        made_for = self._made_for
        contents = [objects.dump(value, key, tells=False) for key, value in self.state.objects.items()]
        return PlanRequest(
            inventory=made_for.inventory,
            paths=pack_paths(made_for.paths),
            structure=made_for.structure,
            digests=array("I", map(_C.crc32, contents)).tobytes(),
            replicas=self.offered_hashes(on_devices),
        )

    def offered_hashes(self, on_devices: bool = True) -> bytes:
        return replicas.offered_hashes(self.state, on_devices) if this_rank()[1] > 1 else b""

    def accept(self, answer: PlanAnswer) -> LocalPlan:
        """This rank's local plan, given the coordinator's answer."""
        plan = answer if answer.local_plan is not None else self._cache.local_plan(self._made_for)
        if plan is None or (plan.plan_id, plan.position) != (answer.plan_id, answer.position):
            raise CheckpointError("the coordinator refers to a plan that this rank does not have")
        if self._reuses and plan.plan_id != NOT_KEPT:
            self._cache.local_plans.keep(plan.plan_id, (self._made_for, plan))
        self._cache.end()
        assert plan.local_plan is not None
        return LocalPlan(self.state, plan.local_plan)


@lru_cache(maxsize=256)  # logged once for the same keys
def _warn_of_lost_keys(names: tuple[str, ...]) -> None:
    logger.warning(
        "keys of mappings that are neither text nor numbers are saved as text, and come back so without a state to "
        "load into: %s",
        ", ".join(names),
    )


def pack_paths(paths: Mapping[str, Any] | None) -> bytes:
    return b"" if paths is None else _C.pack_paths(list(paths), list(paths.values()))
