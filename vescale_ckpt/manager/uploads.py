"""`Uploads` copies checkpoints in a thread from the local folder of a `Tier` to the durable place."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from .._checkpoint.native.file_names import METADATA_NAME, NODE_MARKER
from .._checkpoint.native.metadata_file import metadata_fingerprint
from .._checkpoint.native.step_order import SavedOrder, complete_steps, path_of
from .._checkpoint.verify import verify
from .._convert.copy import FolderCopy
from .._convert.transfer import CopyReport
from .._engine.engine_errors import named_system_errors
from .._observe.amounts import size
from .._storage.open_storage import storage_at
from ..errors import CheckpointError
from .background_work import BackgroundWork
from .clean_up import clean_up, to_remove
from .repair import write_lost_copies
from .retention import Retention
from .tier import Tier

logger = logging.getLogger(__name__)

_SECONDS_TO_STOP = 1.0


class Uploads(BackgroundWork[None]):
    """The uploads of one manager. Only the coordinator has one.

    One checkpoint is copied at a time, beginning with the one that was saved last. If the network is slower than the
    saves, retention may remove others locally before their turn. A checkpoint is not removed while it is copied. A
    checkpoint in the durable place is whole or not there. After a kill, the next manager copies the missing files.
    """

    def __init__(self, local: str, durable: str, retention: Retention, tier: Tier) -> None:
        self.local = local
        self.durable = durable
        self._retention = retention
        self._tier = tier
        self._stopped = threading.Event()
        self._step: int | None = None  # the step that is being copied; `_changed` guards it
        self._sent: dict[int, str] = {}  # {step: fingerprint of the metadata in the durable place}
        super().__init__("vescale_ckpt tiers")

    def begin(self) -> None:
        """Looks for checkpoints to copy. Called after each save."""
        with self._changed:
            if self._stopped.is_set() or self._waiting:
                return
        self._add(None)

    def uploading(self) -> int | None:
        """The step that is being copied."""
        with self._changed:
            return self._step

    def stop(self) -> None:
        """Cancels the running copy. The next manager continues it. A request to a store that does not answer may still
        end later."""
        with self._changed:
            self._stopped.set()
            self._waiting.clear()
        self.wait(_SECONDS_TO_STOP)

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise CheckpointError(f"uploads to {self.durable} were stopped", path=self.durable)

    def end_within(self, seconds: float) -> None:
        if not self.wait(seconds):
            logger.warning("%s is not uploaded yet: the next manager goes on with it", self.local)
            self.stop()

    def finish(self, seconds: float) -> None:
        """Ends the uploads. Raises `CheckpointError` if steps could not be uploaded."""
        try:
            self.end_within(seconds)
        finally:
            self.stop()
        self.raise_failures(
            lambda steps: f"steps {steps} could not be uploaded to {self.durable}, and are in {self.local} alone",
            self.durable,
        )

    # --- In the thread

    def _do(self, work: None) -> None:
        try:
            self._upload_all()
        except Exception as error:
            logger.warning("checkpoints in %s are not uploaded now: %s", self.local, error)
            with contextlib.suppress(Exception):
                if (last := SavedOrder(self.local).last) is not None:
                    self.failures[last] = CheckpointError(str(error), path=self.durable)

    def _upload_all(self) -> None:
        tried: set[int] = set()
        while not self._stopped.is_set() and (step := self._next(tried)) is not None:
            tried.add(step)
            with self._changed:
                self._step = step
            try:
                self._upload(step)
                self.failures.pop(step, None)
            except (CheckpointError, OSError) as error:
                if storage_at(path_of(self.local, step)).has(METADATA_NAME) and not self._stopped.is_set():
                    failure = error if isinstance(error, CheckpointError) else CheckpointError(str(error))
                    self.failures[step] = failure
                    logger.warning(
                        "step %d stays in %s alone, and is uploaded after the next save: %s", step, self.local, error
                    )
            finally:
                with self._changed:
                    self._step = None

    def _next(self, tried: set[int]) -> int | None:
        """Returns the step saved last of those that the durable place lacks and would keep."""
        order = SavedOrder(self.local)
        if order.last is None:
            return None
        there = set(complete_steps(self.durable))
        surplus = to_remove(self.local, self._retention, order.last)
        for step in order.newest_first():
            if not self._tier.becomes_durable(step):
                continue
            path = path_of(self.local, step)
            if storage_at(path).has(NODE_MARKER) and not verify(path, quick=True).ok:
                continue  # an earlier job of several nodes has left a part of it
            if step not in tried and step not in surplus and not (step in there and self._is_sent(step)):
                return step
        return None

    def _is_sent(self, step: int) -> bool:
        """Whether the durable place has the same checkpoint, not an older save of the same step."""
        fingerprint = metadata_fingerprint(path_of(self.local, step))
        if self._sent.get(step) != fingerprint:
            self._sent[step] = metadata_fingerprint(path_of(self.durable, step))
        return self._sent[step] == fingerprint

    def _upload(self, step: int) -> None:
        source, url = path_of(self.local, step), path_of(self.durable, step)
        began = time.monotonic()
        report = CopyReport(url)
        with storage_at(source).share(METADATA_NAME), named_system_errors(url):
            self._copy(source, url, report)
        logger.info("step %d is in %s: %s in %.1f s", step, url, size(report.bytes), time.monotonic() - began)
        self._clean_up(step)

    def _copy(self, source: str, url: str, report: CopyReport) -> None:
        """Raises `CheckpointError` and OSError, soon after the uploads were stopped, too."""
        write_lost_copies(source)  # a save that was killed did not write them, and one that is ending will in a moment
        FolderCopy(
            source, url, True, report, bytes_per_second=self._tier.upload_bytes_per_second, read_back=False,
            check=self._check_stopped,
        ).run()  # fmt: skip

    def _clean_up(self, step: int) -> None:
        try:
            # Where retention keeps all, it does not ask which steps are complete.
            known = frozenset(complete_steps(self.durable) if self._retention.keeps_all else ())
            clean_up(self.durable, self._retention, step, known=known)
        except (CheckpointError, OSError) as error:  # the upload itself has succeeded
            logger.warning("what step %d supersedes stays in %s until the next upload: %s", step, self.durable, error)
