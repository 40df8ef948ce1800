"""Finds keys under which ranks hold different values, for saves that store one value of each key.

A key that several ranks hold is saved from one of them, or in parts from several. In parts, different values would
become a mixture that no rank ever had. So every save compares some elements of each chunk that several ranks hold, in
messages that it sends anyway. A new plan compares a hash of each chunk (csrc/plan/replicas.h) and names keys and ranks.
A save that reuses a plan compares one sum over all ranks. If it is not 0, ranks plan again.

Chunks on devices are compared only if they are large, because each comparison waits for the device.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from .._engine import _C
from .._engine.rows import LEAST_PIECE_BYTES, Inventory
from .._engine.wrapper_tensors import is_wrapper
from .._state.state import State
from .._state.tensor_table import narrowed
from ..errors import some
from .global_plan import PlanRequest

logger = logging.getLogger(__name__)

LARGE_BYTES = 2 * LEAST_PIECE_BYTES  # plans never split a smaller chunk

_SMALL_SAMPLE, _LARGE_SAMPLE = 4, 16  # elements of a small and of a large chunk that are compared
_SAMPLE = _SMALL_SAMPLE, _LARGE_SAMPLE, LARGE_BYTES
_MASK = (1 << 64) - 1
_SIGN = 1 << 63
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def offered_hashes(state: State, on_devices: bool) -> bytes:
    """Returns a hash of 64 bits for each item of the inventory; 0 for an item that is not compared. `on_devices`:
    whether chunks on devices are compared; this waits for copies from them."""
    packed, rest = state.for_engine.offered_hashes(_SAMPLE, _packed_factors())
    if rest:
        hashes = array("Q", packed)
        for item, value in _hashes(_tensors(state, rest, on_devices)):
            hashes[item] = value
        packed = hashes.tobytes()
    return packed


def replica_sum(state: State, holders: bytes, on_devices: bool) -> int:
    """Returns this rank's term of the sum over all ranks that is 0 if no chunk differs, as a signed integer of 64 bits.
    `holders`: from the plan that is reused."""
    if not holders:
        return 0
    total, rest = state.for_engine.replica_sum(_SAMPLE, _packed_factors(), holders)
    factors = dict(rest)
    for item, value in _hashes(_tensors(state, factors, on_devices)):
        total += factors[item] * value
    return ((total + _SIGN) & _MASK) - _SIGN


def warn(keys: dict[str, tuple[int, int]]) -> None:
    logger.warning(
        "%d tensors that several ranks hold differ from rank to rank: %s. One rank's whole value of each is saved. "
        "What belongs to each rank needs a key of its own, or vescale_ckpt.PerRank",
        len(keys),
        some(_with_ranks(keys)),
    )


def warn_of_objects(requests: Iterable[PlanRequest]) -> None:
    """Warns of keys whose objects differ between ranks. Only one object is saved, which is mostly a mistake (random
    states, data loaders). A request that only names a kept plan has no objects to compare."""
    names: dict[Inventory, list[str]] = {}
    seen: dict[str, tuple[int, int]] = {}  # {key: checksum, and the first rank that has the object}
    found: dict[str, tuple[int, int]] = {}
    for rank, request in enumerate(requests):
        if request.of_items or (inventory := request.inventory) is None:
            continue
        if inventory not in names:
            names[inventory] = _C.inventory_objects(inventory)
        for key, value in zip(names[inventory], memoryview(request.digests).cast("I"), strict=True):
            first_value, first_rank = seen.setdefault(key, (value, rank))
            if first_value != value:
                found.setdefault(key, (first_rank, rank))
    if found:
        logger.warning(
            "%d objects differ from rank to rank, and only one value of each is saved: %s. "
            "Wrap what belongs to each rank in vescale_ckpt.PerRank",
            len(found),
            some(_with_ranks(found), 5),
        )


def _with_ranks(keys: dict[str, tuple[int, int]]) -> list[str]:
    return [f"{key} (ranks {a} and {b})" for key, (a, b) in keys.items()]


def _tensors(state: State, items: Iterable[int], on_devices: bool) -> list[tuple[int, torch.Tensor, int]]:
    """Returns the items that are compared: the item's index, its tensor, and how many elements are compared."""
    found = []
    for item in items:
        tensor, offset = state.source(item)
        large = state.items[item][4] >= LARGE_BYTES
        if (tensor.is_cpu or (large and on_devices)) and not is_wrapper(tensor):
            size = state.items[item][7]
            found.append((item, narrowed(tensor, offset, size), _LARGE_SAMPLE if large else _SMALL_SAMPLE))
    return found


# This is the hash of csrc/state/replica_hash.h, for tensors that the engine cannot read: they are on devices, or lazily
# conjugated.


@torch.no_grad()
def _hashes(tensors: Sequence[tuple[int, torch.Tensor, int]]) -> list[tuple[int, int]]:
    groups: dict[tuple[torch.device, torch.dtype, int], tuple[list[int], list[torch.Tensor]]] = {}
    for number, tensor, most in tensors:
        try:
            elements = _elements(tensor, most)
        except Exception:  # no rank can hash such a class or dtype
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
        rows ^= rows >> 31  # mixes the high bits into the low bits
        rows *= torch.tensor(_factors()[: rows.shape[1]], dtype=torch.int64, device="cpu")
        found += zip(numbers, [value & _MASK or 1 for value in rows.sum(1).tolist()], strict=True)
    return found


def _elements(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Returns at most so many elements of a tensor as integers. The choice does not depend on device and strides."""
    total = tensor.numel()
    count = min(most, total)
    step = total // count
    first = step // 2 if count > 1 else 0
    if tensor.is_contiguous():
        sample = torch.as_strided(tensor, (count,), (step,), tensor.storage_offset() + first)
    else:
        indices = torch.arange(count, device=tensor.device) * step + first
        sample = tensor[torch.unravel_index(indices, tensor.shape)]
    sample = sample.resolve_conj().resolve_neg()
    if tensor.itemsize == 16:
        sample = torch.view_as_real(sample).reshape(-1)
    return sample.view(_INTEGERS[sample.itemsize])


@lru_cache
def _factors() -> list[int]:
    """Returns the factors of the hash, equal on all ranks. They are odd, so that a product loses no bit."""
    digests = (hashlib.blake2b(repr(("factor", at)).encode(), digest_size=8) for at in range(2 * _LARGE_SAMPLE))
    return [int.from_bytes(of.digest(), "little", signed=True) | 1 for of in digests]


@lru_cache
def _packed_factors() -> bytes:
    return array("q", _factors()).tobytes()
