"""Compares a state with a checkpoint's contents for a load: shapes, dtypes, kinds, and whether all of it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from .._checkpoint.checkpoint import incomplete_tensor
from .._checkpoint.quantized_tensors import VALUE_DTYPES, Quantized
from .._engine import _C
from .._engine.wrapper_tensors import is_wrapper
from .._state.chunks import tells_chunks, whole_shape
from .._state.describe import Describer
from .._state.state import State
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


def quantized_targets(
    state: Mapping[str, Any], known: Mapping[str, Quantized]
) -> tuple[dict[str, torch.Tensor], dict[str, Mismatch]]:
    """Returns the tensors of a state that take the values of quantised tensors, and those that cannot. A tensor of the
    dtype of the stored numbers takes these, and so does one beside whose scales are loaded, too."""
    found, unfit = {}, {}
    for key, of in known.items():
        value = state.get(key)
        if not isinstance(value, torch.Tensor) or value.dtype == of.numbers_dtype or of.scales in state:
            continue
        shape = whole_shape(value)
        if shape != of.shape:
            unfit[key] = Mismatch(key, f"shape {tuple(shape)}", f"shape {of.shape}")
        elif value.dtype not in VALUE_DTYPES or tells_chunks(value, loading=True) or is_wrapper(local_of(value)):
            stored = f"values of {of.numbers} and {of.scales}, for a plain tensor of a floating-point dtype"
            unfit[key] = Mismatch(key, f"a {type(value).__name__} of dtype {value.dtype}", stored)
        else:
            found[key] = value
    return found, unfit


def local_of(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def describe_values(state: dict[str, torch.Tensor]) -> State | None:
    return Describer(loading=True).describe(state) if state else None


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
    return hasattr(value, "__create_chunk_list__") or isinstance(value, ShardedTensor)
