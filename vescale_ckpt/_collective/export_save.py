"""`CollectiveExport` saves safetensors files with all ranks, which write into the same files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._engine import _C
from .._observe.timeline import phase
from .._plan.save_plan import PackedResults
from .._ranks.message import pack, unpack
from .._state.shared_memory import empty_duplicates, tied_names
from .._write.export_save import ExportSave
from .agree_plan import CollectivePlan
from .save import CollectiveSave


class CollectiveExport(CollectiveSave):
    """A `CollectiveSave` as safetensors files. The coordinator lays out the files after planning; the layout is kept
    with the plan."""

    _kind = ExportSave
    _save: ExportSave
    _tied: dict[str, str]  # for each name that is not stored, the name of the tensor in the same memory

    def begin(self, state: Mapping[str, Any], error: BaseException | None = None, gated: bool = False) -> bool:
        if not super().begin(state, error, gated):
            return False
        try:
            with phase("plan", "lay out the files"):
                self._lay_out()
        except BaseException:
            self._save.end()
            raise
        return True

    def _describe(self, plan: CollectivePlan, values: dict[str, Any]) -> dict[str, Any]:
        values = super()._describe(plan, _without_empty_name(values))
        self._tied = {}
        if plan.description is not None:
            self._tied = tied_names(plan.description)
            if left_out := self._tied.keys() | empty_duplicates(plan.description):
                plan.leave_out(left_out)
        return values

    def _lay_out(self) -> None:
        """Finds where in the files each rank writes. A kept layout is used if all ranks have it."""
        exchange, steps, save, items = self.exchange, self.steps, self._save, self._items
        assert items is not None
        known, tied, table = items.exports.get(save.wanted, ("0", {}, b""))
        have = int(known, 16) if tied == self._tied else 0
        least, not_most, none_tied = exchange.agree([have, ~have, int(not self._tied)], steps.phase("agree on files"))
        all_have = known if least == ~not_most and least != 0 else ""
        of_all: list[dict[str, str]] = [{}]
        if not (all_have or none_tied):
            texts = [text.encode() for names in self._tied.items() for text in names]
            of_all = [_pairs(message) for message in exchange.gather(pack(*texts), steps.phase("gather names")) or []]
        answers = None
        if exchange.is_coordinator:
            answers = steps.take(self._make_files, all_have, of_all) or [b""] * exchange.size
        answer = exchange.scatter(answers, steps.phase("scatter files"))
        if not answer:  # the coordinator could not make them: all ranks learn why
            steps.raise_together("make files")
        count, token, *locations = unpack(answer)
        if locations:
            table = _C.export_targets(items.description.inventory, items.local_plan, *locations)
            items.exports[save.wanted] = token.decode(), self._tied, table
        save.write_to(int(count), token.decode(), table)

    def _make_files(self, all_have: str, tied: list[dict[str, str]]) -> list[bytes]:
        """Creates the files on the coordinator. Returns the answers to all ranks. `all_have`: the token of the export
        whose layout all ranks have; empty if there is none. After a failed save some ranks may have a newer layout than
        others."""
        planned, save = self._of_all, self._save
        assert planned is not None
        name, made = planned.exports.get(save.wanted, ("", None))
        known = made is not None and name == all_have
        if made is None or not known:
            made = save.layout_of(planned, {name: kept for names in tied for name, kept in names.items()})
        token = save.make_files(made)
        if not known:
            planned.exports[save.wanted] = token, made
        start = str(len(made.file_bytes)).encode(), token.encode()
        return [pack(*start, *([] if known else [made.record_locations(rank)])) for rank in range(self.exchange.size)]

    def _message(self, results: PackedResults) -> bytes:
        return pack(self._save.blocks)

    def _commit_all(self, messages: list[bytes] | None) -> None:
        if messages is not None:
            self.steps.take(self._commit, self._save.commit, [unpack(message)[0] for message in messages])


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
