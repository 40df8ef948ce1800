"""Plans the load of a flat state under the checkpoint's keys, and lists all that does not fit before reading."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from .._checkpoint.checkpoint import Read, incomplete_tensor
from .._checkpoint.loadable import LoadableCheckpoint, targets_of
from .._checkpoint.view import View
from .._engine import _C
from .._engine.dtype_codes import CODE_DTYPES
from .._engine.gc import gc_paused
from .._engine.torch_types import is_sharded_tensor, is_tensor_metadata
from .._engine.wrapper_tensors import type_name
from .._plan.read_plan import Reads
from .._routes.broadcast_load import BroadcastLoad
from .._state.chunks import whole_shape
from .._state.describe import Describer
from .._state.shared_targets import replaced_in_state
from .._state.state import State
from .._state.tensor_table import narrowed
from ..errors import CheckpointError, Mismatch
from ..reports import LoadStats
from .load_packed import load_packed
from .rank_load import RankLoad, ranks_of_node

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
        self.checkpoint = checkpoint
        self.values: dict[str, torch.Tensor] = {}  #: tensors of the state that the view makes values for
        self._view = View(checkpoint)
        self._unfit: dict[str, Mismatch] = {}  # tensors of the state for which it cannot
        self._described_values: State | None = None
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
        if self._found is None:  # else the targets were made like what is stored
            self.values, self._unfit = self._view.values_for(self.state)
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
        return list(missing), [*mismatched, *self._unfit.values()]

    def made_of(self) -> set[str]:
        """Returns the keys of the stored tensors that the values are made of."""
        return self._view.made_of(self.values)

    def _explained(self, entry: Mismatch) -> Mismatch:
        """Names the kinds of both sides, and what a stored tensor means nothing without."""
        stored = self.checkpoint.metadata.state_dict_metadata[entry.key]
        if is_tensor_metadata(stored):
            dtype = stored.properties.dtype
            if entry.expected == "an object":
                kind = type(self.state[entry.key]).__name__
                found = f"a tensor of shape {tuple(stored.size)} and dtype {dtype}"
                return Mismatch(entry.key, f"an object of type {kind}", found)
            if entry.found.endswith(_CASTS) and (scales := self._view.scales_of(entry.key, dtype)) is not None:
                return entry._replace(found=f"dtype {dtype} with its scales {scales}, not one without the other")
        if entry.expected == "a tensor":
            return entry._replace(found="an object that is no tensor, as a number (any object takes it)")
        return entry

    def leave_out(self, keys: set[str]) -> None:
        if keys:
            self.state = {key: value for key, value in self.state.items() if key not in keys}
            self.values = {key: value for key, value in self.values.items() if key not in keys}
            self._found = None

    def _planned(self) -> tuple[State, _C.LoadPlan]:
        """Plans once: nothing changes the state between `misfits` and `reads`, unless keys are left out."""
        if self._found is None:
            apart = {*self.values, *self._unfit}
            stored = {key: value for key, value in self.state.items() if key not in apart} if apart else self.state
            description = Describer(loading=True).describe(stored)
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
        if self.values:  # they are filled after all others
            replaced = replaced_in_state(self.state, self.state, lambda *keys: self.values.keys().isdisjoint(keys))
            values = {key: value for key, value in self.values.items() if key not in replaced}
            self._described_values = Describer(loading=True).describe(values) if values else None
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
        return load_packed(load, reads, self.state, self._put_object, broadcast, lambda: self._fill_values(load))

    def _fill_values(self, load: RankLoad) -> int:
        """Fills the tensors that the view makes values for, and returns their number. Each rank reads for itself."""
        if (description := self._described_values) is None:
            return 0
        load.begin(description, None)
        through_cache = load.options.direct_io == "auto" and ranks_of_node() > 1

        def boxes() -> Iterator[Read]:
            for row, (name, *_, offset, size) in enumerate(description.items):
                tensor, inside = description.source(row)
                yield Read(name, offset, narrowed(tensor.detach(), inside, size))

        def read_stored(reads: list[Read]) -> None:
            load.fill(targets_of(load, self.checkpoint.parts(reads)), through_cache=through_cache)

        self._view.read(boxes(), read_stored, load.threads)
        return len(set(description.names))

    def _put_object(self, key: str, value: Any) -> None:
        self.objects[key] = self._parts.get(key, value)


# --- What fits, also for DCP's planner


def mismatch(key: str, value: Any, stored: object, cast_hint: str) -> Mismatch | None:
    """How a value of a state differs from what is stored under its key; None if they fit.

    `cast_hint`: text for a mismatch of dtypes; empty if dtypes may differ.
    """
    stored_tensor = is_tensor_metadata(stored)
    if stored_tensor != (isinstance(value, torch.Tensor) or _has_chunks(value)):
        return Mismatch(key, *(("an object", "a tensor") if stored_tensor else ("a tensor", "an object")))
    if is_tensor_metadata(stored) and isinstance(value, torch.Tensor):
        try:
            shape, dtype = whole_shape(value), stored.properties.dtype
        except Exception:  # of a nested tensor, say
            return Mismatch(key, f"a {type(value).__name__} without a shape", f"shape {tuple(stored.size)}")
        if shape != stored.size:
            return Mismatch(key, f"shape {tuple(shape)}", f"shape {tuple(stored.size)}")
        if cast_hint and value.dtype != dtype:
            return Mismatch(key, f"dtype {value.dtype}", f"dtype {dtype} {cast_hint}")
    return None


def mismatches_on_index(description: State, plan: _C.LoadPlan, cast_hint: str) -> list[Mismatch]:
    """The mismatches of a plan that was made on an index."""
    return [
        Mismatch(description.names[item], wanted, f"{stored} {cast_hint}" if stored.startswith("dtype") else stored)
        for item, wanted, stored in plan.mismatched
    ]


def check_all_there(description: State, plan: _C.LoadPlan) -> None:
    if plan.uncovered:
        raise incomplete_tensor(description.names[plan.uncovered[0]])


def _has_chunks(value: Any) -> bool:
    """Whether an object, which need not be a tensor, lists chunks of one, by DCP's protocol."""
    return hasattr(value, "__create_chunk_list__") or is_sharded_tensor(value)
