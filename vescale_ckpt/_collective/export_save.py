"""`CollectiveExport` saves safetensors files with all ranks, which write into the same files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._dcp.save_planner import SavePlanner
from .._dcp.storage_writer import StorageWriter
from .._engine import _C
from .._hf.folder import shard_bytes
from .._hf.header import checked_metadata
from .._ranks.exchange import Exchange
from .._ranks.message import pack, unpack
from .._state.shared_memory import empty_duplicates, tied_names
from .._write.export_files import ExportFiles, ExportSave, Targets
from .agree_plan import CollectivePlan
from .save import CollectiveSave


class CollectiveExport(CollectiveSave):
    """A `CollectiveSave` as safetensors files. The coordinator lays out the files after planning; the layout is kept
    with the plan."""

    def __init__(
        self,
        exchange: Exchange,
        planner: SavePlanner,
        path: str,
        doing: str,
        overwrite: bool,
        max_shard_size: int | str,
        metadata: Mapping[str, str] | None,
    ) -> None:
        super().__init__(exchange, planner, path, doing, overwrite)
        self._max_shard_size = max_shard_size
        self._metadata = metadata
        self._tied: dict[str, str] = {}
        self._targets: Targets | None = None  # of this rank, when files are laid out
        self._written: ExportFiles | None = None

    def begin(self, state: Mapping[str, Any], error: BaseException | None = None, gated: bool = False) -> bool:
        if not super().begin(state, error, gated):
            return False
        try:
            self._lay_out()
        except BaseException:
            self._export.end()
            raise
        return True

    def _new_save(self) -> ExportSave:
        metadata = {"format": "pt"} if self._metadata is None else dict(self._metadata)
        self._export = ExportSave(
            self._options(),
            overwrite=self.overwrite,
            most_file_bytes=shard_bytes(self._max_shard_size),
            texts=checked_metadata(metadata),
        )
        return self._export

    def _clean_up(self) -> None:
        pass  # the coordinator does it when it creates the files

    def _files(self) -> ExportFiles:
        assert self._targets is not None
        self._written = self._export.files(self._targets)
        return self._written

    def _blocks(self) -> bytes:
        """This rank's contribution to the checksums of the files. Called after writing."""
        assert self._written is not None
        return self._written.blocks

    def _writer(self) -> StorageWriter:
        return StorageWriter(
            self.path,
            format="safetensors",
            overwrite=self.overwrite,
            max_shard_size=self._max_shard_size,
            metadata=self._metadata,
        )

    def _describe(self, plan: CollectivePlan, values: dict[str, Any]) -> dict[str, Any]:
        values = super()._describe(plan, _without_empty_name(values))
        if plan.description is not None:
            self._tied = tied_names(plan.description)
            if left_out := self._tied.keys() | empty_duplicates(plan.description):
                plan.leave_out(left_out)
        return values

    def _lay_out(self) -> None:
        """Finds the targets of all ranks in the files. A kept layout is used if all ranks have it."""
        exchange, items = self.exchange, self._items
        assert items is not None
        known, tied, table = items.exports.get(self._export.wanted, ("0", {}, None))
        have = int(known, 16) if tied == self._tied else 0
        least, not_most, none_tied = exchange.agree([have, ~have, int(not self._tied)], self._phase("agree on files"))
        all_have = known if least == ~not_most and least != 0 else ""
        of_all: list[dict[str, str]] = [{}]
        if not (all_have or none_tied):
            texts = [text.encode() for names in self._tied.items() for text in names]
            of_all = [_pairs(message) for message in exchange.gather(pack(*texts), self._phase("gather names")) or []]
        answers = None
        if exchange.is_coordinator:
            answers = [b""] * exchange.size
            self._keep_error(self._make_files, answers, all_have, of_all)
        answer = exchange.scatter(answers, self._phase("scatter files"))
        if not answer:  # the coordinator could not make them: all ranks learn why
            exchange.fail_together(self.error, self._phase("make files"))
        token, count, locations = unpack(answer)
        if locations:
            table = _C.export_targets(items.description.inventory, items.part, unpack(locations)[0])
            items.exports[self._export.wanted] = token.decode(), self._tied, table
        assert table is not None
        self._targets = Targets.of(int(count), token.decode(), table)

    def _make_files(self, answers: list[bytes], all_have: str, tied: list[dict[str, str]]) -> None:
        """Creates the files on the coordinator, and fills in the `answers` to all ranks. `all_have`: the token of the
        export whose layout all ranks have; empty if there is none. After a failed save some ranks may have a newer
        layout than others."""
        planned, export = self._of_all, self._export
        assert planned is not None
        name, made = planned.exports.get(export.wanted, ("", None))
        known = made is not None and name == all_have
        if made is None or not known:
            made = export.layout_of(planned, {name: kept for names in tied for name, kept in names.items()})
        token = export.make_files(made)
        if not known:
            planned.exports[export.wanted] = token, made
        count = str(len(made.file_bytes)).encode()
        for rank in range(len(answers)):
            answers[rank] = pack(token.encode(), count, b"" if known else pack(made.places(rank)))

    def _write_and_commit(self) -> None:
        message = b""
        try:
            self._write()
            message = pack(self._blocks())
        except Exception as error:
            self.error = error
        gathered = self.exchange.gather(message, self._phase("write"))
        with self._commit_in_doubt():
            if gathered is not None and all(gathered):
                self._keep_error(self._commit, self._export.commit, [unpack(data)[0] for data in gathered])
            self.exchange.fail_together(self.error, self._phase("commit"))


def _pairs(message: bytes) -> dict[str, str]:
    texts = [text.decode() for text in unpack(message)]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _without_empty_name(values: dict[str, Any]) -> dict[str, Any]:
    """Moves the keys of the value under the name "" to the top level, as files of a model have them."""
    inner = values.get("")
    if not isinstance(inner, Mapping):
        return values
    others = {name: value for name, value in values.items() if name != ""}
    if both := sorted(map(str, inner.keys() & others.keys())):
        raise ValueError(f"names that the state has twice, in itself and under '': {', '.join(both[:10])}")
    return {**others, **inner}
