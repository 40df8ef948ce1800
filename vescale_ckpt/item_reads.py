"""Reads that a planner of DCP's kind has planned, in the packed form in which ranks tell each other what they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from . import engine
from .describe import Describer
from .load_planner import LoadPlanner as OurLoadPlanner
from .overrides import is_method_of
from .read_plan import PackedReads

_KEEPS = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")


@dataclass(frozen=True)
class ItemPlan:
    """Stands where `_C.LoadPlan` does for what was planned on an index."""

    reads: bytes
    objects: bytes
    files: list[str]


@dataclass(slots=True)
class Record:
    """Where a tensor's chunk or an object is stored, and as what."""

    key: str
    file: int  #: index into the load's paths
    offset: int
    length: int
    crc: int  #: CRC-32 of the tensor's bytes or of the whole object, -1 if metadata has none
    dtype: torch.dtype = torch.uint8
    sizes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """A tensor to fill, and the record that it is filled from."""

    item: ReadItem
    tensor: torch.Tensor
    record: Record


def resolves_views(planner: LoadPlanner) -> bool:
    """Whether what it resolves are views of its state, there from the beginning of a load to its end and filled when
    they are filled: other planners hand out memory piece by piece, and want it committed."""
    return isinstance(planner, DefaultLoadPlanner) and all(
        is_method_of(planner, name, DefaultLoadPlanner, OurLoadPlanner) for name in _KEEPS
    )


def item_reads(
    planner: LoadPlanner, placed: Sequence[PlacedItem], objects: Sequence[Record], files: list[str]
) -> PackedReads | None:
    """What fills the tensors, each an item with its own number, and of objects by theirs. None if a tensor cannot be
    said so."""
    description, _ = Describer().describe({str(number): entry.tensor for number, entry in enumerate(placed)})
    if description.other or len(description.names) != len(placed):
        return None
    table = engine.int_table()
    for number, entry in enumerate(placed):
        of = entry.record
        code, ndim = engine.dtype_code(of.dtype, of.key), len(of.sizes)
        table.extend((number, of.file, of.offset, of.length, of.crc, code, ndim, *of.sizes))
        table.extend((*entry.item.storage_offsets, *entry.item.lengths, *[0] * ndim))
    object_table = engine.int_table()
    for number, of in enumerate(objects):
        object_table.extend((number, of.file, of.offset, of.length, of.crc))
    described = replace(description, names=[entry.record.key for entry in placed])
    return PackedReads(planner, described, ItemPlan(table.tobytes(), object_table.tobytes(), files))
