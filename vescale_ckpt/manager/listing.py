"""Lists the checkpoints below a manager's directory, and finds the best one, for the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from .._checkpoint.native.file_names import is_data_file
from .._checkpoint.native.metadata_file import read_index
from .._checkpoint.native.save_facts import unstamped
from .._checkpoint.native.step_order import SavedOrder, path_of
from .._checkpoint.newest import newest_sound
from .._checkpoint.recognize import committed_at
from .._checkpoint.verify import verify
from .._storage.open_storage import size_in, storage_at
from ..reports import SavedBy
from . import step_metrics
from .retention import Candidate, Retention


@dataclass(frozen=True)
class ListedStep:
    """A checkpoint below a manager's directory, by names and lengths alone."""

    step: int
    saved: str | None  #: the time of its commit, as ISO 8601 has it; None if it is not known
    saved_by: SavedBy | None  #: None: not recorded
    bytes: int  #: of its data files
    metrics: dict[str, float]
    state: str  #: "complete", "damaged", "refused", or "not all is here"
    reason: str  #: why it is not complete; empty if it is
    last: bool  #: whether it was saved last
    directory: str


def listed_steps(root: str) -> list[ListedStep]:
    """The complete and damaged checkpoints below `root`, in ascending order."""
    order = SavedOrder(root)
    return [_listed(root, step, step == order.last) for step in sorted(order.branches)]


def _listed(root: str, step: int, is_last: bool) -> ListedStep:
    path = path_of(root, step)
    report, time, index = verify(path, quick=True), committed_at(path), read_index(path)
    saved = None if time is None else datetime.fromtimestamp(time / 1e9).astimezone().isoformat(" ", "seconds")
    states = (("damaged", report.damaged), ("refused", report.refused), ("not all is here", report.unreadable))
    state = next((name for name, found in states if found), "complete")
    saved_by = None if index is None else unstamped(index.save_id)[1]
    return ListedStep(
        step, saved, saved_by, _data_bytes(path), step_metrics.read(path), state, report.reason, is_last, root
    )  # fmt: skip


def newest_or_best(
    root: str, rule: Retention, *, quick: bool, on_damage: Callable[[int, str], None]
) -> tuple[int, str] | None:
    """That of `newest_sound`; if the rule names a metric, of the steps that have it, the best one first."""

    def best_first(steps: list[int]) -> list[int]:
        metrics = ((step, step_metrics.read(path_of(root, step))) for step in steps)
        return rule.best_first(Candidate(step, found.get(rule.best or "")) for step, found in metrics)

    arrange = None if rule.best is None else best_first
    return newest_sound([root], quick=quick, on_damage=on_damage, arrange=arrange)


def _data_bytes(path: str) -> int:
    storage = storage_at(path)
    return sum(size_in(path, name) or 0 for name in storage.names() if is_data_file(name))
