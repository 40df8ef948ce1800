"""Defines the dtypes and the texts with a meaning of their own in headers of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from ..._engine import _C

# A text by torch's HuggingFaceStorageWriter: `{name: {SHARDING_OFFSETS: [...]}}` as JSON, the offset of each tensor in
# the file that is a box of a larger tensor.
SHARDING_INFO = "DCP_SHARDING_INFO"
SHARDING_OFFSETS = "saved_offsets"

# A text by this package: `{other name: name of the tensor}` as JSON, of tensors that were tied. In a file with it no
# other text names a tie. In a file without it every text is a tie whose value is a tensor's name: the library's
# save_model writes ties so, and this package did before.
TIED_NAMES = "vescale_ckpt.tied"

#: dtypes that both the format and this torch have, by their names in torch
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _C.safetensors_dtypes() if hasattr(torch, name)
}
MISSING_DTYPES = frozenset(_C.safetensors_dtypes()) - DTYPES.keys()  #: those that this torch does not have
STORABLE = frozenset(DTYPES.values())
OUR_TEXTS = frozenset({_C.SAFETENSORS_CHECKSUMS, TIED_NAMES})  #: keys of texts that this package writes


def checked_metadata(metadata: object) -> list[tuple[str, str]]:
    """A user's metadata as texts of a header. Raises TypeError, UnicodeEncodeError."""
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata is a dict of texts, not {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata {key!r}: {value!r}: both must be text")
        key.encode()
        value.encode()
    return [(key, value) for key, value in metadata.items() if key not in OUR_TEXTS]  # those are of another file


def with_ties(texts: Sequence[tuple[str, str]], ties: Mapping[str, str]) -> list[tuple[str, str]]:
    """The texts of a header, with the tied names. They are written even if there are none: then no other text is a
    tie."""
    return [*texts, (TIED_NAMES, json.dumps(ties))]
