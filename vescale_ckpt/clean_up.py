"""What goes after a save has committed: checkpoints that the rule does not keep, and what dead saves have left."""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet

from . import step_directories, step_metrics
from .retention import Kept, Retention
from .verify import verify

logger = logging.getLogger(__name__)


def clean_up(root: str, retention: Retention, saved: int, damaged: AbstractSet[int]) -> None:
    """Removes what need not be kept, unless it is in use, or nothing sound would be left.

    Args:
        saved: the step that has just been saved. It stays.
        damaged: steps that could not be loaded: they do not count as kept.
    """
    complete = step_directories.complete_steps(root)
    checkpoints = [Kept(step, _metric(root, step, retention.best)) for step in complete if step not in damaged]
    surplus = set(retention.surplus(checkpoints))
    if retention.max_to_keep is not None:
        surplus |= damaged & set(complete)
    surplus.discard(saved)
    stay = [saved, *(step for step in reversed(complete) if step not in surplus)]
    if surplus and not any(verify(step_directories.path_of(root, step), quick=True).ok for step in stay):
        logger.warning("nothing is removed from %s: no checkpoint that would stay there is sound", root)
        surplus = set()
    step_directories.remove(root, sorted(surplus))
    step_directories.remove_leftovers(root)


def _metric(root: str, step: int, name: str | None) -> float | None:
    return None if name is None else step_metrics.read(step_directories.path_of(root, step)).get(name)
