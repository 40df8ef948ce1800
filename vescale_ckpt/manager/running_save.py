"""`RunningSave` locks the directory and writes the metrics before one save of a manager, and cleans up after it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from .._checkpoint.native import step_order
from .._checkpoint.native.step_order import Branch
from .._collective.handle import SaveHandle
from .._engine import _C
from .._storage.open_storage import storage_at
from .._storage.storage import Lease
from ..errors import CheckpointError, SaveCancelledError
from . import step_directories, step_metrics
from .node_table import Removal

logger = logging.getLogger(__name__)


class RunningSave:
    """One save of this rank. Its clean-up runs after that of the save before, whichever thread runs it."""

    def __init__(self, root: str, step: int, is_coordinator: bool, before: RunningSave | None) -> None:
        self.root = root
        self.path = step_order.path_of(root, step)
        self.step = step
        self.is_coordinator = is_coordinator  # stored: the process group may be destroyed before the save ends
        self.handle: SaveHandle | None = None  # None: the save could not begin
        self.has_begun = False  # whether what measures and tells of a save has begun
        self._cancelled_here = False
        self.began = time.monotonic()
        self.on_end: list[Callable[[int | None], None]] = []  # called with the step, or None after a failure
        self.superseded = Removal()  # with folders of the nodes: what goes when it has committed
        self.before = before  # until this one has ended
        self._lock = Lease()  # it locks the step's directory
        self._ended = threading.Event()

    def prepare(self, metrics: Mapping[str, float] | None, branch: Branch) -> None:
        """Takes the lock and writes metrics and branch, on the coordinator. Failures of lock and metrics are only
        logged. Raises if the branch cannot be written: the checkpoint would not count as the one saved last."""
        if not self.is_coordinator:
            return
        try:
            self._lock = storage_at(self.path).share()
        except (CheckpointError, _C.EngineError, OSError) as error:
            logger.warning("the directory of step %d cannot be locked: %s", self.step, error)
        try:
            step_metrics.write(self.path, self.step, metrics)
        except (CheckpointError, _C.EngineError, OSError) as error:
            logger.warning("the metrics of step %d are not kept: %s", self.step, error)
        step_order.write(self.path, branch)

    def cancel(self) -> bool:
        self._cancelled_here = True
        return self.handle is not None and self.handle.cancel()

    def ends_within(self, seconds: float) -> bool:
        """Whether it ends, but for the clean-up, within so many seconds."""
        with suppress(TimeoutError):
            if self.handle is not None:
                self.handle.wait(seconds)
        return self.handle is None or self.handle.done()

    def is_durable(self) -> bool:
        return self.handle is not None and self.handle.stats is not None

    def end(self, then: Callable[[], None] | None) -> None:
        """Called when the save is durable or has failed. Releases the lock and calls `then`, whose errors are logged.
        Needs no other rank."""
        try:
            self._lock.release()
            if self.before is not None:  # its clean-up may still remove large files
                self.before.wait_until_ended()
            if then is not None:
                then()
            elif self.is_coordinator and self._was_cancelled():
                step_directories.remove_orphans(self.root, [self.step])
        except Exception:
            logger.exception("the checkpoints that step %d supersedes stay until the next save", self.step)
        finally:
            self.before = None
            try:
                for call in self.on_end:
                    call(None if then is None else self.step)
            finally:
                self.on_end = []
                self._ended.set()

    def wait_until_ended(self) -> None:
        """Waits until the save has ended and its clean-up is done."""
        self._ended.wait()

    def raise_error(self) -> None:
        """Raises the error of a save that has ended, if there is one; not to who has cancelled it."""
        if self.handle is not None and not (self._cancelled_here and self._was_cancelled()):
            self.handle.result()

    def _was_cancelled(self) -> bool:
        return self.handle is not None and isinstance(self.handle.wait(), SaveCancelledError)
