"""One candidate of the demo's table, in a process of its own so that its peak memory is its own.

    python examples/measure.py ours|stock-1|stock-4 CHECKPOINT

Holds the state of CHECKPOINT; then, for every directory named on a line of standard input, saves there, loads
back cold, checks every bit, removes the directory, and answers with one JSON line of figures. The parent,
table.py, alternates candidates.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from whole_state import first_difference, load_whole

import vescale_ckpt


@dataclass(frozen=True)
class Figures:
    """One round. Seconds; memory in MiB above the resident set that holds the state alone."""

    blocking: float
    durable: float
    load: float
    peak_save: float
    peak_load: float


@dataclass(frozen=True)
class Candidate:
    """The plug points one would hand to DCP. Planners live on between saves, for they cache plans."""

    writer: Callable[[Path], StorageWriter]
    reader: Callable[[Path], StorageReader]
    save_planner: SavePlanner
    load_planner: LoadPlanner


def candidate(name: str) -> Candidate:
    if name == "ours":
        return Candidate(
            vescale_ckpt.StorageWriter,
            vescale_ckpt.StorageReader,
            vescale_ckpt.SavePlanner(),
            vescale_ckpt.LoadPlanner(),
        )
    threads = int(name.removeprefix("stock-"))
    return Candidate(
        lambda path: dcp.FileSystemWriter(path, thread_count=threads, sync_files=True),
        dcp.FileSystemReader,
        dcp.DefaultSavePlanner(enable_plan_caching=True),
        dcp.DefaultLoadPlanner(),
    )


def memory_mib(field: str) -> float:
    """`VmRSS` or `VmHWM` (the peak of the former) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def reset_peak() -> None:
    """Set VmHWM back to VmRSS."""
    Path("/proc/self/clear_refs").write_text("5")


def evict(directory: Path) -> None:
    """Put the directory's files out of the page cache; the kernel drops clean pages only, hence the fsync."""
    for path in filter(Path.is_file, directory.rglob("*")):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def resident_state(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's state, with nothing of the loading left in memory for a candidate to reuse unseen."""
    state = load_whole(checkpoint, dcp.FileSystemReader(checkpoint), dcp.DefaultLoadPlanner())
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return state


def measure_round(
    chosen: Candidate, state: dict[str, Any], expected: dict[str, Any], baseline: float, directory: Path
) -> Figures:
    """Save, evict, load, compare. A synchronous save is durable when it returns, so both times are one."""
    os.sync()  # what earlier rounds left to the disk is not this one's to pay for
    reset_peak()
    start = time.perf_counter()
    dcp.save(state, storage_writer=chosen.writer(directory), planner=chosen.save_planner, no_dist=True)
    saved = time.perf_counter() - start
    peak_save = memory_mib("VmHWM") - baseline

    evict(directory)
    for value in state.values():
        if isinstance(value, Tensor):
            value.zero_()
    reset_peak()
    start = time.perf_counter()
    dcp.load(state, storage_reader=chosen.reader(directory), planner=chosen.load_planner, no_dist=True)
    loaded = time.perf_counter() - start
    peak_load = memory_mib("VmHWM") - baseline

    if difference := first_difference(state, expected):
        raise SystemExit(f"what was loaded is not what was saved: {difference}")
    shutil.rmtree(directory)
    return Figures(saved, saved, loaded, peak_save, peak_load)


def main() -> None:
    name, checkpoint = sys.argv[1:]
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP's answer to no_dist=True
    chosen = candidate(name)
    state = resident_state(Path(checkpoint))
    expected = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
    baseline = memory_mib("VmRSS")
    for line in sys.stdin:
        figures = measure_round(chosen, state, expected, baseline, Path(line.rstrip("\n")))
        print(json.dumps(asdict(figures)), flush=True)


if __name__ == "__main__":
    main()
