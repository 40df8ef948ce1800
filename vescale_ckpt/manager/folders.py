"""`Folders` is where the checkpoints of a manager lie: `SharedFolder`, if all ranks see one, else `NodeFolders`."""

from __future__ import annotations

import errno
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from functools import partial
from typing import Any

from .. import api
from .._checkpoint.native.metadata_file import has_metadata
from .._checkpoint.native.step_order import SavedOrder, all_steps, complete_steps, path_of
from .._checkpoint.newest import newest_sound
from .._collective.handle import SaveHandle
from .._engine.engine_errors import named_system_errors
from .._fingerprint.prove import prove_restored, stored_fingerprint
from .._storage.open_storage import is_inconclusive, storage_at
from ..errors import CheckpointError, CorruptCheckpointError, some
from . import step_metrics
from .branch_tracker import BranchTracker
from .clean_up import clean_up
from .retention import Candidate, Retention
from .running_save import RunningSave
from .schedule import Ranks
from .tier import DurablePlace, StepPlace, Tier
from .uploads import Uploads

logger = logging.getLogger(__name__)

#: Errors for which `restore` tries an older checkpoint without calling this one damaged: they may be temporary.
_UNREADABLE_NOW = {errno.EIO, errno.ENOENT, errno.ESTALE, errno.ENODATA, errno.EBADMSG}


class Folders(ABC):
    """The steps in the folder of a manager, and in the durable place behind it, if there is one. All ranks call its
    methods together unless stated otherwise."""

    branches: BranchTracker
    writes_notes: bool  #: whether this rank writes what stands beside checkpoints in its folder, and cleans up there

    def __init__(self, ranks: Ranks, retention: Retention, durable: DurablePlace | None) -> None:
        self.root = ranks.directory
        self.durable = durable
        self.uploads: Uploads | None = None
        self.proves = False  #: whether what was loaded is compared with the checkpoint's fingerprint
        self._ranks = ranks
        self._retention = retention

    def steps(self) -> list[int]:
        """The complete steps, ascending. Asks no other rank."""
        return sorted({*_complete_steps(self.root), *self.durable_steps()})

    def durable_steps(self) -> list[int]:
        """Asks no other rank."""
        place = self.durable
        return [] if place is None else place.ask(lambda: _complete_steps(place.url), [])

    def tiers(self) -> dict[int, StepPlace]:
        """{step: where it is}, ascending. Asks no other rank."""
        durable = set(self.durable_steps())
        uploading = None if self.uploads is None else self.uploads.uploading()
        return {
            step: "uploading" if step == uploading else "durable" if step in durable else "local"
            for step in sorted({*_complete_steps(self.root), *durable})
        }

    def path_of(self, step: int) -> str:
        """Returns the path of a step's checkpoint; the local one if there are two. Asks no other rank."""
        roots = [self.root] if self.durable is None else [self.root, self.durable.url]
        paths = [path_of(root, step) for root in roots]
        return next((path for path in paths if has_metadata(path, None)), paths[0])

    def best_step(self, name: str) -> int | None:
        """The step with the best value of a metric."""

        def best_first() -> list[int]:
            return self._retention.best_first(itertools.starmap(Candidate, self._values(name).items()))

        return next(iter(self._ranks.from_coordinator(best_first, "looking for the best checkpoint")), None)

    def _read_values(self, name: str, steps: Iterable[int]) -> dict[int, float | None]:
        return {step: step_metrics.read(self.path_of(step)).get(name) for step in steps}

    def load(self, state: dict[str, Any], step: int | None, options: Mapping[str, Any]) -> int:
        """Loads a step, or for None the newest sound one, and notes that training goes on from it. Returns it.
        `options` are those of `vescale_ckpt.load`."""
        found = self._load(state, step, options)

        def go_on() -> None:
            if abandoned := self.branches.note_restored(found):
                logger.warning(
                    "step %d was saved last in %s; later steps %s were abandoned, when training went back",
                    found,
                    self.root,
                    some([*map(str, abandoned)]),
                )

        self._ranks.from_coordinator(go_on, "looking for later checkpoints")
        return found

    def prepare(self, running: RunningSave, metrics: dict[str, float] | None) -> None:
        """Prepares the step's directory. Raises on all ranks if its branch cannot be recorded."""
        if abandoned := self._prepare(running, metrics, f"preparing {running.path}"):
            logger.warning(
                "step %d is saved after going back: steps %s in %s are abandoned. latest() and restore() go on from "
                "what is saved last",
                running.step,
                some([*map(str, abandoned)]),
                running.root,
            )

    def _load_from(self, path: str, state: dict[str, Any], options: Mapping[str, Any]) -> None:
        group, timeout = self._ranks.process_group, self._ranks.timeout
        api.load(path, state, process_group=group, timeout=timeout, **options)
        if self.proves:
            prove_restored(stored_fingerprint(path, group, timeout), path, state, options, group, timeout)

    def _pass_over(self, which: str, error: CheckpointError) -> None:
        level = logging.WARNING if self._ranks.is_coordinator() else logging.DEBUG
        logger.log(level, "the checkpoint of %s: %s", which, error)

    @abstractmethod
    def latest(self, full: bool) -> int | None:
        """The step that was saved last of the sound ones."""

    @abstractmethod
    def prepare_save(self, state: Mapping[str, Any], async_checkpoint: bool) -> None:
        """As `vescale_ckpt.prepare`."""

    @abstractmethod
    def begin_save(self, running: RunningSave, state: Mapping[str, Any], **options: Any) -> SaveHandle:
        """As `vescale_ckpt.save`."""

    @abstractmethod
    def committed(self, running: RunningSave) -> None:
        """Cleans up after a save, without any other rank."""

    @abstractmethod
    def _values(self, name: str) -> dict[int, float | None]:
        """{step: a metric}, on the coordinator."""

    @abstractmethod
    def _load(self, state: dict[str, Any], step: int | None, options: Mapping[str, Any]) -> int: ...

    @abstractmethod
    def _prepare(self, running: RunningSave, metrics: dict[str, float] | None, phase: str) -> list[int]:
        """Returns the steps that the save abandons, on ranks that warn of them."""

    # --- What folders of nodes have to do besides

    def votes(self, step: int) -> list[int]:
        """What all ranks agree on before a save; `reserve` gets the minima."""
        return []

    def reserve(self, running: RunningSave, votes: Sequence[int]) -> None:  # noqa: B027
        """Reserves what begins when a save has ended."""

    def losses_survived(self) -> dict[int, int]:
        """{step: how many nodes may be lost}."""
        return {}

    def close(self, seconds: float) -> None:  # noqa: B027
        """Waits at most so long for copies of the last step."""


