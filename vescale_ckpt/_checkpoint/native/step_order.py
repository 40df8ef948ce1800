"""Lists the checkpoints `step-N` of a manager in the order in which they were saved.

A directory is a checkpoint if it is named `step-N` and holds `.metadata`.

As long as steps rise, their numbers are the order, and no file is written. A save that continues from an earlier step
than the last on disk begins a new branch. This save and all saves after it have a small file `.order`. It holds the
number of the branch, and the branches that it continues, each up to a step. No clock is used. A copy or a rename of the
checkpoint includes the file. A checkpoint without the file belongs to branch 0, the first.

The file is written before its save commits, so that no committed checkpoint lacks it. Like the metrics, it holds the
fingerprint of the `.metadata` that the save replaces. While that `.metadata` is still there, the save has not
committed, and the checkpoint belongs to the branch `before`, which the file also holds.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar

from ..._engine.overlap import submit
from ..._storage.open_storage import read_twice, storage_at
from ...errors import CorruptCheckpointError
from .metadata_file import has_metadata, metadata_fingerprint

logger = logging.getLogger(__name__)

ORDER_NAME = ".order"  #: the file that holds the branch of a checkpoint
_MOST_BYTES = 1 << 24  # of a small file
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_AT_ONCE = 16  # questions about steps, each of which is a request or two to an object store

_Answer = TypeVar("_Answer")


def _ask_each(root: str, steps: Sequence[int], ask: Callable[[int], _Answer]) -> dict[int, _Answer]:
    """Returns {step: answer}. Where each question is a request, several are asked at once."""
    if not storage_at(root).by_requests:
        return {step: ask(step) for step in steps}
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="vescale_ckpt") as pool:
        try:  # within the caller's limits of waiting, which are of its context
            asked = {step: submit(pool, copy_context().run, ask, step) for step in steps}
            return {step: answer.result() for step, answer in asked.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def path_of(root: str, step: int) -> str:
    return os.path.join(root, f"step-{step}")


def is_step(name: str) -> bool:
    """Whether `name` has the form of a step's directory."""
    return _STEP.fullmatch(name) is not None


def all_steps(root: str) -> list[int]:
    """Steps that have a directory, in ascending order. Links, files and other names are ignored."""
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, storage_at(root).folders()) if match)


def complete_steps(root: str, known: Container[int] = ()) -> list[int]:
    """Returns the steps whose directory holds a checkpoint. Checks only the name for steps in `known`, which held a
    checkpoint before."""
    steps = all_steps(root)
    found = _ask_each(
        root, [step for step in steps if step not in known], lambda step: has_metadata(path_of(root, step), None)
    )
    return [step for step in steps if found.get(step, True)]


class Branch(NamedTuple):
    """Steps that were saved one after another, in ascending order."""

    number: int = 0  #: it is greater than the number of every earlier branch
    line: tuple[tuple[int, int], ...] = ()  #: (branch, last step) of each branch that this one continues

    def follows(self, number: int, step: int) -> bool:
        """Whether a step of branch `number` belongs to this branch or to the branches that it continues."""
        return number == self.number or any(number == of and step <= last for of, last in self.line)

    def leaving_at(self, step: int, number: int) -> Branch:
        """Branch `number`, which continues this one from `step`."""
        line = tuple((of, min(last, step)) for of, last in self.line)
        return Branch(number, (*line, (self.number, step)))


FIRST = Branch()


class SavedOrder:
    """The complete checkpoints under a root at the time of the call."""

    def __init__(
        self, root: str, known: dict[int, Branch] | None = None, elsewhere: dict[int, Branch] | None = None
    ) -> None:
        """`known`: {step: branch} that need not be read again. `elsewhere`: {step: branch} that the root may lack."""
        self.branches = dict(elsewhere or {})
        known = known or {}
        steps = complete_steps(root, known)
        found = _ask_each(root, [step for step in steps if step not in known], lambda step: read(path_of(root, step)))
        self.branches.update({step: found[step] if step in found else known[step] for step in steps})

    @classmethod
    def of(cls, branches: Mapping[int, Branch]) -> SavedOrder:
        """The order of steps whose branches are known. Reads nothing."""
        order = cls.__new__(cls)
        order.branches = dict(branches)
        return order

    @property
    def last(self) -> int | None:
        """The step that was saved last."""
        return max(self.branches, key=lambda step: (self.branches[step].number, step), default=None)

    @property
    def branch(self) -> Branch:
        """The branch of the last step."""
        return FIRST if (last := self.last) is None else self.branches[last]

    def newest_first(self) -> list[int]:
        """Returns the last step and the steps that it continues, back to the first; then the abandoned steps."""
        branch = self.branch

        def rank(step: int) -> tuple[bool, int, int]:
            number = self.branches[step].number
            return branch.follows(number, step), number, step

        return sorted(self.branches, key=rank, reverse=True)

    def abandoned_for(self, step: int, branch: Branch) -> list[int]:
        """Returns the steps after `step` that belong neither to `branch` nor to the branches that it continues."""
        return [other for other, its in self.branches.items() if other > step and not branch.follows(its.number, other)]


def write(directory: str, branch: Branch) -> None:
    """Writes `.order` durably for a save that begins. The first branch has no such file, unless it replaces an older
    one. Raises `_C.EngineError` and OSError."""
    if branch == FIRST and not storage_at(directory).has(ORDER_NAME):
        return
    before = read(directory)
    record = {
        "branch": branch.number,
        "line": branch.line,
        "replaces": metadata_fingerprint(directory),
        "before": {"branch": before.number, "line": before.line},
    }
    write_record(directory, ORDER_NAME, record)


def read(directory: str) -> Branch:
    """Returns the branch of the checkpoint in a directory. If `.order` cannot be read, warns and returns the first
    branch. Raises OSError if an object store cannot read it: a checkpoint in the wrong order might be removed."""
    path = os.path.join(directory, ORDER_NAME)
    try:
        record = read_record(directory, ORDER_NAME)
        replaces = record["replaces"]
        # If the save died before its commit, the record before it counts.
        found = record["before"] if replaces and replaces == metadata_fingerprint(directory) else record
        return Branch(int(found["branch"]), tuple((int(of), int(last)) for of, last in found["line"]))
    except FileNotFoundError:
        return FIRST
    except (OSError, CorruptCheckpointError, ValueError, TypeError, KeyError) as error:
        if storage_at(directory).is_away(error):
            raise
        logger.warning("%s: nobody knows when its checkpoint was saved: %s", path, error)
        return FIRST


def write_record(directory: str, name: str, record: dict[str, Any]) -> None:
    """Writes a small file of JSON durably, with a checksum. Raises `_C.EngineError` and OSError."""
    content = json.dumps({**record, "crc32": _checksum_of(record)}, indent=1)
    storage_at(directory).write(name, content.encode())


def read_record(directory: str, name: str) -> dict[str, Any]:
    """Returns the content of a small file of JSON. Raises `CorruptCheckpointError` if its checksum does not match."""
    path = os.path.join(directory, name)

    def read() -> dict[str, Any]:
        _, content = storage_at(directory).read_range(name, 0, _MOST_BYTES)
        try:
            record: dict[str, Any] = json.loads(content)
            if record.pop("crc32") == _checksum_of(record):
                return record
            reason = "its checksum does not match"
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = str(error)
        raise CorruptCheckpointError(f"{path} is damaged: {reason}", key=None, file=path)

    return read_twice(path, read)


def _checksum_of(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
