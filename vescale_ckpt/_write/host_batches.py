"""Copies tensors that the engine cannot read directly to host memory in batches, for a rank that writes them.

One batch is written while the next one is copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItem

from .._engine import _C
from .._engine.device_streams import filled_snapshot
from .._engine.dtype_codes import DTYPE_CODES, dtype_code
from .._engine.engine_errors import named_errors
from .._engine.options import batch_bytes, threads_of
from .._engine.overlap import GROUP_TENSORS, overlap
from .._engine.rows import PLAN_ROW, int_table, words
from .._engine.tensor_checks import as_host_tensor, dense
from .._engine.wrapper_tensors import is_wrapper, stored_form
from .._plan.save_plan import PackedItems
from .._state import objects
from .._state.tensor_table import NOT_READY, ON_HOST
from ..errors import CheckpointError
from .layout import Layout, SaveOptions

_SAMPLED_ELEMENTS = 4  # most elements of a tensor that are hashed


class _Batch(NamedTuple):
    """Rows of a rank's part that are written together."""

    rows: Sequence[int]
    table: Any
    memory: _C.Snapshot | list[torch.Tensor] | None  #: holds the memory of the table; None if it is the state's own
    archives: Sequence[bytes] = ()  #: in place of a table: the records of wrapper subclasses


class ItemBatch(NamedTuple):
    """DCP's items that are written together: their tensors in host memory, or the records of wrapper subclasses."""

    items: list[WriteItem]
    tensors: list[torch.Tensor]
    archives: list[bytes]


def samples_of(table: Any, devices: Any = b"") -> memoryview:
    """A hash for each row of a table of tensors to write or to copy, which differs if some of its elements do: finds
    changes that raise no version counter. `devices`: as for `new_snapshot`. 0 for tensors on a device: to read them
    would wait for it."""
    return memoryview(_C.sample_hashes(table, devices, _SAMPLED_ELEMENTS)).cast("Q")


def write_table(tensors: Sequence[torch.Tensor]) -> array[int]:
    """The engine's table of tensors, which must live until they are written."""
    table = int_table()
    for tensor in tensors:
        shape = tensor.shape
        table.extend((DTYPE_CODES[tensor.dtype], tensor.data_ptr(), len(shape), *shape, *tensor.stride()))
    return table


def write_rows(layout: Layout, items: PackedItems, rows: Sequence[int]) -> None:
    """Writes `rows` of a rank's part, in host memory or on devices. At most two batches are in memory. They share
    `VESCALE_CKPT_MEMORY_BYTES` unless one tensor needs more."""

    def write(batch: _Batch) -> None:
        if batch.archives:
            layout.write_records(list(batch.archives), list(map(items.key, batch.rows)), batch.rows, of_tensors=True)
            return
        try:
            layout.write_table(batch.table, lambda row: items.key(batch.rows[row]), batch.rows)
        finally:
            if isinstance(batch.memory, _C.Snapshot):
                batch.memory.release()

    for _ in overlap(_batches(layout.options, items, rows), write):
        pass


def _batches(options: SaveOptions, items: PackedItems, rows: Sequence[int]) -> Iterator[_Batch]:
    if items.description.all_ready:
        on_host, on_devices, not_ready = rows, [], []
    else:
        ready = items.ready_rows()
        on_host = [row for row in rows if ready[row] == ON_HOST]
        on_devices = [row for row in rows if ready[row] > ON_HOST]
        not_ready = [row for row in rows if ready[row] == NOT_READY]
    if on_host:
        yield _Batch(on_host, items.write_table(on_host), None)
    for some in _bounded(on_devices, items) if on_devices else ():
        with named_errors(items.key, options.path):
            snapshot = filled_snapshot(*items.copy_table(some), threads_of(options.thread_count))
        yield _Batch(some, snapshot.table(), snapshot)
    for some, batch in converted(items, not_ready):
        yield _Batch(some, write_table(batch.tensors), batch.tensors, batch.archives)


