"""`write_packed` and `write_items` write one rank's part of a plan."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .._engine import _C
from .._engine.overlap import overlap
from .._observe.timeline import phase
from .._plan.save_plan import PackedItems, PackedResults, body_bytes, write_result
from .._state import objects
from .._state.watch import WatchedState
from ..errors import CheckpointError
from ..reports import SaveStats
from .host_batches import ItemBatch, item_batches, write_rows, write_table
from .rank_save import RankSave

Resolve = Callable[[WriteItem], object]  # a planner's `resolve_data`


def write_packed(save: RankSave, items: PackedItems) -> tuple[PackedResults, SaveStats]:
    """Writes all items to one file. Tensors are written without a copy if the engine can read them directly."""
    with save, phase("write"):
        if not items:
            return PackedResults(b"", [], items), save.finish(0, 0)
        description, tensors = items.description, range(items.count_tensors())
        unread = save.unread(items)
        if description.all_ready and not unread:
            table = items.write_table()
            save.open(_C.body_bytes(table))
            placed = save.write_table(table, items.key, tensors)
        else:
            save.open(items.body_bytes())
            of_row = dict(unread)
            for some, of_some in write_rows(save, items, [row for row in tensors if row not in unread]):
                of_row.update((row, of_some[3 * at : 3 * at + 3]) for at, row in enumerate(some))
            placed = [number for row in tensors for number in of_row[row]]
        keys = items.objects()
        placed += save.write_contents([objects.dump(description.objects[key], key) for key in keys], keys)
        items.check_unchanged()
        return PackedResults(*save.located(placed), items), save.finish(len(tensors), len(keys))


def write_items(
    save: RankSave, items: Sequence[WriteItem], resolve: Resolve, state: Mapping[str, Any], *, makes_tensors: bool
) -> tuple[list[WriteResult], SaveStats]:
    """Writes DCP's items as a planner resolves them.

    `state`: must not change meanwhile. `makes_tensors`: whether `resolve` may return tensors that are not the state's
    own."""
    single_file = save.options.single_file
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    others = [item for item in items if item.type == WriteItemType.BYTE_IO]
    if single_file:
        parts = [(tensors, others)] if items else []
    else:
        parts = [([item], []) for item in tensors] + [([], [item]) for item in others]
    results: list[WriteResult] = []
    with save, phase("write"):
        watch = WatchedState(state)
        for number, (part_tensors, part_objects) in enumerate(parts):
            save.open(body_bytes(part_tensors), None if single_file else number)
            placed = _write_tensors(save, part_tensors, resolve, makes_tensors)
            placed += _write_objects(save, part_objects, resolve)
            for row, item in enumerate(part_tensors + part_objects):
                results.append(write_result(item.index, [save.name], 0, *placed[3 * row : 3 * row + 3]))
        watch.check_unchanged()
        return results, save.finish(len(tensors), len(others))


def _write_tensors(save: RankSave, items: Sequence[WriteItem], resolve: Resolve, makes_tensors: bool) -> list[int]:
    written = 0

    def write(batch: ItemBatch) -> list[int]:
        nonlocal written
        rows = range(written, written := written + len(batch.items))
        if batch.archives:
            return save.write_archives(batch.archives, [item.index.fqn for item in batch.items], rows)
        return save.write_table(write_table(batch.tensors), lambda row: batch.items[row].index.fqn, rows)

    return [number for _, placed in overlap(item_batches(items, resolve, makes_tensors), write) for number in placed]


def _write_objects(save: RankSave, items: Sequence[WriteItem], resolve: Resolve) -> list[int]:
    contents = []
    for item in items:
        resolved = resolve(item)
        if not isinstance(resolved, io.BytesIO):
            raise CheckpointError(
                f"{item.index.fqn}: the planner resolved an object to {type(resolved).__name__}, not BytesIO"
            )
        contents.append(resolved.getvalue())
    return save.write_contents(contents, [item.index.fqn for item in items])
