"""`LoadPlanner` plans DCP's loads like the default planner, but faster, and reports all keys that do not fit."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as DcpLoadPlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .._checkpoint.checkpoint import incomplete_tensor
from .._checkpoint.native.lazy_metadata import LazyMetadata
from .._engine import _C
from .._engine.gc import gc_paused
from .._engine.tensor_checks import holds_any
from .._load.fill_plan import check_all_there, mismatch, mismatches_on_index
from .._plan.read_plan import Reads
from .._state import objects
from .._state.chunks import Chunks, chunks_to_read, copy_protocol, shard_at, tells_chunks
from .._state.describe import Describer
from .._state.flatten import flatten, place
from .._state.per_rank import PerRank, Restoring
from .._state.structure import Path
from ..errors import IncompatibleStateError, MissingKeysError
from ..settings import checked_flag
from .item_load import ItemTargets, target_elements
from .overrides import is_method_of
from .packed_lists import PackedReads

_Found = TypeVar("_Found")
_CASTS = "(LoadPlanner(allow_cast=True) casts)"
#: Methods that return targets and take filled tensors: a subclass that overrides one gets each tensor separately.
_FILLS = ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor")


class LoadPlanner(DefaultLoadPlanner):
    """Plans the same reads as `DefaultLoadPlanner`, in less time, and checks shapes and dtypes.

    Pass it as `planner` of `dcp.load`, which is collective and wraps errors in DCP's `CheckpointException`.

    Args:
        flatten_state_dict, flatten_sharded_tensors: as in the save.
        allow_partial_load: True leaves values whose key is not in the checkpoint unchanged.
        allow_cast: True converts a stored tensor to its target's dtype; False raises `IncompatibleStateError` for
            another dtype.

    Raises:
        MissingKeysError: with all missing keys.
        IncompatibleStateError: a tensor has another shape, or another dtype without `allow_cast`.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        allow_cast: bool = False,
    ) -> None:
        super().__init__(
            checked_flag("flatten_state_dict", flatten_state_dict),
            checked_flag("flatten_sharded_tensors", flatten_sharded_tensors),
            checked_flag("allow_partial_load", allow_partial_load),
        )
        self.allow_cast = checked_flag("allow_cast", allow_cast)
        self._packed: PackedReads | None = None

    def __getstate__(self) -> dict[str, Any]:
        made_by_a_load = ("_packed", "_index", "_per_rank", "metadata", "state_dict")
        state = {name: value for name, value in self.__dict__.items() if name not in made_by_a_load}
        return {**state, "_packed": None}

    @gc_paused()
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """DCP calls it first, on each rank, with the state to fill. Keeps the state; does not change its tensors."""
        self._packed = None
        self._index = metadata.index if isinstance(metadata, LazyMetadata) and self._packs() else None
        self._per_rank = Restoring()
        flat: dict[str, Any] = state_dict
        mappings: dict[str, Path] = {}
        if self.flatten_state_dict:
            flat, mappings = flatten(state_dict)
        if not self.flatten_state_dict or _needs_stock_set_up(flat):
            wrapped = {key: value for key, value in flat.items() if isinstance(value, PerRank)}
            told = {key: value for key, value in flat.items() if tells_chunks(value, loading=True)}
            super().set_up_planner(state_dict, metadata, is_coordinator)
            for key, value in told.items():  # DCP replaces tensors on the meta device by tensors that do not tell
                if value is not self.state_dict[key]:
                    copy_protocol(value, self.state_dict[key])
            for key, value in wrapped.items():  # DCP replaces objects that it does not know by None
                self.state_dict[key] = value
                place(state_dict, mappings.get(key, (key,)), value)
        else:
            self.original_state_dict, self.state_dict, self.mappings = state_dict, flat, mappings
            self.metadata, self.is_coordinator = metadata, is_coordinator
        if metadata is not None:
            self.state_dict = self._per_rank.unwrap(
                self.state_dict, lambda: self._by_index(_C.Index.keys) or metadata.state_dict_metadata
            )

    def _by_index(self, ask: Callable[[_C.Index], _Found | None]) -> _Found | None:
        """Returns what `ask` finds on the index. None without an index, and from now on if it is damaged: `.metadata`
        is used."""
        if self._index is not None:
            try:
                return ask(self._index)
            except _C.EngineError:
                self._index = None
        return None

    @gc_paused()
    def create_local_plan(self) -> LoadPlan:
        """DCP calls it second, on each rank. Plans on the index where possible, else on DCP's metadata."""
        assert self.metadata is not None
        reads = self._by_index(self._plan_on_index)
        if reads is not None:
            self._packed = PackedReads(reads)
            return LoadPlan(self._packed)  # type: ignore[arg-type]  # looks like a list
        stored = self.metadata.state_dict_metadata
        objects = (key for key, of in stored.items() if isinstance(of, BytesStorageMetadata))
        if self.flatten_state_dict and not all(key in self.state_dict for key in objects):
            self._try_old_names()
        missing = [key for key in self.state_dict if key not in stored]
        if missing and not self.allow_partial_load:
            raise MissingKeysError(missing)
        return self._plan({key: value for key, value in self.state_dict.items() if key in stored})

    def reads_of(self, plan: LoadPlan) -> Reads | None:
        """The reads of a plan that this planner has packed; None for any other plan."""
        items: object = plan.items
        return self._packed.reads if self._packed is not None and items is self._packed else None

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """DCP calls it on each rank with the coordinator's answer, before reading. Packed reads are pickled empty, as
        the coordinator decides nothing about them; here they take their place in the plan again."""
        return central_plan if self._packed is None else replace(central_plan, items=self._packed)  # type: ignore[arg-type]

    def _plan_on_index(self, index: _C.Index) -> Reads | None:
        """Plans on the index. None if DCP has to plan, because of a value of the state or of old key names."""
        state = Describer(loading=True).describe(self.state_dict)
        plan = None if state.other else index.plan_load(state.inventory, self.allow_cast)
        if plan is None or plan.missing:
            return None
        for found in mismatches_on_index(state, plan, _CASTS):
            raise IncompatibleStateError(*found)
        check_all_there(state, plan)
        return Reads.of_plan(state, plan)

    def _packs(self) -> bool:
        names = ("create_local_plan", "create_global_plan", "finish_plan", "load_bytes", *_FILLS)
        return all(is_method_of(self, name, LoadPlanner) for name in names)

    def _try_old_names(self) -> None:
        """Lets the default planner detect key names of torch before 2.4. It renames keys of `state_dict` then."""
        partial, self.allow_partial_load = self.allow_partial_load, True
        try:
            super().create_local_plan()
        except ValueError:
            pass  # a shape that does not fit: `_plan` raises it with its key
        finally:
            self.allow_partial_load = partial

    def _plan(self, state: dict[str, Any]) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        hint = _CASTS if not self.allow_cast and item_targets(self).are_views else ""
        for key, value in state.items():
            stored = self.metadata.state_dict_metadata[key]
            # DCP's own readers would silently convert another dtype.
            if (found := mismatch(key, value, stored, hint)) is not None:
                raise IncompatibleStateError(*found)
            is_tensor = isinstance(stored, TensorStorageMetadata)
            if isinstance(stored, TensorStorageMetadata) and tells_chunks(value, loading=True):
                planned = _read_items(key, chunks_to_read(key, value), stored)
            else:
                with _on_the_host():
                    planned = create_default_local_load_plan({key: value}, self.metadata).items
            if is_tensor and sum(item.lengths.numel() for item in planned) != target_elements(key, value):
                raise incomplete_tensor(key)
            items.extend(planned)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The reader calls it for each item of a tensor: the memory to fill."""
        if self._packed is not None:
            assert read_item.dest_index.index is not None
            return self._packed.reads.target(read_item.dest_index.index, read_item.dest_offsets, read_item.lengths)
        resolved: torch.Tensor = super().resolve_tensor(read_item)
        return resolved

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        value: Any = self.state_dict[index.fqn]
        return shard_at(value, index) if tells_chunks(value, loading=True) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """DCP's own readers call it for each item of an object. Unpickles without running code."""
        key = read_item.storage_index.fqn
        self.put_object(read_item.dest_index.fqn, objects.load(value.getvalue(), weights_only=True, key=key))

    def put_object(self, key: str, value: Any) -> None:
        """Puts a loaded object into the state."""
        if self._per_rank.take(key, value):
            return
        if self.flatten_state_dict:
            place(self.original_state_dict, self.mappings[key], value)
        else:
            # With flatten_sharded_tensors `state_dict` is a copy of the user's dict.
            self.state_dict[key] = self.original_state_dict[key] = value


