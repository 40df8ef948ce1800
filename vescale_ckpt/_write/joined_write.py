"""`JoinedWrite` lets the ranks of a node put short runs of tensors together in memory that they share, so that each
block of a file has one writer."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from .._observe.timeline import phase
from .._plan.save_plan import JoinedRanges
from .._ranks.connections import Connections, tensor_over
from .._ranks.exchange import Exchange
from .._routes.node_buffer import NodeBuffer, open_on_all
from .._routes.rounds import ROUNDS_BETWEEN_CHECKS

logger = logging.getLogger(__name__)

WINDOW_BYTES = 8 << 20  #: what a rank writes in one round, at most; it has two windows
LEAST_BYTES = 1 << 20  #: of a node, below which nothing is put together
_FINE, _FAILED = 0, 1
_KEPT = "windows"  # of an exchange


class _Files(Protocol):
    """What takes part with this rank's bytes: `_C.SharedWriter`, for instance. Windows are given by address."""

    def fill(self, round: int, windows: list[int], /) -> None:
        """Copies this rank's bytes of the round into the windows of all writers."""

    def send(self, round: int, window: int, /) -> None:
        """Writes this rank's window."""


def _sizes() -> list[int]:
    return [WINDOW_BYTES, WINDOW_BYTES]


def _near(exchange: Exchange, joined: JoinedRanges) -> list[int]:
    return [rank for rank in joined.ranks if rank != exchange.rank]


class JoinedWrite:
    """The rounds of one save. All ranks take each round, or none. `begin` makes it.

    In a round each rank copies its bytes into the windows of all writers of its node. When all ranks of the node have,
    each writes its own window, while the next round is copied into the other windows.
    """

    def __init__(
        self, exchange: Exchange, doing: str, joined: JoinedRanges, memory: NodeBuffer, keeps: bool = False
    ) -> None:
        """`keeps`: the memory is for the next save, too."""
        self._exchange = exchange
        self._phase = doing
        self._joined = joined
        self._memory = memory
        self._keeps = keeps
        self._files: _Files | None = None
        self._error: BaseException | None = None
        self._node_is_fine = True
        self._ran = False

    @classmethod
    def begin(cls, exchange: Exchange, doing: str, joined: JoinedRanges, ready: bool) -> JoinedWrite | None:
        """Shares memory with the other ranks of the node. `ready`: whether this rank can take part. None on all ranks
        if one cannot: then each rank writes its own bytes."""
        memory, error = cls._kept_memory(exchange, doing, joined, ready), None
        if memory is None:
            memory, error = cls.share_memory(exchange, doing, joined, ready)
        if error is not None:
            logger.warning("%s: each rank writes its own bytes, without the other ranks of its node: %s", doing, error)
        return None if memory is None else cls(exchange, doing, joined, memory, keeps=True)

    @staticmethod
    def share_memory(
        exchange: Exchange, doing: str, joined: JoinedRanges, ready: bool
    ) -> tuple[NodeBuffer | None, Exception | None]:
        """As `open_on_all`."""
        return open_on_all(exchange, doing, lambda: NodeBuffer(_sizes()), _near(exchange, joined), ready)

    @staticmethod
    def _kept_memory(exchange: Exchange, doing: str, joined: JoinedRanges, ready: bool) -> NodeBuffer | None:
        """The memory of an earlier save: all ranks have mapped its pages. None on all ranks unless all have kept it."""
        kept = exchange.kept.pop(_KEPT, None)
        if not (isinstance(kept, NodeBuffer) and kept.is_as(_sizes(), _near(exchange, joined))):
            kept = None
        # All ranks have ended their earlier saves when they agree: nobody looks at the windows any more.
        usable = exchange.agree([int(ready and kept is not None)], f"{doing}: memory of an earlier save") == [1]
        return kept if usable else None

    def run(self, files: _Files) -> None:
        """Takes all rounds. `files` have what this rank contributes. Raises this rank's error only."""
        self._files = files
        self._take_rounds()
        if self._error is not None:
            raise self._error

    def give_up(self, error: BaseException) -> None:
        """Takes the rounds of a rank that has failed before them, or in them. The other ranks wait for its messages."""
        if not self._ran:
            self._error = error
            self._take_rounds()

    def _take_rounds(self) -> None:
        self._ran = True
        try:
            with phase("write", "with the ranks of the node"), ThreadPoolExecutor(1, "vescale_ckpt") as pool:
                self._run(pool)
            if self._keeps and self._error is None:
                self._exchange.kept[_KEPT] = self._memory
        finally:
            self._files = None
            if self._exchange.kept.get(_KEPT) is not self._memory:
                self._memory.release()

    def _run(self, pool: ThreadPoolExecutor) -> None:
        count = self._joined.rounds
        self._fill(0)
        for first in range(0, count, ROUNDS_BETWEEN_CHECKS):
            rounds = range(first, min(count, first + ROUNDS_BETWEEN_CHECKS))
            if self._exchange.size == 1:
                self._take(rounds, pool, None)
                continue
            with self._exchange.peers(f"rounds {first} to {rounds[-1]} of {count}", self._phase) as peers:
                self._take(rounds, pool, peers)
            if rounds.stop < count and self._exchange.agree([int(self._error is None)], self._phase) != [1]:
                return

    def _take(self, rounds: range, pool: ThreadPoolExecutor, peers: Connections | None) -> None:
        for number in rounds:
            if peers is not None:
                peers.progress(number)
                # All ranks of the node have filled the windows of this round, and sent those of the last one.
                self._meet(peers, number)
            filled = pool.submit(self._fill, number + 1) if number + 1 < self._joined.rounds else None
            self._send(number)
            if filled is not None:
                filled.result()

    def _meet(self, peers: Connections, number: int) -> None:
        """Waits for the other ranks of the node. Learns whether one has failed."""
        others = _near(self._exchange, self._joined)
        said = tensor_over(bytearray([_FINE if self._error is None else _FAILED]))
        received = [bytearray(1) for _ in others]
        for peer, word in zip(others, received, strict=True):
            peers.receive(peer, tensor_over(word))
            peers.send(peer, said)
        peers.wait()
        if any(word[0] != _FINE for word in received):
            self._node_is_fine = False

    def _window(self, rank: int, number: int) -> int:
        memory = self._memory[number] if rank == self._exchange.rank else self._memory.neighbour(rank, number)
        return memory.data_ptr()

    def _windows(self, number: int) -> list[int]:
        """The addresses of the writers' windows in a round."""
        return [self._window(rank, number) for rank in self._joined.ranks]

    def _fill(self, number: int) -> None:
        self._fill_windows(number, self._windows(number))

    def _fill_windows(self, number: int, windows: list[int]) -> None:
        files = self._files
        if self._error is None and self._node_is_fine and files is not None:
            try:
                files.fill(number, windows)
            except BaseException as error:
                self._error = error

    def _send(self, number: int) -> None:
        if self._error is None and self._node_is_fine and self._files is not None:
            try:
                self._files.send(number, self._memory[number].data_ptr())
            except BaseException as error:
                self._error = error
