"""Says what headers of safetensors files can hold beside places: dtypes, and texts with a meaning of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from .._engine import _C

# What torch's HuggingFaceStorageWriter has among the texts of a header: `{name: {SHARDING_OFFSETS: [...]}}` as JSON, of
# each tensor in the file that is a box of a larger one, where it begins.
SHARDING_INFO = "DCP_SHARDING_INFO"
SHARDING_OFFSETS = "saved_offsets"

# What ours have among the texts of a header: `{other name: name of the tensor}` as JSON, of tensors that were tied.
# Where it is, nothing else in the texts stands for a tensor; else any text does whose value is a tensor's name, as the
# library's save_model writes it, and exports of ours before they had this.
TIED_NAMES = "vescale_ckpt.tied"

#: by their names in torch, those that the format has and this torch, too
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _C.safetensors_dtypes() if hasattr(torch, name)
}
STORABLE = frozenset(DTYPES.values())
OUR_TEXTS = frozenset({_C.SAFETENSORS_CHECKSUMS, TIED_NAMES})  #: keys among the texts of a header that no user wrote


def checked_metadata(metadata: object) -> list[tuple[str, str]]:
    """As a header keeps it. Raises TypeError, UnicodeEncodeError."""
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata is a dict of texts, not {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata {key!r}: {value!r}: both must be text")
        key.encode()
        value.encode()
    return [(key, value) for key, value in metadata.items() if key not in OUR_TEXTS]  # of another file


def with_ties(texts: Sequence[tuple[str, str]], ties: Mapping[str, str]) -> list[tuple[str, str]]:
    """The texts of a header, and which names stand for other names' tensors: told always, so that no other text can."""
    return [*texts, (TIED_NAMES, json.dumps(ties))]
