"""Finds keys under which ranks hold different values, for saves that store one value of each key.

The pieces of a replicated tensor that is split come from several ranks. If their values differ, the save is a mixture
that no rank ever had. So every save compares some elements of each such box, also a save that reuses a plan.

Ranks compare by one sum, which travels with messages that they exchange anyway. A rank that writes the rows from a to b
of a box adds h * (g(b) - g(a)). h is a hash of elements of the whole box as this rank has it; g is random, but 0 at
both ends of the box. If all ranks have the same h, the sum over the pieces of a box is 0, however the box is cut.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch

from .._engine import _C
from .._engine.rows import OBJECT, PLAN_ROW, Inventory, words
from .._state.describe import Description
from .._state.tensor_table import ON_HOST, narrowed
from ..errors import some

logger = logging.getLogger(__name__)

Name = TypeVar("Name")

LEAST_BYTES = 2 << 20  # a smaller box is never split: planning makes no piece of less than 1 MiB

_ELEMENTS = 16  # so many elements of a box are compared
_MASK = (1 << 64) - 1
_SIGN = 1 << 63
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _ReplicaBox:
    """A box that this rank holds of a tensor."""

    name: int  #: a hash of key, offset and size
    tensor: int  #: number of the description's tensor that holds it
    narrow: tuple[tuple[int, ...], tuple[int, ...]] | None  #: offset and size in that tensor; None: all of it
    factor: int  #: of the box's hash in the sum
    row: bytes  #: for `_C.replica_hashes`


@dataclass(frozen=True)
class ReplicaBoxes:
    """The boxes of a description that are compared between ranks."""

    sources: bytes  #: of the description
    boxes: list[_ReplicaBox]

    def hashes(self, description: Description, on_devices: bool) -> tuple[list[tuple[int, int]], bool]:
        """Number and hash of each box that can be hashed, and whether all boxes were tried.

        Without `on_devices` only boxes in host memory are tried; with it this waits for copies from devices.
        """
        ready = description.ready
        on_host = [number for number, box in enumerate(self.boxes) if ready[box.tensor] == ON_HOST]
        rows = b"".join([self.boxes[number].row for number in on_host])
        hashes = memoryview(_C.replica_hashes(description.table, rows, _ELEMENTS, _packed_factors())).cast("Q")
        found = list(zip(on_host, hashes, strict=True))
        if len(on_host) == len(self.boxes):
            return found, True
        known = set(on_host)
        others = [(number, _of(box, description)) for number, box in enumerate(self.boxes) if number not in known]
        looked_at = others if on_devices else [(number, tensor) for number, tensor in others if tensor.is_cpu]
        return found + _hashes(looked_at), len(looked_at) == len(others)

    def sum(self, hashes: Iterable[tuple[int, int]]) -> int:
        """This rank's summand of the sum that is 0 if no box differs, as a signed integer of 64 bits."""
        return _signed(sum(self.boxes[number].factor * value for number, value in hashes) & _MASK)

    def table(self, hashes: Iterable[tuple[int, int]]) -> bytes:
        """Names and hashes as bytes, for the coordinator."""
        return array("Q", [word for number, value in hashes for word in (self.boxes[number].name, value)]).tobytes()


def split_boxes(description: Description, local_plan: bytes) -> ReplicaBoxes:
    """The boxes of which this rank writes a piece. `part`: its local plan."""
    factors: dict[int, int] = {}
    rows = words(local_plan)
    for item, dim, start, length in zip(*(rows[column::PLAN_ROW] for column in range(PLAN_ROW)), strict=True):
        if dim >= 0:
            name, end = _name(description, item), description.items[item][7][dim]
            factors[item] = factors.get(item, 0) + _at(name, dim, start + length, end) - _at(name, dim, start, end)
    return _boxes(description, factors)


def large_boxes(description: Description) -> ReplicaBoxes:
    """The boxes that are large enough for a plan to split."""
    items = description.items if any(map(_is_large, description.tensors)) else []
    return _boxes(
        description,
        dict.fromkeys((number for number, item in enumerate(items) if item[1] != OBJECT and item[4] >= LEAST_BYTES), 0),
    )


def differing(tables: Sequence[bytes]) -> dict[int, tuple[int, int]]:
    """Names of boxes that differ, each with two ranks. `tables`: `ReplicaBoxes.table` of each rank."""
    numbers = [memoryview(table).cast("Q") for table in tables]
    return _differing(zip(of_rank[::2], of_rank[1::2], strict=True) for of_rank in numbers)


def keys_of(found: dict[int, tuple[int, int]], inventories: Sequence[Inventory]) -> dict[str, tuple[int, int]]:
    """The same by key, from the inventories of all ranks."""
    keys: dict[str, tuple[int, int]] = {}
    for name, ranks in found.items():
        for item in _C.inventory_items(inventories[ranks[0]]):
            if item[1] != OBJECT and _hash(item[0], item[6], item[7]) == name:
                keys.setdefault(item[0], ranks)
    return keys


def warn(keys: dict[str, tuple[int, int]]) -> None:
    logger.warning(
        "%d tensors that several ranks hold differ from rank to rank: %s. One rank's whole value of each is saved. "
        "What belongs to each rank needs a key of its own, or vescale_ckpt.PerRank",
        len(keys),
        some(_with_ranks(keys)),
    )


