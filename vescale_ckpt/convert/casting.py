"""Which tensors change their dtype."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

import torch

from ..selection import Selection

DTypes = torch.dtype | str | Mapping[str, torch.dtype | str]

_SHORT = {"bf16": "bfloat16"} | {f"{kind}{bits}": f"float{bits}" for kind in ("fp", "f") for bits in (16, 32, 64)}
_PACKED = getattr(torch, "float4_e2m1fn_x2", None)  # two values in a byte: torch converts none of them


def casting(dtype: DTypes | None) -> Callable[[str, torch.dtype], torch.dtype]:
    """From a name and a stored dtype to the one to write.

    Floating-point tensors become floating-point tensors of another dtype; all others stay as they are, unless a mapping
    gives their very name. Of a mapping's patterns (those of `keys`) the first that fits counts.

    Raises ValueError for what is no dtype, and TypeError for tensors that torch cannot convert.
    """
    if dtype is None:
        return lambda name, stored: stored
    if not isinstance(dtype, Mapping):
        wanted = dtype_named(dtype)
        if not wanted.is_floating_point:
            raise ValueError(f"dtype={wanted}: for all tensors only a floating-point dtype is wanted")
        if wanted == _PACKED:
            raise TypeError(f"dtype={wanted}: torch has no conversion to it")
        return lambda name, stored: wanted if stored.is_floating_point and stored != _PACKED else stored
    rules = [(pattern, Selection(pattern), dtype_named(value)) for pattern, value in dtype.items()]

    def of(name: str, stored: torch.dtype) -> torch.dtype:
        for pattern, selection, wanted in rules:
            if name in selection:
                if name != pattern and not (stored.is_floating_point and wanted.is_floating_point):
                    return stored
                if wanted != stored and not _converts(stored, wanted):
                    raise TypeError(f"{name}: torch has no conversion from {stored} to {wanted}")
                return wanted
        return stored

    return of


def _converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=wanted, device="cpu").copy_(torch.zeros((), dtype=stored, device="cpu"))
    except (RuntimeError, TypeError):
        return False
    return True


def dtype_named(dtype: torch.dtype | str) -> torch.dtype:
    """`torch.bfloat16`, "bfloat16", "torch.bfloat16" or "bf16". Raises ValueError for anything else."""
    if not isinstance(dtype, str):
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype={dtype!r}: a dtype of torch, or its name, is wanted")
        return dtype
    name = dtype.removeprefix("torch.")
    found = getattr(torch, _SHORT.get(name.lower(), name), None)
    if not isinstance(found, torch.dtype):
        names = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
        alike = difflib.get_close_matches(name.lower(), names)
        raise ValueError(
            f"dtype={dtype!r}: torch has no such dtype" + (f"; it has {', '.join(alike)}" if alike else "")
        )
    return found
