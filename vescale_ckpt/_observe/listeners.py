"""Calls the registered listeners at the end of each save and load, for metrics."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ..reports import LoadStats, SaveStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """A save or load that has ended on this rank. Exactly one of `stats` and `error` is set."""

    kind: Literal["save", "load"]
    path: str
    rank: int
    ranks: int
    seconds: float  #: from the call to the end
    stats: SaveStats | LoadStats | None
    error: BaseException | None

    @property
    def step(self) -> int | None:
        """The number at the end of the path, as in `step-1000`; None without one."""
        found = re.search(r"(\d+)/*$", self.path)
        return None if found is None else int(found[1])


Listener = Callable[[Finished], object]

_listeners: list[Listener] = []  # each change is one operation of the list, so threads need no lock


def on_finish(listener: Listener) -> Callable[[], None]:
    """Calls `listener` with a `Finished` at the end of each save and load of this process, on the thread that ends it.

    An exception in the listener is logged and not propagated. Returns a function that removes the listener.
    """
    _listeners.append(listener)

    def remove() -> None:
        with suppress(ValueError):
            _listeners.remove(listener)

    return remove


def tell(finished: Finished) -> None:
    for listener in list(_listeners):
        try:
            listener(finished)
        except Exception:
            logger.exception("a listener of saves and loads failed; the %s is not affected", finished.kind)