def warn_of_objects(of_ranks: Iterable[tuple[Inventory, bytes] | None]) -> None:
    """Warns of keys whose objects differ between ranks: only one is saved, which is mostly a mistake (random states,
    data loaders).

    `of_ranks`: for each rank its inventory and a CRC-32 of each object in it; None for a rank without them.
    """
    names: dict[Inventory, list[str]] = {}

    def objects() -> Iterator[Iterable[tuple[str, int]]]:
        for of_rank in of_ranks:
            if of_rank is None:
                yield ()
                continue
            inventory, digests = of_rank
            if inventory not in names:
                names[inventory] = _C.inventory_objects(inventory)
            yield zip(names[inventory], memoryview(digests).cast("I"), strict=True)

    if found := _differing(objects()):
        logger.warning(
            "%d objects differ from rank to rank, and only one value of each is saved: %s. "
            "Wrap what belongs to each rank in vescale_ckpt.PerRank",
            len(found),
            some(_with_ranks(found), 5),
        )


def _differing(of_ranks: Iterable[Iterable[tuple[Name, int]]]) -> dict[Name, tuple[int, int]]:
    """The names whose values differ, with the first two ranks that do. `of_ranks`: names and values on each rank."""
    seen: dict[Name, tuple[int, int]] = {}
    found: dict[Name, tuple[int, int]] = {}
    for rank, values in enumerate(of_ranks):
        for name, value in values:
            first = seen.setdefault(name, (value, rank))
            if first[0] != value:
                found.setdefault(name, (first[1], rank))
    return found


def _with_ranks(keys: dict[str, tuple[int, int]]) -> list[str]:
    return [f"{key} (ranks {a} and {b})" for key, (a, b) in keys.items()]


def _boxes(description: Description, factors: dict[int, int]) -> ReplicaBoxes:
    boxes = []
    for item, factor in factors.items():
        tensor, offset = description.source(item)
        size = description.items[item][7]
        whole = not any(offset) and tuple(tensor.shape) == tuple(size)
        narrow = None if whole else (tuple(offset), tuple(size))
        number = description.tensor_number(item)
        row = array("q", [number, len(size), *offset, *size]).tobytes()
        boxes.append(_ReplicaBox(_name(description, item), number, narrow, factor, row))
    return ReplicaBoxes(description.sources, boxes)


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.itemsize >= LEAST_BYTES


def _name(description: Description, item: int) -> int:
    name, _, _, _, _, _, offset, size = description.items[item]
    return _hash(name, offset, size)


def _at(name: int, dim: int, row: int, end: int) -> int:
    return 0 if row in (0, end) else _hash(name, dim, row)


def _hash(*values: object) -> int:
    return int.from_bytes(
        hashlib.blake2b(repr(values).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )


def _of(box: _ReplicaBox, description: Description) -> torch.Tensor:
    tensor = description.tensors[box.tensor]
    return tensor if box.narrow is None else narrowed(tensor, *box.narrow)


# The same hash as in plan/replica_hash.h, for tensors that the engine cannot read: on devices, or lazily conjugated.


@torch.no_grad()
def _hashes(tensors: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, int]]:
    groups: dict[tuple[torch.device, torch.dtype, int], tuple[list[int], list[torch.Tensor]]] = {}
    for number, tensor in tensors:
        try:
            elements = _elements(tensor)
        except Exception:  # a class or dtype that cannot be hashed here cannot be on any rank
            continue
        numbers, of_group = groups.setdefault((tensor.device, elements.dtype, elements.numel()), ([], []))
        numbers.append(number)
        of_group.append(elements)
    found: list[tuple[int, int]] = []
    for numbers, of_group in groups.values():
        try:
            rows = torch.stack(of_group).to("cpu", torch.int64)
        except Exception:
            continue
        rows ^= rows >> 31  # lets the high bits count in the low ones
        rows *= torch.tensor(_factors()[: rows.shape[1]], dtype=torch.int64, device="cpu")
        found += zip(numbers, [value & _MASK for value in rows.sum(1).tolist()], strict=True)
    return found


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements of a tensor, as integers: the same ones whatever its device and strides."""
    total = tensor.numel()
    count = min(_ELEMENTS, total)
    step = total // count
    first = step // 2 if count > 1 else 0
    if tensor.is_contiguous():
        some_of_it = torch.as_strided(tensor, (count,), (step,), tensor.storage_offset() + first)
    else:
        positions = torch.arange(count, device=tensor.device) * step + first
        some_of_it = tensor[torch.unravel_index(positions, tensor.shape)]
    some_of_it = some_of_it.resolve_conj().resolve_neg()
    if tensor.itemsize == 16:
        some_of_it = torch.view_as_real(some_of_it).reshape(-1)
    return some_of_it.view(_INTEGERS[some_of_it.itemsize])


@lru_cache
def _factors() -> list[int]:
    """Odd numbers, so that a product loses no bit; the same on all ranks."""
    return [_signed(_hash("factor", number) | 1) for number in range(2 * _ELEMENTS)]


@lru_cache
def _packed_factors() -> bytes:
    return array("q", _factors()).tobytes()


def _signed(value: int) -> int:
    """The same 64 bits as a signed integer."""
    return value - (1 << 64) if value & _SIGN else value
