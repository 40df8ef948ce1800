"""`Tier` says which folder a manager uses in front of its durable place, and what becomes durable.

`DurablePlace` reads that place, without long waits for a store that is away. `DurableStep` copies to a node what the
nodes have lost of a step.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from .._checkpoint.native.step_order import Branch, SavedOrder, complete_steps, path_of
from .._collective.node_files import DURABLE
from .._convert.transfer import Transfer
from .._engine import _C
from .._ranks.send_files import Check
from .._storage.open_storage import size_in, storage_at
from .._storage.pending import PendingFile
from ..errors import CheckpointError, StorageFullError
from ..settings import checked_count, checked_path
from . import run_id
from .run_id import Run

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_PATIENCE = 10  # a request times out after so many seconds if there are local checkpoints
_AWAY_SECONDS = 60.0  # a store that did not answer is not asked again for so long
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EDQUOT, errno.ENOSPC}


StepPlace = Literal["local", "uploading", "durable"]


@dataclass(frozen=True)
class Tier:
    """A folder on fast disks or in memory, in front of a `CheckpointManager`'s `directory`: its durable place, which is
    a shared folder or an object store.

    Saves go to the folder, and are copied to the durable place in the background. Retention holds for both. `restore`
    and `latest` prefer the local copy of a step if it is whole. `tiers` of the manager says where each step is.

    A subclass may define `becomes_durable`, to have a rule of its own.

    Args:
        local: the folder. All ranks may share it; then the coordinator copies. Or, which is experimental, each node has
            one of its own under the same path: then a node saves what its ranks hold, and the folders of all nodes
            together have the step. `restore` brings what a node lacks from nodes that have it. Managers find out when
            they are made: all ranks make theirs together. They raise `CheckpointError` if a folder has steps of another
            run.
        copies: with a folder of each node, how many other nodes get each file of a step, while training goes on. At
            most all others, with a warning. Replicas that nodes have saved count. While a step is sent, those that are
            saved get no copies, but the last one when the manager is closed.
        copy_bytes_per_second: with `copies`, most that each node sends; 0: no limit.
        durable_interval_steps: only steps that are multiples of it are copied to the durable place, and with a folder
            of each node the last one when the manager is closed. None: all steps. While nodes copy a step, those that
            are saved stay on the nodes.
        upload_bytes_per_second: the limit for copies to the durable place, of each node that copies; 0: no limit.
    """

    local: str | os.PathLike[str]
    copies: int = 0
    copy_bytes_per_second: int = 0
    durable_interval_steps: int | None = None
    upload_bytes_per_second: int = 0

    def __post_init__(self) -> None:
        checked_path("local", self.local)
        every = checked_count("durable_interval_steps", self.durable_interval_steps)
        object.__setattr__(self, "durable_interval_steps", every)  # an int: NumPy's may overflow
        for name in ("copies", "copy_bytes_per_second", "upload_bytes_per_second"):
            object.__setattr__(self, name, checked_count(name, getattr(self, name) or None) or 0)

    def becomes_durable(self, step: int) -> bool:
        """Whether a step is copied to the durable place."""
        return self.durable_interval_steps is None or step % self.durable_interval_steps == 0


class DurablePlace:
    """The durable place behind a local folder. As long as no local directory has a checkpoint, requests wait as
    always, and errors are raised: there is no other checkpoint to continue from.

    Args:
        timeout: seconds that other ranks wait for the one that asks.
    """

    def __init__(self, url: str, local: str, timeout: float) -> None:
        self.url = url
        self.local = local
        self.branches: dict[int, Branch] = {}  #: {step: branch} of what `look` has found
        self.error: CheckpointError | OSError | None = None  #: why `look` had no answer, without local checkpoints
        self._answers = False
        self._run_there: Run | None = None
        self.run: Run | None = None  #: the run that this job continues, on the coordinator
        self.nodes_have_steps = False  #: whether the folder of any node has a checkpoint
        self._longest = max(1, int(timeout / 3))
        self._patience = min(_PATIENCE, self._longest)
        self._away_until = 0.0

    def look(self) -> None:
        """Notes what is there. Raises nothing."""
        self._answers, self._run_there, self.branches, self.error = False, None, {}, None
        try:
            with storage_at(self.url).limit_wait(self._longest):
                found = self.ask(lambda: (run_id.read(self.url), SavedOrder(self.url).branches), None)
            if found is not None:
                self._answers, (self._run_there, self.branches) = True, found
        except (OSError, CheckpointError) as error:
            logger.warning("the checkpoints in %s cannot be listed now: %s", self.url, error)
            self.error = error

    def begin_run(self) -> None:
        """Notes which run goes on in a local folder that all ranks share. Raises `CheckpointError` if another one has
        left its steps there."""
        self.look()
        folders: dict[int, Run | None] = {}
        with suppress(OSError, CheckpointError):  # what reads or saves there raises
            if complete_steps(self.local):
                folders[0] = run_id.read(self.local)
        self.choose_run(folders)

    def choose_run(self, folders: Mapping[int, Run | None]) -> Run:
        self.run = run_id.choose(Run.new(self.url, self.local), self._run_there, folders)
        if self._answers and self._run_there is None and any(folders.values()):
            logger.warning("%s has no id of a run: the steps in %s count, of %s", self.url, self.local, self.run)
        return self.run

    def write_run(self, *, shares_local: bool) -> None:
        """Writes the id of the run at the first save: into the durable place, unless that is away, and with
        `shares_local` into the local folder, which otherwise `NodeTier` does on each node."""
        run, self.run = self.run, None
        if run is None:
            return
        try:
            if shares_local:
                run_id.write(self.local, run)
            if self._answers:
                with storage_at(self.url).limit_wait(self._patience):
                    run_id.write(self.url, run)
        except (CheckpointError, _C.EngineError, OSError) as error:
            logger.warning("the id of the run is not kept: %s", error)

    def ask(self, request: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Returns the result of `request`. If the store cannot be read now or could not a minute ago, and there are
        local checkpoints, warns and returns `otherwise`. Without local checkpoints, errors of `request` pass
        through."""
        if not self._has_local():
            return request()
        if time.monotonic() < self._away_until:
            return otherwise
        try:
            with storage_at(self.url).limit_wait(self._patience):
                return request()
        except (OSError, CheckpointError) as error:
            self._away_until = time.monotonic() + _AWAY_SECONDS
            logger.warning("checkpoints in %s do not count now, and those in %s do: %s", self.url, self.local, error)
            return otherwise

    def patience(self) -> AbstractContextManager[None]:
        """A context with the same timeout for requests whose errors the caller handles."""
        return storage_at(self.url).limit_wait(self._patience) if self._has_local() else nullcontext()

    def _has_local(self) -> bool:
        return self.nodes_have_steps or bool(complete_steps(self.local))


