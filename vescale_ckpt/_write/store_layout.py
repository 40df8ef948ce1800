"""`StoreLayout` writes the safetensors files of a model to an object store.

An object is uploaded in order, and a file begins with the checksums of its tensors. So each file has one rank as its
writer: it sends its own tensors directly from memory, and receives those of other ranks in rounds. Ranks checksum their
tensors beforehand, and the writers checksum what they send: the two must match.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from .._checkpoint.safetensors.commit import check_replaceable, commit_objects
from .._checkpoint.safetensors.model_names import object_names
from .._engine import _C
from .._engine.engine_errors import named_errors, named_system_errors
from .._engine.options import threads_of
from .._engine.rows import int_table
from .._observe.timeline import phase
from .._plan.global_plan import GlobalPlan
from .._ranks.message import pack, unpack
from .._ranks.steps import Steps
from .._routes.routed_write import RoutedWrite, plan_writes, routes_from, writers_of
from .._storage.open_storage import storage_at
from .._storage.pending import new_token
from ..errors import CheckpointError
from .layout import SaveOptions, Written
from .safetensors_layout import Safetensors, SafetensorsLayout


class StoreLayout(SafetensorsLayout):
    """The files of one model in an object store. `finish` is collective: ranks first agree on the heads of the
    files."""

    reads_in_finish = True

    def __init__(self, options: SaveOptions, wanted: Safetensors) -> None:
        super().__init__(options, wanted)
        self._names: list[str] = []
        self._tables: list[tuple[bytes, Sequence[int]]] = []  # this rank's tensors, and their rows in the plan
        self._steps: Steps | None = None  # from `join_ranks` until the heads are agreed on
        self._own = b""  # this rank's boxes in the files that it writes
        self._file_heads: list[bytes] = []  # one for each file, on the coordinator
        self._may_be_committed = False

    # --- The files of all ranks

    def _plan_routes(self, made: _C.ExportLayout, catalog: _C.Catalog, nodes: list[int]) -> list[bytes]:
        made.bring_all()
        try:
            writers = writers_of(made.file_bytes, len(nodes))
            return plan_writes(made, catalog, [0] * len(nodes), nodes, writers)
        except _C.EngineError as error:
            raise CheckpointError(
                f"{self.options.path}: {error}. Save with format='dcp' and convert (vescale_ckpt.convert, also from "
                "the store to the store)",
                path=self.options.path,
            ) from None

    def make_files(self, made: _C.ExportLayout) -> str:
        """Only chooses names, because objects appear when they are complete. Returns the token in the names."""
        if not self.options.overwrite:
            storage_at(self.options.path).check_exclusive_commits()
        with named_system_errors(self.options.path):
            check_replaceable(self.options.path)
        self._layout = made
        return new_token()

    def write_to(self, count: int, token: str, boxes: bytes) -> None:
        self._names = object_names(count, token)
        self._boxes = boxes

    def join_ranks(self, steps: Steps, in_one_table: bool) -> None:
        """Collective. Raises on all ranks if any rank has an error or cannot share memory."""
        routes, doing = routes_from(self._routes), steps.phase("write together")
        if routes.rounds:
            with phase("write", "share memory"):
                self._rounds, error = RoutedWrite.begin(steps.exchange, doing, routes, steps.error is None)
            steps.error = steps.error or error
        steps.raise_together("write together")
        if routes.rounds and self._rounds is None:
            raise CheckpointError(f"{doing}: the ranks share no memory", path=self.options.path)
        self._steps, self._own = steps, routes.own

    def contents(self, planned: GlobalPlan, messages: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        contents = super().contents(planned, messages)
        if [*contents[0]] != self._file_heads:
            path = self.options.path
            raise CheckpointError(f"tensors have changed while they were saved to {path}", path=path)
        return contents

    # --- This rank's tensors

    def open(self, body_bytes: Any, part: int | None = None, *, in_background: bool = False) -> None:
        self._in_background = in_background

    def write_table(self, table: Any, key_of: Callable[[int], str], rows: Sequence[int]) -> None:
        """Only records where the tensors are."""
        if self._steps is None:
            raise CheckpointError(
                f"{self.options.path}: safetensors files of an object store are written from host memory, and "
                "snapshots have no room for all that this rank holds. Let them take more "
                "(VESCALE_CKPT_SNAPSHOT_BYTES), or save with format='dcp' and convert (vescale_ckpt.convert, also from "
                "the store to the store)",
                path=self.options.path,
            )
        self._tables.append((bytes(table), rows))

    def finish(self) -> Written:
        steps = self._steps
        assert steps is not None
        with named_errors(str, self.options.path):
            table = b"".join(words for words, _ in self._tables)
            held = _C.HeldRows(table, int_table([row for _, rows in self._tables for row in rows]))
            heads = self._agree_on_heads(steps, held)
            if steps.error is not None:
                raise steps.error
            if heads is None:  # another rank has failed
                return Written(0, 0, [])
            targets = [
                (os.path.join(self.options.path, self._names[int(number)]), int(number), int(length), head)
                for number, length, head in zip(heads[::3], heads[1::3], heads[2::3], strict=True)
            ]
            files = _C.OrderedWriter(targets, held.box_table(self._own), len(self._names), self._for_engine())
            self._writer = files
            if self._cancelled:
                files.cancel()
            if self._rounds is not None:
                threads, rounds = threads_of(self.options.thread_count), self._rounds
                complete = rounds.run(held, threads, self.write)
                self._rounds = None
                if not complete:
                    self._close()
                    return Written(0, 0, [])
            self.blocks = files.finish()
        self._close()
        self._done_bytes = files.progress()
        return Written(self._done_bytes, files.file_bytes(), [files.stats()])

    def sum(self, held: _C.HeldRows) -> bytes:
        """Returns this rank's contribution to the checksums of the files."""
        return _C.checksums_of_boxes(held.box_table(self._boxes), len(self._names), self._for_engine())

    def write(self, boxes: bytes) -> None:
        """Writes the boxes that this rank received in one round, and its own boxes that precede them."""
        assert self._writer is not None
        self._writer.write(boxes)

    def _agree_on_heads(self, steps: Steps, held: _C.HeldRows) -> list[bytes] | None:
        """Collective. Returns number, length and head of each file that this rank writes; None on all ranks if any rank
        has an error."""
        self._steps = None
        of_all = steps.gather(lambda: pack(self.sum(held)), "write together: checksums")
        heads = None if of_all is None else steps.take(self._make_heads, [unpack(of_rank)[0] for of_rank in of_all])
        heads = heads or [b""] * steps.exchange.size
        packed = steps.exchange.scatter(heads, steps.phase("write together: heads"))
        if not packed:
            self._rounds = None  # no rank runs them
        return unpack(packed) if packed else None

    def _make_heads(self, blocks: list[bytes]) -> list[bytes]:
        """Returns, per rank, number, length and head of each file that it writes. `blocks`: each rank's
        contribution."""
        assert self._layout is not None
        lengths, self._file_heads = self._layout.file_bytes, self.heads(blocks)
        of_all: list[list[bytes]] = [[] for _ in blocks]
        for number, writer in enumerate(writers_of(lengths, len(blocks))):
            of_all[writer] += [str(number).encode(), str(lengths[number]).encode(), self._file_heads[number]]
        return [pack(*of_rank) for of_rank in of_all]

    def discard(self, error: BaseException | None = None) -> None:
        """Aborts uploads, and removes this rank's objects: after its error, no rank commits."""
        begun = self._writer.begun() if isinstance(self._writer, _C.OrderedWriter) else []
        self._close()
        if (steps := self._steps) is not None and isinstance(error, Exception):  # other ranks wait for its checksums
            steps.error = error
            self._agree_on_heads(steps, _C.HeldRows(b"", b""))
        self._give_up(error)
        self._remove([self._names[number] for number in begun])

    def _close(self) -> None:
        self._writer = None  # an unfinished upload is aborted
        self._tables.clear()

    def _remove(self, names: list[str]) -> None:
        with contextlib.suppress(OSError, CheckpointError):  # what remains is an orphan, for `repair` to find
            for name in names:
                storage_at(self.options.path).remove(name)

    # --- The commit

    def commit(self, *content: bytes) -> None:
        assert self._layout is not None
        path = self.options.path
        self._may_be_committed = True
        with named_system_errors(path):
            try:
                commit_objects(path, self._names, self._layout.index(self._names), self.options.overwrite)
            except (FileExistsError, CheckpointError):  # certainly not committed
                self._may_be_committed = False
                raise

    def end(self) -> None:
        """Aborts incomplete uploads. The coordinator removes the objects if they were not committed."""
        self._close()
        if self._file_heads and not self._may_be_committed:
            self._remove(self._names)
        self._file_heads, self._layout = [], None
