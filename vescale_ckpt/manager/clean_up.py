"""Removes the checkpoints that retention does not keep, and orphans, for the manager after each commit."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from .._checkpoint.native.step_order import SavedOrder, all_steps, complete_steps, path_of
from .._checkpoint.verify import verify
from ..errors import CheckpointError
from ..reports import VerifyReport
from . import step_directories, step_metrics
from .retention import Candidate, Retention

logger = logging.getLogger(__name__)


def clean_up(
    root: str,
    retention: Retention,
    saved: int,
    doubted: AbstractSet[int] = frozenset(),
    spared: AbstractSet[int] = frozenset(),
    known: AbstractSet[int] = frozenset(),
) -> frozenset[int]:
    """Removes checkpoints that retention does not keep. Checkpoints in use stay, and at least one sound checkpoint
    stays.

    A damaged checkpoint does not count as kept: retention chooses again without it. It is removed if a whole
    verification finds damage, too. Raises OSError or `CheckpointError`, and removes nothing, if an object store cannot
    be read.

    Args:
        saved: the step that has just been saved. It always stays.
        doubted: steps that a load found damaged. They count as kept only if a verification finds no damage.
        spared: steps that stay whatever retention says.
        known: steps that were complete when the save began, and so are no orphans. In an object store each look at one
            is a request.

    Returns the steps of `doubted` that are sound. They stay, too: their load failed for another reason, and training
    went on from an older step.
    """
    checkpoints = _candidates(root, retention)
    surplus, sound = _to_remove(root, retention, checkpoints, saved, doubted)
    step_directories.remove(root, sorted(surplus - sound - spared))
    complete = known | {checkpoint.step for checkpoint in checkpoints}
    step_directories.remove_orphans(root, besides=complete - surplus)
    return sound


def clean_up_part(root: str, surplus: set[int], spared: Collection[int]) -> None:
    """Removes steps from the folder of one node, and orphans but for `spared`: only all nodes together see which steps
    are whole, so the coordinator decides. What is gone leaves `surplus`; a step that does so meanwhile is saved again,
    and stays."""
    there = {*all_steps(root)}
    removed = step_directories.remove(root, (step for step in sorted(there & surplus) if step in surplus))
    surplus -= {*removed} | (surplus - there)
    step_directories.remove_orphans(root, besides=spared)


def to_remove(root: str, retention: Retention, saved: int) -> set[int]:
    """Returns the steps that `clean_up` removes unless they are in use."""
    checkpoints = _candidates(root, retention)
    return _to_remove(root, retention, checkpoints, saved, frozenset())[0]


@dataclass(frozen=True)
class Pruned:
    """What `prune` did, or would do: steps, from the lowest on; those of `kept` in the order of saving."""

    removed: list[int]
    in_use: list[int]  #: retention does not keep them, but they stay
    kept: list[int]


def prune(root: str, retention: Retention, *, dry_run: bool) -> Pruned:
    """Removes the checkpoints that retention does not keep. Raises `CheckpointError` if there are none. `dry_run`:
    removes nothing, and returns what would be done."""
    last = SavedOrder(root).last
    if last is None:
        raise CheckpointError(f"{root} holds no checkpoints of a CheckpointManager", path=root)
    removed = steps = sorted(to_remove(root, retention, last))
    if not dry_run:
        removed = sorted(step_directories.remove(root, steps))
    kept = [step for step in SavedOrder(root).newest_first()[::-1] if step not in removed]
    return Pruned(removed, sorted(set(steps) - set(removed)), kept)


def _to_remove(
    root: str, retention: Retention, checkpoints: Sequence[Candidate], saved: int, doubted: AbstractSet[int]
) -> tuple[set[int], frozenset[int]]:
    complete = {checkpoint.step for checkpoint in checkpoints}
    found: dict[int, VerifyReport] = {}  # {step: report} of the checkpoints that would be kept
    # A load may have failed for another reason than the files.
    whole = {step: verify(path_of(root, step)) for step in sorted(complete & doubted)}
    sound = frozenset(step for step, report in whole.items() if report.ok)
    uncounted = whole.keys() - sound
    while True:
        counted = [checkpoint for checkpoint in checkpoints if checkpoint.step not in uncounted]
        beaten = retention.beaten(counted) - {saved}  # those that are kept for good are many, and do not count as kept
        if uncounted and (others := [checkpoint.step for checkpoint in counted if checkpoint.step != saved]):
            beaten.discard(others[-1])  # damage was found, so the checkpoint that a load would take next stays
        surplus = {step for step in beaten if not retention.keeps_for_good(step)}
        if not surplus and not uncounted:
            return set(), sound
        kept = {checkpoint.step for checkpoint in counted} - beaten
        for step in kept - found.keys():
            found[step] = verify(path_of(root, step), quick=True)
        unsound = {step for step in kept if not found[step].ok}
        if not unsound:
            break
        uncounted |= unsound
    if uncounted:
        uncounted &= set(complete_steps(root))  # another process may have removed some of them meanwhile
    for step in sorted(uncounted):
        reason = (found[step] if step in found else whole[step]).reason
        logger.warning("the checkpoint of step %d in %s does not count as kept: %s", step, root, reason)
    lost = {step for step in uncounted if step != saved and not retention.keeps_for_good(step)}
    # A checkpoint whose files could not be read may still be whole.
    lost = {step for step in lost if step in whole or found[step].damaged}
    for step in sorted(lost - whole.keys()):
        whole[step] = verify(path_of(root, step))
    lost = {step for step in lost if whole[step].damaged and not whole[step].unreadable}
    if not kept:
        logger.warning("nothing is removed from %s: none of the checkpoints that would stay is sound", root)
        return set(), sound
    if not surplus | lost:
        logger.warning("nothing is removed from %s: all sound checkpoints there are needed", root)
    return surplus | lost, sound


def _candidates(root: str, retention: Retention) -> list[Candidate]:
    """Returns none where retention keeps all, and reads nothing for that."""
    if retention.keeps_all:
        return []
    oldest_first = SavedOrder(root).newest_first()[::-1]
    return [Candidate(step, _metric(root, step, retention.best)) for step in oldest_first]


def _metric(root: str, step: int, name: str | None) -> float | None:
    return None if name is None else step_metrics.read(path_of(root, step)).get(name)
