"""Defines the dtypes and the special texts in headers of safetensors files, for readers and writers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ..._engine import _C

# torch's HuggingFaceStorageWriter writes this text: `{name: {SHARDING_OFFSETS: [...]}}` as JSON. It gives the offset of
# each tensor in the file that is a chunk of a larger tensor.
SHARDING_INFO = "DCP_SHARDING_INFO"
SHARDING_OFFSETS = "saved_offsets"

# This package writes this text: `{other name: name of the tensor}` as JSON, for shared (tied) weights. In a file with
# this text, no other text names shared weights. In a file without it, every text whose value is a tensor's name is such
# a pair: the library's save_model writes them so, and old versions of this package did.
TIED_NAMES = "vescale_ckpt.tied"

OUR_TEXTS = frozenset({_C.SAFETENSORS_CHECKSUMS, TIED_NAMES})  #: keys of texts that this package writes


def checked_metadata(metadata: object) -> list[tuple[str, str]]:
    """A user's metadata as texts of a header. Raises TypeError, UnicodeEncodeError."""
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata: expected a dict of texts, got {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata: expected texts, got {key!r}: {value!r}")
        key.encode()
        value.encode()
    return [(key, value) for key, value in metadata.items() if key not in OUR_TEXTS]  # they come from another file


def with_ties(texts: Sequence[tuple[str, str]], ties: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the texts of a header with the names of shared weights. This text is added even if there are none: then
    no other text counts as such a name."""
    return [*texts, (TIED_NAMES, json.dumps(ties))]
