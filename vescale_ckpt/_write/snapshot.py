"""A rank's part of a save in memory that training does not touch, from which it is written while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass

from .._engine import _C
from .._engine.errors import named_errors
from .._engine.options import threads_of
from .._engine.rows import PART_ROW, in_first_file, words
from .._plan.save_plan import PackedItems, PackedResults
from .._state import objects
from .._state.tensor_table import NOT_READY
from ..reports import SaveStats
from . import snapshot_budget
from .host_batches import converted, new_snapshot, write_rows, write_table
from .optimizer_gate import Gate, GatedCopy
from .rank_files import RankFile, RankFiles

logger = logging.getLogger(__name__)

MiB = 1 << 20


@dataclass
class _Copy:
    """Some rows of the part, all or the last of which lie in a snapshot."""

    rows: Sequence[int]
    snapshot: _C.Snapshot


class StagedPlan:
    """Copies what a rank writes as soon as it is made, but for what a gate guards: that is copied in the background.

    What exceeds the budget is written right away instead, from the state itself. `staged` is done when nothing is read
    from the state any more; it fails if something was changed before it was copied.

    Made by the thread that trains; then `write` is called once, by any thread.
    """

    def __init__(self, files: RankFiles, items: PackedItems, gate: Gate | None) -> None:
        self.staged: Future[None] = Future()
        self._guarded: _C.Snapshot | None = None  # its copying goes on after this constructor has returned
        self._gate = None if gate is None else GatedCopy(gate)  # holds what is copied: goes after the copying
        self._files = files
        self._threads = threads_of(files.options.thread_count)
        self._budget = snapshot_budget.snapshot_bytes()
        self._part, self._names = words(items.part), items.description.names
        self._tensors, self._body_bytes = items.count_tensors(), items.body_bytes()
        self._object_keys = items.objects()
        self._objects = [objects.dump(items.description.objects[key], key) for key in self._object_keys]
        self._copies: list[_Copy] = []
        self._guarded_rows: Sequence[int] = []
        self._placed: dict[int, Sequence[int]] = {}  # by row: offset, length and CRC-32
        self._early_bytes = 0
        self._file: RankFile | None = None
        with self._files:
            try:
                self._copy_all(items)
            except BaseException as error:
                self.staged.set_exception(error)  # steps may wait for it
                self._release()
                raise
            if self._early_bytes:
                logger.warning(
                    "%.0f MiB of %.0f MiB were written before training went on: snapshots may take %.0f MiB in this "
                    "process (VESCALE_CKPT_SNAPSHOT_BYTES)",
                    self._early_bytes / MiB,
                    self.total_bytes / MiB,
                    self._budget / MiB,
                )
        if self._guarded is None:
            self.staged.set_result(None)

    @property
    def total_bytes(self) -> int:
        """Of the tensors in this part."""
        return sum(words(self._body_bytes))

    @property
    def written_bytes(self) -> int:
        return 0 if self._file is None else self._file.progress()

    def write(self) -> tuple[PackedResults, SaveStats]:
        """Writes what the snapshots hold, and the objects. Raises as `write_packed` does."""
        try:
            return self._write()
        finally:
            self._release()

    def _release(self) -> None:
        """An error's traceback would keep the memory."""
        for copy in self._copies:
            copy.snapshot.release()
        self._copies.clear()

    def _write(self) -> tuple[PackedResults, SaveStats]:
        with self._files:
            try:
                self._wait_until_copied()
            except BaseException as error:
                self.staged.set_exception(error)
                raise
            if not self._part:
                return PackedResults(b"", []), self._files.finish(0, 0)
            file = self._open(in_background=True)
            while self._copies:  # each frees its memory when it is written
                copy = self._copies.pop(0)
                self._keep(copy.rows, file.write_table(copy.snapshot.table(), self._key_of(copy.rows), copy.rows))
                copy.snapshot.release()
            placed = [number for row in range(self._tensors) for number in self._placed[row]]
            placed += file.write_contents(self._objects, self._object_keys)
            file.finish()
            return PackedResults(in_first_file(placed), [file.name]), self._files.finish(
                self._tensors, len(self._objects)
            )

    def cancel(self) -> None:
        """Lets `write`, in another thread, fail soon."""
        if self._guarded is not None:
            self._guarded.cancel()
        if (file := self._file) is not None:
            file.cancel()

    # --- Copying

    def _copy_all(self, items: PackedItems) -> None:
        where_they_are: Sequence[int] = range(self._tensors)
        if NOT_READY in items.description.ready:
            ready = items.ready_rows()
            where_they_are = [row for row in where_they_are if ready[row] != NOT_READY]
            self._copy_after_conversion(items, [row for row, flag in enumerate(ready) if flag == NOT_READY])
        guarded = self._gate.rows(items, where_they_are) if self._gate is not None else []
        waiting = set(guarded)
        at_once = [row for row in where_they_are if row not in waiting] if guarded else where_they_are
        if at_once:
            snapshot = self._copy_where_they_are(items, at_once)
            with self._named_errors(at_once):
                snapshot.copy()
        if guarded:
            assert self._gate is not None
            self._gate.close(self.staged)
            self._guarded = self._copy_where_they_are(items, guarded)
            self._guarded_rows = guarded
        items.check_unchanged()
        if self._guarded is not None:
            with self._named_errors(self._guarded_rows):
                self._guarded.start()

    def _copy_where_they_are(self, items: PackedItems, rows: Sequence[int]) -> _C.Snapshot:
        """A snapshot, yet to be filled, of rows in host memory or on CUDA devices."""
        table, devices = (items.write_table(rows), b"") if items.description.all_ready else items.copy_table(rows)
        with self._named_errors(rows):
            snapshot = new_snapshot(table, devices, self._budget, self._threads)
        early = rows[: snapshot.first]
        if early:
            for some, placed in write_rows(self._open(in_background=False), items, early, self._threads):
                self._keep(some, placed)
        self._add(snapshot, rows)
        return snapshot

    def _copy_after_conversion(self, items: PackedItems, rows: Sequence[int]) -> None:
        """Of rows that neither the engine nor a snapshot can use where they are."""
        for some, tensors in converted(items, rows):
            snapshot = new_snapshot(write_table(tensors), b"", self._budget, self._threads)
            early = some[: snapshot.first]
            if early:
                table = write_table(tensors[: len(early)])
                self._keep(early, self._open(in_background=False).write_table(table, self._key_of(early), early))
            self._add(snapshot, some)
            snapshot.copy()

    def _add(self, snapshot: _C.Snapshot, rows: Sequence[int]) -> None:
        """A snapshot for the rows, those excepted for which there was no memory: they were written."""
        sizes = words(self._body_bytes)
        self._early_bytes += sum(sizes[row] for row in rows[: snapshot.first])
        self._copies.append(_Copy(rows[snapshot.first :], snapshot))

    def _wait_until_copied(self) -> None:
        if self._guarded is not None:
            assert self._gate is not None
            with self._named_errors(self._guarded_rows):
                self._guarded.wait(None)
            self._gate.check_unchanged()
            self.staged.set_result(None)

    def _named_errors(self, rows: Sequence[int]) -> AbstractContextManager[None]:
        return named_errors(self._key_of(rows), self._files.options.path)

    # --- Writing

    def _open(self, *, in_background: bool) -> RankFile:
        """What training has to wait for is written at full speed, and what follows in the same file, too."""
        if self._file is None:
            self._file = self._files.open(self._body_bytes, in_background=in_background)
        return self._file

    def _keep(self, rows: Sequence[int], placed: list[int]) -> None:
        for number, row in enumerate(rows):
            self._placed[row] = placed[3 * number : 3 * number + 3]

    def _key_of(self, rows: Sequence[int]) -> Callable[[int], str]:
        return lambda row: self._names[self._part[rows[row] * PART_ROW]]
