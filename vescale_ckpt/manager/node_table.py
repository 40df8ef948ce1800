"""`NodeTable` is the coordinator's record of the steps in the folders of all nodes, from one gather of these folders.

It alone decides which steps are whole, which have copies, which branch of the training was abandoned, and what
retention removes. Later saves, copies and removals are noted in it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .._checkpoint.native import metadata_file, step_order
from .._checkpoint.native.file_names import is_data_file
from .._checkpoint.native.step_order import FIRST, Branch, SavedOrder, path_of
from .._collective.node_files import Places
from .._storage.open_storage import storage_at
from ..errors import CheckpointError
from . import step_metrics
from .retention import Candidate, Retention

logger = logging.getLogger(__name__)


class Part(NamedTuple):
    """What a node has of a step."""

    fingerprint: str  #: of its `.metadata`; empty: it has none
    branch: Branch
    files: dict[str, int]  #: {data file: bytes}
    metric: float | None = None  #: the one that retention compares

    @staticmethod
    def read(path: str, metric: str | None) -> Part:
        storage = storage_at(path)
        fingerprint = metadata_file.metadata_fingerprint(path)
        files = {name: storage.stat(name).size for name in storage.names() if is_data_file(name)}
        value = step_metrics.read(path).get(metric) if metric and fingerprint else None
        return Part(fingerprint, step_order.read(path) if fingerprint else FIRST, files, value)


def branch_of(pair: Any) -> Branch:
    number, line = pair
    return Branch(number, tuple((of, last) for of, last in line))


def parts_in(root: str, metric: str | None) -> dict[int, Part]:
    """{step: part} of a node's folder. What cannot be read does not count, with a warning."""
    found: dict[int, Part] = {}
    try:
        steps = step_order.all_steps(root)
    except (CheckpointError, OSError) as error:
        logger.warning("this node's part of the steps does not count: %s", error)
        return {}
    for step in steps:
        try:
            found[step] = Part.read(path_of(root, step), metric)
        except (CheckpointError, OSError) as error:
            logger.warning("this node's part of step %d does not count: %s", step, error)
    return found


@dataclass
class Row:
    """A step whose metadata some node has."""

    branch: Branch
    metric: float | None
    survives: int  #: how many nodes can be lost while it stays whole; -1: it is not whole, or unknown


@dataclass(frozen=True)
class Removal:
    """What nodes remove from their folders when a save has committed."""

    steps: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  #: a node's data of them are no orphans, even without metadata


class NodeTable:
    """Kept on the coordinator; empty on other ranks."""

    def __init__(self, parts: Mapping[int, Mapping[int, Part]] | None = None) -> None:
        """`parts`: {step: {leader: its part}}."""
        self.parts = parts or {}
        self.durable: Mapping[int, Branch] = {}  #: {step: branch} of the durable place, if it can be read
        self.rows: dict[int, Row] = {}
        for step, of_step in self.parts.items():
            if groups := self.groups(step):
                newest = max((of_step[rank] for rank in groups[0]), key=lambda part: part.branch.number)
                self.rows[step] = Row(newest.branch, newest.metric, -1)

    @property
    def branches(self) -> dict[int, Branch]:
        """{step: branch}, wherever the step is."""
        found = dict(self.durable)
        for step, row in self.rows.items():
            if row.branch.number >= found.get(step, FIRST).number:
                found[step] = row.branch
        return found

    def groups(self, step: int) -> list[list[int]]:
        """Ranks grouped by equal metadata of a step: the newest branch first, then the largest group. A step that was
        saved again has several groups if nodes were stopped during its commit, or if a node returns with an older
        one."""
        ranks: dict[str, list[int]] = {}
        parts = self.parts.get(step, {})
        for rank, part in parts.items():
            if part.fingerprint:
                ranks.setdefault(part.fingerprint, []).append(rank)

        return sorted(ranks.values(), key=lambda same: (self._number(step, same), len(same)), reverse=True)

    def _number(self, step: int, same: list[int]) -> int:
        """The number of the branch. One rank's record of it may be damaged."""
        return max(self.parts[step][rank].branch.number for rank in same)

    def candidates(self, step: int) -> list[list[int]]:
        """`groups`, and [] for the durable copy, which is last unless it is newer."""
        found = self.groups(step)
        if step in self.durable:
            number = self.durable[step].number
            at = (i for i, same in enumerate(found) if self._number(step, same) < number)
            found.insert(next(at, len(found)), [])
        return found

    def places(self, step: int, ends: Mapping[str, int]) -> Places:
        """Where each file lies that a step's metadata names. Names have a random part, so a file of that name that is
        long enough was written by this save."""
        return {
            name: {rank: part.files[name] for rank, part in self.parts[step].items() if part.files.get(name, -1) >= end}
            for name, end in ends.items()
        }

    def note_ends(self, step: int, ends: Mapping[str, int]) -> None:
        """Notes which files the newest metadata of a step names, and their least lengths."""
        holders = [len(ranks) for ranks in self.places(step, ends).values()]
        self.rows[step].survives = min([*holders, len(self.groups(step)[0])]) - 1

    def note_saved(self, step: int, branch: Branch, metric: float | None, removed: Removal) -> None:
        for gone in removed.steps:
            self.rows.pop(gone, None)
        self.rows[step] = Row(branch, metric, 0)

    def note_copied(self, step: int, copies: int) -> None:
        if (row := self.rows.get(step)) is not None:
            row.survives = max(row.survives, copies)

    def removal(
        self, step: int, branch: Branch, metric: float | None, retention: Retention, copies: int, sent: int | None
    ) -> Removal:
        """What goes when the save of a step has committed. The step stays, so does the newest one of those that survive
        the loss of most nodes (up to `copies`), and `sent`, which gets its copies now. A step that is not whole does
        not count as kept; it goes when retention would remove it if it did."""
        rows = {**self.rows, step: Row(branch, metric, 0)}
        order = SavedOrder.of({step: row.branch for step, row in rows.items()})
        newest_first = order.newest_first()
        line = [of for of in newest_first if order.branch.follows(rows[of].branch.number, of)]
        levels = {of: min(rows[of].survives, copies) for of in line}
        kept = {step, sent, newest_first[0], next(of for of in line if levels[of] == max(levels.values()))}
        of_all = [Candidate(of, rows[of].metric) for of in reversed(newest_first)]
        surplus: set[int] = set()
        among_whole: set[int] = set()
        try:
            surplus |= {*retention.surplus(of_all)}
            among_whole |= {*retention.surplus([one for one in of_all if rows[one.step].survives >= 0])}
        except Exception:  # of a user's rule
            logger.exception("the checkpoints that step %d supersedes stay until the next save", step)
            surplus.clear()
        gone = {of for of in rows if of in (among_whole if rows[of].survives >= 0 else surplus)} - kept
        return Removal(sorted(gone), sorted(rows.keys() - gone))
