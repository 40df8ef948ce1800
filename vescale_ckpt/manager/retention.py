"""Decides for the manager which checkpoints to keep, from their steps and metrics alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..settings import checked_count

BestMode = Literal["max", "min"]


@dataclass(frozen=True)
class Candidate:
    """The properties of a complete checkpoint that retention needs."""

    step: int
    metric: float | None = None  #: the metric that `best` names; None: the checkpoint has none
    order: int | None = None  #: index in the order of saving, with abandoned checkpoints first; None: the step


@dataclass(frozen=True)
class Retention:
    """Keeps the `max_to_keep` checkpoints that were saved last, or with `best` (a metric's name) the best ones.

    The checkpoint saved last and that of the highest step always stay. With `keep_period`, checkpoints whose step is a
    multiple of it stay for good. Of the steps in `pinned`, which may be added to, the last one that is there stays, and
    counts towards `max_to_keep`. `max_to_keep=None` keeps all.
    """

    max_to_keep: int | None = None
    keep_period: int | None = None
    best: str | None = None
    best_mode: BestMode | None = None
    pinned: list[int] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        for name in ("max_to_keep", "keep_period"):
            checked_count(name, getattr(self, name))
        if self.best is not None and (not isinstance(self.best, str) or not self.best):
            raise ValueError(f"best: expected the name of a metric or None, got {self.best!r}")
        if self.best_mode not in ("max", "min", None):
            raise ValueError(f"best_mode: expected 'max' or 'min', got {self.best_mode!r}")
        if self.best is not None and self.best_mode is None:
            raise ValueError(
                f"best_mode is missing: for best={self.best!r} say 'min' if less is better (a loss), or 'max'"
            )

    def keeps_for_good(self, step: int) -> bool:
        return self.keep_period is not None and step % self.keep_period == 0

    def surplus(self, checkpoints: Iterable[Candidate]) -> list[int]:
        """The steps that may be removed, in ascending order."""
        if self.max_to_keep is None:
            return []
        found = list(checkpoints)
        there = {checkpoint.step for checkpoint in found}
        pinned = next((step for step in reversed(self.pinned) if step in there), None)
        ranked = sorted(found, key=lambda one: (one.step == pinned, self._rank(one)), reverse=True)
        kept = {checkpoint.step for checkpoint in ranked[: self.max_to_keep]}
        if found:
            kept |= {max(found, key=_order).step, max(checkpoint.step for checkpoint in found)}
        return sorted(
            checkpoint.step
            for checkpoint in found
            if checkpoint.step not in kept and not self.keeps_for_good(checkpoint.step)
        )

    def best_first(self, checkpoints: Iterable[Candidate]) -> list[int]:
        """The steps that have the metric, the best one first."""
        ranked = sorted(checkpoints, key=self._rank, reverse=True)
        return [checkpoint.step for checkpoint in ranked if self._rank(checkpoint)[0]]

    def _rank(self, checkpoint: Candidate) -> tuple[bool, float, int]:
        """Returns a rank that is greater for a better checkpoint. Of equal metrics the newer one wins. A checkpoint
        without a metric, or with NaN, ranks below all others. An infinity counts as a number."""
        metric = checkpoint.metric
        if self.best is None or metric is None or math.isnan(metric):
            return False, 0.0, _order(checkpoint)
        return True, (metric if self.best_mode == "max" else -metric), _order(checkpoint)


def _order(checkpoint: Candidate) -> int:
    return checkpoint.step if checkpoint.order is None else checkpoint.order
