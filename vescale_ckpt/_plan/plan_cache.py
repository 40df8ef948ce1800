"""`PlanCache` keeps the plans of a `Planner` for later saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from .global_plan import GlobalPlan, PlanAnswer

MOST_PLANS = 4  # one planner may save so many forms of state in turn


class MadeFor(NamedTuple):
    """What a local plan depends on. The coordinator of another group does not have the global plan."""

    coordinates: bool  #: whether this rank coordinates
    ranks: tuple[int, ...] | None  #: the group's ranks, as the default group numbers them; None: not known
    inventory: bytes  #: the whole inventory, not a hash: it is compared byte by byte
    structure: str  #: `Structure.pack`: what the paths leave out
    paths: Mapping[str, Any] | None  #: path of each key in the state: DCP's planner_data


Plan = TypeVar("Plan")


class _LastPlans(dict[bytes, Plan]):
    """The last `MOST_PLANS` plans by the id of the global plan, in the order of last use."""

    def keep(self, plan_id: bytes, plan: Plan) -> None:
        self.pop(plan_id, None)
        self[plan_id] = plan
        while len(self) > MOST_PLANS:
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
