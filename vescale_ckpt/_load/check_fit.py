"""Compares a state with a checkpoint's contents for a load: shapes, dtypes, kinds, and whether all of it is stored."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from .._checkpoint.checkpoint import incomplete_tensor
from .._engine import _C
from .._state.chunks import whole_shape
from .._state.describe import Description
from ..errors import Mismatch


def mismatch(key: str, value: Any, stored: STORAGE_TYPES, cast_hint: str) -> Mismatch | None:
    """How a value of a state differs from what is stored under its key; None if they fit.

    `cast_hint`: text for a mismatch of dtypes; empty if dtypes may differ.
    """
    stored_tensor = isinstance(stored, TensorStorageMetadata)
    if stored_tensor != (isinstance(value, torch.Tensor) or _has_chunks(value)):
        return Mismatch(key, *(("an object", "a tensor") if stored_tensor else ("a tensor", "an object")))
    if isinstance(stored, TensorStorageMetadata) and isinstance(value, torch.Tensor):
        try:
            shape, dtype = whole_shape(value), stored.properties.dtype
        except Exception:  # of a nested tensor, say
            return Mismatch(key, f"a {type(value).__name__} without a shape", f"shape {tuple(stored.size)}")
        if shape != stored.size:
            return Mismatch(key, f"shape {tuple(shape)}", f"shape {tuple(stored.size)}")
        if cast_hint and value.dtype != dtype:
            return Mismatch(key, f"dtype {value.dtype}", f"dtype {dtype} {cast_hint}")
    return None


def mismatches_on_index(description: Description, plan: _C.LoadPlan, cast_hint: str) -> list[Mismatch]:
    """The mismatches of a plan that was made on an index."""
    return [
        Mismatch(description.names[item], wanted, f"{stored} {cast_hint}" if stored.startswith("dtype") else stored)
        for item, wanted, stored in plan.mismatched
    ]


def check_all_there(description: Description, plan: _C.LoadPlan) -> None:
    if plan.uncovered:
        raise incomplete_tensor(description.names[plan.uncovered[0]])


def _has_chunks(value: Any) -> bool:
    """Whether an object, which need not be a tensor, lists chunks of one, by DCP's protocol."""
    return hasattr(value, "__create_chunk_list__") or isinstance(value, ShardedTensor)
