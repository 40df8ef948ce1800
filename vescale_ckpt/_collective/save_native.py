"""`CollectiveNativeSave` saves in DCP's own layout with all ranks: data files of each rank and one `.metadata`."""

from __future__ import annotations

from collections.abc import Sequence

from .._checkpoint.native.delta_table import DeltaTable, Row, rows_of_rank
from .._engine.rows import words
from .._plan.save_plan import PackedResults
from .._ranks.message import pack, unpack
from .._ranks.node import node_of_this_process
from .._write.delta import Delta
from .._write.delta_base import LEAST_RECORD_BYTES, DeltaBase
from .._write.native_save import NativeSave
from .save import CollectiveSave


class CollectiveNativeSave(CollectiveSave):
    """A `CollectiveSave` in DCP's own layout."""

    _kind = NativeSave
    _save: NativeSave
    _table: DeltaTable  # of the base, as far as this save may name its records

    def _take_base(self) -> None:
        if (base := self._base) is None:
            return
        opened: DeltaBase | None = None
        try:
            if self.exchange.is_coordinator:
                opened = self._save.base = self.steps.take(DeltaBase, base, self.path)
            self.steps.raise_together("base")
            known = None if opened is None else opened.table.pack(b"")
            self._table = DeltaTable.unpack(self.exchange.broadcast(known, self.steps.phase("base")))
        except BaseException:
            self._save.end()
            raise
        self._save.delta = Delta(self._table, self._frozen)

    def _message(self, results: PackedResults) -> bytes:
        node = str(node_of_this_process())
        ids = b"" if self._save.delta is None else self._save.delta.ids()
        return pack(results.locations, ids, *(text.encode() for text in (node, *results.names)))

    def _commit_all(self, messages: list[bytes] | None) -> None:
        if self.planner.placement == "local":
            self._commit_on_nodes(messages)
        elif messages is not None:
            self.steps.take(self._commit_everything, messages)

    def _commit_everything(self, messages: list[bytes]) -> None:
        of_all = list(map(unpack, messages))
        content, index = self._contents(of_all)
        if self._save.base is None:
            self._commit(self._save.commit, content, index)
            return
        delta = self._table_for_later(of_all)
        self._save.base.check(delta.files)
        self._commit(self._save.commit, content, index, delta.pack(content))

    def _table_for_later(self, of_all: Sequence[list[bytes]]) -> DeltaTable:
        """The records of the new checkpoint."""
        files: dict[str, int] = {}
        rows: dict[Row, None] = {}
        for locations, ids, _, *names in of_all:
            numbers = [files.setdefault(name.decode(), len(files)) for name in names]
            rows.update(dict.fromkeys(rows_of_rank(words(locations), ids, numbers, LEAST_RECORD_BYTES)))
        return DeltaTable.of(self._table.seed, list(files), rows)

    def _commit_on_nodes(self, messages: list[bytes] | None) -> None:
        """Commits on each node, by its first rank, a metadata that names the node's own files."""
        contents = None if messages is None else self.steps.take(self._contents_of_nodes, messages)
        if self.exchange.is_coordinator and contents is None:
            contents = [b""] * self.exchange.size
        if mine := self.exchange.scatter(contents, self.steps.phase("metadata")):
            self.steps.take(self._commit, self._save.commit, *unpack(mine))

    def _contents_of_nodes(self, messages: list[bytes]) -> list[bytes]:
        """For the first rank of each node what it commits; empty for other ranks."""
        of_all = list(map(unpack, messages))
        nodes = [int(node) for _, _, node, *_ in of_all]
        contents = [b""] * len(of_all)
        for number, node in enumerate(sorted(set(nodes))):  # as plans number nodes
            contents[nodes.index(node)] = pack(*self._contents(of_all, number))
        return contents

    def _contents(self, of_all: Sequence[list[bytes]], node: int = 0) -> tuple[bytes, bytes]:
        """The contents of a node's metadata and index. `of_all`: record locations, ids, node and files of each
        rank."""
        assert self._of_all is not None
        locations = [locations for locations, *_ in of_all]
        names = [[name.decode() for name in names] for _, _, _, *names in of_all]
        return self._of_all.files(locations, names, self.path, self._save.options.save_id, node)
