"""`RoutedWrite` sends the bytes of an export to the ranks that write them: a broadcast load in reverse."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence

from .._engine import _C
from .._engine.rows import int_table
from .._observe.timeline import phase
from .._ranks.exchange import Exchange
from .node_buffer import NodeBuffer, open_on_all
from .pipeline import Pipeline
from .routes import Routes

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20  #: most bytes of a piece, which one rank writes
BUDGET_BYTES = 16 << 20  #: memory of a rank in a round


def plan_writes(
    layout: _C.ExportLayout,
    catalog: _C.Catalog,
    nodes: Sequence[int],
) -> list[bytes]:
    """Returns each rank's packed routes, for `routes_from`. `nodes`: a number per rank, equal for ranks that map each
    other's memory: these exchange bytes, and those that hold a part of a piece write it, evenly."""
    held, straight = layout.held(catalog), layout.straight_bytes()
    planned = _C.plan_writes(held, nodes, straight, PIECE_BYTES, BUDGET_BYTES)
    number = (secrets.randbits(62) | 1).to_bytes(8, "little")
    return [number + packed for packed in planned]


def routes_from(packed: bytes) -> Routes:
    """Unpacks one rank's result of `plan_writes`."""
    return Routes(int.from_bytes(packed[:8], "little"), [packed[8:]])


class RoutedWrite:
    """The rounds of one export. Each round is collective. Created by `begin`."""

    def __init__(self, exchange: Exchange, phase: str, routes: Routes, memory: NodeBuffer) -> None:
        self.routes = routes
        self._memory = memory
        self._pipeline = Pipeline(exchange, phase, routes, memory)
        self._ran = False

    @classmethod
    def begin(
        cls, exchange: Exchange, phase: str, routes: Routes, ready: bool
    ) -> tuple[RoutedWrite | None, Exception | None]:
        """Takes memory for the rounds. `ready`: whether this rank can take part. None on all ranks unless all have it
        and have mapped their neighbours'; and the error of this rank, if it has one."""
        memory, error = open_on_all(exchange, phase, lambda: NodeBuffer(routes.buffer_bytes), routes.neighbours, ready)
        return (None if memory is None else cls(exchange, phase, routes, memory)), error

    def run(self, held: _C.HeldRows, threads: int, write: Callable[[bytes], object]) -> None:
        """Runs all rounds. `held`: the host addresses of this rank's tensors. `write` receives the boxes in memory that
        this rank writes, in file order. Raises only this rank's error."""

        def fill(index: int) -> None:
            round_, table = self.routes.rounds[index], int_table()
            for peer, memory in self._memory.targets(index, round_).items():
                table.extend((peer, memory.data_ptr(), len(memory)))
            _C.gather_boxes(held.gather_table(round_.placements, table), threads)

        def empty(index: int) -> None:
            round_, memory = self.routes.rounds[index], self._memory[index]
            if len(round_.staged):
                write(_C.staging_table(round_.staged, memory.data_ptr(), len(memory)))

        self._take_rounds(fill, empty)
        if self._pipeline.error is not None:
            raise self._pipeline.error

    def give_up(self, error: BaseException) -> None:
        """Takes the rounds of a rank that has failed before them, or in them. The other ranks wait for its messages."""
        if not self._ran:
            self._pipeline.error = error
            self._take_rounds(lambda index: None, lambda index: None)

    def _take_rounds(self, fill: Callable[[int], None], empty: Callable[[int], None]) -> None:
        self._ran = True
        try:
            with phase("write", "with other ranks"):
                self._pipeline.run(fill, self._memory.meet_neighbours, empty, fills_others=True)
        except BaseException:
            self._memory.leave()
            raise
        finally:
            self._memory.release()
