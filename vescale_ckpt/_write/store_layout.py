"""`StoreLayout` puts the safetensors files of a model into an object store.

A store takes an object in order, and a file begins with the checksums of its tensors. So each file has one rank as its
writer, which gets the file's bytes from all ranks in rounds, a window at a time. The ranks take the checksums of their
tensors before the rounds, and the writers take them again from the windows: the two must be equal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._checkpoint.safetensors.commit import check_replaceable, commit_objects, holds_model
from .._checkpoint.safetensors.model_names import holds_export, object_names
from .._engine import _C
from .._engine.engine_errors import named_errors, named_system_errors
from .._engine.options import engine_options
from .._engine.rows import int_table, words
from .._observe.timeline import phase
from .._plan.save_plan import GlobalSavePlan
from .._ranks.message import pack, unpack
from .._ranks.node import memory_domain
from .._ranks.steps import Steps
from .._storage.open_storage import storage_at
from .._storage.pending import new_token
from ..errors import CheckpointError
from .joined_write import WINDOW_BYTES, JoinedWrite
from .layout import SaveOptions, Written
from .safetensors_layout import Safetensors, SafetensorsLayout
from .streamed_write import StreamedWrite

_RANGE_WORDS = 6  # file, begin, end, writer, round, offset in the writer's window


@dataclass
class _Object:
    """A file that this rank writes."""

    url: str
    length: int
    head: bytes
    file: _C.FileWriter | None = None  # while it is written


class StoreLayout(SafetensorsLayout):
    """The files of one model in an object store. `finish` takes the rounds of a `StreamedWrite`.

    These are `sum` on each rank, `make_heads` on the coordinator, `take_heads` on each rank, and for each round `fill`
    and `send`.
    """

    reads_in_finish = True

    def __init__(self, options: SaveOptions, wanted: Safetensors) -> None:
        super().__init__(options, wanted)
        self._names: list[str] = []
        self._writers: dict[int, int] = {}  # of all files, by number: ranks
        self._window_bytes: dict[tuple[int, int], int] = {}  # by writer and round
        self._ranges_of_round: dict[int, list[tuple[int, int, int, int]]] = {}  # of this rank: file, begin, end, place
        self._file_heads: list[bytes] = []  # of all files, on the coordinator
        self._objects: dict[int, _Object] = {}  # that this rank writes, by number
        self._begun: list[str] = []  # names of objects that this rank has sent bytes of
        self._sent_bytes = self._tensor_bytes = 0
        self._stats_of_objects: list[dict[str, int]] = []
        self._in_background = self._cancelled = self._may_be_committed = False

    @property
    def _kept_by(self) -> tuple[Any, ...]:
        return *super()._kept_by, "in order", memory_domain()

    def begin(self, is_coordinator: bool) -> None:
        path = self.options.path
        if not self.options.overwrite and holds_export(path):
            raise holds_model(path)

    # --- The files of all ranks

    def _choose_ranges(self, made: _C.ExportLayout, nodes: list[int]) -> None:
        try:
            made.stream(nodes, WINDOW_BYTES)
        except _C.EngineError as error:
            raise CheckpointError(
                f"{self.options.path}: {error}. Save with format='dcp' and convert (vescale_ckpt.convert, also from "
                "the store to the store)",
                path=self.options.path,
            ) from None

    def _packed_ranges(self, made: _C.ExportLayout, rank: int) -> bytes:
        return int_table(made.file_bytes).tobytes()  # all ranges are the same for all ranks, and may be many

    def _unpacked_ranges(self, ranges: bytes, size: int) -> bytes:
        return _C.stream_ranges(ranges, size, WINDOW_BYTES)

    def _messages(self, made: _C.ExportLayout, rank: int) -> bytes:
        return made.messages(rank)

    def _make_files(self, made: _C.ExportLayout) -> str:
        """Only chooses names: objects appear when they are complete. Returns the token in the names."""
        if not self.options.overwrite:
            storage_at(self.options.path).check_exclusive_commits()
        with named_system_errors(self.options.path):
            check_replaceable(self.options.path)
        self._layout = made
        return new_token()

    def _write_to(self, count: int, token: str, table: bytes) -> None:
        self._names = object_names(count, token)
        self._paths = [os.path.join(self.options.path, name) for name in self._names]
        self._targets = table

    def join_ranks(self, steps: Steps, in_one_table: bool) -> None:
        """Raises on all ranks if one has an error, or cannot share memory. The ranges are all of each file."""
        if (joined := self._ranges) is None:
            return
        doing = steps.phase("write together")
        with phase("write", "share memory"):
            memory, error = JoinedWrite.share_memory(steps.exchange, doing, joined, steps.error is None)
            steps.error = steps.error or error
            steps.raise_together("write together")
        if memory is None:
            raise CheckpointError(f"{doing}: the ranks share no memory", path=self.options.path)
        self._rounds = StreamedWrite(steps.exchange, doing, joined, memory, self)
        table = words(joined.ranges)
        for at in range(0, len(table), _RANGE_WORDS):
            file, begin, end, writer, number, place = table[at : at + _RANGE_WORDS].tolist()
            self._writers[file] = writer
            self._window_bytes[writer, number] = place + end - begin
            if writer == self.options.rank:
                self._ranges_of_round.setdefault(number, []).append((file, begin, end, place))

    def contents(self, planned: GlobalSavePlan, messages: Sequence[bytes], by_node: bool) -> list[tuple[bytes, ...]]:
        contents = super().contents(planned, messages, by_node)
        if [*contents[0]] != self._file_heads:
            path = self.options.path
            raise CheckpointError(f"tensors have changed while they were saved to {path}", path=path)
        return contents

    # --- This rank's tensors

    def open(self, body_bytes: Any, part: int | None = None, *, in_background: bool = False) -> None:
        self._in_background = in_background
        with named_errors(str, self.options.path):
            self._files = _C.SharedWriter(self._paths, self._targets, self._for_engine())
            if self._rounds is not None and self._ranges is not None:
                joined = self._ranges
                self._files.join(joined.ranges, self.options.rank, WINDOW_BYTES, joined.first_target)

    def _for_engine(self) -> _C.Options:
        return engine_options(self.options.thread_count, self.options.direct_io, self._in_background)

    def write_table(self, table: Any, key_of: Callable[[int], str], rows: Sequence[int]) -> None:
        """Only notes where the tensors are."""
        if self._rounds is None:
            raise CheckpointError(
                f"{self.options.path}: safetensors files of an object store are written from host memory, and "
                "snapshots have no room for all that this rank holds. Let them take more "
                "(VESCALE_CKPT_SNAPSHOT_BYTES), or save with format='dcp' and convert (vescale_ckpt.convert, also from "
                "the store to the store)",
                path=self.options.path,
            )
        assert self._files is not None
        with named_errors(key_of, self.options.path):
            self._files.write(table, int_table(rows))

    def finish(self) -> Written:
        if self._files is None:  # this rank has no tensors, but may be a writer
            self.open(b"")
        assert self._files is not None and self._rounds is not None
        rounds, self._rounds = self._rounds, None
        rounds.run(self)
        with named_errors(str, self.options.path):
            self._blocks = self._files.finish(self.options.sync_files)
        self._close()
        return Written(self._tensor_bytes, self._sent_bytes, self._stats_of_objects)

    # --- The rounds

    def sum(self) -> bytes:
        """What this rank's tensors contribute to the checksums of the files."""
        assert self._files is not None
        with named_errors(str, self.options.path):
            return self._files.sum()

    def make_heads(self, blocks: list[bytes]) -> list[bytes]:
        """For each rank what `take_heads` takes. `blocks`: those of each rank."""
        assert self._layout is not None
        self._file_heads = self._heads(blocks)
        of_all: list[list[bytes]] = [[] for _ in blocks]
        for number, (length, head) in enumerate(zip(self._layout.file_bytes, self._file_heads, strict=True)):
            of_all[self._writers[number]] += [str(number).encode(), str(length).encode(), head]
        return [pack(*of_rank) for of_rank in of_all]

    def take_heads(self, packed: bytes) -> None:
        """Takes what the files begin with that this rank writes."""
        parts = unpack(packed)
        for number, length, head in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            self._objects[int(number)] = _Object(self._paths[int(number)], int(length), head)

    def window_bytes(self, writer: int, number: int) -> int:
        """How much of the writer's window a round uses."""
        return self._window_bytes[writer, number]

    def fill(self, number: int, windows: list[int]) -> None:
        """Copies this rank's bytes of a round into the windows of all writers, given by address; 0: none."""
        assert self._files is not None
        with named_errors(str, self.options.path):
            self._files.fill(number, windows)

    def send(self, number: int, window: int) -> None:
        """Sends the window of this rank in a round. All ranks must have filled it."""
        assert self._files is not None
        ranges = self._ranges_of_round.get(number, ())
        for file, begin, end, place in ranges:
            if head := self._objects[file].head[begin:end]:
                ctypes.memmove(window + place, head, len(head))
        with named_errors(str, self.options.path):
            self._files.sum_window(number, window)
            for file, begin, end, place in ranges:
                one = self._objects[file]
                self._send(one, window + place, begin, min(end, one.length))

    def _send(self, one: _Object, address: int, begin: int, end: int) -> None:
        if self._cancelled:
            raise CheckpointError(f"writing {one.url} was cancelled", path=one.url)
        if one.file is None:
            self._begun.append(os.path.basename(one.url))
            one.file = _C.FileWriter.exactly(one.url, one.length, self._for_engine(), False)
        one.file.write_bytes(address, end - begin, begin)
        self._tensor_bytes += end - min(end, max(begin, len(one.head)))
        if end < one.length:
            return
        with phase("sync", one.url):
            self._sent_bytes += one.file.finish_bytes(b"", True)
        self._stats_of_objects.append(one.file.stats())
        one.file = None

    def progress(self) -> int:
        return self._sent_bytes + sum(
            file.progress() for one in self._objects.values() if (file := one.file) is not None
        )

    def cancel(self) -> None:
        self._cancelled = True
        if (files := self._files) is not None:
            files.cancel()
        for one in self._objects.values():
            if (file := one.file) is not None:
                file.cancel()

    def discard(self, error: BaseException | None = None) -> None:
        """Aborts uploads, and removes the objects of this rank: with its error nobody commits."""
        self._close()
        self._give_up(error)
        self._remove(self._begun)
        self._begun = []

    def _close(self) -> None:
        self._files = None
        for one in self._objects.values():
            one.file = None  # an unfinished upload is aborted

    def _remove(self, names: list[str]) -> None:
        with contextlib.suppress(OSError, CheckpointError):  # what stays is an orphan, which `repair` finds by its age
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
            except (FileExistsError, CheckpointError):  # it is known that this was not
                self._may_be_committed = False
                raise

    def end(self) -> None:
        """Aborts what is not complete. The coordinator removes the objects if they were not committed."""
        self._close()
        if self._file_heads and not self._may_be_committed:
            self._remove(self._names)
        self._file_heads, self._layout = [], None
