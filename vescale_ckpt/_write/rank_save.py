"""`RankSave` writes one rank's part of a save into the files of a layout."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .._engine import _C
from .._engine.options import used_paths
from .._engine.torch_copies import device_notes
from .._observe.timeline import phase
from .._plan.local_plan import LocalPlan
from .._state import objects
from ..reports import SaveStats
from .host_batches import write_rows
from .layout import Layout


class RankSave:
    """The writes of one rank in one save: by `write`, or by a `StagedPlan` from its snapshots."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._started = 0.0  # when `writing` was first entered

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context manager for writing: starts the timer, and discards the files after an error."""
        self._started = self._started or time.perf_counter()
        try:
            yield
        except BaseException as error:
            self.layout.discard(error)
            raise

    def write(self, plan: LocalPlan) -> SaveStats:
        """Writes all rows to one file. Tensors that the engine can read directly are written without a copy."""
        layout, tensors = self.layout, plan.tensors
        with self.writing(), phase("write"):
            if not plan:
                return self.finish(0, 0)
            if plan.state.all_ready:
                table = plan.write_table()
                layout.open(_C.body_bytes(table))
                layout.write_table(table, plan.key, tensors)
            else:
                layout.open(plan.body_bytes())
                write_rows(layout, plan, tensors)
            if values := plan.objects():
                contents = [objects.dump(value, key) for key, value in values.items()]
                layout.write_records(contents, list(values), range(len(tensors), len(plan)), of_tensors=False)
            plan.check_unchanged()
            return self.finish(len(tensors), len(values))

    def finish(self, tensors: int, objects: int) -> SaveStats:
        written = self.layout.finish()
        names = ("in_place_bytes", "slot_bytes", "direct_bytes", "buffered_bytes")
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
