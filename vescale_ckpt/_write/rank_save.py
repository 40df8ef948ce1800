"""`RankSave` writes what one rank holds in one save, into the files that a layout gives it."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from .._engine import _C
from .._engine.options import used_paths
from .._engine.overlap import overlap
from .._engine.torch_copies import device_notes
from .._observe.timeline import phase
from .._plan.save_plan import PackedItems, body_bytes
from .._state import objects
from .._state.watch import watch_values
from ..errors import CheckpointError
from ..reports import SaveStats
from .host_batches import ItemBatch, item_batches, write_rows, write_table
from .layout import Layout

Resolve = Callable[[WriteItem], object]  # a planner's `resolve_data`


class RankSave:
    """What one rank does in one save: `write`, or `write_items`, or the copy and the writing of a `StagedPlan`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._started = 0.0  # when the first context was entered

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context around writing: measures the time, and discards the files after an error."""
        self._started = self._started or time.perf_counter()
        try:
            yield
        except BaseException as error:
            self.layout.discard(error)
            raise

    def write(self, items: PackedItems) -> SaveStats:
        """Writes all items to one file. Tensors are written without a copy if the engine can read them directly."""
        layout, tensors = self.layout, range(items.count_tensors())
        with self.writing(), phase("write"):
            if not items:
                return self.finish(0, 0)
            if items.description.all_ready:
                table = items.write_table()
                layout.open(_C.body_bytes(table))
                layout.write_table(table, items.key, tensors)
            else:
                layout.open(items.body_bytes())
                write_rows(layout, items, tensors)
            if keys := items.objects():
                contents = [objects.dump(items.description.objects[key], key) for key in keys]
                layout.write_records(contents, keys, range(len(tensors), len(items)), of_tensors=False)
            items.check_unchanged()
            stats = self.finish(len(tensors), len(keys))
            if layout.reads_in_finish:
                items.check_unchanged()
            return stats

    def write_items(
        self, items: Sequence[WriteItem], resolve: Resolve, state: Mapping[str, Any], *, makes_tensors: bool
    ) -> tuple[list[WriteItem], SaveStats]:
        """Writes DCP's items as a planner resolves them. Returns them in the order of their rows.

        `state`: must not change meanwhile. `makes_tensors`: whether `resolve` may return tensors that are not the
        state's own."""
        single_file = self.layout.options.single_file
        tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
        others = [item for item in items if item.type == WriteItemType.BYTE_IO]
        if single_file:
            parts = [(tensors, others)] if items else []
        else:
            parts = [([item], []) for item in tensors] + [([], [item]) for item in others]
        row = 0
        with self.writing(), phase("write"):
            watch = watch_values(state.items())
            for number, (part_tensors, part_objects) in enumerate(parts):
                self.layout.open(body_bytes(part_tensors), None if single_file else number)
                self._write_tensors(part_tensors, resolve, makes_tensors, row)
                row += len(part_tensors)
                if part_objects:
                    contents = [_content(item, resolve(item)) for item in part_objects]
                    rows = range(row, row := row + len(part_objects))
                    self.layout.write_records(contents, _keys(part_objects), rows, of_tensors=False)
            watch.check_unchanged()
            return tensors + others, self.finish(len(tensors), len(others))

    def _write_tensors(self, items: Sequence[WriteItem], resolve: Resolve, makes_tensors: bool, first_row: int) -> None:
        written = first_row

        def write(batch: ItemBatch) -> None:
            nonlocal written
            rows = range(written, written := written + len(batch.items))
            if batch.archives:
                self.layout.write_records(batch.archives, _keys(batch.items), rows, of_tensors=True)
            else:
                self.layout.write_table(write_table(batch.tensors), lambda row: batch.items[row].index.fqn, rows)

        for _ in overlap(item_batches(items, resolve, makes_tensors), write):
            pass

    def finish(self, tensors: int, objects: int) -> SaveStats:
        written = self.layout.finish()
        names = ("in_place_bytes", "slot_bytes", "direct_bytes", "uncached_bytes", "buffered_bytes")
        total: dict[str, Any] = {name: sum(stats[name] for stats in written.of_files) for name in names}
        return SaveStats(
            seconds=time.perf_counter() - self._started,
            tensors=tensors,
            objects=objects,
            bytes=written.tensor_bytes,
            io_path=used_paths(total),
            device_notes=device_notes(),
            file_bytes=written.file_bytes,
            **total,
        )


def _content(item: WriteItem, resolved: object) -> bytes:
    if not isinstance(resolved, io.BytesIO):
        raise CheckpointError(
            f"{item.index.fqn}: the planner resolved an object to {type(resolved).__name__}, not BytesIO"
        )
    return resolved.getvalue()


def _keys(items: Sequence[WriteItem]) -> list[str]:
    return [item.index.fqn for item in items]
