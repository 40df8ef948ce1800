"""To which branch of the training the saves of a manager belong."""

from __future__ import annotations

from .._native.steps import FIRST, Branch, SavedOrder


class BranchTracker:
    """To which branch the saves of one manager belong. Used where it is the coordinator.

    Other managers may save in the same directory meanwhile: only what this one knew of before can it go back from.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._branch: Branch | None = None  # of the saves to come; None: not decided yet
        self._newest = -1  # step of this branch that this manager knows of
        self._origin: tuple[int, Branch] | None = None  # that was restored, where it was not the last
        self._known: dict[int, Branch] = {}

    def look(self) -> None:
        """Takes note of what is there before this manager saves. What others save from now on is no step to go back
        from: two that save in turn, say."""
        last = SavedOrder(self.root).last
        self._newest = -1 if last is None else last

    def restored(self, step: int) -> list[int]:
        """Training goes on from a step. Returns later ones that are abandoned already."""
        order = SavedOrder(self.root)
        self._branch = self._origin = None
        if order.last == step:
            self._newest = step
            return order.abandoned_for(step, order.branch)
        self._origin = step, order.branches.get(step, FIRST)
        return []

    def branch_of(self, step: int) -> tuple[Branch, list[int]]:
        """The branch of the save that begins, and the steps that it abandons."""
        order = SavedOrder(self.root, self._known)
        self._known = {known: branch for known, branch in order.branches.items() if known != step}
        newest, before = order.branch, self._branch
        if before is not None and before.number >= newest.number:
            branch = before
        elif before is None and self._origin is not None:
            origin, of = self._origin
            branch, self._newest = of.leaving_at(min(origin, step), newest.number + 1), step
        else:  # what is there goes on, or another manager has begun a branch
            branch = newest
        if step < self._newest and any(
            other > step and its.number == branch.number for other, its in order.branches.items()
        ):
            branch = branch.leaving_at(step, max(branch.number, newest.number) + 1)
            self._newest = step
        self._newest = max(self._newest, step)
        self._branch = branch
        began = branch != before and branch.number > newest.number
        return branch, [other for other in order.abandoned_for(step, branch) if began]
