"""`SavePlanner`: DCP's default planner, with cheap local planning, cheap objects and a plan kept from save to save."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from . import objects
from .engine import dtype_code, is_plain_tensor
from .pause import garbage_collector_paused


class SavePlanner(DefaultSavePlanner):
    """Plans what `DefaultSavePlanner` plans, in less time.

    Args:
        flatten_state_dict: nested containers become dotted keys.
        flatten_sharded_tensors: ShardedTensors inside ShardedTensors become one.
        enable_plan_caching: keep the plan of the last save and use it again while the state's description (keys, kinds,
            dtypes, shapes, shards) stays the same. The cache belongs to this object: two planners never share one.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        *,
        enable_plan_caching: bool = True,
    ) -> None:
        # The default planner's own cache is one for all planners of a class, and does not look at dtypes.
        super().__init__(flatten_state_dict, flatten_sharded_tensors, enable_plan_caching=False)
        self.reuse_plans = enable_plan_caching
        self._described: list[Any] | None = None
        self._described_paths: Any = None
        self._local: SavePlan | None = None
        self._global: tuple[list[SavePlan], Metadata] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A planner goes to the process of an asynchronous save by pickle, at every save: without its caches.
        state = self.__dict__.copy()
        state.update(_described=None, _described_paths=None, _local=None, _global=None)
        for made_by_a_save in ("plan", "global_plan", "metadata", "state_dict", "mappings"):
            state.pop(made_by_a_save, None)
        return state

    @garbage_collector_paused()
    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    @garbage_collector_paused()
    def create_local_plan(self) -> SavePlan:
        paths = self.mappings if self.flatten_state_dict else None
        description = [_describe(key, value) for key, value in self.state_dict.items()] if self.reuse_plans else None
        if (
            self._local is not None
            and description is not None
            and description == self._described
            and paths == self._described_paths
        ):
            self.plan = self._local
            return self.plan
        items: list[WriteItem] = []
        for key, value in self.state_dict.items():
            if is_plain_tensor(value):
                items.append(_tensor_item(key, value))
            else:
                items.extend(create_default_local_save_plan({key: value}, self.is_coordinator).items)
        self.plan = SavePlan(items, planner_data=paths)
        self._local, self._described, self._described_paths, self._global = self.plan, description, paths, None
        return self.plan

    @garbage_collector_paused()
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # With one rank the plan arrives as the very object that was kept. Plans of several ranks arrive as copies.
        kept = self.reuse_plans and len(all_plans) == 1 and all_plans[0] is self._local
        if not kept or self._global is None:
            plans, metadata = super().create_global_plan(all_plans)
            if not kept:
                return plans, metadata
            self._global = plans, metadata
        plans, metadata = self._global
        # The storage writes into the metadata it is given.
        self.global_plan = plans
        self.metadata = Metadata(metadata.state_dict_metadata, planner_data=metadata.planner_data)
        return plans, self.metadata

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        return all_plans if len(all_plans) == 1 else super()._dedup_save_plans(all_plans)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        kind = type(self)
        value = self.state_dict.get(write_item.index.fqn)
        stock = (
            kind.lookup_object is SavePlanner.lookup_object and kind.transform_object is SavePlanner.transform_object
        )
        if stock and is_plain_tensor(value):
            return value  # type: ignore[return-value]  # no shard: nothing to look up
        return super().resolve_data(write_item)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(objects.dump(object))
        return object

    # The storage holds all tensors of a save at once if they are the state's own memory.
    resolve_data.keeps_memory = True  # type: ignore[attr-defined]
    transform_object.keeps_memory = True  # type: ignore[attr-defined]


def _describe(key: str, value: Any) -> Any:
    """All of a value that its plan depends on, comparable by `==`. Never equal for kinds that are not known here."""
    if is_plain_tensor(value):
        return key, value.dtype, value.shape, value.requires_grad, value.layout
    if type(value) is DTensor:
        local = value.to_local()
        kind = type(local)
        return (
            key,
            value.dtype,
            value.shape,
            value.requires_grad,
            value.placements,
            value.device_mesh,
            kind,
            local.shape,
        )
    if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
        return key, object()
    return key, "object"


def _tensor_item(key: str, tensor: torch.Tensor) -> WriteItem:
    dtype_code(tensor.dtype, key)  # raises if it cannot be stored: before any rank has written a byte
    size = tensor.size()
    origin = torch.Size([0] * len(size))
    return WriteItem(
        index=MetadataIndex(key, origin),
        type=WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=origin, sizes=size),
            properties=TensorProperties.create_from_tensor(tensor),
            size=size,
        ),
    )
