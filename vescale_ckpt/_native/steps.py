"""The directories `step-N` of a manager: which are checkpoints, and in which order they were saved, also where training
went back and took another way.

A directory is a checkpoint if it is named `step-N` and holds `.metadata`.

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
import re
import zlib
from collections.abc import Container
from typing import Any, NamedTuple

from .._storage.directory import directory_at
from .metadata_file import has_metadata, metadata_mark

logger = logging.getLogger(__name__)

ORDER_NAME = ".order"  #: of the record which branch of the training a checkpoint belongs to
_MOST_ORDER_BYTES = 1 << 20
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


def path_of(root: str, step: int) -> str:
    return os.path.join(root, f"step-{step}")


def is_step(name: str) -> bool:
    """Whether a directory of a manager is named so."""
    return _STEP.fullmatch(name) is not None


def all_steps(root: str) -> list[int]:
    """Steps that have a directory, rising. Links, files and other names are none."""
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, directory_at(root).folders()) if match)


def complete_steps(root: str, known: Container[int] = ()) -> list[int]:
    """Those whose directory holds a checkpoint. Of steps that are `known` to have held one only the name is looked
    for."""
    return [step for step in all_steps(root) if step in known or has_metadata(path_of(root, step), None)]


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
        self.branches = {
            step: known[step] if known and step in known else read(path_of(root, step))
            for step in complete_steps(root, known or ())
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


def write(directory: str, branch: Branch) -> None:
    """Writes the record of the save that begins, durably, if there is one to write.

    Raises `_C.EngineError` and OSError for what the disk refuses.
    """
    if branch == FIRST and not directory_at(directory).has(ORDER_NAME):
        return
    before = read(directory)
    record = {
        "branch": branch.number,
        "line": branch.line,
        "replaces": metadata_mark(directory),
        "before": {"branch": before.number, "line": before.line},
    }
    content = json.dumps({**record, "crc32": _checksum(record)})
    directory_at(directory).write(ORDER_NAME, content.encode())


def read(directory: str) -> Branch:
    """The branch of the checkpoint in a directory. One that cannot be read counts as the first, with a warning."""
    path = os.path.join(directory, ORDER_NAME)
    try:
        _, content = directory_at(directory).read_range(ORDER_NAME, 0, _MOST_ORDER_BYTES)
    except FileNotFoundError:
        return FIRST
    except OSError as error:
        logger.warning("%s cannot be read, so nobody knows when its checkpoint was saved: %s", path, error)
        return FIRST
    try:
        record = json.loads(content)
        if record.pop("crc32") != _checksum(record):
            raise ValueError("its checksum does not match")
        replaces = record["replaces"]
        # That of a save that died counts for nothing, what was there before it does.
        return _branch(record["before"] if replaces and replaces == metadata_mark(directory) else record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s is damaged, so nobody knows when its checkpoint was saved: %s", path, error)
        return FIRST


def _branch(record: Any) -> Branch:
    return Branch(int(record["branch"]), tuple((int(of), int(last)) for of, last in record["line"]))


def _checksum(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
