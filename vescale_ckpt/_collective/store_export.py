"""`CollectiveStoreExport` saves safetensors files to an object store with all ranks, each file by one of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from .._engine import _C
from .._engine.rows import words
from .._plan.save_plan import JoinedRanges
from .._ranks.connections import Connections
from .._ranks.exchange import Exchange
from .._ranks.message import pack, unpack
from .._share.node_buffer import NodeBuffer
from .._write.store_export import StoreExport
from ..errors import CheckpointError
from .export_save import CollectiveExport
from .joined_write import WINDOW_BYTES, JoinedWrite

_FINE, _FAILED = b"\1", b"\0"


class CollectiveStoreExport(CollectiveExport):
    """A `CollectiveExport` into an object store."""

    _kind = StoreExport
    _save: StoreExport

    def _choose_ranges(self, made: _C.ExportLayout, nodes: list[int]) -> None:
        made.stream(nodes, WINDOW_BYTES)

    def _messages(self, made: _C.ExportLayout, rank: int) -> bytes:
        return made.messages(rank)

    def _share_memory(self, joined: JoinedRanges) -> None:
        """Raises on all ranks if one has an error, or cannot share memory."""
        steps, doing = self.steps, self.steps.phase("write together")
        if self.staged_plan is None and self._items is not None and not self._items.description.all_ready:
            self.stage(None)  # until a tensor is sent it must be in host memory
        memory, error = JoinedWrite.share_memory(self.exchange, doing, joined, steps.error is None)
        steps.error = steps.error or error
        steps.raise_together("write together")
        if memory is None:
            raise CheckpointError(f"{doing}: the ranks share no memory", path=self.path)
        self._rounds = StreamedWrite(self.exchange, doing, joined, memory, self._save)
        self._save.join(joined, WINDOW_BYTES, self._rounds.run)


class StreamedWrite(JoinedWrite):
    """The rounds of a save into an object store. Before them the ranks learn what the files begin with.

    Ranks of a node copy their bytes into the windows of its writers. For a writer of another node a rank copies them
    into a window of zeros, and sends it: the writer's own window has zeros there, and takes the exclusive or. A rank
    sends one message at a time, and receives one.
    """

    def __init__(
        self, exchange: Exchange, doing: str, joined: JoinedRanges, memory: NodeBuffer, save: StoreExport
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
        near = self._joined.ranks
        return [self._window(rank, number) if rank in near else 0 for rank in range(self._exchange.size)]

    def _meet(self, peers: Connections, number: int) -> None:
        super()._meet(peers, number)
        me, size = self._exchange.rank, self._exchange.size
        sends = {writer for sender, writer in self._far.get(number, ()) if sender == me}
        receives = {sender for sender, writer in self._far.get(number, ()) if writer == me}
        for step in range(1, size if sends or receives else 1):  # in the same order on all ranks
            to, source = (me + step) % size, (me - step) % size
            received = sent = None
            if source in receives:
                received = torch.empty(self._save.window_bytes(me, number), dtype=torch.uint8)
                peers.receive(source, received)
            if to in sends:
                sent = torch.zeros(self._save.window_bytes(to, number), dtype=torch.uint8)
                self._fill_windows(number, [sent.data_ptr() if rank == to else 0 for rank in range(size)])
                peers.send(to, sent)
            peers.wait()
            if received is not None:
                self._memory[number][: len(received)].bitwise_xor_(received)

    def _send(self, number: int) -> None:
        super()._send(number)
        if self._far:
            self._memory[number].zero_()  # for the round after the next
