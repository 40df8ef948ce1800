"""Measures saves and loads in one directory for `vescale-ckpt bench`: the disk itself, this package, stock DCP."""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .. import settings
from ..settings import SETTINGS, MiB
from . import page_cache, saves_and_loads
from .by_turns import Row, Sample, Steps, alternate, ratios, summarize
from .page_cache import RESIDENT_LIMIT, StillResidentError, file_system_of
from .random_states import ITEM_BYTES, Shapes
from .room import check_room, working_folder
from .saves_and_loads import Candidate, Disk, SavesAndLoads
from .usage import available_memory

DISK, OURS, STOCK = "disk", "vescale_ckpt", "stock DCP"
_LARGE, _SMALL = 64 * MiB, 4096  # bytes of a tensor
_SMALL_TENSORS = 100
_DEFAULT_BYTES = 1 << 30
_SLOTS = (4, 8, 16, 32)  # MiB
_WORTH = 1.05  # a setting is recommended if save and load together are faster by this factor,
_STEADY = 0.8  # are faster in this part of the rounds,
_HARM = 0.95  # and neither alone is slower than by this factor

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Trial:
    """This package with other settings than those in force."""

    variable: str
    value: int
    save: float  #: how many times faster than with the settings in force: median over rounds
    load: float
    together: float  #: the same of their sum
    steady: float  #: the part of the rounds in which the sum was less


@dataclass
class BenchReport:
    """What was measured."""

    directory: str
    file_system: str
    bytes: int
    rounds: int
    cold: bool  #: whether all loads read from the disk, and not from the page cache
    rows: list[Row]  #: a save and a load of each of DISK, OURS and STOCK
    trials: list[Trial]
    recommended: list[Trial]  #: at most one for each setting; none: those in force are as good


def bench(
    directory: str | os.PathLike[str],
    size: int | None = None,
    rounds: int = 5,
    *,
    with_trials: bool = True,
    progress: Progress | None = None,
) -> BenchReport:
    """Saves and loads a state of `size` bytes in a new folder below `directory`, which is removed at the end.

    Candidates take turns, in another order in each round; the first round is not counted. Files are dropped from the
    page cache before loads. `size`: None for 1 GiB, or less where disk or memory has little room. `progress` is called
    with the bytes moved so far and in all.

    Raises ValueError for arguments, `StorageFullError` and `CheckpointError`.
    """
    settings.check()
    root = _folder(os.fspath(directory))
    size = size if size is not None else _bytes_that_fit(root)
    if size < MiB:
        raise ValueError(f"expected a state of 1 MiB or more, got {size:,} bytes")
    check_room(root, size + size // 8, 2 * size)
    trials = {_named(*trial): trial for trial in (_trials() if with_trials else [])}
    with working_folder(root) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        candidates = {
            DISK: saves_and_loads.raw(),
            OURS: saves_and_loads.ours(),
            STOCK: saves_and_loads.stock(settings.number("threads")),
            **{name: _with(saves_and_loads.ours(), *trial) for name, trial in trials.items()},
        }
        both = SavesAndLoads(_shapes(size), Disk(folder, _drop))
        total, done = 2 * both.bytes * len(candidates) * (rounds + 1), 0

        def turn(name: str) -> Steps:
            nonlocal done
            steps = both.turn(name, candidates[name])
            done += 2 * both.bytes
            if progress is not None:
                progress(done, total)
            together = replace(steps["save"], seconds=steps["save"].seconds + steps["load"].seconds)
            return {**steps, "together": together}

        samples = list(alternate("", {name: partial(turn, name) for name in candidates}, rounds, warmup=1))
    resident = [sample.usage.resident for sample in samples if sample.usage.resident is not None]
    rows = [row for row in summarize(samples, STOCK, DISK) if row.candidate not in trials and row.step != "together"]
    judged = [_judged(samples, *trial) for trial in trials.values()]
    cold = max(resident) <= RESIDENT_LIMIT
    return BenchReport(str(root), file_system_of(root), both.bytes, rounds, cold, rows, judged, _recommended(judged))


def _folder(text: str) -> Path:
    if text.startswith("file://"):
        text = unquote(urlsplit(text).path)
    if "://" in text:
        raise ValueError(f"{text}: expected a folder of a local disk or mounted file system, got a URL")
    if not os.path.isdir(text):
        raise FileNotFoundError(f"{text} is no directory")
    return Path(text).absolute()


def _bytes_that_fit(root: Path) -> int:
    space = os.statvfs(root)
    return max(MiB, min(_DEFAULT_BYTES, space.f_bavail * space.f_frsize // 4, available_memory() // 4))


def _shapes(size: int) -> Shapes:
    """Large tensors, and for larger states some small ones."""
    small = _SMALL_TENSORS if size >= 2 * _LARGE else 0
    large, rest = divmod(size - small * _SMALL, _LARGE)
    sizes = [_SMALL] * small + [_LARGE] * large + ([rest] if rest >= ITEM_BYTES else [])
    return {f"layers.{number}.weight": (count // ITEM_BYTES,) for number, count in enumerate(sizes)}


def _drop(folder: Path) -> float:
    """The fraction of a folder's files that stayed in memory. Some file systems keep theirs."""
    try:
        return page_cache.prepare(folder, warm=False)
    except (StillResidentError, OSError):
        return 1.0


# --- Other settings


def _trials() -> list[tuple[str, int]]:
    cores = len(os.sched_getaffinity(0))
    threads = sorted({1, 2, 4, 8, 16} & set(range(1, 2 * cores + 1)) | {cores})
    values = [("threads", count) for count in threads] + [("slot_bytes", count * MiB) for count in _SLOTS]
    return [(name, value) for name, value in values if settings.number(name) != value]


def _named(setting: str, value: int) -> str:
    return f"{SETTINGS[setting].variable}={value}"


def _with(candidate: Candidate, setting: str, value: int) -> Candidate:
    """The candidate with another value of a setting."""
    variable = SETTINGS[setting].variable
    return replace(
        candidate,
        save=_variable_set(variable, str(value))(candidate.save),
        load=_variable_set(variable, str(value))(candidate.load),
    )


@contextmanager
def _variable_set(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _judged(samples: Sequence[Sample], setting: str, value: int) -> Trial:
    def of(step: str, candidate: str) -> list[Sample]:
        return [sample for sample in samples if (sample.step, sample.candidate) == (step, candidate)]

    found: Mapping[str, list[float]] = {
        step: ratios(of(step, _named(setting, value)), of(step, OURS)) for step in ("save", "load", "together")
    }
    save, load, together = map(statistics.median, found.values())
    steady = sum(ratio > 1 for ratio in found["together"]) / len(found["together"])
    return Trial(SETTINGS[setting].variable, value, save, load, together, steady)


def _recommended(trials: list[Trial]) -> list[Trial]:
    best: dict[str, Trial] = {}
    for trial in trials:
        better = trial.together >= _WORTH and trial.steady >= _STEADY and min(trial.save, trial.load) >= _HARM
        if better and (trial.variable not in best or trial.together > best[trial.variable].together):
            best[trial.variable] = trial
    return list(best.values())
