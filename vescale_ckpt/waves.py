"""Writing what the engine cannot use where it is: copied to host memory a wave at a time, one written while the next is
copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner

from . import _C, engine, settings
from .data_file import DataFile, groups, write_table
from .errors import CheckpointError
from .overlap import overlap
from .rows import NO_LIMIT, words
from .save_plan import PackedItems
from .tensors import NOT_READY, ON_HOST


@dataclass
class _Wave:
    rows: Sequence[int]
    table: Any
    memory: _C.Snapshot | list[torch.Tensor] | None  #: what the table points into, unless it is the state's own


def new_snapshot(table: Any, devices: Any, budget: int, threads: int) -> _C.Snapshot:
    """A snapshot, yet to be filled, of rows of which `devices` says where they are; empty if all in host memory.

    Its copies come behind what the current streams of the devices have queued when they start.
    """
    numbers = sorted({device for device in memoryview(devices).cast("B").cast("q") if device >= 0})
    producers = [(number, int(torch.cuda.current_stream(number).cuda_stream)) for number in numbers]
    return _C.Snapshot(table, budget, threads, devices, producers)


def write_rows(
    file: DataFile, items: PackedItems, planner: SavePlanner, rows: Sequence[int], threads: int
) -> Iterator[tuple[Sequence[int], list[int]]]:
    """Writes those rows of a part, wherever they are. Yields some of them at a time, and for each offset, length and
    CRC-32. Two waves are in memory at most, which share `VESCALE_CKPT_ARENA_BYTES` unless one tensor needs more."""

    def write(wave: _Wave) -> list[int]:
        try:
            return file.write_table(wave.table, lambda row: items.key(wave.rows[row]), wave.rows)
        finally:
            if isinstance(wave.memory, _C.Snapshot):
                wave.memory.release()

    for wave, placed in overlap(_waves(file, items, planner, rows, threads), write):
        yield wave.rows, placed


def _waves(
    file: DataFile, items: PackedItems, planner: SavePlanner, rows: Sequence[int], threads: int
) -> Iterator[_Wave]:
    if items.description.all_ready:
        on_host, on_devices, not_ready = rows, [], []
    else:
        ready = items.ready_rows()
        on_host = [row for row in rows if ready[row] == ON_HOST]
        on_devices = [row for row in rows if ready[row] > ON_HOST]
        not_ready = [row for row in rows if ready[row] == NOT_READY]
    if on_host:
        yield _Wave(on_host, items.write_table(on_host), None)
    for some in _bounded(on_devices, items) if on_devices else ():
        with engine.named_errors(items.key, file.path):
            snapshot = new_snapshot(*items.copy_table(some), NO_LIMIT, threads)
            if snapshot.first:
                raise CheckpointError(f"the system has no memory to copy {snapshot.bytes:,} bytes from a device to")
            snapshot.copy()
        yield _Wave(some, snapshot.table(), snapshot)
    yield from (_Wave(some, write_table(tensors), tensors) for some, tensors in converted(items, planner, not_ready))


def converted(
    items: PackedItems, planner: SavePlanner, rows: Sequence[int]
) -> Iterator[tuple[Sequence[int], list[torch.Tensor]]]:
    """Some rows at a time, and copies of them that the engine can use: of other devices, of lazy conjugates."""
    start = 0
    for group in groups([items[row] for row in rows], planner):
        yield rows[start : start + len(group.items)], group.tensors
        start += len(group.items)


def _bounded(rows: Sequence[int], items: PackedItems) -> Iterator[Sequence[int]]:
    budget, sizes = settings.number("arena_bytes") // 2, words(items.body_bytes())
    start, held = 0, 0
    for number, row in enumerate(rows):
        if held and held + sizes[row] > budget:
            yield rows[start:number]
            start, held = number, 0
        held += sizes[row]
    yield rows[start:]
