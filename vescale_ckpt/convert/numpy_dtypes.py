"""numpy's dtypes and torch's, and how files say which one of torch is meant where numpy has none.

Tensors of such dtypes (bfloat16, float8, ...) are stored as unsigned integers of the same size. A text beside them, in
an archive or a folder, maps their names to torch's names of their dtypes: `{"model.norm": "bfloat16"}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError, CorruptCheckpointError

DTYPES_NAME = "torch_dtypes.json"

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def numpy_dtype(dtype: torch.dtype, name: str) -> tuple[np.dtype[Any], bool]:
    """The dtype to store one of torch's as, and whether that is the same. Raises `CheckpointError` where there is
    none."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype, True
    except (TypeError, RuntimeError):
        pass
    if dtype.itemsize not in _UNSIGNED:
        raise CheckpointError(f"{name}: numpy has no place for {dtype}", key=name)
    return np.dtype(_UNSIGNED[dtype.itemsize]), False


def torch_dtype(dtype: np.dtype[Any], name: str, dtypes: Mapping[str, str]) -> torch.dtype:
    """The dtype of torch that an array holds. Raises `CheckpointError` for arrays that no tensor can be."""
    said = dtypes.get(name)
    if said is not None:
        found = getattr(torch, said, None)
        stored = _UNSIGNED.get(dtype.itemsize)
        if not isinstance(found, torch.dtype) or found.itemsize != dtype.itemsize or stored is None or dtype != stored:
            raise CheckpointError(f"{name}: its dtype should be {said}, which {dtype} cannot be", key=name)
        return found
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):  # text, objects, records, another order of bytes
        raise CheckpointError(f"{name}: torch has no tensors of numpy's {dtype}", key=name) from None


def dump_dtypes(dtypes: Mapping[str, torch.dtype]) -> bytes:
    names = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
    return (json.dumps(names, indent=1, ensure_ascii=False) + "\n").encode()


def load_dtypes(data: bytes, path: str) -> dict[str, str]:
    try:
        dtypes = json.loads(data)
    except ValueError:
        dtypes = None
    if not isinstance(dtypes, dict) or not all(isinstance(value, str) for value in dtypes.values()):
        raise CorruptCheckpointError(f"{path} does not name dtypes", key=None, file=path)
    return dtypes
