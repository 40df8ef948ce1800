"""Plans the load of a flat state under the checkpoint's keys, and lists all that does not fit before reading."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .._checkpoint.loadable import LoadableCheckpoint
from .._checkpoint.quantized_names import scales_of
from .._engine import _C
from .._engine.dtype_codes import CODE_DTYPES
from .._engine.gc import gc_paused
from .._engine.wrapper_tensors import type_name
from .._plan.read_plan import Reads
from .._routes.broadcast_load import BroadcastLoad
from .._state.describe import Describer
from .._state.state import State
from ..errors import CheckpointError, Mismatch
from ..reports import LoadStats
from .check_fit import check_all_there, mismatch, mismatches_on_index
from .load_packed import load_packed
from .rank_load import RankLoad

_OBJECT = 255  # in place of a dtype's code
_CASTS = "(allow_cast=True converts)"


class FillPlan:
    """The plan of one load: ask for `misfits`, `leave_out` these, then `fill` by `reads`.

    Tensors are filled in place. Loaded objects are kept in `objects`, by key, for the caller.
    """

    def __init__(
        self,
        checkpoint: LoadableCheckpoint,
        state: dict[str, Any],
        allow_cast: bool = False,
        parts: Mapping[str, Any] | None = None,
    ) -> None:
        """`parts`: {key: value} of objects that are stored as a part of another object, which a read gives."""
        self.state = state
        self.objects: dict[str, Any] = {}
        #: tensors to fill with values of quantised tensors; they are not in the state
        self.quantized: State | None = None
        self.checkpoint = checkpoint
        self._allow_cast = allow_cast
        self._parts = parts or {}
        self._found: tuple[State, _C.LoadPlan] | None = None  # of the state as it is

    @classmethod
    def of_new(cls, checkpoint: LoadableCheckpoint, keys: Collection[str]) -> FillPlan | None:
        """Plans to load these keys into new tensors, without Python code for each. None if the metadata have to be
        looked at: the index is damaged, or a tensor seems larger than its records, say."""
        try:
            index = checkpoint.load_index.index
            selected = [row for row, key in enumerate(index.keys()) if key in keys]
            names, codes, shapes, inventory, sources = index.whole_items(selected)
            plan = index.plan_load(inventory)
        except _C.EngineError:
            return None
        if len(names) < len(keys):
            return None
        first: dict[tuple[int, tuple[int, ...]], torch.Tensor | None] = {}
        values: list[torch.Tensor | None] = []
        for form in zip(codes, shapes, strict=True):
            if (like := first.get(form)) is not None:  # takes half the time of `empty`
                values.append(torch.empty_like(like))
            else:
                code, shape = form
                new = None if code == _OBJECT else torch.empty(shape, dtype=CODE_DTYPES[code], device="cpu")
                values.append(first.setdefault(form, new))
        made = cls(checkpoint, dict(zip(names, values, strict=True)))
        tensors = [value for value in values if value is not None]
        made._found = State.of_new(inventory, names, sources, tensors), plan
        return made

    # --- What fits

    def misfits(self) -> tuple[list[str], list[Mismatch]]:
        """Keys that the checkpoint does not have, and those whose stored value does not fit. Raises
        `CorruptCheckpointError` if the stored chunks of a tensor do not cover it."""
        description, plan = self._planned()
        check_all_there(description, plan)
        missing = dict.fromkeys(description.names[item] for item in plan.missing)
        mismatched = [*map(self._explained, dict.fromkeys(mismatches_on_index(description, plan, _CASTS)))]
        # Values that cannot be described, and keys that an index cannot hold, are compared with the metadata.
        odd = [*description.other, *(key for key in missing if (key, ()) in self.checkpoint.load_index.refused)]
        entries = self.checkpoint.metadata.state_dict_metadata if odd else {}
        for key in odd:
            missing.pop(key, None)
            if key not in entries:
                missing[key] = None
            elif found := mismatch(key, self.state[key], entries[key], "" if self._allow_cast else _CASTS):
                mismatched.append(self._explained(found))
        return list(missing), mismatched

    def _explained(self, entry: Mismatch) -> Mismatch:
        """Names the kinds of both sides, and the scales of numbers that no load converts without them."""
        entries = self.checkpoint.metadata.state_dict_metadata
        stored = entries[entry.key]
        if isinstance(stored, TensorStorageMetadata):
            dtype = stored.properties.dtype
            if entry.expected == "an object":
                kind = type(self.state[entry.key]).__name__
                found = f"a tensor of shape {tuple(stored.size)} and dtype {dtype}"
                return Mismatch(entry.key, f"an object of type {kind}", found)
            if (
                entry.found.endswith(_CASTS)
                and (scales := scales_of(entry.key, str(dtype).removeprefix("torch."), entries)) is not None
            ):
                return entry._replace(found=f"dtype {dtype} with its scales {scales}, not one without the other")
        if entry.expected == "a tensor":
            return entry._replace(found="an object that is no tensor, as a number (any object takes it)")
        return entry

    def leave_out(self, keys: set[str]) -> None:
        if keys:
            self.state = {key: value for key, value in self.state.items() if key not in keys}
            self._found = None

    def _planned(self) -> tuple[State, _C.LoadPlan]:
        """Plans once: nothing changes the state between `misfits` and `reads`, unless keys are left out."""
        if self._found is None:
            description = Describer(loading=True).describe(self.state)
            self._found = description, self._plan(description)
        return self._found

    def _plan(self, description: State) -> _C.LoadPlan:
        try:
            return self.checkpoint.load_index.index.plan_load(description.inventory, self._allow_cast)
        except _C.EngineError:
            if self.checkpoint.index is None:
                raise
            self.checkpoint = self.checkpoint.without_index()  # it is damaged
            return self._plan(description)

    # --- Reading

    @gc_paused()
    def reads(self) -> Reads:
        """What this rank reads. Raises the error of what the load needs and the metadata do not describe soundly."""
        description, plan = self._planned()
        for key, value in description.other.items():
            raise CheckpointError(f"{key}: a {type_name(value)} cannot be filled: load into a tensor", key=key)
        refused = self.checkpoint.load_index.refused
        for item in plan.missing:
            raise refused[description.names[item], ()]
        reads = Reads.of_plan(description, plan)
        for row in chain(reads.tensors(), reads.objects()) if refused else ():
            if (error := refused.get(reads.stored_chunk(row))) is not None:
                raise error
        return reads

    def fill(self, load: RankLoad, reads: Reads, broadcast: BroadcastLoad | None) -> LoadStats:
        """Fills the state by `reads`. With `broadcast`, other ranks, which call this together, read some of it."""
        load.quantized = self.quantized
        return load_packed(load, reads, self.state, self._put_object, broadcast)

    def _put_object(self, key: str, value: Any) -> None:
        self.objects[key] = self._parts.get(key, value)
