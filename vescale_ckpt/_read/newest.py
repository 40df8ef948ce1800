"""Finds the newest checkpoint of a manager that is sound."""

from __future__ import annotations

from collections.abc import Callable, Container

from .._native.steps import SavedOrder, path_of
from .verify import verify


def newest_sound(
    root: str, *, quick: bool, passed_over: Callable[[int, str], None], but: Container[int] = ()
) -> int | None:
    """The step that was saved last of those that `verify` finds sound, without those in `but`. None if there is none.
    `passed_over` is called with each damaged one before it, and why."""
    for step in SavedOrder(root).newest_first():
        if step in but:
            continue
        report = verify(path_of(root, step), quick=quick)
        if report.ok:
            return step
        passed_over(step, report.damaged[0].reason)
    return None
