"""`StagedPlan` copies a rank's part of a save to a snapshot, and writes it from there while training continues."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch

from .._engine import _C
from .._engine.device_streams import new_snapshot
from .._engine.dtype_codes import dtype_code
from .._engine.engine_errors import named_errors
from .._engine.options import threads_of
from .._engine.rows import PLAN_ROW, int_table, words
from .._engine.torch_copies import note_device
from .._observe.timeline import phase
from .._plan.local_plan import LocalPlan
from .._state import objects
from .._state.tensor_table import NOT_READY
from ..errors import CheckpointError
from ..reports import SaveStats
from . import snapshot_budget
from .host_batches import converted, on_accelerator, samples_of, write_rows, write_table
from .optimizer_gate import Gate, GatedCopy, changed_behind_gate
from .rank_save import RankSave

logger = logging.getLogger(__name__)

MiB = 1 << 20
_GAP = 4096  # bytes between the addresses of two ranges


class TorchSnapshot:
    """A snapshot of tensors on devices that the engine cannot copy from: torch copies them. It is used like
    `_C.Snapshot`.

    Its memory comes from the arena of all snapshots. If the budget is too small for all tensors, it holds the last ones
    of them. A tensor without gaps keeps its strides; others become contiguous."""

    def __init__(self, tensors: Sequence[torch.Tensor], budget: int, threads: int) -> None:
        table, address = int_table(), _GAP
        for tensor in tensors:
            # The engine lays out ranges by address and never reads them: each gets a range of its own.
            table.extend((dtype_code(tensor.dtype, ""), address, 1, tensor.numel(), 1))
            address += tensor.nbytes + _GAP
        self._memory = _C.Snapshot(table, budget, threads)
        self.first = self._memory.first  #: tensors before this one are not in the snapshot
        self._sources = list(tensors[self.first :])
        self._copies: list[torch.Tensor] = []

    def copy(self, key_of: Callable[[int], str]) -> None:
        """Copies the tensors after the work queued on the current streams of their devices, and returns when all are
        copied. `key_of`: returns the key of a tensor, by its number, for errors."""
        for number, (source, offset) in enumerate(zip(self._sources, self._memory.offsets(), strict=True)):
            strides = torch.empty_like(source, device="meta").stride()
            target = torch.empty_strided(source.shape, strides, dtype=source.dtype, device="cpu")
            if source.numel() != 0:
                body = torch.frombuffer(self._memory, dtype=torch.uint8, count=source.nbytes, offset=offset)
                target = body.view(source.dtype).as_strided(source.shape, strides)
            self._copies.append(target)
            note_device(source.device.type)
            try:
                target.copy_(source)
            except RuntimeError as error:  # from the backend, such as a lack of memory
                key = key_of(self.first + number)
                raise CheckpointError(f"{key}: {error}", key=key) from error
        self._sources.clear()

    def table(self) -> Any:
        return write_table(self._copies)

    def release(self) -> None:
        self._copies.clear()
        self._memory.release()


_Copies = _C.Snapshot | TorchSnapshot


class StagedPlan:
    """The constructor copies what a rank writes; tensors guarded by a gate are copied in the background.

    Tensors that exceed the budget are written immediately, from the state itself. `staged` is done when the state is no
    longer read. It fails if a tensor was changed before it was copied.

    Created on the training thread. After that, one thread calls `write`, once.
    """

    def __init__(self, save: RankSave, plan: LocalPlan, gate: Gate | None) -> None:
        self.staged: Future[None] = Future()
        self._guarded: _C.Snapshot | None = None  # filled in the background, after the constructor has returned
        # Keeps the tensors alive that are being copied, so it must outlive the copy.
        self._gate = None if gate is None else GatedCopy(gate)
        self._save, self._layout = save, save.layout
        self.in_background = True  #: whether threads of `write` give way to training
        self._is_open = False
        self._threads = threads_of(save.layout.options.thread_count)
        self._budget = snapshot_budget.snapshot_bytes()
        self._rows, self._names = words(plan.table), plan.state.names  # not the plan: it keeps the state alive
        self._tensors, self._body_bytes = plan.tensors, plan.body_bytes()
        self._objects = {key: objects.dump(value, key) for key, value in plan.objects().items()}
        self._copies: list[tuple[Sequence[int], _Copies]] = []  # rows of the local plan, and their copies
        self._guarded_rows: Sequence[int] = []
        self._archives: dict[int, bytes] = {}  # {row: record of a wrapper subclass}
        self._samples = memoryview(b"").cast("Q")  # hashes of the guarded rows when the constructor returned
        self._early_bytes = 0
        with self._save.writing():
            try:
                self._copy_all(plan)
            except BaseException as error:
                self.staged.set_exception(error)  # optimizer steps may wait for it
                self._release()
                raise
            if self._early_bytes:
                logger.warning(
                    "%.0f MiB of %.0f MiB were written before training went on: snapshots may take %.0f MiB in this "
                    "process (VESCALE_CKPT_SNAPSHOT_BYTES)",
                    self._early_bytes / MiB,
                    self.progress()[1] / MiB,
                    self._budget / MiB,
                )
        if self._guarded is None:
            self.staged.set_result(None)

    def progress(self) -> tuple[int, int]:
        """Returns (bytes written, bytes of all tensors in this rank's part)."""
        return self._layout.progress(), sum(words(self._body_bytes))

    @property
    def in_one_table(self) -> bool:
        """Whether a single snapshot holds every tensor, so that one table locates them all."""
        return not self._is_open and len(self._copies) <= 1

    def write(self) -> SaveStats:
        """Writes the content of the snapshots, and the objects. Raises like `RankSave.write`."""
        try:
            return self._write()
        finally:
            self._release()

    def _release(self) -> None:
        """Frees the snapshots explicitly, because the traceback of an error would keep them alive."""
        for _, snapshot in self._copies:
            snapshot.release()
        self._copies.clear()
        self._archives.clear()

    def _write(self) -> SaveStats:
        layout = self._layout
        with self._save.writing(), phase("write"):
            try:
                with phase("snapshot"):
                    self._wait_until_copied()
            except BaseException as error:
                self.staged.set_exception(error)
                raise
            if not self._rows:
                return self._save.finish(0, 0)
            self._open(in_background=self.in_background)
            while self._copies:  # each snapshot is freed when it is written
                rows, snapshot = self._copies[0]
                self._write_rows(rows, snapshot.table())
                self._copies.pop(0)
                snapshot.release()
            if rows := list(self._archives):
                keys = list(map(self._key_of(rows), range(len(rows))))
                layout.write_records(list(self._archives.values()), keys, rows, of_tensors=True)
                self._archives.clear()
            count, records = len(self._tensors), self._objects
            if records:
                rows = range(count, count + len(records))
                layout.write_records(list(records.values()), list(records), rows, of_tensors=False)
            return self._save.finish(count, len(records))

    def cancel(self) -> None:
        if self._guarded is not None:
            with contextlib.suppress(_C.EngineError):  # it is written, and released
                self._guarded.cancel()
        self._layout.cancel()

    # --- Copying

    def _copy_all(self, plan: LocalPlan) -> None:
        where_they_are: Sequence[int] = self._tensors
        if NOT_READY in plan.state.ready:
            ready = plan.ready_rows()
            where_they_are = [row for row in where_they_are if ready[row] != NOT_READY]
            not_ready = [row for row, flag in enumerate(ready) if flag == NOT_READY]
            by_torch = on_accelerator(plan, not_ready)
            self._copy_by_torch(plan, by_torch)
            self._copy_after_conversion(plan, [row for row in not_ready if row not in by_torch])
        guarded = self._gate.rows(plan, where_they_are) if self._gate is not None else []
        waiting = set(guarded)
        at_once = [row for row in where_they_are if row not in waiting] if guarded else where_they_are
        if at_once:
            snapshot = self._copy_where_they_are(plan, at_once, *_table_of(plan, at_once))
            with self._named_errors(at_once):
                snapshot.copy()
        if guarded:
            assert self._gate is not None
            self._gate.close(self.staged)
            table, devices = _table_of(plan, guarded)
            self._samples = samples_of(table, devices)
            self._guarded = self._copy_where_they_are(plan, guarded, table, devices)
            self._guarded_rows = guarded
        plan.check_unchanged()
        if self._guarded is not None:
            with self._named_errors(self._guarded_rows):
                self._guarded.start()

    def _copy_where_they_are(self, plan: LocalPlan, rows: Sequence[int], table: bytes, devices: bytes) -> _C.Snapshot:
        """Returns an unfilled snapshot of rows in host memory or on CUDA devices, described by `table` and
        `devices`."""
        with self._named_errors(rows):
            snapshot = new_snapshot(table, devices, self._budget, self._threads)
        if early := rows[: snapshot.first]:
            with phase("write", "what snapshots have no room for"):
                self._open(in_background=False)
                write_rows(self._layout, plan, early)
        self._add(snapshot, rows)
        return snapshot

    def _copy_after_conversion(self, plan: LocalPlan, rows: Sequence[int]) -> None:
        """Copies rows whose memory neither the engine nor a snapshot can read directly."""
        for batch in converted(plan, rows):
            if batch.archives:
                self._archives.update(zip(batch.rows, batch.archives, strict=True))
                continue
            snapshot = new_snapshot(batch.table, b"", self._budget, self._threads)
            if early := batch.rows[: snapshot.first]:
                self._open(in_background=False)
                self._write_rows(early, write_table(batch.tensors[: len(early)]))
            self._add(snapshot, batch.rows)
            snapshot.copy()

    def _copy_by_torch(self, plan: LocalPlan, tensors: dict[int, torch.Tensor]) -> None:
        """Copies {row: tensor} from devices that the engine cannot read, each tensor once, to a snapshot."""
        rows = list(tensors)
        if not rows:
            return
        with self._named_errors(rows):
            snapshot = TorchSnapshot(list(tensors.values()), self._budget, self._threads)
        if early := rows[: snapshot.first]:
            with phase("write", "what snapshots have no room for"):
                self._open(in_background=False)
                write_rows(self._layout, plan, early)
        self._add(snapshot, rows)
        snapshot.copy(self._key_of(rows))

    def _add(self, snapshot: _Copies, rows: Sequence[int]) -> None:
        """Keeps a snapshot of `rows`, except the first `snapshot.first` rows, which were written immediately."""
        sizes = words(self._body_bytes)
        self._early_bytes += sum(sizes[row] for row in rows[: snapshot.first])
        self._copies.append((rows[snapshot.first :], snapshot))

    def _wait_until_copied(self) -> None:
        if self._guarded is not None:
            assert self._gate is not None
            with self._named_errors(self._guarded_rows):
                self._guarded.wait()
            self._gate.check_unchanged()
            self._check_samples()
            self.staged.set_result(None)

    def _check_samples(self) -> None:
        """Raises `CheckpointError` if the copy of a guarded tensor differs from the tensor at the time `save` returned.
        Collectives, for example, change tensors without incrementing the version counter."""
        assert self._guarded is not None
        first = self._guarded.first
        before, copied = self._samples[first:], samples_of(self._guarded.table())
        if before == copied:
            return
        for index, (was, of_copy) in enumerate(zip(before, copied, strict=True)):
            if was not in (0, of_copy):
                raise changed_behind_gate(self._key_of(self._guarded_rows)(first + index))

    def _named_errors(self, rows: Sequence[int]) -> AbstractContextManager[None]:
        return named_errors(self._key_of(rows), self._layout.options.path)

    # --- Writing

    def _open(self, *, in_background: bool) -> None:
        """Opens the file, unless it is open: writes that training waits for open it first, to run at full speed."""
        if not self._is_open:
            self._layout.open(self._body_bytes, in_background=in_background)
        self._is_open = True

    def _write_rows(self, rows: Sequence[int], table: Any) -> None:
        self._layout.write_table(table, self._key_of(rows), rows)

    def _key_of(self, rows: Sequence[int]) -> Callable[[int], str]:
        return lambda row: self._names[self._rows[rows[row] * PLAN_ROW]]


def _table_of(plan: LocalPlan, rows: Sequence[int]) -> tuple[bytes, bytes]:
    """Returns the engine's table of the rows' own tensors, and the devices of these; b"" if all are in host memory."""
    return (plan.write_table(rows), b"") if plan.state.all_ready else plan.copy_table(rows)
