"""Plans a save for simulated ranks and measures it: bytes written by each rank, time and memory of planning."""

from __future__ import annotations

import math
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

from .._engine import _C
from .._engine.rows import LOCATION_ROW, PLAN_ROW, Inventory, InventoryParts, words
from .._ranks.exchange import DIGEST_BYTES
from ..settings import Placement
from .models import Entry
from .parallelism import Boxes, Parallelism, SimulatedState

_Result = TypeVar("_Result")
_Columns = tuple["array[int]", "array[int]"]

_BLOCK, _LARGE_BODY, _SLOT = 4096, 2 << 20, (8 << 20) - (16 << 10)  # docs/format.md, "Where records lie"
_PROLOGUE, _EPILOGUE = 704, 832  # of the archive around a tensor of two dimensions


@dataclass(frozen=True)
class Simulation:
    """The figures of a simulated save. Sizes are in bytes."""

    ranks: int
    items: float  #: items that a rank describes, on average
    pieces: float  #: pieces that a rank writes, on average
    bytes_least: int  #: fewest bytes that a rank writes
    bytes_mean: float
    bytes_most: int
    inventory_bytes: int  #: what all ranks send to the coordinator
    local_plan_bytes: int  #: local plans that it sends back
    planning_seconds: float  #: on the coordinator, from all inventories to all local plans
    planning_memory: int | None  #: peak, with the inventories. None if the kernel does not report it
    metadata_seconds: float  #: to build `.metadata` and its index
    metadata_bytes: int
    index_bytes: int

    @property
    def imbalance(self) -> float:
        """Bytes of the busiest rank over their mean; 1 is perfect."""
        return self.bytes_most / self.bytes_mean if self.bytes_mean else 1.0


def simulate(
    entries: Sequence[Entry], parallelism: Parallelism, placement: Placement = "balanced", node_size: int = 8
) -> Simulation:
    """Plans a save of `entries` by ranks of which `node_size` share a node."""
    state = SimulatedState(entries, parallelism)
    inventories, inventory_bytes = gather(state, node_size)
    start = time.perf_counter()
    (plan, parts), peak = with_peak_memory(lambda: planned(inventories, placement))
    planning_seconds = time.perf_counter() - start
    item_count = sum(map(_item_count, inventories))
    by_rank = plan.bytes_by_rank()
    results = written(state, parts)
    start = time.perf_counter()
    metadata, index = metadata_files(plan, results)
    metadata_seconds = time.perf_counter() - start
    return Simulation(
        ranks=parallelism.ranks,
        items=item_count / parallelism.ranks,
        pieces=sum(map(len, parts)) / 8 / PLAN_ROW / parallelism.ranks,
        bytes_least=min(by_rank),
        bytes_mean=sum(by_rank) / parallelism.ranks,
        bytes_most=max(by_rank),
        inventory_bytes=inventory_bytes,
        local_plan_bytes=sum(map(len, parts)),
        planning_seconds=planning_seconds,
        planning_memory=None if peak is None else inventory_bytes + peak,
        metadata_seconds=metadata_seconds,
        metadata_bytes=len(metadata),
        index_bytes=len(index),
    )


class Gathered(NamedTuple):
    """What the coordinator has of all ranks. Equal parts of inventories are one object."""

    inventories: list[InventoryParts]
    sent_bytes: int  #: sum over all ranks: each distinct part once, and a digest of each part of each rank


def gather(state: SimulatedState, node_size: int = 8) -> Gathered:
    """Gathers as `Exchange.gather_distinct` does."""
    distinct: dict[bytes, bytes] = {}
    inventories: list[InventoryParts] = []
    for rank in range(state.parallelism.ranks):
        header, rows, numbers, names = _C.inventory_parts(state.inventory(rank, rank // node_size))
        once = distinct.setdefault
        inventories.append((once(header, header), once(rows, rows), once(numbers, numbers), once(names, names)))
    parts = sum(map(len, inventories))
    return Gathered(inventories, sum(map(len, distinct)) + parts * DIGEST_BYTES)


def planned(inventories: Sequence[Inventory], placement: Placement) -> tuple[_C.GlobalPlan, list[bytes]]:
    """What the coordinator computes between gathering inventories and scattering local plans."""
    plan = _C.GlobalPlan(inventories, placement)
    return plan, [plan.local_plan(rank) for rank in range(len(inventories))]


class Written(NamedTuple):
    """Made-up reports of ranks that have written their local plans: one file for each rank, of realistic length."""

    record_locations: list[bytes]
    files: list[list[str]]
    paths: list[bytes]


def written(state: SimulatedState, parts: Sequence[bytes]) -> Written:
    layouts: dict[object, _Columns] = {}  # ranks whose records have equal sizes write equal files
    random = Random(0)
    return Written(
        [_record_locations(part, state.boxes(rank), layouts, random) for rank, part in enumerate(parts)],
        [[f"__{rank}_00000000.distcp"] for rank in range(len(parts))],
        [_C.pack_paths(state.names, [(name,) for name in state.names])] * len(parts),
    )


def metadata_files(plan: _C.GlobalPlan, results: Written) -> tuple[bytes, bytes]:
    """`.metadata` and its index."""
    return _C.checkpoint_files(plan.catalog(), *results, "checkpoint", "0" * 32)


def _item_count(inventory: InventoryParts) -> int:
    return int.from_bytes(inventory[0][8:16], sys.byteorder)


def _record_locations(part: bytes, boxes: Boxes, layouts: dict[object, _Columns], random: Random) -> bytes:
    """Made-up record locations, laid out as in a file (docs/format.md), with random checksums."""
    known = part, boxes.distinct
    if known not in layouts:
        layouts[known] = _lay_out(part, boxes)
    offsets, lengths = layouts[known]
    count = len(offsets)
    locations = array("q", bytes(8 * LOCATION_ROW * count))
    locations[1::LOCATION_ROW] = offsets
    locations[2::LOCATION_ROW] = lengths
    locations[3::LOCATION_ROW] = array("q", array("I", random.randbytes(4 * count)))
    return locations.tobytes()


def _lay_out(part: bytes, boxes: Boxes) -> _Columns:
    """The offsets and lengths of the records of one rank."""
    offsets, lengths = array("q"), array("q")
    cursor, group, after_large = 0, 0, False
    plan = words(part)
    for row in range(0, len(plan), PLAN_ROW):
        item, dim, _, length = plan[row : row + PLAN_ROW]
        itemsize, sizes = boxes.of_item(item)
        body = itemsize * math.prod(sizes)
        if dim >= 0:
            body = body // sizes[dim] * length
        large = body >= _LARGE_BODY
        begin = _aligned(cursor, 64)
        if large:
            begin = _aligned(cursor + _PROLOGUE - 64, _BLOCK) + 64 - _PROLOGUE
        elif after_large or begin + body + _PROLOGUE + _EPILOGUE - group > _SLOT:
            begin = group = _aligned(cursor, _BLOCK)
        offsets.append(begin)
        lengths.append(_PROLOGUE + body + _EPILOGUE)
        cursor, after_large = begin + lengths[-1], large
    return offsets, lengths


def _aligned(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def with_peak_memory(operation: Callable[[], _Result]) -> tuple[_Result, int | None]:
    """The result, and by how many bytes the peak of resident memory exceeded the value before. None: unknown."""
    try:
        Path("/proc/self/clear_refs").write_text("5\n")
        before = _resident("VmRSS")
        result = operation()
        return result, max(0, _resident("VmHWM") - before)
    except OSError:
        return operation(), None


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"the kernel does not tell {field}")
