"""`LoadPlanner`: DCP's default planner, with errors that name all keys, checked dtypes and cheap local planning."""

from __future__ import annotations

import io
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from . import _C, objects
from .arguments import checked_flag
from .describe import Describer
from .engine import is_plain_tensor
from .errors import CorruptCheckpointError, IncompatibleStateError, MissingKeysError
from .flatten import flatten, place
from .lazy_metadata import LazyMetadata
from .overrides import is_method_of
from .pause import garbage_collector_paused
from .per_rank import PerRank, Restoring
from .read_plan import PackedReads

_CASTS = " (LoadPlanner(allow_cast=True) casts)"


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
        for name, value in (
            ("flatten_state_dict", flatten_state_dict), ("flatten_sharded_tensors", flatten_sharded_tensors),
            ("allow_partial_load", allow_partial_load),
        ):  # fmt: skip
            checked_flag(name, value)
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self.allow_cast = checked_flag("allow_cast", allow_cast)
        self._reads: PackedReads | None = None
        self._describer = Describer()
        self._kept_plan: _C.LoadPlan | None = None  # of the last load, and what it was for
        self._kept_for: tuple[str, bool] | None = None

    def __getstate__(self) -> dict[str, Any]:
        made_by_a_load = ("_reads", "_index", "_per_rank", "_kept_plan", "_kept_for", "metadata", "state_dict")
        state = {name: value for name, value in self.__dict__.items() if name not in made_by_a_load}
        return {**state, "_reads": None, "_kept_plan": None, "_kept_for": None}

    @garbage_collector_paused()
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._begin(metadata)
        flat, mappings = flatten(state_dict) if self.flatten_state_dict else (state_dict, {})
        if not self.flatten_state_dict or any(_needs_stock_set_up(value) for value in flat.values()):
            wrapped = {key: value for key, value in flat.items() if isinstance(value, PerRank)}
            super().set_up_planner(state_dict, metadata, is_coordinator)
            for key, value in wrapped.items():  # DCP puts None in place of what it does not know
                self.state_dict[key] = value
                place(state_dict, mappings.get(key, (key,)), value)
        else:
            self.original_state_dict, self.state_dict, self.mappings = state_dict, flat, mappings
            self.metadata, self.is_coordinator = metadata, is_coordinator
        if metadata is not None:
            self.state_dict = self._per_rank.wanted(self.state_dict, lambda: self._stored_keys(metadata))

    def _begin(self, metadata: Metadata | None) -> None:
        self._reads = None
        self._index = metadata.index if isinstance(metadata, LazyMetadata) and self._packs() else None
        self._per_rank = Restoring()

    def _stored_keys(self, metadata: Metadata) -> Iterable[str]:
        if self._index is not None:
            try:
                return self._index.keys()
            except _C.EngineError:
                self._index = None
        return metadata.state_dict_metadata

    @garbage_collector_paused()
    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        if self._index is not None:
            try:
                self._reads = self._plan_on_index(self._index)
            except _C.EngineError:
                self._index = None  # damaged: `.metadata` rules
            if self._reads is not None:
                return LoadPlan(self._reads)  # type: ignore[arg-type]  # looks like a list
        stored = self.metadata.state_dict_metadata
        if any(key not in stored for key in self.state_dict):
            self._try_old_names()
            missing = [key for key in self.state_dict if key not in stored]
            if missing and not self.allow_partial_load:
                raise MissingKeysError(missing)
        return self._plan({key: value for key, value in self.state_dict.items() if key in stored})

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        # Plans of ours go to the coordinator empty: nothing is decided there.
        return central_plan if self._reads is None else replace(central_plan, items=self._reads)  # type: ignore[arg-type]

    def _plan_on_index(self, index: _C.Index) -> PackedReads | None:
        """None if it takes DCP's own planning, because of what the state holds or how keys are named."""
        description, same = self._describer.describe(self.state_dict)
        if description.other:
            return None
        plan = self._kept_plan
        if not same or plan is None or self._kept_for != (index.save_id, self.allow_cast):
            plan = index.plan_load(description.inventory, self.allow_cast)
            if plan.missing:
                return None
            if plan.mismatched:
                item, wanted, stored = plan.mismatched[0]
                hint = _CASTS if stored.startswith("dtype") else ""
                raise IncompatibleStateError(description.names[item], wanted, stored + hint)
            if plan.uncovered:
                raise not_all_there(description.names[plan.uncovered[0]])
            self._kept_plan, self._kept_for = plan, (index.save_id, self.allow_cast)
        return PackedReads(self, description, plan)

    def _packs(self) -> bool:
        names = (
            "create_local_plan", "create_global_plan", "finish_plan", "load_bytes", "resolve_tensor", "commit_tensor",
            "lookup_tensor", "transform_tensor",
        )  # fmt: skip
        return all(is_method_of(self, name, LoadPlanner) for name in names)

    def _fills_the_state_itself(self) -> bool:
        """Whether what is filled are the state's own tensors, not what a subclass gives in their place."""
        names = ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor")
        return all(is_method_of(self, name, LoadPlanner) for name in names)

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
        checks_dtype = not self.allow_cast and self._fills_the_state_itself()
        for key, value in state.items():
            stored = self.metadata.state_dict_metadata[key]
            stored_tensor, wants_tensor = isinstance(stored, TensorStorageMetadata), isinstance(value, torch.Tensor)
            if stored_tensor != (wants_tensor or has_chunks(value)):
                names = ("an object", "a tensor") if stored_tensor else ("a tensor", "an object")
                raise IncompatibleStateError(key, *names)
            if isinstance(stored, TensorStorageMetadata) and isinstance(value, torch.Tensor):
                if stored.size != value.size():
                    raise IncompatibleStateError(key, f"shape {tuple(value.size())}", f"shape {tuple(stored.size)}")
                if checks_dtype and value.dtype != (dtype := stored.properties.dtype):
                    # Stock readers would convert it without a word.
                    raise IncompatibleStateError(key, f"dtype {value.dtype}", f"dtype {dtype}{_CASTS}")
                if is_plain_tensor(value) and len(stored.chunks) == 1 and stored.chunks[0].sizes == stored.size:
                    items.append(_whole_item(key, stored))
                    continue
            with _on_the_host():
                found = create_default_local_load_plan({key: value}, self.metadata).items
            if stored_tensor and sum(item.lengths.numel() for item in found) != wanted_elements(value):
                raise not_all_there(key)
            items.extend(found)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        if self._reads is not None:
            assert read_item.dest_index.index is not None
            return self._reads.target(read_item.dest_index.index, read_item.dest_offsets, read_item.lengths)
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
        self.put_object(read_item.dest_index.fqn, value)

    def put_object(self, key: str, value: Any) -> None:
        if self._per_rank.take(key, value):
            return
        if self.flatten_state_dict:
            place(self.original_state_dict, self.mappings[key], value)
        else:
            # With flatten_sharded_tensors the state planned with is a copy of the user's.
            self.state_dict[key] = self.original_state_dict[key] = value


def _on_the_host() -> AbstractContextManager[Any]:
    """Torch's planning makes tensors to count with, on the default device: under `torch.device("meta")` it fails."""
    device = torch.get_default_device()
    return nullcontext() if device.type == "cpu" else torch.device("cpu")


def _needs_stock_set_up(value: Any) -> bool:
    """Tensors that DCP first gives memory, or shards of shards that it flattens."""
    return isinstance(value, ShardedTensor) or (isinstance(value, torch.Tensor) and value.is_meta)


def has_chunks(value: Any) -> bool:
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
