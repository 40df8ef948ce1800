"""`SavePlanner` plans for DCP which rank writes what, in C++, and only if the form of the state has changed."""

from __future__ import annotations

import io
import logging
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from .._checkpoint.native.lazy_metadata import metadata_of_plan
from .._engine import _C
from .._engine.gc import gc_paused
from .._engine.rows import PLAN_ROW, Inventory, words
from .._engine.tensor_checks import holds_any
from .._engine.torch_private import flatten_sharded_tensors, ranks_of_dcp_save
from .._engine.wrapper_tensors import type_name
from .._plan import replicas
from .._plan.plan_cache import KeptLocalPlan, MadeFor, PlanCache, describe_changes
from .._plan.save_plan import NOT_KEPT, GlobalSavePlan, PackedItems, PackedSavePlan, SavePlans, pack_items
from .._ranks.node import node_of_this_process
from .._state import objects
from .._state.chunks import has_fields
from .._state.describe import Describer, Description
from .._state.flatten import Flattener
from .._state.per_rank import this_rank, unwrap_per_rank
from .._state.structure import Structure
from ..errors import CheckpointError
from ..settings import Placement, checked_flag
from .overrides import is_method_of

logger = logging.getLogger(__name__)

_MOST_NAMED = 5  # keys in a message
_INSTEAD = "save the tensors that it is made of, or leave it out"
NO_COLLECTIVES = (
    "use_collectives=False: with the planner or the writer of this package all ranks save together. Leave it out: "
    "plans are kept, and nothing is gathered again while the state keeps its form"
)


