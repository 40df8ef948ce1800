"""Finds keys under which ranks hold different values, for saves that store one value of each key.

A replicated tensor that is split over its holders comes from several ranks: if they differ, what is saved is a mixture
that no rank ever had. So some elements of each are compared, at every save: values change, plans do not.

Ranks compare by one sum, which travels with what they exchange anyway. A rank that writes the rows from a to b of a box
adds h * (g(b) - g(a)): h is a hash of elements that it has of the whole box, g random but 0 at both ends of the box. Of
a box that is the same everywhere that adds up to 0, whoever writes how many pieces.
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
from .._engine.rows import OBJECT, PART_ROW, words
from .._state.describe import Description
from .._state.tensor_table import ON_HOST, narrowed
from ..errors import some

logger = logging.getLogger(__name__)

Name = TypeVar("Name")

LEAST_BYTES = 2 << 20  # of a box that may be split: planning makes no piece of less than 1 MiB

_ELEMENTS = 16  # that are compared of a box
_MASK = (1 << 64) - 1
_SIGN = 1 << 63
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Box:
    """What this rank has of a tensor, or one box of that."""

    name: int  #: a hash of key, offset and size
    tensor: int  #: among the description's
    narrow: tuple[tuple[int, ...], tuple[int, ...]] | None  #: offset and size in it; None: all of it
    factor: int  #: of its hash in the sum


@dataclass(frozen=True)
class Boxes:
    """Those to compare of a description."""

    sources: bytes  #: of the description
    boxes: list[_Box]
    rows: list[bytes]  #: of each, as `_C.replica_hashes` wants it

    def hashes(self, description: Description, on_devices: bool) -> tuple[list[tuple[int, int]], bool]:
        """Number and hash of each that can be looked at, of those in host memory alone if not `on_devices`; and whether
        none was left out for that. What lies on a device is waited for."""
        ready = description.ready
        on_host = [number for number, box in enumerate(self.boxes) if ready[box.tensor] == ON_HOST]
        rows = b"".join(self.rows if len(on_host) == len(self.boxes) else [self.rows[number] for number in on_host])
        hashes = memoryview(_C.replica_hashes(description.table, rows, _ELEMENTS, _packed_factors())).cast("Q")
        found = list(zip(on_host, hashes, strict=True))
        if len(on_host) == len(self.boxes):
            return found, True
        known = set(on_host)
        others = [(number, _of(box, description)) for number, box in enumerate(self.boxes) if number not in known]
        looked_at = others if on_devices else [(number, tensor) for number, tensor in others if tensor.is_cpu]
        return found + _hashes(looked_at), len(looked_at) == len(others)

    def sum(self, hashes: Iterable[tuple[int, int]]) -> int:
        """This rank's part of what adds up to 0, as a signed integer of 64 bits."""
        return _signed(sum(self.boxes[number].factor * value for number, value in hashes) & _MASK)

    def table(self, hashes: Iterable[tuple[int, int]]) -> bytes:
        """Names and hashes, for the coordinator."""
        return array("Q", [word for number, value in hashes for word in (self.boxes[number].name, value)]).tobytes()


def split_boxes(description: Description, part: bytes) -> Boxes:
    """Those of which this rank writes a piece."""
    factors: dict[int, int] = {}
    rows = words(part)
    for item, dim, start, length in zip(*(rows[column::PART_ROW] for column in range(PART_ROW)), strict=True):
        if dim >= 0:
            name, end = _name(description, item), description.items[item][7][dim]
            factors[item] = factors.get(item, 0) + _at(name, dim, start + length, end) - _at(name, dim, start, end)
    return _boxes(description, factors)


def large_boxes(description: Description) -> Boxes:
    """Those that a plan might split."""
    items = description.items if any(map(_is_large, description.tensors)) else []
    return _boxes(
        description,
        dict.fromkeys((number for number, item in enumerate(items) if item[1] != OBJECT and item[4] >= LEAST_BYTES), 0),
    )


def differing(tables: Sequence[bytes]) -> dict[int, tuple[int, int]]:
    """From what `Boxes.table` gives on each rank: names of boxes that differ, with two ranks."""
    numbers = [memoryview(table).cast("Q") for table in tables]
    return _differing(zip(of_rank[::2], of_rank[1::2], strict=True) for of_rank in numbers)


def keys_of(found: dict[int, tuple[int, int]], inventories: Sequence[bytes]) -> dict[str, tuple[int, int]]:
    """The same by key. `inventories`: those of the ranks."""
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


def warn_of_objects(of_ranks: Iterable[tuple[bytes, bytes] | None]) -> None:
    """Of keys whose objects differ, of which one is saved: a mistake, mostly (random states, data loaders).

    `of_ranks`: of each rank its inventory and a CRC-32 of each object in it; None of one that does not tell."""
    names: dict[bytes, list[str]] = {}

    def objects() -> Iterator[Iterable[tuple[str, int]]]:
        for of_rank in of_ranks:
            if of_rank is None:
                yield ()
                continue
            inventory, digests = of_rank
            if inventory not in names:
                names[inventory] = [name for name, kind, *_ in _C.inventory_items(inventory) if kind == OBJECT]
            yield zip(names[inventory], memoryview(digests).cast("I"), strict=True)

    if found := _differing(objects()):
        logger.warning(
            "%d objects differ from rank to rank, and only one value of each is saved: %s. "
            "Wrap what belongs to each rank in vescale_ckpt.PerRank",
            len(found),
            some(_with_ranks(found), 5),
        )


def _differing(of_ranks: Iterable[Iterable[tuple[Name, int]]]) -> dict[Name, tuple[int, int]]:
    """From names and values on each rank: the names of which values differ, with the first two ranks that do."""
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


def _boxes(description: Description, factors: dict[int, int]) -> Boxes:
    boxes, rows = [], []
    for item, factor in factors.items():
        tensor, offset = description.source(item)
        size = description.items[item][7]
        whole = not any(offset) and tuple(tensor.shape) == tuple(size)
        narrow = None if whole else (tuple(offset), tuple(size))
        number = description.tensor_number(item)
        boxes.append(_Box(_name(description, item), number, narrow, factor))
        rows.append(array("q", [number, len(size), *offset, *size]).tobytes())
    return Boxes(description.sources, boxes, rows)


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


def _of(box: _Box, description: Description) -> torch.Tensor:
    tensor = description.tensors[box.tensor]
    return tensor if box.narrow is None else narrowed(tensor, *box.narrow)


# What the engine cannot look at: on devices, lazily conjugated. As plan/replica_hash.h does it.


@torch.no_grad()
def _hashes(tensors: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, int]]:
    groups: dict[tuple[torch.device, torch.dtype, int], tuple[list[int], list[torch.Tensor]]] = {}
    for number, tensor in tensors:
        try:
            elements = _elements(tensor)
        except Exception:  # a class or dtype that cannot be looked at: on no rank, then
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
        rows ^= rows >> 31  # what lies in the high bits alone
        rows *= torch.tensor(_factors()[: rows.shape[1]], dtype=torch.int64, device="cpu")
        found += zip(numbers, [value & _MASK for value in rows.sum(1).tolist()], strict=True)
    return found


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Some of them, as integers: the same ones wherever and however they lie."""
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
    """Odd, so that they lose no bit; the same on all ranks."""
    return [_signed(_hash("factor", number) | 1) for number in range(2 * _ELEMENTS)]


@lru_cache
def _packed_factors() -> bytes:
    return array("q", _factors()).tobytes()


def _signed(value: int) -> int:
    """The same 64 bits as a signed integer."""
    return value - (1 << 64) if value & _SIGN else value
