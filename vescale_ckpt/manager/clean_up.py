"""Removes, after a commit, the checkpoints that retention does not keep and the files that dead saves have left."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace

from .._native import metadata_file
from .._native.names import METADATA_NAME
from .._native.steps import SavedOrder, complete_steps, path_of
from .._read.verify import verify
from .._storage.directory import directory_at, stat_of
from ..errors import CheckpointError
from . import step_directories, step_metrics
from .retention import Kept, Retention

logger = logging.getLogger(__name__)


def clean_up(
    root: str,
    retention: Retention,
    saved: int,
    failed_loads: Callable[[str], tuple[set[int], set[int]]] = lambda root: (set(), set()),
) -> None:
    """Removes checkpoints that retention does not keep. A checkpoint in use stays, and at least one sound one stays.

    A checkpoint that `verify(quick=True)` finds damaged does not count as kept: retention chooses again without it.

    Args:
        saved: the step that has just been saved. It always stays.
        failed_loads: gives the steps below a root that could not be loaded: those that are damaged, which do not count
            as kept, and others, which stay whatever retention says. Not called if everything is kept.
    """
    if retention.max_to_keep is not None:
        damaged, others = failed_loads(root)
        step_directories.remove(root, sorted(to_remove(root, retention, saved, damaged) - others))
    step_directories.remove_leftovers(root)


def to_remove(root: str, retention: Retention, saved: int, damaged: AbstractSet[int]) -> set[int]:
    """The steps that `clean_up` removes, unless they are in use."""
    if retention.max_to_keep is None:
        return set()
    oldest_first = SavedOrder(root).newest_first()[::-1]
    complete = set(oldest_first)
    checkpoints = [Kept(step, _metric(root, step, retention.best), at) for at, step in enumerate(oldest_first)]
    found: dict[int, _Check] = {}  # of the checkpoints that would be kept
    uncounted = complete & damaged
    # Checkpoints kept by `keep_period` are many, and do not count towards `max_to_keep`.
    by_rank = replace(retention, keep_period=None)
    while True:
        counted = [checkpoint for checkpoint in checkpoints if checkpoint.step not in uncounted]
        beaten = set(by_rank.surplus(counted)) - {saved}
        surplus = {step for step in beaten if not retention.keeps_for_good(step)}
        if not surplus and not uncounted:
            return set()
        kept = {checkpoint.step for checkpoint in counted} - beaten
        for step in kept - found.keys():
            found[step] = _Check(path_of(root, step), quick=True)
        unsound = {step for step in kept if not found[step].sound}
        if not unsound:
            break
        uncounted |= unsound
    uncounted &= set(complete_steps(root))  # another process may have removed some of them meanwhile
    for step in sorted(found.keys() & uncounted):
        logger.warning("the checkpoint of step %d in %s does not count as kept: %s", step, root, found[step].reason)
    # A checkpoint whose files could not be examined may still be whole.
    lost = {step for step in uncounted if step not in found or found[step].damaged}
    lost = {step for step in lost if step != saved and not retention.keeps_for_good(step)}
    if not kept:
        logger.warning("nothing is removed from %s: no checkpoint that would stay there is sound", root)
        return set()
    if not surplus | lost:
        logger.warning("nothing is removed from %s: the sound ones there are needed", root)
    return surplus | lost


def is_damaged(path: str) -> bool:
    """Whether a verification of all data finds a checkpoint damaged, and the file system answered for its files."""
    return _Check(path, quick=False).damaged


class _Check:
    """The result of `verify` for one checkpoint."""

    def __init__(self, path: str, *, quick: bool) -> None:
        report = verify(path, quick=quick)
        self.sound = report.ok
        self.reason = "" if report.ok else report.damaged[0].reason
        #: whether it is certainly damaged: the file system answered for every file that is reported
        self.damaged = not report.ok and all(_status_is_known(path, damage.file) for damage in report.damaged)


def _status_is_known(directory: str, file: str) -> bool:
    """Whether the file system answers for a file. "It does not exist" is an answer; an I/O error is none."""
    try:
        directory_at(directory).names()
        if file == os.path.join(directory, METADATA_NAME):
            metadata_file.metadata_bytes(directory, None)
        else:
            stat_of(file)
    except CheckpointError as error:
        return getattr(error, "errno", None) in (None, errno.ENOENT)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _metric(root: str, step: int, name: str | None) -> float | None:
    return None if name is None else step_metrics.read(path_of(root, step)).get(name)
