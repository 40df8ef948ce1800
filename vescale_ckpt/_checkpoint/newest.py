"""Finds the newest sound checkpoint for a manager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence

from .._storage.open_storage import storage_at
from ..errors import CheckpointError
from ..reports import VerifyReport
from .native.step_order import SavedOrder, path_of
from .verify import verify

logger = logging.getLogger(__name__)


def newest_sound(
    roots: Sequence[str],
    *,
    quick: bool,
    on_damage: Callable[[int, str], None],
    but: Container[str] = (),
    arrange: Callable[[list[int]], list[int]] | None = None,
) -> tuple[int, str] | None:
    """Returns the step that was saved last of those that `verify` finds sound, and the path of its checkpoint in the
    first of `roots` with a sound one. None if there is none. Ignores paths in `but`. Calls `on_damage` with each newer
    step that is damaged, and the reason. `arrange`: gets the steps, the newest first, and returns them in the order in
    which they are tried.

    If an object store cannot be read, no older checkpoint is taken instead: raises OSError or `CheckpointError`. If an
    earlier root has a sound checkpoint, warns and leaves out the root that cannot be read."""
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
    unknown: CheckpointError | None = None
    newest_first = order.newest_first()
    for step in newest_first if arrange is None else arrange(newest_first):
        for root, steps in list(here.items()):
            path = path_of(root, step)
            if step not in steps or path in but:
                continue
            report = verify(path, quick=quick)
            if report.ok:
                return step, path
            if (doubt := in_doubt(path, report)) is not None:
                unknown = doubt
                if root == roots[0]:
                    raise unknown
                logger.warning("checkpoints in %s do not count now: %s", root, unknown)
                del here[root]
                continue
            on_damage(step, report.reason)
    if unknown is not None:
        raise unknown
    return None


def in_doubt(path: str, report: VerifyReport) -> CheckpointError | None:
    """The error for a checkpoint that cannot be read now and may be sound, by its report. None if it is no such one."""
    if report.damaged or not report.unreadable or not storage_at(path).can_be_away:
        return None
    return CheckpointError(
        f"{path} cannot be read, and may be sound: {report.reason}. No older checkpoint is taken instead. Try again "
        "when the store answers, or name a step",
        path=path,
    )
