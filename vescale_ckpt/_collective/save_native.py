"""`CollectiveNativeSave` saves in DCP's own layout with all ranks: data files of each rank and one `.metadata`."""

from __future__ import annotations

from collections.abc import Sequence

from .._plan.save_plan import PackedResults
from .._ranks.message import pack, unpack
from .._ranks.node import node_of_this_process
from .._write.native_save import NativeSave
from .save import CollectiveSave


class CollectiveNativeSave(CollectiveSave):
    """A `CollectiveSave` in DCP's own layout."""

    _kind = NativeSave
    _save: NativeSave

    def _message(self, results: PackedResults) -> bytes:
        node = str(node_of_this_process())
        return pack(results.locations, *(text.encode() for text in (node, *results.names)))

    def _commit_all(self, messages: list[bytes] | None) -> None:
        if self.planner.placement == "local":
            self._commit_on_nodes(messages)
        elif messages is not None:
            self.steps.take(self._commit_everything, messages)

    def _commit_everything(self, messages: list[bytes]) -> None:
        self._commit(self._save.commit, *self._contents(list(map(unpack, messages))))

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
        nodes = [int(node) for _, node, *_ in of_all]
        contents = [b""] * len(of_all)
        for number, node in enumerate(sorted(set(nodes))):  # as plans number nodes
            contents[nodes.index(node)] = pack(*self._contents(of_all, number))
        return contents

    def _contents(self, of_all: Sequence[list[bytes]], node: int = 0) -> tuple[bytes, bytes]:
        """The contents of a node's metadata and index. `of_all`: record locations, node and files of each rank."""
        assert self._of_all is not None
        locations = [locations for locations, *_ in of_all]
        names = [[name.decode() for name in names] for _, _, *names in of_all]
        return self._of_all.files(locations, names, self.path, self._save.options.save_id, node)
