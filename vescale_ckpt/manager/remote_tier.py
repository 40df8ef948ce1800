"""`RemoteTier` asks the object store of a manager with `local`, without long waits for one that does not answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from .._checkpoint.native.step_order import complete_steps
from .._storage.open_storage import storage_at
from ..errors import CheckpointError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_PATIENCE = 10  # a request times out after so many seconds if the local directory has checkpoints
_AWAY_SECONDS = 60.0  # a store that did not answer is not asked again for so long


class RemoteTier:
    """The object store behind a local directory. As long as the directory has no checkpoint, requests wait as always,
    and errors are raised: there is no other checkpoint to continue from."""

    def __init__(self, url: str, local: str) -> None:
        self.url = url
        self.local = local
        self._away_until = 0.0

    def ask(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Returns what `ask` returns. If the store cannot be read now or could not a minute ago, and the local
        directory has checkpoints, warns and returns `otherwise`. Without local checkpoints, errors of `ask` pass
        through."""
        if not self._has_local():
            return ask()
        if time.monotonic() < self._away_until:
            return otherwise
        try:
            with storage_at(self.url).limit_wait(_PATIENCE):
                return ask()
        except (OSError, CheckpointError) as error:
            self._away_until = time.monotonic() + _AWAY_SECONDS
            logger.warning("checkpoints in %s do not count now, and those in %s do: %s", self.url, self.local, error)
            return otherwise

    def patience(self) -> AbstractContextManager[None]:
        """A context with the same timeout for requests whose errors the caller handles."""
        return storage_at(self.url).limit_wait(_PATIENCE) if self._has_local() else nullcontext()

    def _has_local(self) -> bool:
        return bool(complete_steps(self.local))
