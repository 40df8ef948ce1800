"""A checkpoint as one process sees it: every tensor whole, every object as it was, under flat keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader


def load_whole(path: Path, reader: StorageReader, planner: LoadPlanner) -> dict[str, Any]:
    """Everything in the directory, read by `reader` into fresh CPU tensors.

    What there is to read is taken from the metadata by PyTorch's own reader, whoever reads the data.
    """
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state: dict[str, Any] = dict.fromkeys(entries)
    for key, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            # Ones, not empty memory: what a reader leaves out shows up as a difference.
            state[key] = torch.ones(entry.size, dtype=entry.properties.dtype)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


def raw_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as uint8, so that equality is of bits (of NaNs and signed zeros too)."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def first_difference(left: dict[str, Any], right: dict[str, Any]) -> str | None:
    """Where two states differ, or None where every key, shape, dtype, bit and object is the same."""
    if left.keys() != right.keys():
        return f"keys {sorted(left.keys() ^ right.keys())[:5]} are in one state only"
    for key, one in left.items():
        other = right[key]
        if isinstance(one, Tensor) != isinstance(other, Tensor):
            return f"{key}: {type(one).__name__} and {type(other).__name__}"
        if not isinstance(one, Tensor):
            if one != other:
                return f"{key}: {one!r} and {other!r}"
        elif one.shape != other.shape or one.dtype != other.dtype:
            return f"{key}: {one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
        elif not torch.equal(raw_bytes(one), raw_bytes(other)):
            return f"{key}: the bits differ"
    return None