class DurableStep:
    """One step in the durable place, perhaps not committed there. Its files have the names that they have on nodes."""

    def __init__(self, place: DurablePlace, step: int) -> None:
        self._place = place
        self._url = path_of(place.url, step)
        self._path = path_of(place.local, step)

    def size_of(self, name: str) -> int | None:
        """None, with a warning, also if the place cannot be read now."""
        try:
            return self._place.ask(lambda: size_in(self._url, name), None)
        except (CheckpointError, OSError) as error:
            logger.warning("%s in %s does not count: %s", name, self._url, error)
            return None

    def fetch(self, name: str, check: Check) -> None:
        """As `DurableFiles` says."""
        try:
            copy_file(Transfer(0, None), os.path.join(self._url, name), os.path.join(self._path, name), check)
        except (CheckpointError, OSError) as error:
            if cannot_be_stored(error):
                raise
            raise CheckpointError(str(error), rank=DURABLE) from error


def copy_file(transfer: Transfer, source: str, path: str, check: Check = lambda path, name: None) -> None:
    """Copies a file to a folder that can rename, in place of one of this name. `check` is that of `send_files`."""
    with PendingFile(path) as pending:
        transfer.copy(source, "", pending.directory, pending.create)
        name = os.path.basename(path)
        check(pending.paths[0], name)
        pending.give_names([name], replace=True)
        pending.committed()
    storage_at(os.path.dirname(path)).sync()


def cannot_be_stored(error: CheckpointError | OSError) -> bool:
    """Whether a load has failed because a node cannot store files that it lacks. Equal on all ranks."""
    numbers = {getattr(one, "errno", None) for one in (error, getattr(error, "cause", None))}
    return isinstance(error, StorageFullError) or not numbers.isdisjoint(_NOT_WRITABLE)
