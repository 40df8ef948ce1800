"""`write_packed` and `write_items` write one rank's part of a plan to the rank's files."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .._engine import _C
from .._engine.options import threads_of
from .._engine.overlap import overlap
from .._engine.rows import in_first_file
from .._plan.save_plan import PackedItems, PackedResults, body_bytes, write_result
from .._state import objects
from .._state.watch import WatchedState
from ..errors import CheckpointError
from ..reports import SaveStats
from .host_batches import ItemBatch, item_batches, write_rows, write_table
from .rank_files import RankFile, RankFiles

Resolve = Callable[[WriteItem], object]  # a planner's `resolve_data`


def write_packed(files: RankFiles, items: PackedItems) -> tuple[PackedResults, SaveStats]:
    """Writes all items to one file. Tensors are written without a copy if the engine can read them directly."""
    with files:
        if not items:
            return PackedResults(b"", [], items), files.finish(0, 0)
        description, tensors = items.description, range(items.count_tensors())
        if description.all_ready:
            table = items.write_table()
            file = files.open(_C.body_bytes(table))
            placed = file.write_table(table, items.key, tensors)
        else:
            file = files.open(items.body_bytes())
            of_row: dict[int, list[int]] = {}
            for some, of_some in write_rows(file, items, tensors, threads_of(files.options.thread_count)):
                of_row.update((row, of_some[3 * at : 3 * at + 3]) for at, row in enumerate(some))
            placed = [number for row in tensors for number in of_row[row]]
        keys = items.objects()
        placed += file.write_contents([objects.dump(description.objects[key], key) for key in keys], keys)
        items.check_unchanged()
        file.finish()
        return PackedResults(in_first_file(placed), [file.name], items), files.finish(len(tensors), len(keys))


def write_items(
    files: RankFiles,
    items: Sequence[WriteItem],
    resolve: Resolve,
    state: Mapping[str, Any],
    *,
    makes_tensors: bool,
    single_file: bool,
) -> tuple[list[WriteResult], SaveStats]:
    """Writes DCP's items as a planner resolves them.

    `state`: must not change meanwhile. `makes_tensors`: whether `resolve` may return tensors that are not the state's
    own. `single_file`: False for one file an item."""
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    others = [item for item in items if item.type == WriteItemType.BYTE_IO]
    if single_file:
        parts = [(tensors, others)] if items else []
    else:
        parts = [([item], []) for item in tensors] + [([], [item]) for item in others]
    results: list[WriteResult] = []
    with files:
        watch = WatchedState(state)
        for number, (part_tensors, part_objects) in enumerate(parts):
            file = files.open(body_bytes(part_tensors), None if single_file else number)
            placed = _write_tensors(file, part_tensors, resolve, makes_tensors)
            placed += _write_objects(file, part_objects, resolve)
            for row, item in enumerate(part_tensors + part_objects):
                results.append(write_result(item.index, [file.name], 0, *placed[3 * row : 3 * row + 3]))
            file.finish()
        watch.check_unchanged()
        return results, files.finish(len(tensors), len(others))


def _write_tensors(file: RankFile, items: Sequence[WriteItem], resolve: Resolve, makes_tensors: bool) -> list[int]:
    written = 0

    def write(batch: ItemBatch) -> list[int]:
        nonlocal written
        rows = range(written, written := written + len(batch.items))
        return file.write_table(write_table(batch.tensors), lambda row: batch.items[row].index.fqn, rows)

    return [number for _, placed in overlap(item_batches(items, resolve, makes_tensors), write) for number in placed]


def _write_objects(file: RankFile, items: Sequence[WriteItem], resolve: Resolve) -> list[int]:
    contents = []
    for item in items:
        resolved = resolve(item)
        if not isinstance(resolved, io.BytesIO):
            raise CheckpointError(
                f"{item.index.fqn}: the planner resolved an object to {type(resolved).__name__}, not BytesIO"
            )
        contents.append(resolved.getvalue())
    return file.write_contents(contents, [item.index.fqn for item in items])
