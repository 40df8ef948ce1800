"""Computes what each rank holds of a state for simulations, without tensors or a process group.

Models are sharded as torchtitan and Hugging Face's trainers do: fully sharded data parallelism cuts dimension 0, tensor
parallelism the dimension that a layer's role gives, expert parallelism the experts of stacked weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from .._engine import _C
from .._engine.dtype_codes import dtype_code
from .._engine.rows import OBJECT, SHARD, TENSOR
from .._engine.torch_private import DTensorLayout, StridedShard
from .._state.chunk_rows import ShardChunk, packed_row
from .._state.shard_chunks import chunks_at
from .models import Entry

# The dimension that tensor parallelism cuts, by a component of the key.
_TENSOR_DIMS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), 0),
    **dict.fromkeys(("wq", "wk", "wv", "w1", "w3", "tok_embeddings", "output"), 0),
    **dict.fromkeys(("o_proj", "down_proj", "wo", "w2"), 1),
}


_Placed = tuple[tuple[int, ...], tuple[Placement, ...]]  # mesh, placements
Box = tuple[int, tuple[int, ...]]  # bytes of an element, sizes


class Boxes(NamedTuple):
    """The sizes of the items of one rank's inventory."""

    distinct: tuple[Box, ...]
    numbers: Sequence[int] | None  #: the index in `distinct` of each item; None: the items themselves

    def of_item(self, item: int) -> Box:
        return self.distinct[item if self.numbers is None else self.numbers[item]]


@dataclass(frozen=True)
class Parallelism:
    """A mesh of replicas x fsdp x tensor; the last dimension varies fastest. Raises `ValueError` if the sizes do not
    divide the ranks."""

    ranks: int
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1  #: divides fsdp x tensor, or the ranks if nothing is fully sharded

    def __post_init__(self) -> None:
        if min(self.ranks, self.fsdp, self.tensor, self.expert) < 1:
            raise ValueError("there is at least one rank in every dimension")
        if self.ranks % (self.fsdp * self.tensor):
            raise ValueError(f"{self.ranks} ranks cannot be {self.fsdp} (fsdp) x {self.tensor} (tensor) x replicas")
        shared = self.fsdp * self.tensor if self.fsdp > 1 else self.ranks
        if shared % self.expert:
            raise ValueError(f"{shared} ranks cannot be {self.expert} (expert) x others")

    @property
    def replicas(self) -> int:
        return self.ranks // (self.fsdp * self.tensor)

    def mesh_and_placements(self, entry: Entry) -> tuple[tuple[int, ...], tuple[Placement, ...]] | None:
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
        mesh = self.replicas, self.fsdp, self.tensor
        cut = next((_TENSOR_DIMS[name] for name in components if name in _TENSOR_DIMS), None) if dims == 2 else None
        by_tensor = Shard(cut) if cut is not None and self.tensor > 1 else Replicate()
        by_fsdp: Placement = Replicate()
        if self.fsdp > 1:
            by_fsdp = StridedShard(0, split_factor=self.tensor) if by_tensor == Shard(0) else Shard(0)
        return mesh, (Replicate(), by_fsdp, by_tensor)


class SimulatedState:
    """A state on the ranks of a simulated job."""

    def __init__(self, entries: Sequence[Entry], parallelism: Parallelism) -> None:
        self.parallelism = parallelism
        self.names = [entry.name for entry in entries]
        # Layers repeat: rows are computed once for each distinct entry.
        numbers: dict[object, int] = {}
        self._distinct: list[Entry] = []
        self._numbers: list[int] = []
        self._placed = []
        for entry in entries:
            placed = None if entry.dtype is None else parallelism.mesh_and_placements(entry)
            number = numbers.setdefault((entry[1:], placed), len(numbers))
            if number == len(self._distinct):
                self._distinct.append(entry)
                self._placed.append(placed)
            self._numbers.append(number)

    def inventory(self, rank: int, node: int = 0) -> bytes:
        """The inventory of a rank (csrc/state/inventory.h)."""
        rows = [self._rows(number, rank) for number in range(len(self._distinct))]
        if all(len(of_entry) == 1 for of_entry in rows):
            return _C.pack_inventory(self.names, [rows[number][0] for number in self._numbers], node)
        names = [name for name, number in zip(self.names, self._numbers, strict=True) for _ in rows[number]]
        return _C.pack_inventory(names, [row for number in self._numbers for row in rows[number]], node)

    def boxes(self, rank: int) -> Boxes:
        """The sizes of the items of a rank's inventory."""
        of_entries = tuple(self._boxes(number, rank) for number in range(len(self._distinct)))
        if all(len(boxes) == 1 for boxes in of_entries):
            return Boxes(tuple(boxes[0] for boxes in of_entries), self._numbers)
        return Boxes(tuple(box for number in self._numbers for box in of_entries[number]), None)

    def _boxes(self, number: int, rank: int) -> list[Box]:
        entry, placed = self._distinct[number], self._placed[number]
        if entry.dtype is None:
            return [(1, (entry.bytes,))]
        if placed is None:
            return [(entry.dtype.itemsize, entry.shape)]
        return [(entry.dtype.itemsize, chunk.size) for chunk in self._chunks(placed, entry.shape, rank)]

    def _rows(self, number: int, rank: int) -> list[bytes]:
        entry, placed = self._distinct[number], self._placed[number]
        if entry.dtype is None:
            return [packed_row(OBJECT, 0, False, entry.bytes, ShardChunk((), (), ()), ())]
        code = dtype_code(entry.dtype, entry.name)
        if placed is None:
            origin = (0,) * len(entry.shape)
            whole = ShardChunk(origin, entry.shape, origin)
            return [packed_row(TENSOR, code, False, entry.dtype.itemsize, whole, entry.shape)]
        return [
            packed_row(SHARD, code, False, entry.dtype.itemsize, chunk, entry.shape)
            for chunk in self._chunks(placed, entry.shape, rank)
        ]

    @staticmethod
    def _chunks(placed: _Placed, shape: tuple[int, ...], rank: int) -> Sequence[ShardChunk]:
        mesh, placements = placed
        layout = DTensorLayout(placements, None, torch.Size(shape))  # type: ignore[arg-type]  # mesh by shape
        return chunks_at(layout, mesh, coordinate(rank, mesh))


def coordinate(rank: int, mesh: tuple[int, ...]) -> tuple[int, ...]:
    """The coordinate of a rank in a mesh that numbers ranks in row-major order."""
    found: list[int] = []
    for size in reversed(mesh):
        rank, position = divmod(rank, size)
        found.append(position)
    return tuple(reversed(found))
