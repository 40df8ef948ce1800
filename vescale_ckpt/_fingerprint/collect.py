"""Takes the fingerprint of a state with all ranks: each hashes what it holds, and the coordinator adds it up."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import settings
from .._engine import _C
from .._engine.device_streams import producers
from .._engine.dtype_codes import CODE_DTYPES
from .._engine.gc import gc_paused
from .._engine.options import threads_of
from .._engine.rows import NO_LIMIT, OBJECT, PLAN_ROW
from .._engine.wrapper_tensors import is_wrapper, type_name
from .._plan.planner import Planner
from .._ranks.exchange import Exchange, calling
from .._ranks.steps import Steps
from .._state.application import check_is_mapping, saved_form
from .._state.per_rank import set_rank
from .._state.state import State
from .._state.tensor_table import device_number, narrowed
from ..errors import CheckpointError
from .fingerprint import Fingerprint, TensorValue
from .object_digest import DIGEST_BYTES, bytes_of_elements, digest_of

PRIME = (1 << 127) - 1
VALUE_BYTES = DIGEST_BYTES  # a message has one value for each item, of tensors and objects alike

_PARTS = 5  # of a rank's message
_COPY_BYTES = 64 << 20  # of tensors that are copied to the host at a time


def fingerprint(
    state: Mapping[str, Any], *, process_group: dist.ProcessGroup | None = None, timeout: float | None = None
) -> Fingerprint:
    """Takes the fingerprint of what `save` would save of `state`; all ranks of the group call it together.

    Each rank reads once what it holds. Replicas are compared whole; `Fingerprint.replicas` names those that differ.

    Args:
        state: as for `save`.
        process_group: None: all ranks, or this process alone where torch.distributed is not initialised.
        timeout: seconds to wait for other ranks at each step; None: `VESCALE_CKPT_TIMEOUT`.

    Raises on all ranks if any fails: `CheckpointError` with the key of a value that cannot be saved, or has no
    fingerprint; `CheckpointTimeoutError` with the ranks that did not arrive.
    """
    check_is_mapping(state, "fingerprint")
    mine: list[bytes] = []  # the inventory, and the values of its items

    def describe() -> tuple[bytes, ...]:
        held = Planner(reuse_plans=False).describe_all(flat_values(state, exchange), None, "")
        mine[:] = held.inventory, _values(held)
        return *_C.inventory_parts(held.inventory), mine[1]

    with calling("fingerprint", process_group):
        exchange = Exchange.of(process_group, settings.timeout(timeout))
        steps = Steps(exchange, "taking a fingerprint")
        gathered = steps.gather_distinct(describe, _PARTS, "gather fingerprints")
        combined = None if gathered is None else steps.take(_combine, gathered)
        steps.raise_together("combine fingerprints")
        return _parsed(exchange.broadcast(combined, steps.phase("share the fingerprint")), *mine)


def flat_values(state: Mapping[str, Any], exchange: Exchange) -> dict[str, Any]:
    """What a save would store, under its keys."""
    with set_rank(exchange.rank, exchange.size):
        return Planner(reuse_plans=False).flatten(saved_form(state))[0]


def _values(state: State) -> bytes:
    """The value of each item of the inventory: of a tensor its polynomial, of an object its digest."""
    devices = array("q", sorted(map(device_number, set(state.ready))))
    packed, rest = state.for_engine.fingerprints(threads_of(), producers(devices, torch.cuda.current_stream))
    values, kinds = bytearray(packed), _C.inventory_kinds(state.inventory)
    objects = [item for item, kind in enumerate(kinds) if kind == OBJECT]
    for item in (*rest, *objects):
        key = state.names[item]
        held = state.objects[key] if kinds[item] == OBJECT else state.source(item)[0]
        try:
            value = digest_of(held) if kinds[item] == OBJECT else _value_in_python(state, item)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{key}: a {type(held).__name__} has no fingerprint: {error}", key=key) from error
        values[VALUE_BYTES * item : VALUE_BYTES * (item + 1)] = value
    return bytes(values)


def _value_in_python(state: State, item: int) -> bytes:
    """The value of a chunk that the engine cannot read: a kernel does not, its values are lazily conjugated, or its
    tensor is a wrapper."""
    tensor, start = state.source(item)
    key, _, _, _, _, shape, offset, size = state.items[item]
    if is_wrapper(tensor):
        if size != shape:
            raise CheckpointError(
                f"{key}: a shard of a {type_name(tensor)} has no fingerprint that is equal for every sharding, because "
                "only its class knows which elements its inner tensors are of: take the fingerprint of the other keys",
                key=key,
            )
        return digest_of(tensor)  # of its inner tensors, which are what is saved
    total = _sum_on_host(narrowed(tensor, start, size), shape, offset)
    return (total % PRIME).to_bytes(VALUE_BYTES, "little")


def _sum_on_host(chunk: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...]) -> int:
    """The value of a chunk, modulo `PRIME`, by copies of at most `_COPY_BYTES`."""
    if chunk.nbytes > _COPY_BYTES:
        dim = next(dim for dim, length in enumerate(chunk.shape) if length > 1)
        halves = chunk.tensor_split(2, dim)
        behind = (*offset[:dim], offset[dim] + halves[0].size(dim), *offset[dim + 1 :])
        return _sum_on_host(halves[0], shape, offset) + _sum_on_host(halves[1], shape, behind)
    data = bytes_of_elements(chunk.to("cpu")).numpy()
    return _number(_C.fingerprint_of(data, chunk.itemsize, shape, offset, tuple(chunk.shape), threads_of()))


@gc_paused()
def _combine(gathered: Sequence[Sequence[bytes]]) -> bytes:
    """Adds up what the ranks hold: each chunk once, whichever ranks hold it."""
    inventories = [(head, rows, numbers, names) for head, rows, numbers, names, _ in gathered]
    values = [of_rank for *_, of_rank in gathered]
    plan = _C.GlobalPlan(inventories, "lowest_rank", NO_LIMIT, [_hashes(of_rank) for of_rank in values])
    differing = {key: [one, other] for key, one, other in plan.differences}
    tensors: dict[str, list[Any]] = {}
    objects: dict[str, tuple[str, int]] = {}  # {key: digest, and the first rank that has the object}
    for rank, inventory in enumerate(inventories):
        items = _C.inventory_items(inventory)
        for item, (key, kind, *_) in enumerate(items):
            if kind == OBJECT:
                digest = _value_at(values[rank], item).hex()
                first_digest, first_rank = objects.setdefault(key, (digest, rank))
                if first_digest != digest:
                    differing.setdefault(key, [first_rank, rank])
        for item in array("q", plan.local_plan(rank))[::PLAN_ROW]:
            key, kind, dtype, _, _, shape, _, _ = items[item]
            if kind != OBJECT:
                of_key = tensors.setdefault(key, [dtype, shape, 0])
                of_key[2] = (of_key[2] + _number(_value_at(values[rank], item))) % PRIME
    return json.dumps([tensors, {key: digest for key, (digest, _) in objects.items()}, differing]).encode()


def _hashes(values: bytes) -> bytes:
    """The lower half of each value, for comparisons of replicas. 0 would mean that it is not compared."""
    return array("Q", [low or 1 for low in array("Q", values)[::2]]).tobytes()


@gc_paused()
def _parsed(content: bytes, inventory: bytes, values: bytes) -> Fingerprint:
    tensors, objects, differing = json.loads(content)
    of_tensors = {
        key: TensorValue(str(CODE_DTYPES[code]).removeprefix("torch."), tuple(shape), value)
        for key, (code, shape, value) in tensors.items()
    }
    replicas = {key: (one, other) for key, (one, other) in differing.items()}
    return Fingerprint(of_tensors, objects, replicas, inventory, values)


def _value_at(values: bytes, item: int) -> bytes:
    return values[VALUE_BYTES * item : VALUE_BYTES * (item + 1)]


def _number(value: bytes) -> int:
    return int.from_bytes(value, "little")
