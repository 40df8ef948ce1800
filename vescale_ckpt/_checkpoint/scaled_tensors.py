"""Finds tensors whose stored numbers are not their values, for casts: scales in other tensors belong to them."""

from __future__ import annotations

from collections.abc import Container

import torch

from ..errors import CheckpointError

# Names of the tensors with scales, behind that of the weight: DeepSeek and transformers; compressed-tensors, modelopt
# and llm-compressor; bitsandbytes.
_OF_WEIGHT = ("_scale_inv", "_scale", "_scales", "_scale_2", ".SCB", ".absmax")
_BLOCKS, _SCALES = "_blocks", "_scales"  # GPT-OSS


def scales_of(key: str, dtype: torch.dtype, present: Container[str]) -> str | None:
    """Returns the key of the scales of a stored tensor; None if it has none. Numbers of more than a byte have none."""
    if dtype.itemsize > 1 or dtype in (torch.bool, torch.float8_e8m0fnu):
        return None
    names = [key + suffix for suffix in _OF_WEIGHT]
    if key.endswith(_BLOCKS):
        names.append(key.removesuffix(_BLOCKS) + _SCALES)
    if (stem := key.removesuffix("weight")) != key:
        names += [stem + "SCB", stem + "scale"]
    return next((name for name in names if name in present), None)


def check_cast(key: str, stored: torch.dtype, wanted: torch.dtype, present: Container[str]) -> None:
    """Raises `CheckpointError` if a cast of a stored tensor would leave out its scales."""
    if stored != wanted and (scales := scales_of(key, stored, present)) is not None:
        raise CheckpointError(
            f"{key}: it is quantised, stored as {stored} with the scales {scales}. A conversion to {wanted} would "
            f"leave them out and give wrong values. Load it as {stored}, together with {scales}",
            key=key,
        )
