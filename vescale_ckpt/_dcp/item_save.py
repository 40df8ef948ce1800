"""Writes DCP's items, as any planner resolves them, into the files of a layout."""

from __future__ import annotations

import io
from array import array
from collections.abc import Sequence
from functools import partial

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from .._observe.timeline import phase
from .._state.watch import watch_values
from .._write.host_batches import host_batches, write_batches
from .._write.layout import Layout
from .._write.rank_save import RankSave
from ..errors import CheckpointError
from ..reports import SaveStats
from .overrides import is_method_of
from .save_planner import SavePlanner as OurSavePlanner


def save_items(layout: Layout, items: Sequence[WriteItem], planner: SavePlanner) -> tuple[list[WriteItem], SaveStats]:
    """Writes a rank's items. Returns them in the order of their rows. The planner's state must not change meanwhile."""
    save, single_file, makes_tensors = RankSave(layout), layout.options.single_file, _makes_tensors(planner)
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    others = [item for item in items if item.type == WriteItemType.BYTE_IO]
    written = tensors + others
    if single_file:
        parts = [(range(len(tensors)), range(len(tensors), len(written)))] if written else []
    else:
        rows = [range(row, row + 1) for row in range(len(written))]
        parts = [(row, row[1:]) for row in rows[: len(tensors)]] + [(row[1:], row) for row in rows[len(tensors) :]]

    def key_of(row: int) -> str:
        return written[row].index.fqn

    with save.writing(), phase("write"):
        state = getattr(planner, "state_dict", None)
        watch = watch_values(state.items() if isinstance(state, dict) else ())
        for number, (of_tensors, of_objects) in enumerate(parts):
            some = [written[row] for row in of_tensors]
            layout.open(body_bytes(some), None if single_file else number)
            write_batches(
                layout, host_batches(of_tensors, map(partial(_resolved, planner), some), makes_tensors), key_of
            )
            if of_objects:
                contents = [_content(written[row], planner.resolve_data(written[row])) for row in of_objects]
                layout.write_records(contents, list(map(key_of, of_objects)), of_objects, of_tensors=False)
        watch.check_unchanged()
        return written, save.finish(len(tensors), len(others))


def _makes_tensors(planner: SavePlanner) -> bool:
    """Whether the planner's `resolve_data` may return tensors that are not the state's own."""
    return not isinstance(planner, DefaultSavePlanner) or not all(
        is_method_of(planner, name, DefaultSavePlanner, OurSavePlanner)
        for name in ("resolve_data", "lookup_object", "transform_object")
    )


def body_bytes(items: Sequence[WriteItem]) -> array[int]:
    """Returns the bytes of each tensor. Raises `CheckpointError` for an item without tensor data."""
    sizes = array("q")
    for item in items:
        data = item.tensor_data
        if data is None:
            raise CheckpointError(f"{item.index.fqn}: its write item has no tensor data", key=item.index.fqn)
        sizes.append(data.chunk.sizes.numel() * data.properties.dtype.itemsize)
    return sizes


def _resolved(planner: SavePlanner, item: WriteItem) -> tuple[str, torch.Tensor]:
    """An item's key, and what the planner resolves it to, if that can be the item."""
    key, tensor = item.index.fqn, planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{key}: the planner resolved a tensor to {type(tensor).__name__}", key=key)
    wanted = item.tensor_data.chunk.sizes if item.tensor_data is not None else None
    if wanted and 0 in wanted and 0 in tensor.shape:
        return key, tensor.new_empty(wanted)  # FSDP2 may hold (0, 0) for (2, 0)
    if tensor.shape != wanted:
        raise CheckpointError(
            f"{key}: the planner resolved a chunk of shape {tuple(wanted or ())} to {tuple(tensor.shape)}", key=key
        )
    return key, tensor


def _content(item: WriteItem, resolved: object) -> bytes:
    if not isinstance(resolved, io.BytesIO):
        raise CheckpointError(
            f"{item.index.fqn}: the planner resolved an object to {type(resolved).__name__}, not BytesIO"
        )
    return resolved.getvalue()
