"""Loads a plan that is held as tables: objects into the state, tensors through the engine, some read by other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .._plan.read_plan import PackedReads, ReadRow
from .._ranks.groups import resolved
from .._ranks.node import ranks_of_this_node
from .._share.begin import BroadcastLoad
from .._share.rounds import Outcome
from .._state import objects
from ..reports import LoadStats
from .filling import FailedElsewhereError, Filling, Target
from .records import Record

_LEAST_OVERLAP = 1.5


def load_packed(
    filling: Filling,
    reads: PackedReads,
    state: object,
    put_object: Callable[[str, Any], None],
    broadcast: BroadcastLoad | None,
) -> LoadStats:
    """Fills the tensors of `reads`, which are views of `state`, and calls `put_object` with each object and its key.

    With `broadcast`, other ranks, which call this together, read some of it.
    """
    records = filling.records
    names = reads.description.names

    def begin() -> PackedReads:
        for name in reads.plan.files:
            records.file(name, records.where)
        filling.begin(reads.description, state)
        return reads

    def object_records() -> list[Record]:
        return [Record(names[row.item], row.file, row.offset, row.length, row.crc) for row in reads.objects()]

    def load() -> tuple[int, int]:
        own, known = read_by_broadcast(filling, broadcast, begin, object_records)
        of_objects = object_records()
        for record, data in records.objects(of_objects, known):
            put_object(record.key, objects.load(data, weights_only=records.options.weights_only, key=record.key))
        if own is not None:
            fill_packed(filling, own)
        return reads.count_tensors(), len(of_objects)

    return filling.run(load)


def read_by_broadcast(
    filling: Filling,
    broadcast: BroadcastLoad | None,
    begin: Callable[[], PackedReads | None],
    object_records: Callable[[], list[Record]],
) -> tuple[PackedReads | None, dict[int, bytes]]:
    """Lets ranks read for each other, if there is `broadcast`.

    `begin` returns what this rank needs (None: nothing in tables). Returns what of that this rank still has to read
    itself, and the objects that were read for all ranks, by row of `object_records`. Raises `FailedElsewhereError`.
    """
    if broadcast is None:
        return begin(), {}
    records = filling.records
    contents = records.contents

    def read_objects(rows: list[int]) -> list[bytes]:
        of_objects = object_records()
        return records.read_whole([of_objects[row] for row in rows])

    reads, routed = broadcast.begin(begin, lambda: (contents.save_id, contents.stored_bytes()), filling.options.verify)
    if routed is None:
        return reads, {}
    known = routed.objects(read_objects)
    outcome = routed.deliver(filling, reads)
    if outcome is Outcome.failed_elsewhere:
        raise FailedElsewhereError
    if outcome is Outcome.delivered:
        records.bytes = records.shared_bytes = routed.routes.shared_bytes
        reads = None if reads is None else reads.only(routed.routes.own)
    return reads, known


def fill_packed(filling: Filling, reads: PackedReads) -> None:
    """Reads the tensors of this rank. If the ranks of a node need the same bytes, each reads through the page cache:
    with direct I/O the storage would read them once for each rank."""
    through_cache = filling.options.direct_io == "auto" and _overlap(filling, reads) > _LEAST_OVERLAP
    if not reads.description.all_ready or filling.options.allow_cast:
        filling.fill((_target(filling, reads, row) for row in reads.rows()), through_cache=through_cache)
        return
    names = reads.description.names
    rows: list[ReadRow] = []

    def row_at(number: int) -> ReadRow:
        if not rows:  # rarely needed
            rows.extend(reads.rows())
        return rows[number]

    report = filling.records.read_tensors(
        reads.read_table(), lambda number: names[row_at(number).item], through_cache=through_cache
    )
    filling.records.count(report)
    for number in report["unread"]:
        filling.fill_from_archive(_target(filling, reads, row_at(number)))


def _overlap(filling: Filling, reads: PackedReads) -> float:
    """How often the ranks of this node read each stored byte, if the others need as many bytes as this one."""
    group = resolved(None)
    ranks = ranks_of_this_node(1 if group is None else dist.get_world_size(group))
    if ranks == 1:
        return 1
    return ranks * reads.bytes_read_alone(filling.options.verify) / max(1, filling.records.contents.stored_bytes())


def _target(filling: Filling, reads: PackedReads, row: ReadRow) -> Target:
    name = reads.description.names[row.item]
    record = Record(name, row.file, row.offset, row.length, row.crc, row.dtype, row.chunk_size)
    tensor = reads.target(row.item, row.dest_offset, row.lengths).detach()
    return filling.target(record, row.storage_offset, row.lengths, tensor, name)
