"""`Trail` follows a training by the fingerprints of its saves, and finds a copy that is saved again and again."""

from __future__ import annotations

from math import prod

from ..errors import some
from .fingerprint import Fingerprint, TensorValue


class Trail:
    """Compares each save with the one before it."""

    def __init__(self) -> None:
        self._last: tuple[int, dict[str, TensorValue]] | None = None

    def note(self, step: int, taken: Fingerprint) -> str | None:
        """Notes the fingerprint of a save. Returns a warning if all trained tensors equal those of the save before,
        although the step has gone on; otherwise None."""
        trained = {key: of for key, of in taken.tensors.items() if _is_trained(of)}
        before, self._last = self._last, (step, trained)
        if before is None or not trained or before[0] >= step or before[1] != trained:
            return None
        return (
            f"step {step} has the same tensors as step {before[0]}, bit for bit: all {len(trained):,} parameters, "
            f"moments and buffers of floating point ({some(sorted(trained), 3)}). Either the optimizer made no step in "
            "between, or what is saved is a stale copy. Counters, random states and objects are not compared"
        )


def _is_trained(of: TensorValue) -> bool:
    """Whether training changes a tensor. Random states are integers, and counters, such as Adam's `step`, one number:
    they go on beside a stale copy."""
    return of.dtype.startswith(("float", "bfloat", "complex")) and prod(of.shape) > 1
