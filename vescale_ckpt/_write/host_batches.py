"""Copies to host memory, in batches, the tensors that the engine cannot read directly, and writes them.

One batch is written while the next one is copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .._engine import _C
from .._engine.device_streams import filled_snapshot
from .._engine.dtype_codes import DTYPE_CODES, dtype_code
from .._engine.engine_errors import named_errors
from .._engine.options import batch_bytes, threads_of
from .._engine.overlap import GROUP_TENSORS, overlap
from .._engine.rows import int_table, words
from .._engine.tensor_checks import as_host_tensor, dense
from .._engine.wrapper_tensors import is_wrapper, stored_form
from .._plan.local_plan import LocalPlan
from .._state import objects
from .._state.tensor_table import NOT_READY, ON_HOST
from ..errors import CheckpointError
from .layout import Layout, SaveOptions

_SAMPLED_ELEMENTS = 4  # the most elements of a tensor that are hashed


class Batch(NamedTuple):
    """Rows of a rank's part of the plan that are written together."""

    rows: Sequence[int]
    table: Any  #: an engine table
    tensors: Sequence[torch.Tensor] = ()  #: the tensors of the table, if they were copied to host memory one by one
    snapshot: _C.Snapshot | None = None  #: holds the memory of the table, if they were copied together
    archives: Sequence[bytes] = ()  #: in place of a table: the records of wrapper subclasses


def samples_of(table: Any, devices: Any = b"") -> memoryview:
    """Returns a hash of a few elements for each row of a table of tensors to write or copy, to detect changes that do
    not increment the version counter. The hash of a tensor on a device is 0, because reading it would wait for the
    device. `devices`: as for `new_snapshot`."""
    return memoryview(_C.sample_hashes(table, devices, _SAMPLED_ELEMENTS)).cast("Q")


def write_table(tensors: Sequence[torch.Tensor]) -> array[int]:
    """Returns the engine table of tensors, which must stay alive until they are written."""
    table = int_table()
    for tensor in tensors:
        shape = tensor.shape
        table.extend((DTYPE_CODES[tensor.dtype], tensor.data_ptr(), len(shape), *shape, *tensor.stride()))
    return table


def write_rows(layout: Layout, plan: LocalPlan, rows: Sequence[int]) -> None:
    """Writes `rows` of a rank's part, whose tensors are in host memory or on devices. At most two batches are in
    memory; together they take `VESCALE_CKPT_MEMORY_BYTES`, unless one tensor needs more."""
    write_batches(layout, _batches(layout.options, plan, rows), plan.key)


def write_batches(layout: Layout, batches: Iterator[Batch], key_of: Callable[[int], str]) -> None:
    """Writes one batch while the next one is prepared. `key_of`: returns the key of a row."""

    def write(batch: Batch) -> None:
        rows = batch.rows
        if batch.archives:
            layout.write_records(list(batch.archives), list(map(key_of, rows)), rows, of_tensors=True)
            return
        try:
            layout.write_table(batch.table, lambda number: key_of(rows[number]), rows)
        finally:
            if batch.snapshot is not None:
                batch.snapshot.release()

    for _ in overlap(batches, write):
        pass


def _batches(options: SaveOptions, plan: LocalPlan, rows: Sequence[int]) -> Iterator[Batch]:
    if plan.state.all_ready:
        on_host, on_devices, not_ready = rows, [], []
    else:
        ready = plan.ready_rows()
        on_host = [row for row in rows if ready[row] == ON_HOST]
        on_devices = [row for row in rows if ready[row] > ON_HOST]
        not_ready = [row for row in rows if ready[row] == NOT_READY]
    if on_host:
        yield Batch(on_host, plan.write_table(on_host))
    for some in _bounded(on_devices, plan) if on_devices else ():
        with named_errors(plan.key, options.path):
            snapshot = filled_snapshot(*plan.copy_table(some), threads_of(options.thread_count))
        yield Batch(some, snapshot.table(), snapshot=snapshot)
    yield from converted(plan, not_ready)


def converted(plan: LocalPlan, rows: Sequence[int]) -> Iterator[Batch]:
    """Yields batches of rows with host copies of their tensors (those on other devices, lazy conjugates), or with the
    records of wrapper subclasses."""
    return host_batches(rows, zip(map(plan.key, rows), map(plan.tensor, rows), strict=True))


def _bounded(rows: Sequence[int], plan: LocalPlan) -> Iterator[Sequence[int]]:
    budget, sizes = batch_bytes(), words(plan.body_bytes())
    start, held = 0, 0
    for index, row in enumerate(rows):
        if held and held + sizes[row] > budget:
            yield rows[start:index]
            start, held = index, 0
        held += sizes[row]
    yield rows[start:]


def host_batches(
    rows: Sequence[int], tensors: Iterable[tuple[str, torch.Tensor]], makes_tensors: bool = False
) -> Iterator[Batch]:
    """Groups (key, tensor) pairs, one per row, into batches bounded in tensors and in bytes. Only memory beyond the
    state's own counts: copies from a device, or all tensors if `makes_tensors`. Tensors stay alive until they are
    written; two batches exist at a time."""
    budget, start, held = batch_bytes(), 0, 0
    in_memory: list[torch.Tensor] = []
    archives: list[bytes] = []
    for index, (key, tensor) in enumerate(tensors):
        found, copied = _in_host_memory(key, tensor)
        if archives if isinstance(found, torch.Tensor) else in_memory:
            yield Batch(rows[start:index], write_table(in_memory), in_memory, archives=archives)
            in_memory, archives, start, held = [], [], index, 0
        if isinstance(found, torch.Tensor):
            dtype_code(found.dtype, key)  # raises for dtypes that cannot be stored
            in_memory.append(found)
            held += found.nbytes if copied or makes_tensors else 0
        else:
            archives.append(found)
            held += len(found)
        if held >= budget or index + 1 - start == GROUP_TENSORS:
            yield Batch(rows[start : index + 1], write_table(in_memory), in_memory, archives=archives)
            in_memory, archives, start, held = [], [], index + 1, 0
    if start < len(rows):
        yield Batch(rows[start:], write_table(in_memory), in_memory, archives=archives)


def on_accelerator(plan: LocalPlan, rows: Sequence[int]) -> dict[int, torch.Tensor]:
    """Returns {row: tensor} for rows whose tensors are on an accelerator and need no conversion, so that one snapshot
    can hold them all."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return {}
    found = {}
    for row in rows:
        whole, _ = plan.state.source(plan.item(row))
        if whole.device.type != accelerator.type or is_wrapper(whole):
            continue
        key, tensor = plan.key(row), plan.tensor(row)
        with _named(key):
            plain = dense(tensor)
        if not (plain.is_conj() or plain.is_neg()):
            dtype_code(plain.dtype, key)  # raises for dtypes that cannot be stored
            found[row] = plain
    return found


def _in_host_memory(key: str, tensor: torch.Tensor) -> tuple[torch.Tensor | bytes, bool]:
    """Returns a tensor in host memory, or the record of a wrapper subclass; and whether it is a copy."""
    with _named(key):
        if is_wrapper(tensor):
            return objects.dump(stored_form(tensor), key), True
        return as_host_tensor(tensor)


@contextmanager
def _named(key: str) -> Iterator[None]:
    """A context manager that adds the key to errors of a tensor (it cannot be stored, or cannot be copied)."""
    try:
        yield
    except Exception as error:  # a subclass's code may raise anything
        raise CheckpointError(f"{key}: {error}", key=key) from error
