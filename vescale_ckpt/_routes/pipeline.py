"""Runs one rank's rounds as a pipeline of three stages: fill buffers, exchange them with other ranks, empty them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

from .._observe.timeline import phase
from .._ranks.connections import Connections
from .._ranks.exchange import Exchange
from ..errors import CheckpointError
from .routes import Round, Routes

# Rounds between the checks in which all ranks agree whether one has failed. Until the next check, a failed rank keeps
# sending its messages.
ROUNDS_BETWEEN_CHECKS = 16


#: exchanges the buffers of a round with other ranks; may return an error to be raised later
Swap = Callable[[Connections, int, Round], CheckpointError | None]


class Buffers:
    """The memory of the rounds. Where no other process sees it, there is nothing to open, close or tell."""

    sends_by_exchange = False  #: whether messages are sent by the exchange, not by the devices

    def open_neighbours(self, peers: Connections, near: Iterable[int]) -> CheckpointError | None:
        """Maps the buffers of the neighbours `near`, which do the same within the same collective. Returns an error
        instead of raising it."""
        return None

    def close(self) -> None:
        """From now on no other process can open the memory. Mappings stay."""

    def acknowledge(self, peers: Connections, index: int, round_: Round) -> None:
        """Notifies the neighbours that this rank has emptied its buffer of a round, or finished reading theirs. Waits
        until the ranks that `round_` sends to have done the same and the messages of this rank have arrived."""

    def leave(self) -> None:
        """Notifies the neighbours that this rank drops out after an error, so that they do not wait for it."""

    def release(self) -> None:
        """Gives the memory back."""


class Pipeline:
    """The rounds of one load or export. At any time, one round is filled, one is exchanged, and one is emptied.

    `fill` and `empty` run on threads, one round after another. Errors are sticky; after one, only messages are still
    sent, because other ranks wait for them.
    """

    def __init__(self, exchange: Exchange, phase: str, routes: Routes, memory: Buffers) -> None:
        self.error: BaseException | None = None
        self._exchange = exchange
        self._phase = phase
        self._routes = routes
        self._memory = memory

    def run(
        self,
        fill: Callable[[int], None],
        swap: Swap,
        empty: Callable[[int], None],
        *,
        fills_others: bool = False,
    ) -> bool:
        """Runs the rounds. Returns True if all are done, False if a rank has failed. `fills_others`: whether `fill`
        writes to the buffers of neighbours."""
        name = "vescale_ckpt"
        with ThreadPoolExecutor(1, name) as filling, ThreadPoolExecutor(1, name) as emptying:

            def submit(pool: ThreadPoolExecutor, step: Callable[[int], None], index: int) -> Future[None]:
                return pool.submit(self._guarded, step, index)

            rounds = self._routes.rounds
            start, count = 0, len(rounds)
            filled = {0: submit(filling, fill, 0)}
            emptied: dict[int, Future[None]] = {}
            while start < count:
                stop = min(count, start + ROUNDS_BETWEEN_CHECKS)
                with self._peers(start, stop - 1) as peers:
                    for index in range(start, stop):
                        with phase("write" if fills_others else "read"):
                            filled.pop(index).result()
                        emptying_before = emptied.pop(index - 2, None)
                        if emptying_before is not None:  # the next round has the buffers of that one
                            emptying_before.result()
                        peers.progress(2 * index)  # after what this rank does alone: so a slow one is behind the others
                        if emptying_before is not None:
                            shared = rounds[min(index + 1, count - 1) if fills_others else index - 2]
                            self._memory.acknowledge(peers, index - 2, shared)
                        if index + 1 < count:
                            filled[index + 1] = submit(filling, fill, index + 1)
                        self._swap(peers, index, swap)
                        emptied[index] = submit(emptying, empty, index)
                if stop < count and self._exchange.agree([int(self.error is None)], self._phase) != [1]:
                    return False
                start = stop
            return True  # leaving the pools waits for the last rounds

    def _swap(self, peers: Connections, index: int, swap: Swap) -> None:
        peers.progress(2 * index + 1)
        error = swap(peers, index, self._routes.rounds[index])
        self.error = self.error or error

    def _peers(self, first: int, last: int) -> AbstractContextManager[Connections]:
        # The plan's number makes two loads that cross, which is not allowed, fail instead of mixing their bytes.
        of = f"{len(self._routes.rounds)}, plan {self._routes.number:x}"
        whom = self._routes.peers if self._memory.sends_by_exchange else ()
        return self._exchange.peers(f"rounds {first} to {last} of {of}", self._phase, whom)

    def _guarded(self, step: Callable[[int], None], index: int) -> None:
        if self.error is None:
            try:
                step(index)
            except BaseException as error:
                self.error = error
