"""`BranchTracker` finds for a manager which branch of the training each save belongs to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from .._checkpoint.native import step_order
from .._checkpoint.native.step_order import FIRST, Branch, SavedOrder
from ..errors import CheckpointError

logger = logging.getLogger(__name__)


class BranchTracker:
    """The branch that the saves of one manager belong to. Only the coordinator uses it.

    A save of a lower step than before begins a new branch. Other managers may save in the same directory meanwhile, so
    only steps that this manager knows of count for that comparison.
    """

    def __init__(self, root: str, order: Callable[[dict[int, Branch]], SavedOrder]) -> None:
        """`order`: lists all steps that are saved now, given {step: branch} of those that need not be read again."""
        self.root = root
        self._order = order
        self._branch: Branch | None = None  # the branch of the next saves; None: not decided yet
        self._newest = -1  # the newest step of this branch that this manager knows of
        self._origin: tuple[int, Branch] | None = None  # the restored step and its branch, unless it was saved last
        self._known: dict[int, Branch] = {}  # {step: branch} of what need not be read again
        self._has_looked = False
        self._there: set[int] = set()  # steps that were there at the beginning
        self._ours: set[int] = set()  # steps that this manager has saved, has found when it restored, or has warned of
        self._has_warned = False  # of another job

    def look(self) -> None:
        """Notes the step that was saved last before this manager saves. Later steps of other managers do not count: two
        managers may save in turn, and neither of them goes back. If the root cannot be read, `note_restored` and
        `branch_of` look again, and all ranks get their errors."""
        try:
            self._look()
        except (OSError, CheckpointError) as error:
            logger.warning("the checkpoints in %s cannot be listed now: %s", self.root, error)

    def _look(self) -> None:
        order = self._order({})
        self._there = {*order.branches}
        self._newest = -1 if order.last is None else order.last
        self._has_looked = True

    def known_steps(self) -> AbstractSet[int]:
        """Steps that were complete when the last save began. Any thread may ask."""
        return self._known.keys()

    def note_end(self, branch: Branch, step: int | None) -> None:
        """Notes that a save of the branch has ended: of a step, or None after a failure. Any thread may call it."""
        if step is not None:
            self._known = {**self._known, step: branch}

    def note_restored(self, step: int) -> list[int]:
        """Notes that training continues from a step. Returns later steps that are abandoned already."""
        if not self._has_looked:
            self._look()
        order = self._order({})
        self._ours |= order.branches.keys()
        self._branch = self._origin = None
        if order.last == step:
            self._newest = step
            return order.abandoned_for(step, order.branch)
        self._origin = step, order.branches.get(step, FIRST)
        return []

    def branch_of(self, step: int) -> tuple[Branch, list[int]]:
        """The branch of a save of `step`, and the steps that this save abandons."""
        if not self._has_looked:
            self._look()
        order = self._order(self._known)
        self._known = {known: branch for known, branch in order.branches.items() if known != step}
        newest, before = order.branch, self._branch
        if before is not None and before.number >= newest.number:
            branch = before
        elif before is None and self._origin is not None:
            origin, of = self._origin
            branch, self._newest = of.leaving_at(min(origin, step), newest.number + 1), step
        else:  # the branch on disk continues, or another manager has begun one
            branch = newest
        if step < self._newest and any(
            other > step and its.number == branch.number for other, its in order.branches.items()
        ):
            branch = branch.leaving_at(step, max(branch.number, newest.number) + 1)
            self._newest = step
        self._newest = max(self._newest, step)
        self._branch = branch
        began = branch != before and branch.number > newest.number
        abandoned = [other for other in order.abandoned_for(step, branch) if began]
        if abandoned:
            self._ours |= order.branches.keys()  # the caller warns of them
        self._warn_of_others(step, order.branches.keys() - self._ours)
        self._ours.add(step)
        _saved_here.setdefault(self.root, set()).add(step)
        return branch, abandoned

    def _warn_of_others(self, step: int, others: AbstractSet[int]) -> None:
        """Warns once before a save replaces a step of `others` or falls behind one, and if another process has saved
        since this manager began."""
        appeared = others - self._there - _saved_here.get(self.root, set())
        foreign = min((other for other in others if other >= step), default=max(appeared, default=None))
        if foreign is None or self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "step %d is saved %s %s, which another job has saved, or an earlier one that this job has not restored. "
            "Two jobs in one directory replace and remove each other's checkpoints: give each its own",
            step,
            "over" if foreign == step else "beside",
            step_order.path_of(self.root, foreign),
        )


_saved_here: dict[str, set[int]] = {}  # {root: steps that managers of this process have saved there}