class SavePlanner(DefaultSavePlanner):
    """Plans that each byte of replicated state is written once, evenly over all ranks. Plans again only on a change.

    Args:
        flatten_state_dict: nested containers become dotted keys.
        flatten_sharded_tensors: ShardedTensors inside ShardedTensors become one.
        enable_plan_caching: keep plans and reuse them while the state has the same keys, kinds, dtypes, shapes and
            shards on every rank. The cache belongs to this object. If one rank does not keep plans, all ranks plan at
            each save.
        placement: which rank writes what several ranks hold. "balanced": all evenly, large tensors in pieces.
            "lowest_rank": the lowest rank that holds it.

    A subclass that overrides a step of planning gets DCP's own lists of items, and whole tensors.
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
        self.placement: Placement = placement
        self._forget()

    def _forget(self) -> None:
        self._flattener = Flattener()
        self._describer = Describer()
        self._cache = PlanCache()
        self._description: Description | None = None
        self._structure = ""  # the state's, packed: kinds of keys and empty mappings
        #: Of the save's group, as the default group numbers them. Set after `set_up_planner`, except by DCP.
        self.ranks: tuple[int, ...] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # `dcp.async_save` with a process pickles the planner for every save: leave out its caches.
        made_by_a_save = ("plan", "global_plan", "metadata", "state_dict", "mappings")
        caches = ("_flattener", "_describer", "_cache", "_description", "_structure", "ranks")
        return {name: value for name, value in self.__dict__.items() if name not in made_by_a_save + caches}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def share_plans(self, other: SavePlanner) -> None:
        """Keeps plans together with `other` from now on. Only one of both may plan at a time."""
        self._flattener, self._describer, self._cache = other._flattener, other._describer, other._cache

    # --- DCP's calls, in the order in which they come

    @gc_paused()
    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._cache.begin()
        if self.flatten_state_dict:
            flat, paths, structure = self._flattener.flatten(state_dict)
            state_dict, self.mappings = unwrap_per_rank(flat, paths)
            self._structure = structure.pack()
            if structure.lost:
                _warn_of_lost_keys(tuple(".".join(map(str, path)) for path in structure.lost[:_MOST_NAMED]))
        else:
            state_dict, _ = unwrap_per_rank(state_dict, {})
            self._structure = ""
        if self.flatten_sharded_tensors and holds_any(state_dict, ShardedTensor):
            state_dict = flatten_sharded_tensors(state_dict)
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator
        self.ranks = ranks_of_dcp_save()

    @gc_paused()
    def create_local_plan(self) -> SavePlan:
        """DCP calls it after `set_up_planner`, on each rank. The plan of this rank, packed if possible."""
        self._description = self.describe()
        if self._description is None:
            self._refuse_fields()
            try:
                plan = super().create_local_plan()
            except Exception:
                self._raise_with_key()
                raise
            for item in plan.items:
                if item.tensor_data is not None and any(
                    isinstance(size, torch.SymInt) for size in item.tensor_data.size
                ):
                    key = item.index.fqn
                    raise CheckpointError(f"{key}: a jagged tensor has no shape of numbers: {_INSTEAD}", key=key)
            return plan
        local = self.local_plan(self._description)
        if local.inventory is None:  # without a reduction over ranks, the coordinator needs what it would ask for
            local = replace(local, replicas=self._offered_hashes(self._description))
        self.plan = local
        return self.plan

    def _raise_with_key(self) -> None:
        """Raises `CheckpointError` for the value that DCP cannot plan; torch's own errors name no key."""
        for key, value in self.state_dict.items():
            try:
                create_default_local_save_plan({key: value}, self.is_coordinator)
            except Exception as error:
                raise CheckpointError(
                    f"{key}: DCP cannot plan a {type(value).__name__}: {_INSTEAD} ({type(error).__name__}: {error})",
                    key=key,
                ) from error

    @gc_paused()
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """DCP calls it on the coordinator, with the plans of all ranks. The answers go to the ranks."""
        if not self.is_coordinator or len(all_plans) < len(self.ranks or ()):
            raise CheckpointError(NO_COLLECTIVES)
        packed = [plan for plan in all_plans if isinstance(plan, PackedSavePlan)]
        if not packed and (len(all_plans) == 1 or self._overrides("_dedup_save_plans", "_create_global_plan")):
            return super().create_global_plan(all_plans)
        planned, fresh = self.global_plan_of(all_plans)
        answers: list[SavePlan] = []
        for rank, plan in enumerate(all_plans):
            if not isinstance(plan, PackedSavePlan):
                owned = words(planned.plan.local_plan(rank))[::PLAN_ROW]
                answers.append(SavePlan([plan.items[item] for item in owned], planner_data=plan.planner_data))
            else:
                answer = PackedSavePlan([], plan_id=planned.plan_id, position=rank)
                if fresh:
                    made = planned.plan
                    answer = replace(answer, local_plan=made.local_plan(rank), holders=made.holders(rank))
                answers.append(answer)
        self.global_plan = answers
        self.metadata = metadata_of_plan(planned)
        return SavePlans(answers, planned), self.metadata

    @gc_paused()
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """DCP calls it on each rank with the coordinator's answer. The plan that `write_data` gets."""
        if isinstance(new_plan, PackedSavePlan):
            assert self._description is not None
            items = self.accept(self._description, new_plan)
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

    # --- The same steps on packed plans, for DCP's calls above and for `vescale_ckpt.save`

    @property
    def _paths(self) -> dict[str, Any] | None:
        return self.mappings if self.flatten_state_dict else None

    def describe(self) -> Description | None:
        """The state's description. None if a subclass or a value of the state needs DCP's own planning."""
        if not self.packs():
            return None
        description = self._describer.describe(self.state_dict, node_of_this_process())
        return None if description.other else description

    def describe_all(self) -> Description:
        """The state's description. Raises `CheckpointError` with the key of a value that needs DCP's own planning."""
        description = self._describer.describe(self.state_dict, node_of_this_process())
        for key, value in description.other.items():
            raise CheckpointError(
                f"{key}: a {type_name(value)} is neither a tensor of one shape, nor chunks of one, nor an object: "
                f"{_INSTEAD}",
                key=key,
            )
        return description

    def local_plan(self, description: Description, on_devices: bool = True) -> PackedSavePlan:
        """What this rank sends to the coordinator: its inventory, or the name of the plan that it has kept for it.

        `on_devices`: whether replicas on devices are compared, too. That waits for the device."""
        kept = self._cache.local_plan(self._made_for(description))
        if kept is not None:
            check, checked = replicas.replica_sum(description, kept.holders, on_devices)
            return PackedSavePlan([], plan_id=kept.plan_id, position=kept.position, check=check, checked=checked)
        return self.full_local_plan(description, on_devices)

    def _made_for(self, description: Description) -> MadeFor:
        return MadeFor(self.is_coordinator, self.ranks, description.inventory, self._structure, self._paths)

    def full_local_plan(self, description: Description, on_devices: bool = True) -> PackedSavePlan:
        if (last := self._cache.last_inventory) is not None:
            logger.info("planning again: %s", describe_changes(last, description.inventory))
        contents = [objects.dump(value, key, tells=False) for key, value in description.objects.items()]
        return PackedSavePlan(
            [],
            inventory=_C.with_object_bytes(description.inventory, array("q", map(len, contents))),
            paths=_packed_paths(self._paths),
            structure=self._structure,
            digests=array("I", map(_C.crc32, contents)).tobytes(),
            replicas=self._offered_hashes(description, on_devices),
        )

    def _offered_hashes(self, description: Description, on_devices: bool = True) -> bytes:
        return replicas.offered_hashes(description, on_devices) if this_rank()[1] > 1 else b""

    def global_plan_of(self, plans: Sequence[SavePlan]) -> tuple[GlobalSavePlan, bool]:
        """The plan for all ranks, and whether it is new to them. Called on the coordinator. It is kept for later
        saves."""
        named = {
            plan.plan_id if isinstance(plan, PackedSavePlan) and plan.position == rank else None
            for rank, plan in enumerate(plans)
        }
        packed = [plan for plan in plans if isinstance(plan, PackedSavePlan)]
        differ = all(plan.checked for plan in packed) and sum(plan.check for plan in packed) % (1 << 64) != 0
        if not differ and len(named) == 1 and (name := named.pop()) is not None:
            kept = self._cache.global_plans.get(name)
            if kept is not None and len(kept.inventories) == len(plans):
                self._cache.global_plans.keep(kept)
                return kept, False
        inventories: list[Inventory] = []
        paths, structures = [], []
        for rank, plan in enumerate(plans):
            if not isinstance(plan, PackedSavePlan):
                inventories.append(pack_items(plan.items))
                paths.append(_packed_paths(plan.planner_data))
            elif plan.inventory is not None:
                inventories.append(plan.inventory)
                paths.append(plan.paths)
                structures.append(plan.structure)
            elif (kept := self._cache.global_plans.get(plan.plan_id)) is not None:
                inventories.append(kept.inventories[plan.position])
                paths.append(kept.paths[plan.position])
                structures.append(kept.structure)
            else:
                raise CheckpointError(
                    f"rank {rank} refers to a plan that the coordinator does not have: ranks took part in different "
                    "saves with this planner. The next save plans afresh"
                )
        replicas.warn_of_objects(plans)
        pieces = len(packed) == len(plans)  # plans of items hold whole tensors
        hashes = [plan.replicas for plan in packed] if pieces and len(plans) > 1 else []
        structure, keep = Structure.merged(structures), self.reuse_plans
        planned = GlobalSavePlan(inventories, paths, structure, self.placement, hashes, pieces, keep)
        if found := {key: (one, other) for key, one, other in planned.plan.differences}:
            replicas.warn(found)
        if keep:
            self._cache.global_plans.keep(planned)
        return planned, True

    def accept(self, description: Description, plan: PackedSavePlan) -> PackedItems:
        """This rank's local plan, given the coordinator's answer."""
        made_for = self._made_for(description)
        kept = self._cache.local_plan(made_for)
        if plan.local_plan is not None:
            kept = KeptLocalPlan(plan.plan_id, plan.position, plan.local_plan, made_for, plan.holders)
        if kept is None or (kept.plan_id, kept.position) != (plan.plan_id, plan.position):
            raise CheckpointError("the coordinator refers to a plan that this rank does not have")
        if self.reuse_plans and plan.plan_id != NOT_KEPT:
            self._cache.local_plans.keep(kept)
        self._cache.end()
        items = PackedItems(self, description, kept.local_plan)
        self.plan = SavePlan(items)  # type: ignore[arg-type]  # looks like a list
        return items

    def kept_plan(self, plan_id: bytes) -> GlobalSavePlan:
        """The kept plan of all ranks with that id. Called on the coordinator, with the id of its own local plan."""
        kept = self._cache.global_plans[plan_id]
        self._cache.global_plans.keep(kept)
        return kept

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
        self._description = None

    def packs(self) -> bool:
        """Whether plans can stay packed: only if no subclass overrides a step that gets items."""
        return not self._overrides(
            "create_local_plan", "create_global_plan", "finish_plan", "resolve_data", "lookup_object",
            "transform_object", "_dedup_save_plans", "_create_global_plan",
        )  # fmt: skip

    def _overrides(self, *names: str) -> bool:
        return not all(is_method_of(self, name, SavePlanner) for name in names)


@lru_cache(maxsize=256)  # logged once for the same keys
def _warn_of_lost_keys(names: tuple[str, ...]) -> None:
    logger.warning(
        "keys of mappings that are neither text nor numbers are saved as text, and come back so without a state to "
        "load into: %s",
        ", ".join(names),
    )


def _packed_paths(paths: dict[str, Any] | None) -> bytes:
    return b"" if paths is None else _C.pack_paths(list(paths), list(paths.values()))
