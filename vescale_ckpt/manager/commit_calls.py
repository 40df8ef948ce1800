"""`CommitCalls` calls a user's function in a thread for each checkpoint that a manager has committed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from .._checkpoint.native.file_names import METADATA_NAME
from .._storage.open_storage import storage_at
from .background_work import BackgroundWork

logger = logging.getLogger(__name__)

OnCommit = Callable[[int, str], object]


class CommitCalls(BackgroundWork[tuple[int, str]]):
    """The calls of one manager, one at a time, in the order of the commits. Only the coordinator has one.

    A checkpoint is not removed during its call, where the storage has locks. One that retention has removed before its
    turn is passed over.
    """

    def __init__(self, call: OnCommit) -> None:
        self.failures: dict[int, Exception] = {}  #: {step: error of its last call}
        self._call = call
        self._waiting: deque[tuple[int, str]] = deque()  # guarded by `_changed`
        super().__init__("vescale_ckpt on_commit")

    def begin(self, step: int, path: str) -> None:
        with self._changed:
            self._waiting.append((step, path))
        self._begin()

    def end_within(self, seconds: float) -> None:
        """Waits until all calls are done. After so many seconds it warns, and those that have not begun are not
        made."""
        with self._changed:
            if not self.wait(seconds):
                logger.warning(
                    "on_commit has not returned after %.0f s: %d calls are not made", seconds, len(self._waiting)
                )
            self._waiting.clear()

    def _next_work(self) -> tuple[int, str] | None:
        return self._waiting.popleft() if self._waiting else None

    def _do(self, work: tuple[int, str]) -> None:
        step, path = work
        try:
            with storage_at(path).share(METADATA_NAME):
                if storage_at(path).has(METADATA_NAME):
                    self._call(step, path)
                else:
                    logger.warning("on_commit is not called for step %d, which retention has removed meanwhile", step)
            self.failures.pop(step, None)
        except Exception as error:
            self.failures[step] = error
            logger.warning("on_commit failed for step %d: %s: %s", step, type(error).__name__, error)
