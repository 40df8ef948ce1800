"""Plans a save for simulated ranks and measures it: bytes written by each rank, time and memory of planning."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from .._engine import _C
from .._engine.rows import LOCATION_ROW, PLAN_ROW, Inventory, InventoryParts
from .._ranks.exchange import DIGEST_BYTES
from ..settings import Placement
from .models import Entry
from .parallelism import Parallelism, SimulatedState

_Result = TypeVar("_Result")


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
    results = written(state.names, parts, by_rank)
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


def written(names: list[str], parts: Sequence[bytes], bytes_by_rank: Sequence[int]) -> Written:
    return Written(
        [_record_locations(part, own) for part, own in zip(parts, bytes_by_rank, strict=True)],
        [[f"__{rank}_00000000.distcp"] for rank in range(len(parts))],
        [_C.pack_paths(names, [(name,) for name in names])] * len(parts),
    )


def metadata_files(plan: _C.GlobalPlan, results: Written) -> tuple[bytes, bytes]:
    """`.metadata` and its index."""
    return _C.checkpoint_files(plan.catalog(), *results, "checkpoint", "0" * 32)


def _item_count(inventory: InventoryParts) -> int:
    return int.from_bytes(inventory[0][8:16], sys.byteorder)


def _record_locations(part: bytes, rank_bytes: int) -> bytes:
    """Made-up record locations, with offsets, lengths and checksums as large as real ones."""
    count = len(part) // 8 // PLAN_ROW
    locations = array("q", bytes(8 * LOCATION_ROW * count))
    step = rank_bytes // count + 1 if count else 0
    locations[1::LOCATION_ROW] = array("q", range(0, step * count, step) if step else ())
    locations[2::LOCATION_ROW] = array("q", [step]) * count
    locations[3::LOCATION_ROW] = array("q", [0x9E3779B9]) * count
    return locations.tobytes()


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
