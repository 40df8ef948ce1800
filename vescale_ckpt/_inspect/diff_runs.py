"""Compares two runs, or two checkpoints, by the fingerprints that their saves have kept. Reads no other data."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass, field

from .._checkpoint.native.step_order import SavedOrder, path_of
from .._checkpoint.open_checkpoint import open_parts
from .._checkpoint.recognize import recognize
from .._fingerprint.fingerprint import Fingerprint, not_comparable
from .._storage.open_storage import checkpoint_path
from ..errors import CheckpointError
from .info import read_fingerprint


@dataclass
class RunDiff:
    """The result of `diff_runs`."""

    step: int | None = None  #: the first step at which they part; None: they do not, or two checkpoints were compared
    different: dict[str, str] = field(default_factory=dict)  #: {key: how it differs}, at that step
    equal_steps: list[int] = field(default_factory=list)  #: common steps before it, whose fingerprints are equal
    #: common steps before it that were not compared, as one has no fingerprint
    steps_without: list[int] = field(default_factory=list)
    only_a: list[int] = field(default_factory=list)  #: steps that only the first run has
    only_b: list[int] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)  #: keys of `PerRank` values of another number of ranks

    @property
    def equal(self) -> bool:
        """Whether all that either run has was compared, and is equal."""
        missing = self.steps_without or self.only_a or self.only_b or self.not_compared
        return not (self.different or missing)


def diff_runs(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> RunDiff:
    """Compares the common steps of two managers' directories, in ascending order, up to the first that differs; or two
    checkpoints. Steps that a run has abandoned do not count.

    Raises `CheckpointError` if a path is neither, or two checkpoints have no fingerprints; and the errors of reading.
    """
    paths, result = (checkpoint_path(a), checkpoint_path(b)), RunDiff()
    if all(recognize(path) == "dcp" for path in paths):
        if not _compare(*paths, result):
            raise CheckpointError(f"{paths[0]} and {paths[1]}: not both were saved with fingerprint=True")
        return result
    steps = [_steps(path) for path in paths]
    result.only_a, result.only_b = sorted(steps[0] - steps[1]), sorted(steps[1] - steps[0])
    for step in sorted(steps[0] & steps[1]):
        is_known = _compare(path_of(paths[0], step), path_of(paths[1], step), result)
        if result.different:
            result.step = step
            break
        (result.equal_steps if is_known else result.steps_without).append(step)
    return result


def _steps(root: str) -> set[int]:
    order = SavedOrder(root)
    if order.last is None:
        raise CheckpointError(f"{root} has no steps of a CheckpointManager", path=root)
    return {*order.branches} - {*order.abandoned_for(-1, order.branch)}


def _compare(a: str, b: str, result: RunDiff) -> bool:
    """Notes what differs. Returns whether both have a fingerprint."""
    one, other = _fingerprint_at(a), _fingerprint_at(b)
    if one is None or other is None:
        return False
    apart = not_comparable(one, other)
    result.different = {key: how for key, how in (one - other).items() if key not in apart}
    result.not_compared = sorted({*result.not_compared, *apart})
    return True


def _fingerprint_at(path: str) -> Fingerprint | None:
    first, *_ = open_parts(path)
    with closing(first):
        first.check_malformed()
        return read_fingerprint(first)
