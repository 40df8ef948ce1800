"""`Steps` runs the steps of a save on this rank, so that an error on one rank stops all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from .exchange import Exchange

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Steps:
    """Errors are sticky: after one, this rank skips all steps until the next `raise_together`, in which all ranks
    raise.

    Args:
        doing: names the save in errors and phases; equal on all ranks.
    """

    def __init__(self, exchange: Exchange, doing: str) -> None:
        self.exchange = exchange
        self.error: BaseException | None = None
        self._doing = doing

    def phase(self, step: str) -> str:
        return f"{self._doing}: {step}"

    def take(
        self, step: Callable[_Arguments, _Result], *arguments: _Arguments.args, **options: _Arguments.kwargs
    ) -> _Result | None:
        """Runs a step and returns its result; None if this step or an earlier one has failed."""
        if self.error is None:
            try:
                return step(*arguments, **options)
            except Exception as error:
                self.error = error
        return None

    def gather(self, step: Callable[[], bytes], phase: str) -> list[bytes] | None:
        """Runs a step, whose result must not be empty; collective. Returns the results of all ranks on the coordinator;
        None on other ranks, and if any rank has an error."""
        gathered = self.exchange.gather(self.take(step) or b"", self.phase(phase))
        return gathered if gathered is not None and all(gathered) else None

    def gather_distinct(self, step: Callable[[], Sequence[bytes]], count: int, phase: str) -> list[list[bytes]] | None:
        """Like `gather`, for a step that returns `count` parts, the first of which must not be empty. Equal parts of
        several ranks are sent once."""
        gathered = self.exchange.gather_distinct(self.take(step) or [b""] * count, self.phase(phase))
        return gathered if gathered is not None and all(parts[0] for parts in gathered) else None

    def raise_together(self, phase: str, least: Sequence[int] = (), sums: Sequence[int] = ()) -> list[int]:
        """Raises on all ranks if any has an error; collective. Returns the minima of `least` and the sums of `sums`."""
        return self.exchange.fail_together(self.error, self.phase(phase), least=least, sums=sums)
