"""`StreamedWrite` lets all ranks put files of an object store together, each in the windows of one rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from .._engine.rows import words
from .._plan.save_plan import JoinedRanges
from .._ranks.connections import Connections
from .._ranks.exchange import Exchange
from .._ranks.message import pack, unpack
from .._routes.node_buffer import NodeBuffer
from .joined_write import JoinedWrite

if TYPE_CHECKING:
    from .store_layout import StoreLayout

_FINE, _FAILED = b"\1", b"\0"


class StreamedWrite(JoinedWrite):
    """The rounds of a save into an object store. Before them the ranks learn what the files begin with.

    Ranks of a node copy their bytes into the windows of its writers. For a writer of another node a rank copies them
    into a window of zeros, and sends it: the writer's own window has zeros there, and takes the exclusive or. A rank
    sends one message at a time, and receives one.
    """

    def __init__(
        self, exchange: Exchange, doing: str, joined: JoinedRanges, memory: NodeBuffer, save: StoreLayout
    ) -> None:
        super().__init__(exchange, doing, joined, memory)
        self._save = save
        self._far: dict[int, list[tuple[int, int]]] = {}  # by round: sender, writer
        table = words(joined.messages).tolist()
        for number, sender, writer in zip(table[::3], table[1::3], table[2::3], strict=True):
            self._far.setdefault(number, []).append((sender, writer))

    def _run(self, pool: ThreadPoolExecutor) -> None:
        if self._agree_on_heads():
            super()._run(pool)

    def _agree_on_heads(self) -> bool:
        """False if a rank has failed."""
        exchange, save = self._exchange, self._save
        message = pack(_FAILED)
        if self._error is None and self._files is not None:
            try:
                message = pack(_FINE, save.sum())
            except BaseException as error:
                self._error = error
        of_all = exchange.gather(message, f"{self._phase}: checksums")
        heads: list[bytes] | None = None
        if of_all is not None:
            heads = [b""] * exchange.size
            parts = [unpack(of_rank) for of_rank in of_all]
            if all(said == _FINE for said, *_ in parts):
                try:
                    heads = save.make_heads([blocks for _, blocks in parts])
                except BaseException as error:
                    self._error = error
        packed = exchange.scatter(heads, f"{self._phase}: heads")
        if packed:
            save.take_heads(packed)
        return bool(packed)

    def _windows(self, number: int) -> list[int]:
        """Addresses by rank; 0 for those of other nodes."""
        windows = [0] * self._exchange.size
        for rank in self._joined.ranks:
            windows[rank] = self._window(rank, number)
        return windows

    def _meet(self, peers: Connections, number: int) -> None:
        super()._meet(peers, number)
        me, size = self._exchange.rank, self._exchange.size
        messages = self._far.get(number, ())
        sends = {(writer - me) % size: writer for sender, writer in messages if sender == me}
        receives = {(me - sender) % size: sender for sender, writer in messages if writer == me}
        # In this order no ranks wait for each other in a circle.
        for step in sorted(sends.keys() | receives.keys()):
            received = None
            if step in receives:
                received = torch.empty(self._save.window_bytes(me, number), dtype=torch.uint8, device="cpu")
                peers.receive(receives[step], received, receipt=True)
            if step in sends:
                writer = sends[step]
                sent = torch.zeros(self._save.window_bytes(writer, number), dtype=torch.uint8, device="cpu")
                windows = [0] * size
                windows[writer] = sent.data_ptr()
                self._fill_windows(number, windows)
                peers.send(writer, sent, receipt=True)
            peers.wait()
            if received is not None:
                self._memory[number][: len(received)].bitwise_xor_(received)

    def _send(self, number: int) -> None:
        super()._send(number)
        if self._far:
            self._memory[number].zero_()  # for the round after the next
