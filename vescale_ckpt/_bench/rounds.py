"""Measures saves and loads in one directory for `vescale-ckpt bench`: the disk itself, this package, stock DCP."""

from __future__ import annotations

import gc
import os
import random
import secrets
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from .. import api, settings
from .._engine.errors import check_space, named_system_errors
from .._storage import orphans
from .._storage.open_storage import checkpoint_path, is_folder, storage_at
from .._storage.orphans import Orphan
from .._storage.pending import make_locked
from ..errors import CheckpointError
from ..settings import SETTINGS, MiB
from .page_cache import MEMORY_FILE_SYSTEMS, StillResidentError, drop, file_system_of
from .raw_file import RawFile

DISK, OURS, STOCK = "disk", "vescale_ckpt", "stock DCP"
STEPS = ("save", "load")
_PREFIX = "vescale-ckpt-bench-"
_MARK = ".vescale-ckpt-bench"  # a file: the folder was made by this module
_LARGE, _SMALL = 64 * MiB, 4096  # bytes of a tensor
_SMALL_TENSORS = 100
_DEFAULT_BYTES = 1 << 30
_SLOTS = (4, 8, 16, 32)  # MiB
_WORTH = 1.05  # a setting is recommended if save and load together are faster by this factor,
_STEADY = 0.8  # are faster in this part of the rounds,
_HARM = 0.95  # and neither alone is slower than by this factor

Progress = Callable[[int, int], None]


@dataclass
class Timing:
    """One step of one candidate."""

    step: str  #: "save" or "load"
    candidate: str
    seconds: list[float] = field(default_factory=list)  #: by round

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Trial:
    """This package with other settings than those in force."""

    variable: str
    value: int
    save: float  #: how many times faster than with the settings in force: median over rounds
    load: float
    together: float  #: of their sum
    steady: float  #: the part of the rounds in which the sum was less


