"""`CollectiveNativeSave` saves in DCP's own layout with all ranks: data files of each rank and one `.metadata`."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .._dcp.storage_writer import StorageWriter
from .._plan.save_plan import GlobalSavePlan
from .._ranks.message import pack, unpack
from .._ranks.node import node_of_this_process
from .._write.data_files import DataFiles
from .._write.native_save import NativeSave
from .save import CollectiveSave


class CollectiveNativeSave(CollectiveSave):
    """A `CollectiveSave` in DCP's own layout."""

    def _new_save(self) -> NativeSave:
        self._native = NativeSave(self._options(), overwrite=self.overwrite)
        return self._native

    def _files(self) -> DataFiles:
        return self._native.files()

    def _writer(self) -> StorageWriter:
        return StorageWriter(self.path, overwrite=self.overwrite)

    def _clean_up(self) -> None:
        self._native.clean_up()

    def _write_and_commit(self) -> None:
        planned = self._of_all
        message = b""
        try:
            results = self._write()
            node = _number(node_of_this_process())
            message = pack(node, results.locations, *(name.encode() for name in results.names))
        except Exception as error:
            self.error = error
        gathered = self.exchange.gather(message, self._phase("write"))
        results_of_all = [_result(data) for data in gathered] if gathered is not None and all(gathered) else None
        with self._commit_in_doubt():
            if self.placement == "local":
                self._commit_on_nodes(planned, results_of_all)
            elif results_of_all is not None:
                assert planned is not None
                self._keep_error(self._commit_plan, planned, results_of_all)
            self.exchange.fail_together(self.error, self._phase("commit"))

    def _commit_plan(self, planned: GlobalSavePlan, results: list[_Result]) -> None:
        self._commit(self._native.commit, *self._contents(planned, results, 0))

    def _commit_on_nodes(self, planned: GlobalSavePlan | None, results: list[_Result] | None) -> None:
        """Commits on each node, by its first rank, a metadata that names the node's own files."""
        contents: list[bytes] | None = None
        if self.exchange.is_coordinator:
            contents = [b""] * self.exchange.size
            if results is not None:
                assert planned is not None
                self._keep_error(self._fill_contents, contents, planned, results)
        mine = self.exchange.scatter(contents, self._phase("metadata"))
        if mine:
            self._keep_error(self._commit, self._native.commit, *unpack(mine))

    def _fill_contents(self, contents: list[bytes], planned: GlobalSavePlan, results: list[_Result]) -> None:
        leaders: dict[int, int] = {}
        for rank, result in enumerate(results):
            leaders.setdefault(result.node, rank)
        for number, node in enumerate(sorted(leaders)):  # as plans number nodes
            contents[leaders[node]] = pack(*self._contents(planned, results, number))

    def _contents(self, planned: GlobalSavePlan, results: list[_Result], node: int) -> tuple[bytes, bytes]:
        """The contents of a node's metadata and index."""
        return planned.files(
            [result.record_locations for result in results],
            [result.names for result in results],
            self.path,
            self.save_id,
            node,
        )


@dataclass(frozen=True)
class _Result:
    """What a rank has written: its record locations, the names of its files, and its node."""

    node: int
    record_locations: bytes
    names: list[str]


def _number(value: int) -> bytes:
    return struct.pack("<q", value)


def _result(message: bytes) -> _Result:
    node, locations, *names = unpack(message)
    return _Result(struct.unpack("<q", node)[0], locations, [name.decode() for name in names])
