"""`SavePlanner` plans DCP's saves by a `Planner`: in C++, and only when the form of the state has changed."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from .._checkpoint.native.lazy_metadata import metadata_of_plan
from .._engine.gc import gc_paused
from .._engine.rows import PLAN_ROW, words
from .._engine.torch_private import ranks_of_dcp_save
from .._plan.planner import INSTEAD, Planner, Planning
from .._state import objects
from .._state.chunks import has_fields
from ..errors import CheckpointError
from ..settings import checked_flag
from .overrides import is_method_of
from .packed_lists import PackedItems, PackedSavePlan, SavePlans, request_of

NO_COLLECTIVES = (
    "use_collectives=False: with the planner or the writer of this package all ranks save together. Leave it out: "
    "plans are kept, and nothing is gathered again while the state keeps its form"
)


class SavePlanner(DefaultSavePlanner):
    """Plans saves so that replicated bytes are written once, evenly over all ranks. Caches the plan from save to save.

    Pass one object as `planner` of every `dcp.save`, which is collective.

    Args:
        flatten_state_dict: True flattens nested containers to dotted keys.
        flatten_sharded_tensors: True merges ShardedTensors inside ShardedTensors.
        enable_plan_caching: True caches plans and reuses them while the state has the same keys, kinds, dtypes, shapes
            and shards on every rank. The cache belongs to this object. If it is False on one rank, all ranks plan at
            each save.
        placement: which rank writes what several ranks hold. "balanced": all of them evenly, large tensors in pieces.
            "lowest_rank": the lowest rank that holds it.

    A subclass that overrides a planning step receives DCP's own lists of items, and whole tensors.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        *,
        enable_plan_caching: bool = True,
        placement: Literal["balanced", "lowest_rank"] = "balanced",
    ) -> None:
        # The default planner's own cache is shared by all planners of a class, and does not compare dtypes.
        super().__init__(
            checked_flag("flatten_state_dict", flatten_state_dict),
            checked_flag("flatten_sharded_tensors", flatten_sharded_tensors),
            enable_plan_caching=False,
        )
        if placement not in ("balanced", "lowest_rank"):
            raise ValueError(f"placement: expected one of balanced, lowest_rank, got {placement!r}")
        self.reuse_plans = checked_flag("enable_plan_caching", enable_plan_caching)
        self.placement = placement
        self._forget()

    def _forget(self) -> None:
        self._planner = Planner(self.placement, self.reuse_plans)
        self._planning: Planning | None = None  # of the running save; None: DCP plans
        self._structure = ""  # of its state
        self._ranks: tuple[int, ...] | None = None  # of its group, as the default group numbers them

    def __getstate__(self) -> dict[str, Any]:
        # `dcp.async_save` with a process pickles the planner for every save.
        made_by_a_save = {"plan", "global_plan", "metadata", "state_dict", "mappings"}
        others = {"_planner", "_planning", "_structure", "_ranks"}
        return {name: value for name, value in self.__dict__.items() if name not in made_by_a_save | others}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def share_plans(self, other: SavePlanner) -> None:
        """Keeps plans together with `other` from now on. Only one of both may plan at a time."""
        self._planner.share_with(other._planner)

    # --- DCP's calls, in the order in which they come

    @gc_paused()
    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        flattened = self._planner.flatten(state_dict, self.flatten_state_dict, self.flatten_sharded_tensors)
        self.state_dict, paths, self._structure = flattened
        if paths is not None:
            self.mappings = paths
        self.is_coordinator = is_coordinator
        self._ranks = ranks_of_dcp_save()

    @gc_paused()
    def create_local_plan(self) -> SavePlan:
        """DCP calls it after `set_up_planner`, on each rank. The plan of this rank, packed if possible."""
        self._planning = self._begin_planning()
        if self._planning is None:
            return self._plan_items()
        request = self._planning.request()
        if request.inventory is None:  # without a reduction over ranks, the coordinator needs what it would ask for
            request = replace(request, replicas=self._planning.offered_hashes())
        self.plan = PackedSavePlan([], request=request)
        return self.plan

    def _begin_planning(self) -> Planning | None:
        """None if a subclass or a value of the state needs DCP's own planning."""
        if not self.packs():
            return None
        state = self._planner.describe(self.state_dict, self._paths, self._structure)  # a subclass may have changed it
        if state.other:
            return None
        return Planning(self._planner, state, self.is_coordinator, self._ranks)

    @property
    def _paths(self) -> dict[str, Any] | None:
        return self.mappings if self.flatten_state_dict else None

    def _plan_items(self) -> SavePlan:
        self._refuse_fields()
        try:
            plan = super().create_local_plan()
        except Exception:
            self._raise_with_key()
            raise
        for item in plan.items:
            if item.tensor_data is not None and any(isinstance(size, torch.SymInt) for size in item.tensor_data.size):
                key = item.index.fqn
                raise CheckpointError(f"{key}: a jagged tensor has no shape of numbers: {INSTEAD}", key=key)
        return plan

    def _raise_with_key(self) -> None:
        """Raises `CheckpointError` for the value that DCP cannot plan; torch's own errors name no key."""
        for key, value in self.state_dict.items():
            try:
                create_default_local_save_plan({key: value}, self.is_coordinator)
            except Exception as error:
                raise CheckpointError(
                    f"{key}: DCP cannot plan a {type(value).__name__}: {INSTEAD} ({type(error).__name__}: {error})",
                    key=key,
                ) from error

    @gc_paused()
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """DCP calls it on the coordinator, with the plans of all ranks. The answers go to the ranks."""
        if not self.is_coordinator or len(all_plans) < len(self._ranks or ()):
            raise CheckpointError(NO_COLLECTIVES)
        packs = any(isinstance(plan, PackedSavePlan) for plan in all_plans)
        if not packs and (len(all_plans) == 1 or self._overrides("_dedup_save_plans", "_create_global_plan")):
            return super().create_global_plan(all_plans)
        planned, fresh = self._planner.plan_all(list(map(request_of, all_plans)))
        answers: list[SavePlan] = []
        for rank, plan in enumerate(all_plans):
            if isinstance(plan, PackedSavePlan):
                answers.append(PackedSavePlan([], answer=planned.answer(rank, fresh)))
            else:
                owned = words(planned.plan.local_plan(rank))[::PLAN_ROW]
                answers.append(SavePlan([plan.items[item] for item in owned], planner_data=plan.planner_data))
        self.global_plan = answers
        self.metadata = metadata_of_plan(planned)
        return SavePlans(answers, planned), self.metadata

    @gc_paused()
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """DCP calls it on each rank with the coordinator's answer. The plan that `write_data` gets."""
        if isinstance(new_plan, PackedSavePlan):
            assert self._planning is not None and new_plan.answer is not None
            items = PackedItems(self._planning.accept(new_plan.answer))
            new_plan = SavePlan(items, storage_data=new_plan.storage_data, planner_data=self._paths)  # type: ignore[arg-type]
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The writer calls it on each rank for each item. Tensors are the state's own memory, not copies."""
        items = self.plan.items
        if isinstance(items, PackedItems):
            resolved: torch.Tensor | io.BytesIO = self.transform_object(write_item, items.resolve(write_item.index))
            return resolved
        return super().resolve_data(write_item)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(objects.dump(object, write_item.index.fqn))
        return object

    def _refuse_fields(self) -> None:
        """Raises `CheckpointError` for a tensor whose fields say what it is a part of, if torch's own planning, which a
        value of the state or a subclass needs, does not know these fields."""
        if hasattr(dcp, "CheckpointableTensor"):
            return
        for key, value in self.state_dict.items():
            if has_fields(value) and not hasattr(value, "__create_write_items__"):
                raise CheckpointError(
                    f"{key}: this torch does not know CheckpointableTensor (2.14 does), and the planner, or "
                    "another value of the state, needs its planning: save the other values separately",
                    key=key,
                )

    def forget_state(self) -> None:
        """Drops references to the state, which may be large: the planner outlives the save."""
        self.state_dict = {}
        self.plan = SavePlan([])
        self._planning = None

    def packs(self) -> bool:
        """Whether plans can stay packed: only if no subclass overrides a step that gets items."""
        return not self._overrides(
            "create_local_plan", "create_global_plan", "finish_plan", "resolve_data", "lookup_object",
            "transform_object", "_dedup_save_plans", "_create_global_plan",
        )  # fmt: skip

    def _overrides(self, *names: str) -> bool:
        return not all(is_method_of(self, name, SavePlanner) for name in names)
