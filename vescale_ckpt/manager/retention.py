"""`Retention` decides which checkpoints a manager keeps, from their steps and metrics alone; clean_up.py removes the
others."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..settings import checked_count

BestMode = Literal["max", "min"]


@dataclass(frozen=True)
class Candidate:
    """The properties of a complete checkpoint that retention needs."""

    step: int
    metric: float | None = None  #: the metric that `best` names; None: the checkpoint has none


@dataclass(frozen=True)
class Retention:
    """Which checkpoints a `CheckpointManager` keeps. It removes the others after a newer one is durable.

    The checkpoint saved last, that of the highest step, and the last one of `pinned` always stay, whatever the rule
    says. A subclass may define `keeps`, to have a rule of its own.

    Args:
        newest: how many checkpoints stay: those saved last, or with `best` the best ones. None: all.
        period: checkpoints whose step is a multiple of it stay for good, and do not count towards `newest`.
        best: name of the metric that ranks checkpoints. Every save then needs this metric.
        best_mode: "max" or "min"; required with `best`.
        pinned: steps, which may be added to while a manager uses the rule. The last one that is there stays, and counts
            towards `newest`.
    """

    newest: int | None = None
    period: int | None = None
    best: str | None = None
    best_mode: BestMode | None = None
    pinned: list[int] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        for name in ("newest", "period"):
            object.__setattr__(self, name, checked_count(name, getattr(self, name)))  # an int: NumPy's may overflow
        if self.best is not None and (not isinstance(self.best, str) or not self.best):
            raise ValueError(f"best: expected the name of a metric or None, got {self.best!r}")
        if self.best_mode not in ("max", "min", None):
            raise ValueError(f"best_mode: expected 'max' or 'min', got {self.best_mode!r}")
        if self.best is not None and self.best_mode is None:
            raise ValueError(
                f"best_mode is missing: for best={self.best!r} say 'min' if less is better (a loss), or 'max'"
            )

    def keeps(self, checkpoints: Sequence[Candidate]) -> Collection[int]:
        """Returns the steps that stay.

        `checkpoints` are those that count, in the order of saving, after the abandoned ones. Each has a `step`, and as
        `metric` the value of the metric `best`, or None. A damaged checkpoint does not count: the rule is asked again
        without it.

        The coordinator asks, also in threads beside the training. If the rule raises, or returns what is no step,
        nothing is removed, and the error is logged.
        """
        there = {checkpoint.step for checkpoint in checkpoints}
        if self.newest is None:
            return there
        pinned = self._last_pinned(there)
        ranked = sorted(checkpoints, key=lambda one: (one.step == pinned, self._rank(one)))  # of equals the last wins
        return {checkpoint.step for checkpoint in ranked[-self.newest :]}

    def keeps_for_good(self, step: int) -> bool:
        """Whether a step stays whatever `keeps` says, and even if it is damaged."""
        return self.period is not None and step % self.period == 0

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever removed, so that no checkpoints need be listed for it."""
        return self.newest is None and type(self).keeps is Retention.keeps

    def beaten(self, checkpoints: Sequence[Candidate]) -> set[int]:
        """The steps that do not stay by their rank. They may be kept for good. Raises TypeError if `keeps` returns
        what is no step."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        if not steps:
            return set()
        kept = map(_as_step, self.keeps(tuple(checkpoints)))
        return {*steps} - {*kept, self._last_pinned(steps), steps[-1], max(steps)}

    def surplus(self, checkpoints: Sequence[Candidate]) -> list[int]:
        """The steps that may be removed, in ascending order."""
        return sorted(step for step in self.beaten(checkpoints) if not self.keeps_for_good(step))

    def best_first(self, checkpoints: Iterable[Candidate]) -> list[int]:
        """The steps that have the metric, the best one first, and of equals the highest step."""
        ranked = sorted(checkpoints, key=lambda one: (self._rank(one), one.step), reverse=True)
        return [checkpoint.step for checkpoint in ranked if self._rank(checkpoint)[0]]

    def _last_pinned(self, there: Collection[int]) -> int | None:
        return next((step for step in reversed(self.pinned) if step in there), None)

    def _rank(self, checkpoint: Candidate) -> tuple[bool, float]:
        """Returns a rank that is greater for a better checkpoint. One without a metric, or with NaN, ranks below all
        others. An infinity counts as a number."""
        metric = checkpoint.metric
        if self.best is None or metric is None or math.isnan(metric):
            return False, 0.0
        return True, (metric if self.best_mode == "max" else -metric)


def _as_step(kept: int) -> int:
    """Raises TypeError for what is no step: a checkpoint, or a mask of them."""
    if isinstance(kept, bool) or not hasattr(kept, "__index__"):
        raise TypeError(f"Retention.keeps: expected steps, got {kept!r:.100}")
    return operator.index(kept)
