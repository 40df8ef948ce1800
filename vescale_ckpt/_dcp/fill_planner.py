"""Plans the load of a flat state under the checkpoint's keys, and lists all that does not fit before reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .._checkpoint.quantized_names import scales_of
from .._engine import _C
from .._engine.dtype_codes import CODE_DTYPES
from .._load.check_fit import check_all_there, mismatch, mismatches_on_index
from .._state.describe import Description
from ..errors import Mismatch
from .load_planner import LoadPlanner

_OBJECT = 255  # in place of a dtype's code
_CASTS = "(allow_cast=True converts)"


class FillPlanner(LoadPlanner):
    """A planner for one load: `set_up_planner` with a flat state, `misfits`, `leave_out` these, then plan and read.

    Tensors are filled in place. Loaded objects are kept in `objects`, by key, for the caller.
    """

    def __init__(self, allow_cast: bool, parts: Mapping[str, Any] | None = None) -> None:
        """`parts`: {key: value} of objects that are stored as a part of another object, which a read gives."""
        super().__init__(flatten_state_dict=False, allow_cast=allow_cast)
        self.objects: dict[str, Any] = {}
        self._parts = parts or {}
        #: tensors to fill with values of quantised tensors; they are not in the state
        self.quantized: Description | None = None
        self._found: tuple[Any, Description, _C.LoadPlan | None] | None = None  # and the state that it was found for

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._begin(metadata)
        self.original_state_dict = self.state_dict = state_dict
        self.mappings = {}
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def set_up_whole(self, selected: Sequence[int], metadata: Metadata) -> bool:
        """Does the same with new tensors for these keys of the index, by number, without Python code for each. False if
        there is no index, or the metadata has to be looked at: a tensor seems larger than its records, say."""
        self._begin(metadata)
        if self._index is None:
            return False
        try:
            names, codes, shapes, inventory, sources = self._index.whole_items(selected)
            plan = self._index.plan_load(inventory)
        except _C.EngineError:
            return False
        first: dict[tuple[int, tuple[int, ...]], torch.Tensor | None] = {}
        values: list[torch.Tensor | None] = []
        for form in zip(codes, shapes, strict=True):
            if (like := first.get(form)) is not None:  # takes half the time of `empty`
                values.append(torch.empty_like(like))
            else:
                code, shape = form
                new = None if code == _OBJECT else torch.empty(shape, dtype=CODE_DTYPES[code], device="cpu")
                values.append(first.setdefault(form, new))
        tensors = [value for value in values if value is not None]
        self.set_up_planner(dict(zip(names, values, strict=True)), metadata)
        description = Description.of_new(inventory, names, sources, tensors)
        self._found = self.state_dict, description, plan
        return True

    def misfits(self) -> tuple[list[str], list[Mismatch]]:
        """Keys that the checkpoint does not have, and those whose stored value does not fit. Raises
        `CorruptCheckpointError` if the stored chunks of a tensor do not cover it."""
        missing, mismatched = self._by_index(self._misfits_on_index) or self._misfits_in_metadata()
        return missing, [self._explained(entry) for entry in mismatched]

    def _explained(self, entry: Mismatch) -> Mismatch:
        """Names the kinds of both sides, and the scales of numbers that no load converts without them."""
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata[entry.key]
        if isinstance(stored, TensorStorageMetadata):
            dtype = stored.properties.dtype
            if entry.expected == "an object":
                kind = type(self.state_dict[entry.key]).__name__
                found = f"a tensor of shape {tuple(stored.size)} and dtype {dtype}"
                return Mismatch(entry.key, f"an object of type {kind}", found)
            if entry.found.endswith(_CASTS):
                names = self.metadata.state_dict_metadata
                if (scales := scales_of(entry.key, str(dtype).removeprefix("torch."), names)) is not None:
                    return entry._replace(found=f"dtype {dtype} with its scales {scales}, not one without the other")
        if entry.expected == "a tensor":
            return entry._replace(found="an object that is no tensor, as a number (any object takes it)")
        return entry

    def leave_out(self, keys: set[str]) -> None:
        if keys:
            self.original_state_dict = self.state_dict = {
                key: value for key, value in self.state_dict.items() if key not in keys
            }

    def put_object(self, key: str, value: Any) -> None:
        self.objects[key] = self._parts.get(key, value)

    def _found_in_index(self, index: _C.Index) -> tuple[Description, _C.LoadPlan | None]:
        """Looks once: nothing changes the state between `misfits` and the plan, unless keys are left out."""
        if self._found is None or self._found[0] is not self.state_dict:
            self._found = self.state_dict, *super()._found_in_index(index)
        return self._found[1:]

    def _misfits_on_index(self, index: _C.Index) -> tuple[list[str], list[Mismatch]] | None:
        description, plan = self._found_in_index(index)
        if plan is None:
            return None
        check_all_there(description, plan)
        missing = dict.fromkeys(description.names[item] for item in plan.missing)
        return list(missing), list(dict.fromkeys(mismatches_on_index(description, plan, _CASTS)))

    def _misfits_in_metadata(self) -> tuple[list[str], list[Mismatch]]:
        assert self.metadata is not None
        stored, hint = self.metadata.state_dict_metadata, "" if self.allow_cast else _CASTS
        missing = [key for key in self.state_dict if key not in stored]
        there = ((key, value) for key, value in self.state_dict.items() if key in stored)
        found = (mismatch(key, value, stored[key], hint) for key, value in there)
        return missing, [entry for entry in found if entry is not None]
