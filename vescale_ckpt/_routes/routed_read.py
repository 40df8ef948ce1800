"""Runs one rank's rounds of a broadcast load as a pipeline: read, send and receive, copy to targets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from .._checkpoint.record_reader import Record, RecordReader, Target
from .._engine import _C, device_streams, torch_copies
from .._engine.dtype_codes import CODE_DTYPES
from .._engine.engine_errors import named_errors
from .._engine.rows import int_table
from .._plan.read_plan import Reads
from .._ranks.exchange import Exchange
from .._ranks.message import pack, unpack
from .._ranks.nccl import DeviceGroup
from .._state.tensor_table import narrowed
from ..errors import LoadFailedError
from .device_buffer import DeviceBuffer
from .node_buffer import NodeBuffer, open_on_all
from .pipeline import Pipeline
from .routes import Round, Routes

logger = logging.getLogger(__name__)


class FailedElsewhereError(Exception):
    """Another rank has failed, so this rank's load ends early."""


class RoutedRead:
    """One load along `routes`. `own_only`: each rank reads its tensors itself; objects are still read once."""

    def __init__(
        self,
        exchange: Exchange,
        routes: Routes,
        phase: str,
        devices: DeviceGroup | None,
        own_only: bool = False,
    ) -> None:
        self.routes = routes
        self._exchange = exchange
        self._phase = phase
        self._devices = devices
        self._own_only = own_only

    def deliver(self, reader: RecordReader, reads: Reads | None) -> bool:
        """Runs all rounds. `reader`: the reader of this rank's load. `reads`: the reads that its routes were planned
        from (None: nothing).

        Returns True if this rank has received what several ranks need (the rank that read it may still raise an
        error), and False, on all ranks, if each rank must read all that it needs itself. Raises this rank's error, or
        `FailedElsewhereError`.
        """
        if self._own_only or not self.routes.rounds:
            self._exchange.end_device_group(self._phase)
            return not self._own_only
        self._reader, self._reads = reader, reads
        memory = self._take_buffer()
        if memory is None:
            self._exchange.end_device_group(self._phase)
            return False
        self._memory = memory
        pipeline = Pipeline(self._exchange, self._phase, self.routes, memory)
        try:
            is_complete = pipeline.run(self._read, memory.exchange_messages, self._place)
        except BaseException:
            memory.leave()
            raise
        finally:
            memory.release()
        if is_complete:
            self._exchange.end_device_group(self._phase)
        if pipeline.error is not None:
            raise pipeline.error
        if not is_complete:
            raise FailedElsewhereError
        return True

    def objects(self, read: Callable[[list[int]], list[bytes]]) -> dict[int, bytes]:
        """Returns the objects that all ranks need, by row of `Needs.objects`. The coordinator reads them; if it fails,
        all ranks raise."""
        rows, exchange, phase = self.routes.objects, self._exchange, f"{self._phase}: objects"
        if not rows:
            return {}
        data = exchange.together(lambda: pack(*read(rows)) if exchange.is_coordinator else b"", phase, LoadFailedError)
        return dict(zip(rows, unpack(exchange.broadcast(data, phase)), strict=True))

    def _take_buffer(self) -> NodeBuffer | DeviceBuffer | None:
        """Allocates the rounds' memory. None on all ranks unless each has its own and has mapped its neighbours'."""
        devices, sizes = self._devices, self.routes.buffer_bytes

        def make() -> NodeBuffer | DeviceBuffer:
            return NodeBuffer(sizes) if devices is None else DeviceBuffer(sizes, devices)

        memory, error = open_on_all(self._exchange, self._phase, make, self.routes.neighbours)
        if error is not None:
            logger.warning("%s: each rank reads all for itself: %s", self._phase, error)
        return memory

    # --- Steps of a round.

    def _read(self, index: int) -> None:
        round_, memory = self.routes.rounds[index], self._memory[index]
        if len(round_.staged):
            self._read_pieces(round_, memory)
        if len(round_.packs):
            _C.copy_boxes(_C.pack_table(round_.packs, memory.data_ptr(), len(memory)), self._reader.threads)

    def _place(self, index: int) -> None:
        round_ = self.routes.rounds[index]
        if not len(round_.placements):
            return
        assert self._reads is not None
        memories = self._memory.sources(index, round_)
        if isinstance(self._memory, DeviceBuffer):
            with self._memory.placing():
                for placement in self._placements(round_.placements, None, memories):
                    placement.target.copy_(placement.source())
            return
        table = int_table()
        for peer, memory in memories.items():
            table.extend((peer, memory.data_ptr(), len(memory)))
        state, streams = self._reads.state, self._reader.streams
        copies, devices, rest = state.for_engine.place_table(round_.placements, table)
        names, left_out = state.names, set(rest)

        def key_of(index: int) -> str:
            rows = (row for at, row in enumerate(_rows(round_.placements, 5, 4)) if at not in left_out)
            return names[next(islice(rows, index, None))[2]]

        with named_errors(key_of, self._phase):
            _C.copy_boxes(copies, self._reader.threads, devices, device_streams.producers(devices, streams.__getitem__))
        if rest:  # dtypes to convert, and targets that the engine cannot fill
            with device_streams.made_current(streams):  # torch orders its copies, and reuse of memory, by stream
                for placement in self._placements(round_.placements, left_out, memories):
                    torch_copies.copy(placement.target, placement.source())

    def _read_pieces(self, round_: Round, memory: torch.Tensor) -> None:
        assert self._reads is not None
        names = self._reads.state.names
        rows: list[list[int]] = []

        def row_at(index: int) -> list[int]:
            if not rows:  # rarely needed
                rows.extend(_rows(round_.staged, 8, 3))
            return rows[index]

        table = _C.staging_table(round_.staged, memory.data_ptr(), len(memory))
        report = self._reader.read_tensors(table, lambda index: names[row_at(index)[1]])
        self._reader.count(report, for_others=True)
        for index in report["unread"]:
            at, item, file, offset, length, crc, code, ndim = row_at(index)[:8]
            chunk, start, size = _lists(row_at(index)[8:], ndim, 3)
            record = Record(names[item], file, offset, length, crc, CODE_DTYPES[code], chunk)
            piece = _tensor_at(memory, at, record.dtype, size)
            self._reader.fill_from_archive(Target(record, start, piece, piece))

    def _placements(
        self, rows: memoryview, wanted: set[int] | None, buffers: dict[int, torch.Tensor]
    ) -> Iterator[_Placement]:
        """Yields the rows of a table of placements whose indices are in `wanted` (None: all)."""
        assert self._reads is not None
        for index, row in enumerate(_rows(rows, 5, 4)):
            if wanted is not None and index not in wanted:
                continue
            peer, offset, item, dtype, ndim = row[:5]
            size, start, lengths, target = _lists(row[5:], ndim, 4)
            piece = _tensor_at(buffers[peer], offset, CODE_DTYPES[dtype], size)
            yield _Placement(self._reads.target(item, target, lengths).detach(), piece, start, lengths)


class _Placement(NamedTuple):
    """A box of a piece, and the tensor to fill with it."""

    target: torch.Tensor
    piece: torch.Tensor
    start: Sequence[int]
    lengths: Sequence[int]

    def source(self) -> torch.Tensor:
        return narrowed(self.piece, self.start, self.lengths)


def _tensor_at(memory: torch.Tensor, offset: int, dtype: torch.dtype, size: Sequence[int]) -> torch.Tensor:
    size = torch.Size(size)
    return memory[offset : offset + size.numel() * dtype.itemsize].view(dtype).view(size)


def _rows(table: memoryview, head: int, lists: int) -> Iterator[list[int]]:
    """Yields rows of `head` numbers, the last of which is the number of dimensions, and `lists` lists of that
    length."""
    at = 0
    while at < len(table):
        end = at + head + lists * table[at + head - 1]
        yield table[at:end].tolist()
        at = end


def _lists(numbers: Sequence[int], ndim: int, count: int) -> list[Sequence[int]]:
    return [numbers[at * ndim : (at + 1) * ndim] for at in range(count)]
