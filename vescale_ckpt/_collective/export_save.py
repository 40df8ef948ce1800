"""`CollectiveExport` saves safetensors files with all ranks, which write into the same files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._engine import _C
from .._engine.rows import int_table, words
from .._observe.timeline import phase
from .._plan.save_plan import ExportPart, JoinedRanges, PackedResults
from .._ranks.message import pack, unpack
from .._ranks.node import memory_domain
from .._state.shared_memory import empty_duplicates, tied_names
from .._write.export_save import ExportSave, refuse_wrappers
from .agree_plan import CollectivePlan
from .joined_write import LEAST_BYTES, WINDOW_BYTES, JoinedWrite
from .save import CollectiveSave


class CollectiveExport(CollectiveSave):
    """A `CollectiveSave` as safetensors files. The coordinator lays out the files after planning; the layout is kept
    with the plan."""

    _kind = ExportSave
    _save: ExportSave
    _joined: JoinedRanges | None = None  # what the layout lets the ranks of this node put together
    _rounds: JoinedWrite | None = None  # if all ranks do
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
            refuse_wrappers(plan.description)
            self._tied = tied_names(plan.description)
            if left_out := self._tied.keys() | empty_duplicates(plan.description):
                plan.leave_out(left_out)
        return values

    def _lay_out(self) -> None:
        """Finds where in the files each rank writes. A kept layout is used if all ranks have it."""
        exchange, steps, save, items = self.exchange, self.steps, self._save, self._items
        assert items is not None
        part = items.exports.get(save.wanted, ExportPart("0", {}, b"", None))
        have = int(part.token, 16) if part.tied == self._tied else 0
        if self._of_all is not None and self._of_all.exports.get(save.wanted, ("",))[0] != part.token:
            have = 0  # the coordinator laid out the files again, and then failed to tell the other ranks
        least, not_most = exchange.agree([have, ~have], steps.phase("agree on files"))
        all_have = part.token if least == ~not_most and least != 0 else ""
        of_all: list[list[bytes]] = []
        if not all_have:
            texts = [text.encode() for names in self._tied.items() for text in names]
            message = pack(memory_domain().encode(), *texts)
            of_all = [unpack(message) for message in exchange.gather(message, steps.phase("gather names")) or []]
        answers = None
        if exchange.is_coordinator:
            answers = steps.take(self._make_files, all_have, of_all) or [b""] * exchange.size
        answer = exchange.scatter(answers, steps.phase("scatter files"))
        if not answer:  # the coordinator could not make them: all ranks learn why
            steps.raise_together("make files")
        count, token, *made = unpack(answer)
        if made:
            locations, rounds, ranks, ranges, targets, messages = made
            table = _C.export_targets(items.description.inventory, items.local_plan, locations) + targets
            joined = None
            if int(rounds):
                joined = JoinedRanges(int(rounds), [*words(ranks)], self._unpacked(ranges), len(items), messages)
            part = items.exports[save.wanted] = ExportPart(token.decode(), self._tied, table, joined)
        self._joined = part.joined
        save.write_to(int(count), token.decode(), part.targets)

    def _make_files(self, all_have: str, of_all: list[list[bytes]]) -> list[bytes]:
        """Creates the files on the coordinator. Returns the answers to all ranks. `all_have`: the token of the export
        whose layout all ranks have; empty if there is none. After a failed save some ranks may have a newer layout than
        others. `of_all`: otherwise, of each rank its `memory_domain`, and pairs of names of tied tensors."""
        planned, save = self._of_all, self._save
        assert planned is not None
        if all_have:
            _, made = planned.exports[save.wanted]
            token = save.make_files(made)
            start = pack(str(len(made.file_bytes)).encode(), token.encode())
            return [start] * self.exchange.size
        domains, ties = [message[0] for message in of_all], [message[1:] for message in of_all]
        made = save.layout_of(planned, {name: kept for names in ties for name, kept in _pairs(names).items()})
        self._choose_ranges(made, [domains.index(domain) for domain in domains])
        token = save.make_files(made)
        planned.exports[save.wanted] = token, made
        begin = str(len(made.file_bytes)).encode(), token.encode()
        answers = []
        for rank, domain in enumerate(domains):
            ranks = int_table([other for other in range(len(domains)) if domains[other] == domain]).tobytes()
            joined = self._ranges(made, rank), made.joined_targets(rank), self._messages(made, rank)
            answers.append(pack(*begin, made.record_locations(rank), str(made.rounds).encode(), ranks, *joined))
        return answers

    def _choose_ranges(self, made: _C.ExportLayout, nodes: list[int]) -> None:
        """Chooses what ranks put together. `nodes`: a number for each rank, equal where ranks share memory."""
        if self.exchange.size > 1:
            made.join(nodes, WINDOW_BYTES, LEAST_BYTES)

    def _ranges(self, made: _C.ExportLayout, rank: int) -> bytes:
        """From what `_unpacked` makes the ranges of the rank's node."""
        return made.joined_ranges(rank)

    def _unpacked(self, ranges: bytes) -> bytes:
        return ranges

    def _messages(self, made: _C.ExportLayout, rank: int) -> bytes:
        """What the rank sends to other nodes, or receives from them."""
        return b""

    def _write_and_commit(self) -> None:
        if self._joined is not None:
            with phase("write", "share memory"):
                self._share_memory(self._joined)
        super()._write_and_commit()

    def _share_memory(self, joined: JoinedRanges) -> None:
        ready = self.steps.error is None and self._is_in_one_table()
        rounds = JoinedWrite.begin(self.exchange, self.steps.phase("write together"), joined, ready)
        if rounds is not None:
            self._rounds = rounds
            self._save.join(joined, WINDOW_BYTES, rounds.run)

    def _is_in_one_table(self) -> bool:
        """Whether one table tells where all of this rank's tensors are in host memory."""
        if self.staged_plan is not None:
            return self.staged_plan.in_one_table
        assert self._items is not None
        return self._items.description.all_ready

    def _write(self) -> PackedResults:
        try:
            return super()._write()
        except Exception as error:
            if self._rounds is not None:
                self._rounds.give_up(error)
            raise

    def _message(self, results: PackedResults) -> bytes:
        return pack(self._save.blocks)

    def _commit_all(self, messages: list[bytes] | None) -> None:
        if messages is not None:
            self.steps.take(self._commit, self._save.commit, [unpack(message)[0] for message in messages])


def _pairs(names: list[bytes]) -> dict[str, str]:
    texts = [name.decode() for name in names]
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
