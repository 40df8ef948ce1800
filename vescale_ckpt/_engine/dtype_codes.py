"""Gives torch's dtypes the codes of the engine's tables, for modules that read or make them."""

from __future__ import annotations

import torch

from ..errors import CheckpointError
from . import _C

#: The code of each dtype in the tables, for every dtype that torch.save can store
DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, (name, _, _) in enumerate(_C.dtypes()) if hasattr(torch, name)
}

CODE_DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in DTYPE_CODES.items()}

#: dtypes that both safetensors files and torch have, by their names in torch
SAFETENSORS_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _C.safetensors_dtypes()}


def dtype_code(dtype: torch.dtype, key: str) -> int:
    """Raises `CheckpointError` with the key for a dtype that torch itself has no way to store."""
    try:
        return DTYPE_CODES[dtype]
    except KeyError:
        raise CheckpointError(
            f"{key} has dtype {dtype}, which torch.save cannot store either: save it as a view of uint8",
            key=key,
            dtype=str(dtype),
        ) from None
