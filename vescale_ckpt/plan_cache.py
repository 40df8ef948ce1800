"""The plans that a planner keeps from save to save."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .packed import ExportParts, GlobalSavePlan
from .replicas import Boxes

Value = TypeVar("Value")

MOST_PLANS = 4  # states of different form that are saved in turn with one planner


@dataclass(frozen=True)
class KeptPart:
    """This rank's part of a plan that all ranks agreed on, and what it was made for."""

    plan_id: bytes
    position: int  #: whose part it is: the rank within the group that the plan is for
    part: bytes
    inventory: bytes  #: the very one, so that nothing can be mistaken for it
    paths: Mapping[str, Any] | None  #: what its keys stand for: DCP's planner_data
    structure: str  #: what the paths do not tell
    coordinates: bool  #: whether this rank coordinated, which tells groups of ranks apart
    split: list[Boxes] = field(default_factory=list, compare=False)  #: of which it has pieces, when they are known
    exports: ExportParts = field(default_factory=dict, compare=False)  #: where it lies in files that all ranks write


class _Recent(Generic[Value]):
    """The values that were used last, by the name of their plan."""

    def __init__(self) -> None:
        self._values: OrderedDict[bytes, Value] = OrderedDict()

    def get(self, plan_id: bytes) -> Value | None:
        return self._values.get(plan_id)

    def put(self, plan_id: bytes, value: Value) -> None:
        self._values[plan_id] = value
        self._values.move_to_end(plan_id)
        while len(self._values) > MOST_PLANS:
            self._values.popitem(last=False)

    def latest_first(self) -> list[Value]:
        return list(reversed(self._values.values()))


class PlanCache:
    """Parts, and on the coordinator also the plans of all ranks. Bounded.

    All ranks put every plan that they use, and look without putting: so the coordinator still has what others have.
    """

    def __init__(self) -> None:
        self._parts: _Recent[KeptPart] = _Recent()
        self._global_plans: _Recent[GlobalSavePlan] = _Recent()

    def forget_parts(self) -> None:
        """The plans of all ranks stay: other ranks may still name them."""
        self._parts = _Recent()

    def part(
        self, inventory: bytes, paths: Mapping[str, Any] | None, structure: str, coordinates: bool
    ) -> KeptPart | None:
        for kept in self._parts.latest_first():
            if kept.coordinates != coordinates or kept.inventory != inventory:
                continue
            if kept.paths != paths or kept.structure != structure:
                continue
            if not coordinates or self.global_plan(kept.plan_id) is not None:
                return kept
        return None

    def keep_part(self, part: KeptPart) -> None:
        self._parts.put(part.plan_id, part)

    @property
    def last_inventory(self) -> bytes | None:
        return next((kept.inventory for kept in self._parts.latest_first()), None)

    def global_plan(self, plan_id: bytes) -> GlobalSavePlan | None:
        return self._global_plans.get(plan_id)

    def keep_global_plan(self, plan: GlobalSavePlan) -> None:
        self._global_plans.put(plan.plan_id, plan)

    @property
    def last_global_plan(self) -> GlobalSavePlan | None:
        return next(iter(self._global_plans.latest_first()), None)
