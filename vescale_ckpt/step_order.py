"""In which order the checkpoints under one root were saved, also where training went back and took another way.

As long as steps rise, their numbers are the order, and nothing is written. A save that goes on from an earlier step
than the last on disk begins a new branch: it and all that follow it carry a small file `.order`, which names the
branch, and the line of branches that it goes on from, each up to a step. No clock is asked. The file travels with the
checkpoint when that is copied or renamed. A checkpoint without it is of branch 0, the first.

It is written before the save that it belongs to commits, so that a checkpoint is never there without it. Like the
metrics it names the `.metadata` that the save replaces, and does not count as long as that one is there; what counted
for that one it repeats.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from typing import Any, NamedTuple

from . import _C, layout, step_directories

logger = logging.getLogger(__name__)

FILE_NAME = step_directories.ORDER_NAME
_MOST_BYTES = 1 << 20


class Branch(NamedTuple):
    """Steps that were saved one after another, each greater than the one before."""

    number: int = 0  #: greater than that of every branch before it
    line: tuple[tuple[int, int], ...] = ()  #: what it goes on from: branches, each up to a step

    def follows(self, number: int, step: int) -> bool:
        """Whether the step of a branch is of this one, or of what it goes on from."""
        return number == self.number or any(number == of and step <= last for of, last in self.line)

    def leaving_at(self, step: int, number: int) -> Branch:
        """The branch that goes on from a step of this one."""
        line = tuple((of, min(last, step)) for of, last in self.line)
        return Branch(number, (*line, (self.number, step)))


FIRST = Branch()


class SavedOrder:
    """The complete checkpoints under a root, as they are now."""

    def __init__(self, root: str, known: dict[int, Branch] | None = None) -> None:
        """`known`: branches of steps that need not be read again."""
        steps = step_directories.complete_steps(root, known or ())
        self.branches = {
            step: known[step] if known and step in known else read(step_directories.path_of(root, step))
            for step in steps
        }

    @property
    def last(self) -> int | None:
        """The step that was saved last."""
        return max(self.branches, key=lambda step: (self.branches[step].number, step), default=None)

    @property
    def branch(self) -> Branch:
        """That of the last step."""
        return FIRST if (last := self.last) is None else self.branches[last]

    def newest_first(self) -> list[int]:
        """The last step and what it goes on from, back to the first; then what was abandoned."""
        branch = self.branch

        def rank(step: int) -> tuple[bool, int, int]:
            number = self.branches[step].number
            return branch.follows(number, step), number, step

        return sorted(self.branches, key=rank, reverse=True)

    def abandoned_for(self, step: int, branch: Branch) -> list[int]:
        """Later steps than one of a branch, which neither it nor what it goes on from holds; rising."""
        return [other for other, its in self.branches.items() if other > step and not branch.follows(its.number, other)]


class Course:
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


def write(directory: str, branch: Branch) -> None:
    """Writes the record of the save that begins, durably, if there is one to write.

    Raises `_C.EngineError` and OSError for what the disk refuses.
    """
    if branch == FIRST and not os.path.lexists(os.path.join(directory, FILE_NAME)):
        return
    before = read(directory)
    record = {
        "branch": branch.number,
        "line": branch.line,
        "replaces": layout.metadata_mark(directory),
        "before": {"branch": before.number, "line": before.line},
    }
    content = json.dumps({**record, "crc32": _checksum(record)})
    _C.commit_file(directory, FILE_NAME, content.encode())


def read(directory: str) -> Branch:
    """The branch of the checkpoint in a directory. One that cannot be read counts as the first, with a warning."""
    path = os.path.join(directory, FILE_NAME)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return FIRST
    except OSError as error:
        logger.warning("%s cannot be read, so nobody knows when its checkpoint was saved: %s", path, error)
        return FIRST
    try:
        with open(descriptor, "rb") as file:
            record = json.loads(file.read(_MOST_BYTES))
        if record.pop("crc32") != _checksum(record):
            raise ValueError("its checksum does not match")
        replaces = record["replaces"]
        # That of a save that died counts for nothing, what was there before it does.
        return _branch(record["before"] if replaces and replaces == layout.metadata_mark(directory) else record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s is damaged, so nobody knows when its checkpoint was saved: %s", path, error)
        return FIRST


def _branch(record: Any) -> Branch:
    return Branch(int(record["branch"]), tuple((int(of), int(last)) for of, last in record["line"]))


def _checksum(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