@dataclass
class BenchReport:
    """What was measured."""

    directory: str
    file_system: str
    bytes: int
    rounds: int
    cold: bool  #: whether all loads read from the disk, and not from the page cache
    timings: list[Timing]
    trials: list[Trial]
    recommended: list[Trial]  #: at most one for each setting; none: those in force are as good

    def timing(self, step: str, candidate: str) -> Timing:
        return next(found for found in self.timings if (found.step, found.candidate) == (step, candidate))

    def faster(self, step: str, candidate: str, than: str) -> float:
        """How many times faster a candidate is than another: the median of the ratios of the rounds."""
        pairs = zip(self.timing(step, than).seconds, self.timing(step, candidate).seconds, strict=True)
        return statistics.median(other / own for other, own in pairs)

    def rate(self, step: str, candidate: str) -> float:
        """Bytes a second."""
        return self.bytes / self.timing(step, candidate).median


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
    root = checkpoint_path(directory)
    storage_at(root).check_mounted("a benchmark", "It measures local disks and mounted file systems")
    if not is_folder(root):
        raise FileNotFoundError(f"{root} is no directory")
    size = size if size is not None else _bytes_that_fit(root)
    if size < MiB:
        raise ValueError(f"a state of {size:,} bytes: at least 1 MiB is wanted")
    with named_system_errors(root):
        check_space(root, size + size // 8)
    if (memory := _available_memory()) < 2 * size:
        raise ValueError(f"two states of {size:,} bytes are wanted in memory, which has {memory:,} bytes free")
    with _working_folder(root) as folder:
        return _Bench(Path(folder), size, rounds, _trials() if with_trials else [], progress).run(root)


def _bytes_that_fit(root: str) -> int:
    space = os.statvfs(root)
    return max(MiB, min(_DEFAULT_BYTES, space.f_bavail * space.f_frsize // 4, _available_memory() // 4))


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise CheckpointError("the kernel does not tell how much memory is free")


@contextmanager
def _working_folder(root: str) -> Iterator[str]:
    """A new folder below `root`, removed at the end. So are those of benchmarks that were killed."""

    def make() -> tuple[str, str]:
        path = os.path.join(root, _PREFIX + secrets.token_hex(4))
        os.mkdir(path)
        storage_at(path).leave_mark(_MARK)
        return path, path

    with named_system_errors(root):
        old = [os.path.join(root, name) for name in storage_at(root).folders() if name.startswith(_PREFIX)]
        old = [path for path in old if storage_at(path).has(_MARK)]
        orphans.remove(Orphan([path], path, orphans.NEVER, are_folders=True) for path in old)
        path, lock = make_locked(make)
    try:
        yield path
    finally:
        storage_at(root).remove_folder(os.path.basename(path))
        if lock is not None:
            lock.release()


def _trials() -> list[tuple[str, int]]:
    cores = len(os.sched_getaffinity(0))
    threads = sorted({1, 2, 4, 8, 16} & set(range(1, 2 * cores + 1)) | {cores})
    values = [("threads", count) for count in threads] + [("slot_bytes", count * MiB) for count in _SLOTS]
    return [(name, value) for name, value in values if settings.number(name) != value]


class _Bench:
    def __init__(
        self, folder: Path, size: int, rounds: int, trials: list[tuple[str, int]], progress: Progress | None
    ) -> None:
        self._folder = folder
        self._rounds = rounds
        self._trials = trials
        self._progress = progress
        self._state = _state(size)
        self._target = {name: torch.zeros_like(tensor) for name, tensor in self._state.items()}
        self._bytes = sum(tensor.nbytes for tensor in self._state.values())
        self._cold = file_system_of(folder) not in MEMORY_FILE_SYSTEMS
        self._raw = RawFile()
        self._done = 0
        self._turns: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
            DISK: (self._write_raw, self._read_raw),
            OURS: (self._save, self._load),
            STOCK: (self._save_stock, self._load_stock),
        }
        self._settings: dict[str, dict[str, int]] = {_named(*trial): dict([trial]) for trial in trials}
        self._turns.update(dict.fromkeys(self._settings, (self._save, self._load)))

    def run(self, root: str) -> BenchReport:
        timings = {(step, name): Timing(step, name) for step in STEPS for name in self._turns}
        order = random.Random(0)
        for number in range(-1, self._rounds):
            for name in order.sample(list(self._turns), len(self._turns)):
                for step, seconds in zip(STEPS, self._turn(name), strict=True):
                    if number >= 0:
                        timings[step, name].seconds.append(seconds)
        found = [timings[step, name] for step in STEPS for name in (DISK, OURS, STOCK)]
        trials = [_judged(timings, *trial) for trial in self._trials]
        file_system = file_system_of(self._folder)
        return BenchReport(
            root, file_system, self._bytes, self._rounds, self._cold, found, trials, _recommended(trials)
        )

    def _turn(self, name: str) -> tuple[float, float]:
        """Seconds of a save and of a load of one candidate."""
        path = self._folder / "checkpoint"
        save, load = self._turns[name]
        for tensor in self._target.values():
            tensor.zero_()
        gc.collect()
        try:
            with _set(self._settings.get(name, {})), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                saved = self._timed(save, path)
                self._cold = self._cold and _dropped(path)
                loaded = self._timed(load, path)
        finally:
            storage_at(str(path.parent)).remove_folder(path.name)
        if name != DISK and not all(torch.equal(self._target[key], tensor) for key, tensor in self._state.items()):
            raise CheckpointError(f"{name} has loaded something else than was saved", path=str(path))
        return saved, loaded

    def _timed(self, step: Callable[[Path], object], path: Path) -> float:
        began = time.perf_counter()
        step(path)
        seconds = time.perf_counter() - began
        self._done += self._bytes
        if self._progress is not None:
            self._progress(self._done, 2 * self._bytes * len(self._turns) * (self._rounds + 1))
        return seconds

    def _write_raw(self, path: Path) -> None:
        path.mkdir()
        self._raw.write(path, self._bytes)

    def _read_raw(self, path: Path) -> None:
        self._raw.read(path, self._bytes)

    def _save(self, path: Path) -> None:
        api.save(path, self._state)

    def _load(self, path: Path) -> None:
        api.load(path, self._target)

    def _save_stock(self, path: Path) -> None:
        writer = FileSystemWriter(path, thread_count=settings.number("threads"), sync_files=True)
        dcp_save(dict(self._state), storage_writer=writer, no_dist=True)

    def _load_stock(self, path: Path) -> None:
        dcp_load(dict(self._target), storage_reader=FileSystemReader(path), no_dist=True)


def _state(size: int) -> dict[str, torch.Tensor]:
    """Large tensors, and for larger states some small ones, filled with random bits."""
    small = _SMALL_TENSORS if size >= 2 * _LARGE else 0
    sizes = [_SMALL] * small
    rest = size - sum(sizes)
    sizes += [_LARGE] * (rest // _LARGE) + ([rest % _LARGE // 8 * 8] if rest % _LARGE >= 8 else [])
    generator = torch.Generator().manual_seed(0)
    base = torch.empty(max(sizes, default=0) // 8, dtype=torch.int64, device="cpu").random_(generator=generator)
    return {f"layers.{number}.weight": base[: count // 8].add(number) for number, count in enumerate(sizes)}


def _dropped(path: Path) -> bool:
    try:
        drop(path)
    except (StillResidentError, OSError):
        return False
    return True


def _named(setting: str, value: int) -> str:
    return f"{SETTINGS[setting].variable}={value}"


@contextmanager
def _set(values: Mapping[str, int]) -> Iterator[None]:
    """A context with other values of settings."""
    names = {SETTINGS[name].variable: str(value) for name, value in values.items()}
    before: dict[str, Any] = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text


def _judged(timings: Mapping[tuple[str, str], Timing], setting: str, value: int) -> Trial:
    ours = [timings[step, OURS].seconds for step in STEPS]
    others = [timings[step, _named(setting, value)].seconds for step in STEPS]
    save, load = (
        statistics.median(a / b for a, b in zip(*pair, strict=True)) for pair in zip(ours, others, strict=True)
    )
    ratios = [(a + b) / (c + d) for a, b, c, d in zip(*ours, *others, strict=True)]
    steady = sum(ratio > 1 for ratio in ratios) / len(ratios)
    return Trial(SETTINGS[setting].variable, value, save, load, statistics.median(ratios), steady)


def _recommended(trials: list[Trial]) -> list[Trial]:
    best: dict[str, Trial] = {}
    for trial in trials:
        better = trial.together >= _WORTH and trial.steady >= _STEADY and min(trial.save, trial.load) >= _HARM
        if better and (trial.variable not in best or trial.together > best[trial.variable].together):
            best[trial.variable] = trial
    return list(best.values())
