"""`CollectiveStoreExport` saves safetensors files to an object store with all ranks, each file by one of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from .._engine import _C
from .._plan.save_plan import JoinedRanges
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

    def _choose_ranges(self, made: _C.ExportLayout, domains: list[bytes]) -> None:
        if len(set(domains)) > 1:
            raise CheckpointError(
                f"{self.path}: ranks of several machines or containers share no memory, in which they could put a "
                "safetensors file of an object store together. Save with format='dcp' and convert "
                "(vescale_ckpt.convert, also from the store to the store)",
                path=self.path,
            )
        made.stream(WINDOW_BYTES)

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
    """The rounds of a save into an object store. Before them the ranks learn what the files begin with."""

    def __init__(
        self, exchange: Exchange, doing: str, joined: JoinedRanges, memory: NodeBuffer, save: StoreExport
    ) -> None:
        super().__init__(exchange, doing, joined, memory)
        self._save = save

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
