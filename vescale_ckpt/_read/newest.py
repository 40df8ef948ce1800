"""Finds the newest checkpoint of a manager that is sound."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence

from .._native.steps import SavedOrder, path_of
from ..errors import CheckpointError
from .verify import verify

logger = logging.getLogger(__name__)


def newest_sound(
    roots: Sequence[str], *, quick: bool, passed_over: Callable[[int, str], None], but: Container[str] = ()
) -> tuple[int, str] | None:
    """The step that was saved last of those that `verify` finds sound, and the path of its checkpoint: below the first
    of `roots` that has a sound one. Paths in `but` do not count. None if there is none. `passed_over` is called with
    each damaged one before it, and why. A root that cannot be read is left out, with a warning, if one before it has
    checkpoints."""
    order, here = SavedOrder(roots[0]), {}
    here[roots[0]] = set(order.branches)
    for root in roots[1:]:
        try:
            there = SavedOrder(root).branches
        except (OSError, CheckpointError) as error:
            if not order.branches:
                raise
            logger.warning("checkpoints in %s do not count now: %s", root, error)
            continue
        here[root] = set(there)
        order.branches = {**there, **order.branches}
    for step in order.newest_first():
        for root, steps in here.items():
            path = path_of(root, step)
            if step not in steps or path in but:
                continue
            report = verify(path, quick=quick)
            if report.ok:
                return step, path
            passed_over(step, report.damaged[0].reason)
    return None