class SharedFolder(Folders):
    """One folder that all ranks see. The coordinator alone lists it, cleans up there, and copies its steps."""

    def __init__(self, ranks: Ranks, retention: Retention, durable: DurablePlace | None, tier: Tier | None) -> None:
        super().__init__(ranks, retention, durable)
        self._damaged: frozenset[str] = frozenset()  # paths of checkpoints that a load found damaged
        self._spared: frozenset[str] = frozenset()  # paths that a load could not read, but that may be sound
        if tier is not None and tier.copies:
            logger.warning("copies=%d: all ranks see one folder %s, which gets no copies", tier.copies, self.root)
        if durable is not None:
            ranks.from_coordinator(durable.begin_run, "looking for the run")
        # The durable place is read once: all later saves are in the folder.
        elsewhere = {} if durable is None else durable.branches
        self.branches = BranchTracker(self.root, lambda known: SavedOrder(self.root, known, elsewhere))
        self.writes_notes = ranks.is_coordinator()
        if not self.writes_notes:
            return
        self.branches.look()
        if durable is not None and tier is not None:
            self.uploads = Uploads(self.root, durable.url, retention, tier)
            self.uploads.begin()  # continues the uploads of an earlier process

    def latest(self, full: bool) -> int | None:
        found = self._newest_sound("looking for the newest checkpoint", quick=not full)
        return None if found is None else found[0]

    def prepare_save(self, state: Mapping[str, Any], async_checkpoint: bool) -> None:
        group, timeout = self._ranks.process_group, self._ranks.timeout
        api.prepare(state, async_checkpoint=async_checkpoint, process_group=group, timeout=timeout)

    def begin_save(self, running: RunningSave, state: Mapping[str, Any], **options: Any) -> SaveHandle:
        return api.save(running.path, state, **options)

    def committed(self, running: RunningSave) -> None:
        self._damaged -= {running.path}
        self._spared -= {running.path}
        if not running.is_coordinator:
            return
        try:
            self._clean_up(running)
        finally:
            if self.uploads is not None:
                self.uploads.begin()

    def _clean_up(self, running: RunningSave) -> None:
        is_doubt = self._damaged or self._spared
        paths = {step: path_of(self.root, step) for step in (complete_steps(self.root) if is_doubt else ())}
        doubted = {step for step, path in paths.items() if path in self._damaged}
        spared = {step for step, path in paths.items() if path in self._spared}
        # With a durable place, a step that is known may be complete there and an orphan here.
        known = self.branches.known_steps() if self.durable is None else frozenset()
        found = clean_up(self.root, self._retention, running.step, doubted, spared, known)
        sound = {paths[step] for step in found}
        self._damaged -= sound
        self._spared |= sound

    def _values(self, name: str) -> dict[int, float | None]:
        return self._read_values(name, self.steps())

    def _prepare(self, running: RunningSave, metrics: dict[str, float] | None, phase: str) -> list[int]:
        abandoned: list[int] = []

        def prepare() -> None:
            if not running.is_coordinator:
                return
            branch, abandoned[:] = self.branches.branch_of(running.step)
            if self.durable is not None:
                self.durable.write_run(shares_local=True)
            running.prepare(metrics, branch)
            running.on_end.append(partial(self.branches.note_end, branch))

        self._ranks.exchange().together(prepare, phase)
        return abandoned

    def _load(self, state: dict[str, Any], step: int | None, options: Mapping[str, Any]) -> int:
        if step is None:
            return self._load_newest(state, options)
        self._load_from(
            self._ranks.from_coordinator(partial(self.path_of, step), "looking for a checkpoint"), state, options
        )
        return step

    def _load_newest(self, state: dict[str, Any], options: Mapping[str, Any]) -> int:
        failure: CheckpointError | None = None
        tried: set[str] = set()
        is_durable_away = False
        phase = "looking for the newest checkpoint to restore"
        while (newest := self._newest_sound(phase, quick=True, but=tried, only_local=is_durable_away)) is not None:
            found, path = newest
            try:
                self._load_from(path, state, options)
            except CheckpointError as error:  # all ranks get the same class and errno
                number = getattr(error, "errno", None)
                if isinstance(error, CorruptCheckpointError):
                    self._damaged |= {path}
                elif storage_at(path).can_be_away and is_inconclusive(number, path):
                    if self.durable is None:  # it may be sound: nothing older is taken in its place
                        raise
                    is_durable_away = True
                elif not is_passed_over(error):
                    raise
                else:
                    self._spared |= {path}
                failure = error
            else:
                self._spared -= {path}
                return found
            self._pass_over(f"step {found} is passed over, for an older one", failure)
            tried.add(path)
        if failure is not None:
            raise failure
        raise CheckpointError(f"{self.root} holds no checkpoint that is complete and sound", path=self.root)

    def _newest_sound(
        self, phase: str, *, quick: bool, but: AbstractSet[str] = frozenset(), only_local: bool = False
    ) -> tuple[int, str] | None:
        """The step, and the path of its checkpoint."""

        def warn(step: int, reason: str) -> None:
            logger.warning("the checkpoint of step %d is passed over: %s", step, reason)

        def find() -> tuple[int, str] | None:
            roots, durable = [self.root], None if only_local else self.durable
            if durable is not None and durable.ask(lambda: all_steps(durable.url) is not None, False):
                roots.append(durable.url)
            with durable.patience() if durable is not None and quick else nullcontext():
                return newest_sound(roots, quick=quick, on_damage=warn, but=self._damaged | but)

        found = self._ranks.from_coordinator(find, phase)
        return None if found is None else (found[0], found[1])  # it came as a list


def is_passed_over(error: CheckpointError) -> bool:
    """Whether an older checkpoint is tried after an error of a load."""
    return isinstance(error, CorruptCheckpointError) or getattr(error, "errno", None) in _UNREADABLE_NOW


def _complete_steps(root: str) -> list[int]:
    with named_system_errors(root):
        return complete_steps(root)
