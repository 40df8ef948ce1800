"""Loads a plan that is held as tables: objects into the state, tensors through the engine, some read by other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from .._checkpoint.record_reader import Record, Target
from .._engine.wrapper_tensors import any_wrapper, is_wrapper
from .._plan.read_plan import ReadRow, Reads
from .._routes.broadcast_load import BroadcastLoad
from .._state import objects
from ..errors import CheckpointError
from ..reports import LoadStats
from .rank_load import RankLoad, ranks_of_node

_LEAST_OVERLAP = 1.5


def load_packed(
    load: RankLoad,
    reads: Reads,
    state: object,
    put_object: Callable[[str, Any], None],
    broadcast: BroadcastLoad | None,
    fill_values: Callable[[], int] = lambda: 0,
) -> LoadStats:
    """Fills the tensors of `reads`, which are views of `state`, and calls `put_object` with each object and its key.

    With `broadcast`, other ranks, which call this together, read some of it. `fill_values`: fills what is made of
    stored tensors, and returns the number of these tensors.
    """
    names = reads.state.names
    of_objects = [Record(names[row.item], row.file, row.offset, row.length, row.crc) for row in reads.objects()]

    def begin() -> tuple[Reads, list[Record]]:
        for name in reads.files:
            load.file(name, load.where)
        if load.options.allow_cast:
            for row in reads.tensors():
                tensor, _ = reads.state.source(row.item)
                load.view.check_cast(names[row.item], row.dtype, tensor.dtype)
        load.begin(reads.state, state)
        return reads, of_objects

    def work() -> tuple[int, int]:
        own, contents = begin_reading(load, begin, broadcast)
        for record, data in contents:
            put_object(record.key, objects.load(data, weights_only=load.options.weights_only, key=record.key))
        if own is not None:
            fill_packed(load, own)
        return reads.count_tensors() + fill_values(), len(of_objects)

    return load.run(work)


def begin_reading(
    load: RankLoad, begin: Callable[[], tuple[Reads | None, list[Record]]], broadcast: BroadcastLoad | None
) -> tuple[Reads | None, Iterator[tuple[Record, bytes]]]:
    """Lets ranks read for each other, if there is `broadcast`.

    `begin` returns what this rank needs: tensors (None: none in tables), and objects. Returns the tensors that this
    rank still has to read itself, and all objects with their bytes. Raises `FailedElsewhereError`.
    """
    if broadcast is None:
        reads, records = begin()
        return reads, load.objects(records, {})
    records = []
    apart = b""  # reads into wrappers: ranks send each other values, not inner tensors

    def needs() -> tuple[Reads | None, str, int]:
        nonlocal apart
        reads, records[:] = begin()
        if reads is not None and any_wrapper(reads.state.tensors):
            rows, apart = reads.split(is_wrapper)
            reads = replace(reads, rows=rows)
        return reads, load.checkpoint.save_id, load.checkpoint.stored_bytes()

    reads, routed = broadcast.begin(needs, load.options.verify)
    if routed is None:
        return _with_rows(reads, apart), load.objects(records, {})
    known = routed.objects(lambda rows: load.read_whole([records[row] for row in rows]))
    if routed.deliver(load, reads):
        load.bytes = load.shared_bytes = routed.routes.shared_bytes
        reads = None if reads is None else replace(reads, rows=routed.routes.own)
    return _with_rows(reads, apart), load.objects(records, known)


def _with_rows(reads: Reads | None, rows: bytes) -> Reads | None:
    return replace(reads, rows=reads.rows + rows) if reads is not None and rows else reads


def fill_packed(load: RankLoad, reads: Reads) -> None:
    """Reads the tensors of this rank. If the ranks of a node need the same bytes, each reads through the page cache:
    with direct I/O the storage would read them once for each rank."""
    through_cache = load.options.direct_io == "auto" and _overlap(load, reads) > _LEAST_OVERLAP
    if load.options.allow_cast:
        load.fill((_target(load, reads, row) for row in reads.tensors()), through_cache=through_cache)
        return
    table, devices, rest = reads.read_table()
    names = reads.state.names
    rows: list[ReadRow] = []

    def row_at(number: int) -> ReadRow:
        """The row of a number in the table."""
        if not rows:  # rarely needed
            left_out = set(rest)
            rows.extend(row for number, row in enumerate(reads.tensors()) if number not in left_out)
        return rows[number]

    report = load.read_tensors(
        table, lambda number: names[row_at(number).item], devices=devices, through_cache=through_cache
    )
    load.count(report)
    for number in report["unread"]:
        target = _target(load, reads, row_at(number))
        load.fill_from_archive(target)
        load.hand_over(target)
    if rest:
        wanted = set(rest)
        load.fill(
            (_target(load, reads, row) for number, row in enumerate(reads.tensors()) if number in wanted),
            through_cache=through_cache,
        )


def _overlap(load: RankLoad, reads: Reads) -> float:
    """How often the ranks of this node read each stored byte, if the others need as many bytes as this one."""
    if (ranks := ranks_of_node()) == 1:
        return 1
    return ranks * reads.bytes_read_alone(load.options.verify) / max(1, load.checkpoint.stored_bytes())


def _target(load: RankLoad, reads: Reads, row: ReadRow) -> Target:
    name = reads.state.names[row.item]
    record = Record(name, row.file, row.offset, row.length, row.crc, row.dtype, row.chunk_size)
    tensor_of = partial(reads.target, row.item, row.dest_offset, row.lengths)
    try:
        tensor = tensor_of()
    except CheckpointError as error:  # of a wrapper that cannot be cut
        raise CheckpointError(f"{name}: {error}", key=name) from error
    if is_wrapper(tensor):
        return load.target(record, row.storage_offset, tensor, again=tensor_of)
    return load.target(record, row.storage_offset, tensor.detach())
