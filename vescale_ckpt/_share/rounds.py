"""One rank's part in a load in which ranks read for each other: read, send and receive, put in place, all at a time."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from .._engine import _C
from .._engine.dtypes import CODE_DTYPES
from .._engine.rows import int_table
from .._plan.read_plan import PackedReads
from .._ranks.connections import Connections
from .._ranks.exchange import Exchange
from .._ranks.message import pack, unpack
from .._ranks.nccl import DeviceGroup
from .._state.tensor_table import narrowed
from ..errors import LoadFailedError
from .device_buffer import DeviceBuffer
from .node_buffer import NodeBuffer
from .routes import BUFFERS, Round, Routes

logger = logging.getLogger(__name__)

# A rank that failed goes on to send what others wait for, until all look up to see whether somebody has.
_ROUNDS_BETWEEN_LOOKS = 16


class PieceReader(Protocol):
    """Reads what this rank sends to others, or puts in place from the memory of a round."""

    @property
    def threads(self) -> int:
        """Of the engine."""

    def read_pieces(self, table: bytes, key_of: Callable[[int], str]) -> list[int]:
        """Fills what the engine's table says; which of its rows hold no plain tensors and were left unread. `key_of`
        names a row in errors."""

    def read_piece_from_archive(
        self, key: str, record: Sequence[int], sizes: Sequence[int], start: Sequence[int], piece: torch.Tensor
    ) -> None:
        """Fills `piece` with what starts at `start` in a chunk of `sizes`; `record`: file, offset, length, CRC-32 and
        dtype code of one that was left unread."""


class Outcome(enum.Enum):
    """What came of it, the same on all ranks that have no error of their own."""

    delivered = enum.auto()  #: what several ranks need is in place, unless one that had to read it has an error to tell
    stood_down = enum.auto()  #: each rank reads all by itself
    failed_elsewhere = enum.auto()  #: another rank has an error to tell


class RoutedRead:
    """For one load. `own_only`: each rank reads its tensors by itself; objects are read once."""

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
        self._error: BaseException | None = None

    def deliver(self, reader: PieceReader, reads: PackedReads | None) -> Outcome:
        """Takes all rounds; `reads` are what the routes were made from, None if nothing. Raises this rank's error."""
        if self._own_only:
            return Outcome.stood_down
        rounds = self.routes.rounds
        if not rounds:
            return Outcome.delivered
        self._reader, self._reads = reader, reads
        sizes = [max((of.memory_bytes for of in rounds[first::BUFFERS]), default=0) for first in range(BUFFERS)]
        memory = self._meet(sizes)
        if memory is None:
            return Outcome.stood_down
        self._memory = memory
        try:
            with ThreadPoolExecutor(2, thread_name_prefix="vescale_ckpt") as pool:
                outcome = self._run(pool, len(rounds))
        finally:
            memory.let_go()
        if self._error is not None:
            raise self._error
        return outcome

    def objects(self, read: Callable[[list[int]], list[bytes]]) -> dict[int, bytes]:
        """By row of `Reads.objects`: what all ranks want, which the coordinator reads. Raises on all if it cannot."""
        rows, exchange, phase = self.routes.objects, self._exchange, f"{self._phase}: objects"
        if not rows:
            return {}
        data = exchange.together(lambda: pack(*read(rows)) if exchange.is_coordinator else b"", phase, LoadFailedError)
        return dict(zip(rows, unpack(exchange.broadcast(data, phase)), strict=True))

    def _meet(self, sizes: list[int]) -> NodeBuffer | DeviceBuffer | None:
        """Memory for the rounds; None if not all ranks have it, and see what they have to see of each other's."""
        memory, error = None, None
        try:
            memory = NodeBuffer(sizes) if self._devices is None else DeviceBuffer(sizes, self._devices)
        except Exception as raised:
            error = raised
        if self._exchange.agree([int(memory is not None)], f"{self._phase}: take memory") == [1]:
            assert memory is not None
            near = {peer for of in self.routes.rounds for table in (of.sends, of.receives) for peer in of.near(table)}
            with self._exchange.peers("meet", self._phase) as peers:
                error = memory.meet(peers, near)
            if self._exchange.agree([int(error is None)], self._phase) == [1]:
                memory.close()
                return memory
        if error is not None:
            logger.warning("%s: each rank reads all for itself: %s", self._phase, error)
        if memory is not None:
            memory.close()
            memory.let_go()
        return None

    def _run(self, pool: ThreadPoolExecutor, count: int) -> Outcome:
        start = 0
        read = {0: pool.submit(self._read, 0)}
        placed: dict[int, Future[None]] = {}
        while start < count:
            stop = min(count, start + _ROUNDS_BETWEEN_LOOKS)
            with self._peers(start, stop - 1) as peers:
                for number in range(start, stop):
                    read.pop(number).result()
                    peers.progress(2 * number)
                    if number - 2 in placed:  # out of the memories that the next round is read into
                        placed.pop(number - 2).result()
                        self._memory.give_back(peers, self.routes.rounds[number - 2])
                    if number + 1 < count:
                        read[number + 1] = pool.submit(self._read, number + 1)
                    self._send(peers, number)
                    placed[number] = pool.submit(self._place, number)
            if stop < count and self._exchange.agree([int(self._error is None)], self._phase) != [1]:
                return Outcome.failed_elsewhere
            start = stop
        return Outcome.delivered  # the pool's end waits for the last that are put in place

    def _peers(self, first: int, last: int) -> AbstractContextManager[Connections]:
        # The plan's number: if two loads cross, against the rules, one must not be filled with the other's bytes.
        of = f"{len(self.routes.rounds)}, plan {self.routes.number:x}"
        return self._exchange.peers(f"rounds {first} to {last} of {of}", self._phase)

    # --- Steps of a round. An error is kept, and what comes after it left out, but for messages that others wait for.

    def _read(self, number: int) -> None:
        def read() -> None:
            of, memory = self.routes.rounds[number], self._memory[number]
            if len(of.staged):
                self._read_pieces(of, memory)
            if len(of.packs):
                _C.copy_boxes(_C.pack_table(of.packs, memory.data_ptr(), len(memory)), self._reader.threads)

        self._guarded(read)

    def _send(self, peers: Connections, number: int) -> None:
        peers.progress(2 * number + 1)
        error = self._memory.swap(peers, number, self.routes.rounds[number])
        self._error = self._error or error

    def _place(self, number: int) -> None:
        def place() -> None:
            of = self.routes.rounds[number]
            if not len(of.places):
                return
            assert self._reads is not None
            memories = self._memory.swapped(number, of)
            if isinstance(self._memory, DeviceBuffer):
                with self._memory.placing():
                    self._copy_by_torch(of.places, None, memories)
                return
            table = int_table()
            for peer, memory in memories.items():
                table.extend((peer, memory.data_ptr(), len(memory)))
            state = self._reads.description
            copies, rest = _C.place_table(state.inventory, of.places, state.sources, state.table, state.ready, table)
            _C.copy_boxes(copies, self._reader.threads)
            if rest:
                self._copy_by_torch(of.places, set(rest), memories)

        self._guarded(place)

    def _guarded(self, step: Callable[[], None]) -> None:
        if self._error is None:
            try:
                step()
            except BaseException as error:
                self._error = error

    def _read_pieces(self, of: Round, memory: torch.Tensor) -> None:
        assert self._reads is not None
        names = self._reads.description.names
        rows: list[list[int]] = []

        def row_at(number: int) -> list[int]:
            if not rows:  # hardly ever asked for
                rows.extend(_rows(of.staged, 8, 3))
            return rows[number]

        table = _C.staging_table(of.staged, memory.data_ptr(), len(memory))
        for number in self._reader.read_pieces(table, lambda number: names[row_at(number)[1]]):
            offset, item, *record, ndim = row_at(number)[:8]
            chunk, start, size = _lists(row_at(number)[8:], ndim, 3)
            piece = _tensor_at(memory, offset, CODE_DTYPES[record[4]], size)
            self._reader.read_piece_from_archive(names[item], record, chunk, start, piece)

    def _copy_by_torch(self, places: memoryview, wanted: set[int] | None, memories: dict[int, torch.Tensor]) -> None:
        """To tensors on other devices, or of another dtype than the stored one. `wanted`: which rows, None: all."""
        assert self._reads is not None
        for number, row in enumerate(_rows(places, 5, 4)):
            if wanted is not None and number not in wanted:
                continue
            peer, offset, item, dtype, ndim = row[:5]
            size, start, lengths, target = _lists(row[5:], ndim, 4)
            source = narrowed(_tensor_at(memories[peer], offset, CODE_DTYPES[dtype], size), start, lengths)
            self._reads.target(item, target, lengths).detach().copy_(source)


def _tensor_at(memory: torch.Tensor, offset: int, dtype: torch.dtype, size: Sequence[int]) -> torch.Tensor:
    size = torch.Size(size)
    return memory[offset : offset + size.numel() * dtype.itemsize].view(dtype).view(size)


def _rows(table: memoryview, head: int, lists: int) -> Iterator[list[int]]:
    """Rows of `head` numbers, the last of which counts dimensions, and so many lists of a number a dimension."""
    at = 0
    while at < len(table):
        end = at + head + lists * table[at + head - 1]
        yield table[at:end].tolist()
        at = end


def _lists(numbers: Sequence[int], ndim: int, count: int) -> list[Sequence[int]]:
    return [numbers[at * ndim : (at + 1) * ndim] for at in range(count)]
