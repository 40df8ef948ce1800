"""Lists the dtypes that headers of safetensors files can name, for readers and writers of tensors."""

from __future__ import annotations

import torch

from ..._engine import _C

#: dtypes that both the format and this torch have, by their names in torch
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _C.safetensors_dtypes() if hasattr(torch, name)
}
MISSING_DTYPES = frozenset(_C.safetensors_dtypes()) - DTYPES.keys()  #: this torch does not have them
STORABLE = frozenset(DTYPES.values())
