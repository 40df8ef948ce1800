"""`PlanCache` keeps the plans of a `Planner` for later saves, and describes what changed if none fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from .._engine import _C
from .._engine.rows import OBJECT
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

    @property
    def last_inventory(self) -> bytes | None:
        return next((made_then.inventory for made_then, _ in reversed(self.local_plans.values())), None)


def describe_changes(old: bytes, new: bytes, most: int = 5) -> str:
    """Returns the first `most` keys that differ between two inventories, and how. Does not compare sizes of objects."""
    before, after = _keys(old), _keys(new)
    if before == after:
        return "the order of the keys" if list(before) != list(after) else "nothing that planning depends on"
    differ = [name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name)]
    shown = [f"{name!r}: {before.get(name, 'nothing')}, now {after.get(name, 'nothing')}" for name in differ[:most]]
    return "; ".join(shown) + (f"; and {len(differ) - most} more" if len(differ) > most else "")


def _keys(inventory: bytes) -> dict[str, str]:
    """{key: its items as text}"""
    dtypes = [name for name, _, _ in _C.dtypes()]
    keys: dict[str, str] = {}
    for name, kind, code, requires_grad, _, shape, offset, size in _C.inventory_items(inventory):
        item = "an object" if kind == OBJECT else f"{dtypes[code]} {size} at {offset} of {shape}"
        item += " with gradient" * requires_grad
        keys[name] = f"{keys[name]} and {item}" if name in keys else item
    return keys