def _on_the_host() -> AbstractContextManager[Any]:
    """A context that makes the CPU the default device: torch's planning creates tensors there, and fails on meta."""
    device = torch.get_default_device()
    return nullcontext() if device.type == "cpu" else torch.device("cpu")


def _needs_stock_set_up(flat: dict[str, Any]) -> bool:
    """Whether DCP must set values up: it allocates meta tensors and flattens nested ShardedTensors."""
    return holds_any(flat, (ShardedTensor,)) or any(
        value.is_meta for value in flat.values() if isinstance(value, torch.Tensor)
    )


def item_targets(planner: DcpLoadPlanner) -> ItemTargets:
    """How a planner, of this package or not, takes the data that is read for its items."""
    views = isinstance(planner, DefaultLoadPlanner) and all(
        is_method_of(planner, name, DefaultLoadPlanner, LoadPlanner) for name in _FILLS
    )
    if not isinstance(planner, LoadPlanner):
        return ItemTargets(planner, views)
    # This package's planner takes the object itself, unless a subclass overrides `load_bytes`.
    put = planner.put_object if is_method_of(planner, "load_bytes", LoadPlanner) else None
    return ItemTargets(planner, views, True, put)


def _read_items(key: str, chunks: Chunks, stored: TensorStorageMetadata) -> list[ReadItem]:
    targets = [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size)) for chunk in chunks.chunks]
    return create_read_items_for_chunk_list(key, stored, targets)
