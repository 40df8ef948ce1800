"""Plans saves and loads of jobs that exist only as shapes, with the engine's own planning.

Models are sharded as torchtitan and Hugging Face's trainers do: fully sharded data parallelism cuts dimension 0, tensor
parallelism the dimension that a layer's role gives, expert parallelism the experts of stacked weights.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from struct import iter_unpack
from typing import NamedTuple

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from benchmarks.planning.models import Entry
from vescale_ckpt import settings
from vescale_ckpt._engine import _C
from vescale_ckpt._engine.dtype_codes import dtype_code
from vescale_ckpt._engine.rows import LOCATION_ROW, OBJECT, PLAN_ROW, SHARD, TENSOR, Inventory, InventoryParts, words
from vescale_ckpt._engine.torch_private import DTensorLayout, StridedShard
from vescale_ckpt._ranks.exchange import DIGEST_BYTES
from vescale_ckpt._routes.routes import BUFFERS, renumbered
from vescale_ckpt._state.chunk_rows import ShardChunk, packed_row
from vescale_ckpt._state.shard_chunks import chunks_at

_Placed = tuple[tuple[int, ...], tuple[Placement, ...]]  # mesh, placements

_RECORD_BYTES = 704 + 832  # of the archive around a tensor of two dimensions
_OBJECT_BYTES = 1024  # about what torch.save needs for a number
# The dimension that tensor parallelism cuts, by a component of the key.
_TENSOR_DIMS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}


@dataclass(frozen=True)
class Parallelism:
    """A mesh of replicas x fsdp x tensor; the last dimension varies fastest."""

    ranks: int
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1  #: divides fsdp x tensor, or the ranks if nothing is fully sharded

    def mesh_and_placements(self, entry: Entry) -> _Placed | None:
        """The mesh and placements of an entry. None: a plain tensor, whole on every rank."""
        dims = len(entry.shape)
        components = entry.name.split(".")
        if entry.everywhere or dims == 0:
            return None
        if self.expert > 1 and dims == 3 and "experts" in components:
            sharded = self.fsdp * self.tensor // self.expert if self.fsdp > 1 else 1
            mesh = self.ranks // (sharded * self.expert), sharded, self.expert
            return mesh, (Replicate(), Shard(1) if sharded > 1 else Replicate(), Shard(0))
        if self.fsdp == self.tensor == 1:
            return None
        mesh = self.ranks // (self.fsdp * self.tensor), self.fsdp, self.tensor
        cut = next((_TENSOR_DIMS[name] for name in components if name in _TENSOR_DIMS), None) if dims == 2 else None
        by_tensor = Shard(cut) if cut is not None and self.tensor > 1 else Replicate()
        by_fsdp: Placement = Replicate()
        if self.fsdp > 1:
            by_fsdp = StridedShard(0, split_factor=self.tensor) if by_tensor == Shard(0) else Shard(0)
        return mesh, (Replicate(), by_fsdp, by_tensor)


def coordinate(rank: int, mesh: tuple[int, ...]) -> tuple[int, ...]:
    """The rank's place in a mesh whose last dimension varies fastest."""
    return tuple(rank // math.prod(mesh[dim + 1 :]) % size for dim, size in enumerate(mesh))


class SimulatedState:
    """A state on the ranks of a simulated job."""

    def __init__(self, entries: Sequence[Entry], parallelism: Parallelism) -> None:
        self.parallelism = parallelism
        self.names = [entry.name for entry in entries]
        # Layers repeat: chunks are computed once for each distinct entry.
        numbers: dict[object, int] = {}
        self._distinct: list[tuple[Entry, _Placed | None]] = []
        self._numbers: list[int] = []
        for entry in entries:
            placed = None if entry.dtype is None else parallelism.mesh_and_placements(entry)
            number = numbers.setdefault((entry[1:], placed), len(numbers))
            if number == len(self._distinct):
                self._distinct.append((entry, placed))
            self._numbers.append(number)

    def inventory(self, rank: int, node: int = 0) -> bytes:
        """The inventory of a rank (csrc/state/inventory.h)."""
        rows = [_rows(entry, placed, rank) for entry, placed in self._distinct]
        names = [name for name, number in zip(self.names, self._numbers, strict=True) for _ in rows[number]]
        return _C.pack_inventory(names, [row for number in self._numbers for row in rows[number]], node)

    def sizes(self, rank: int) -> list[tuple[int, tuple[int, ...]]]:
        """Bytes of an element, and sizes, of each item of a rank's inventory."""
        of_entries = [
            [(1, (_OBJECT_BYTES,))]
            if entry.dtype is None
            else [(entry.dtype.itemsize, tuple(chunk.size)) for chunk in _chunks(entry, placed, rank)]
            for entry, placed in self._distinct
        ]
        return [box for number in self._numbers for box in of_entries[number]]


def _rows(entry: Entry, placed: _Placed | None, rank: int) -> list[bytes]:
    if entry.dtype is None:
        return [packed_row(OBJECT, 0, False, 0, ShardChunk((), (), ()), ())]
    kind, code = TENSOR if placed is None else SHARD, dtype_code(entry.dtype, entry.name)
    chunks = _chunks(entry, placed, rank)
    return [packed_row(kind, code, False, entry.dtype.itemsize, chunk, entry.shape) for chunk in chunks]


def _chunks(entry: Entry, placed: _Placed | None, rank: int) -> Sequence[ShardChunk]:
    if placed is None:
        origin = (0,) * len(entry.shape)
        return [ShardChunk(origin, entry.shape, origin)]
    mesh, placements = placed
    layout = DTensorLayout(placements, None, torch.Size(entry.shape))  # type: ignore[arg-type]  # mesh by shape
    return chunks_at(layout, mesh, coordinate(rank, mesh))


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
    return Gathered(inventories, sum(map(len, distinct)) + sum(map(len, inventories)) * DIGEST_BYTES)


def planned(
    inventories: Sequence[Inventory], placement: settings.Placement = "balanced"
) -> tuple[_C.GlobalPlan, list[bytes]]:
    """What the coordinator computes between gathering inventories and scattering local plans."""
    plan = _C.GlobalPlan(inventories, placement)
    return plan, [plan.local_plan(rank) for rank in range(len(inventories))]


def bytes_by_rank(inventories: Sequence[Inventory], parts: Sequence[bytes]) -> list[int]:
    """The bytes of tensors that each rank writes. `parts`: the local plans."""
    return [
        sum(
            items[item][4] if dim < 0 else items[item][4] // items[item][7][dim] * length
            for item, dim, _, length in iter_unpack("<4q", part)
        )
        for items, part in zip(map(_C.inventory_items, inventories), parts, strict=True)
    ]


class Written(NamedTuple):
    """Made-up reports of ranks that have written their local plans, one file each."""

    record_locations: list[bytes]
    files: list[list[str]]
    paths: list[bytes]


def written(state: SimulatedState, parts: Sequence[bytes]) -> Written:
    random = Random(0)
    return Written(
        [_record_locations(part, state.sizes(rank), random) for rank, part in enumerate(parts)],
        [[f"__{rank}_00000000.distcp"] for rank in range(len(parts))],
        [_C.pack_paths(state.names, [(name,) for name in state.names])] * len(parts),
    )


def _record_locations(part: bytes, sizes: Sequence[tuple[int, tuple[int, ...]]], random: Random) -> bytes:
    locations, at, plan = array("q"), 0, words(part)
    for row in range(0, len(plan), PLAN_ROW):
        item, dim, _, length = plan[row : row + PLAN_ROW]
        itemsize, shape = sizes[item]
        body = itemsize * math.prod(shape)
        if dim >= 0:
            body = body // shape[dim] * length
        locations.extend((0, at, body + _RECORD_BYTES, random.getrandbits(32)))
        at += -(-(body + _RECORD_BYTES) // 64) * 64
    assert len(locations) == len(plan) // PLAN_ROW * LOCATION_ROW
    return locations.tobytes()


def metadata_files(plan: _C.GlobalPlan, results: Written) -> tuple[bytes, bytes]:
    """`.metadata` and its index."""
    return _C.checkpoint_files(plan.catalog(), *results, "checkpoint", "0" * 32)


def shared_reads(index: _C.Index, state: SimulatedState, node_size: int = 8) -> list[int]:
    """Plans one load of all tensors, in one part, for which ranks read for each other. Returns the bytes that each rank
    reads."""
    kept: dict[bytes, tuple[bytes, list[str]]] = {}  # ranks that need the same share their tables
    tables, files, ranks = [], [], range(state.parallelism.ranks)
    for rank in ranks:
        plan = index.plan_load(state.inventory(rank))
        table, names = kept.setdefault(plan.reads, (plan.reads, plan.files))
        tables.append(table)
        files.append(names)
    budget = settings.broadcast_bytes()
    nodes = [rank // node_size for rank in ranks]
    routes, read, alike = _C.plan_routes(
        tables, files, [0] * len(ranks), nodes, True, whole_bytes=budget // 2, budget_bytes=budget // BUFFERS
    )
    for ranks_alike, planned in alike[:1]:
        renumbered(routes[planned[0]], array("q", planned).tobytes(), array("q", ranks_alike).tobytes())
    return read