def converted(items: PackedItems, rows: Sequence[int]) -> Iterator[tuple[Sequence[int], ItemBatch]]:
    """Yields some rows at a time, with host copies of their tensors (those on other devices, lazy conjugates), or with
    the records of wrapper subclasses."""
    start = 0
    for batch in item_batches([items[row] for row in rows], lambda item: items.resolve(item.index)):
        yield rows[start : start + len(batch.items)], batch
        start += len(batch.items)


def _bounded(rows: Sequence[int], items: PackedItems) -> Iterator[Sequence[int]]:
    budget, sizes = batch_bytes(), words(items.body_bytes())
    start, held = 0, 0
    for index, row in enumerate(rows):
        if held and held + sizes[row] > budget:
            yield rows[start:index]
            start, held = index, 0
        held += sizes[row]
    yield rows[start:]


def item_batches(
    items: Sequence[WriteItem], resolve: Callable[[WriteItem], object], makes_tensors: bool = False
) -> Iterator[ItemBatch]:
    """Cuts a rank's tensors into batches, bounded in number and in bytes. Only tensors outside the state's own memory
    count as bytes: copies from a device, and tensors that a planner makes (`makes_tensors`). They live until they are
    written, two batches at a time."""
    budget = batch_bytes()
    batch, held = ItemBatch([], [], []), 0
    for item in items:
        found, copied = _in_host_memory(item, _checked(item, resolve(item)))
        if batch.archives if isinstance(found, torch.Tensor) else batch.tensors:
            yield batch
            batch, held = ItemBatch([], [], []), 0
        batch.items.append(item)
        if isinstance(found, torch.Tensor):
            dtype_code(found.dtype, item.index.fqn)  # raises for those that cannot be stored
            batch.tensors.append(found)
            held += found.nbytes if copied or makes_tensors else 0
        else:
            batch.archives.append(found)
            held += len(found)
        if held >= budget or len(batch.items) == GROUP_TENSORS:
            yield batch
            batch, held = ItemBatch([], [], []), 0
    if batch.items:
        yield batch


def on_accelerator(items: PackedItems, rows: Sequence[int]) -> dict[int, torch.Tensor]:
    """{row: its tensor} of those of `rows` that lie on an accelerator as they are, so that one copy each is a
    snapshot."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return {}
    found, description, local_plan = {}, items.description, words(items.local_plan)
    for row in rows:
        whole, _ = description.source(local_plan[row * PLAN_ROW])
        if whole.device.type != accelerator.type or is_wrapper(whole):
            continue
        item = items[row]
        tensor = _checked(item, items.resolve(item.index))
        with _of_item(item):
            plain = dense(tensor)
        if not (plain.is_conj() or plain.is_neg()):
            dtype_code(plain.dtype, item.index.fqn)  # raises for those that cannot be stored
            found[row] = plain
    return found


def _checked(item: WriteItem, tensor: object) -> torch.Tensor:
    """What a planner resolved an item to, if it can be that item."""
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(
            f"{item.index.fqn}: the planner resolved a tensor to {type(tensor).__name__}", key=item.index.fqn
        )
    wanted = item.tensor_data.chunk.sizes if item.tensor_data is not None else None
    if wanted and 0 in wanted and 0 in tensor.shape:
        return tensor.new_empty(wanted)  # FSDP2 may hold (0, 0) for (2, 0)
    if tensor.shape != wanted:
        raise CheckpointError(
            f"{item.index.fqn}: the planner resolved a chunk of shape {tuple(wanted or ())} to {tuple(tensor.shape)}",
            key=item.index.fqn,
        )
    return tensor


def _in_host_memory(item: WriteItem, tensor: torch.Tensor) -> tuple[torch.Tensor | bytes, bool]:
    """An item's tensor in host memory, or the record of a wrapper subclass; and whether it is a copy."""
    with _of_item(item):
        if is_wrapper(tensor):
            return objects.dump(stored_form(tensor), item.index.fqn), True
        return as_host_tensor(tensor)


@contextmanager
def _of_item(item: WriteItem) -> Iterator[None]:
    """A context in which an error of a tensor (it cannot be stored, or not be copied from its device) gets the key."""
    try:
        yield
    except Exception as error:  # code of a subclass may raise anything
        raise CheckpointError(f"{item.index.fqn}: {error}", key=item.index.fqn) from error
