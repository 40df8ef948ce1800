"""`LoadPlanner`: DCP's default planner, with errors that name all keys, checked dtypes and cheap local planning."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from . import objects
from .engine import is_plain_tensor
from .errors import CorruptCheckpointError, IncompatibleStateError, MissingKeysError
from .pause import garbage_collector_paused
from .stock import set_element


class LoadPlanner(DefaultLoadPlanner):
    """Plans what `DefaultLoadPlanner` plans, in less time, and tells what does not fit.

    Args:
        flatten_state_dict, flatten_sharded_tensors: as they were on saving.
        allow_partial_load: True leaves values whose key is not in the checkpoint as they are.
        allow_cast: True converts a stored tensor to its target's dtype; otherwise a different dtype raises
            `IncompatibleStateError`.

    Raises (inside DCP's `CheckpointException`) `MissingKeysError` with every missing key, `IncompatibleStateError` for
    a tensor of another shape.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        allow_cast: bool = False,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self.allow_cast = allow_cast

    @garbage_collector_paused()
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)

    @garbage_collector_paused()
    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        if any(key not in stored for key in self.state_dict):
            self._try_old_names()
            missing = [key for key in self.state_dict if key not in stored]
            if missing and not self.allow_partial_load:
                raise MissingKeysError(missing)
        return self._plan({key: value for key, value in self.state_dict.items() if key in stored})

    def _try_old_names(self) -> None:
        """Lets the default planner find out if keys are named as before torch 2.4: it changes `state_dict` then."""
        partial, self.allow_partial_load = self.allow_partial_load, True
        try:
            super().create_local_plan()
        except ValueError:
            pass  # a shape that does not fit, which _plan names
        finally:
            self.allow_partial_load = partial

    def _plan(self, state: dict[str, Any]) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, value in state.items():
            stored = self.metadata.state_dict_metadata[key]
            stored_tensor, wants_tensor = isinstance(stored, TensorStorageMetadata), isinstance(value, torch.Tensor)
            if stored_tensor != (wants_tensor or _has_chunks(value)):
                names = ("an object", "a tensor") if stored_tensor else ("a tensor", "an object")
                raise IncompatibleStateError(key, *names)
            if isinstance(stored, TensorStorageMetadata) and isinstance(value, torch.Tensor):
                if stored.size != value.size():
                    raise IncompatibleStateError(key, f"shape {tuple(value.size())}", f"shape {tuple(stored.size)}")
                if is_plain_tensor(value) and len(stored.chunks) == 1 and stored.chunks[0].sizes == stored.size:
                    items.append(_whole_item(key, stored))
                    continue
            found = create_default_local_load_plan({key: value}, self.metadata).items
            if stored_tensor and sum(item.lengths.numel() for item in found) != wanted_elements(value):
                raise not_all_there(key)
            items.extend(found)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        value: Any = self.state_dict[read_item.dest_index.fqn]
        kind = type(self)
        stock = (
            kind.lookup_tensor is LoadPlanner.lookup_tensor and kind.transform_tensor is LoadPlanner.transform_tensor
        )
        if stock and is_plain_tensor(value) and value.shape == read_item.lengths:
            return value  # type: ignore[no-any-return]  # all of a tensor that is no shard: nothing to look up
        resolved: torch.Tensor = super().resolve_tensor(read_item)
        return resolved

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.storage_index.fqn
        self.set_object(read_item, objects.load(value.getvalue(), weights_only=True, key=key))

    def set_object(self, read_item: ReadItem, value: Any) -> None:
        """Puts a loaded object into the state, under the key of `read_item`."""
        key = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], value)
        else:
            # With flatten_sharded_tensors the state planned with is a copy of the user's.
            self.state_dict[key] = self.original_state_dict[key] = value


def _has_chunks(value: Any) -> bool:
    """Whether it is no tensor but describes chunks of one, as DCP lets objects do."""
    return hasattr(value, "__create_chunk_list__") or isinstance(value, ShardedTensor)


def not_all_there(key: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{key}: the checkpoint does not hold all of it that this rank needs", key=key, file=""
    )


def wanted_elements(value: Any) -> int:
    """Elements that this rank holds of a tensor, and so must get."""
    if isinstance(value, DTensor):
        mesh_member = value.device_mesh.get_coordinate() is not None
        return value.to_local().numel() if mesh_member else 0
    if isinstance(value, ShardedTensor):
        return sum(shard.tensor.numel() for shard in value.local_shards())
    if hasattr(value, "__create_chunk_list__"):
        return sum(chunk.sizes.numel() for chunk in value.__create_chunk_list__())
    return int(value.numel())


def _whole_item(key: str, stored: TensorStorageMetadata) -> ReadItem:
    index = MetadataIndex(key, stored.chunks[0].offsets, 0)
    origin = stored.chunks[0].offsets
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=origin,
        storage_index=index,
        storage_offsets=origin,
        lengths=stored.size,
    )
