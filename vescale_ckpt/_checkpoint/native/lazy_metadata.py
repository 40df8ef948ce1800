"""Builds DCP's `Metadata` for planners and storage on the first access to a field.

At thousands of ranks the objects of DCP's metadata take seconds to build and hundreds of megabytes to send. They are
rarely needed: a save only passes them from planner to writer and to every rank, and a load uses the index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ..._engine import _C
from ..._engine.rows import LOCATION_ROW, PLAN_ROW
from ..._plan.global_plan import GlobalPlan, Locations
from . import metadata_pickle

_FIELDS = tuple(field.name for field in dataclasses.fields(Metadata))


class LazyMetadata(Metadata):
    """Behaves as the `Metadata` that `build` returns, and calls `build` at the first access to a field.

    A pickle contains the fields; after `become` it contains only the function and the arguments that build them.
    """

    planned: GlobalPlan | None = None  #: set by this package's planner for its writer
    index: _C.Index | None = None  #: set by this package's reader for its planner

    def __init__(self, *args: Any, build: Callable[[], Metadata] | None = None, **fields: Any) -> None:
        self._build = build
        self._built = Metadata(*args, **fields) if build is None else None  # fields: dataclasses.replace
        self._copy_from: tuple[Callable[..., Metadata], tuple[Any, ...]] | None = None

    def become(self, build: Callable[..., Metadata], *arguments: Any) -> None:
        """Makes this object behave as the result of `build(*arguments)`, here and in other processes."""
        self._build = lambda: build(*arguments)
        self._built = None
        self._copy_from = _rebuild, (build, arguments)

    def built(self) -> Metadata:
        if self._built is None:
            assert self._build is not None
            self._built = self._build()
        return self._built

    def was_changed(self) -> bool:
        """Whether the fields have been changed since they were built."""
        return self._built is not None and self._build is not None and self._built != self._build()

    def __eq__(self, other: object) -> bool:
        return self.built() == (other.built() if isinstance(other, LazyMetadata) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._built) if self._built is not None else "<Metadata, not looked at yet>"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._copy_from is not None:
            return self._copy_from
        built = self.built()
        others = {name: value for name, value in vars(built).items() if name not in _FIELDS}
        return Metadata, tuple(getattr(built, name) for name in _FIELDS), others


def metadata_of_plan(planned: GlobalPlan) -> LazyMetadata:
    """Returns the metadata of a save that is planned but not written, without record locations."""
    metadata = LazyMetadata(build=partial(_without_locations, planned))
    metadata.planned = planned
    return metadata


def _without_locations(planned: GlobalPlan) -> Metadata:
    plans = map(planned.plan.local_plan, range(len(planned.inventories)))
    nowhere = [Locations(bytes(len(plan) // PLAN_ROW * LOCATION_ROW), ["-"]) for plan in plans]
    content, _ = planned.files(nowhere, "", "")
    metadata = metadata_pickle.loads(content, "the plan")
    metadata.storage_data = metadata.storage_meta = metadata.version = None
    return metadata


def _rebuild(build: Callable[..., Metadata], arguments: tuple[Any, ...]) -> LazyMetadata:
    metadata = LazyMetadata(build=lambda: build(*arguments))
    metadata.become(build, *arguments)
    return metadata


def _field(name: str) -> property:
    def get(self: LazyMetadata) -> Any:
        return getattr(self.built(), name)

    def put(self: LazyMetadata, value: Any) -> None:
        setattr(self.built(), name, value)
        self._copy_from = None  # a copy that is built again would lack the change

    return property(get, put)


for _name in _FIELDS:
    setattr(LazyMetadata, _name, _field(_name))
