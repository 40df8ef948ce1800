"""Which checkpoints to keep: a rule on steps and metrics, which knows nothing of files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

BestMode = Literal["max", "min"]


@dataclass(frozen=True)
class Kept:
    """A complete checkpoint, as far as the rule looks at it."""

    step: int
    metric: float | None = None  #: that the rule asks for; None: the checkpoint has none


@dataclass(frozen=True)
class Retention:
    """Keeps the newest `max_to_keep` checkpoints, or with `best` (a metric's name) the best ones; the newest in any
    case; and with `keep_period` each whose step is a multiple of it, for good. `max_to_keep=None` keeps all."""

    max_to_keep: int | None = None
    keep_period: int | None = None
    best: str | None = None
    best_mode: BestMode = "max"

    def __post_init__(self) -> None:
        for name in ("max_to_keep", "keep_period"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: at least 1 is wanted, or None")
        if self.best_mode not in ("max", "min"):
            raise ValueError(f"best_mode={self.best_mode!r}: 'max' or 'min' is wanted")

    def surplus(self, checkpoints: Iterable[Kept]) -> list[int]:
        """Steps that need not be kept, rising."""
        if self.max_to_keep is None:
            return []
        found = list(checkpoints)
        ranked = sorted(found, key=self._rank, reverse=True)
        kept = {checkpoint.step for checkpoint in ranked[: self.max_to_keep]}
        kept.add(max((checkpoint.step for checkpoint in found), default=0))
        return sorted(
            checkpoint.step
            for checkpoint in found
            if checkpoint.step not in kept and not (self.keep_period and checkpoint.step % self.keep_period == 0)
        )

    def _rank(self, checkpoint: Kept) -> tuple[float, int]:
        """Better is greater. Of equals the newer is; without a metric, or with NaN, it is worse than any with."""
        if self.best is None:
            return 0.0, checkpoint.step
        metric = checkpoint.metric
        if metric is None or math.isnan(metric):
            return -math.inf, checkpoint.step
        return (metric if self.best_mode == "max" else -metric), checkpoint.step
