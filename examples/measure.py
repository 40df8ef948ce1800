"""One candidate of the demo's table, in a process of its own so that its peak memory is its own.

    python examples/measure.py ours|stock-1|stock-4 CHECKPOINT

Holds the state of CHECKPOINT; then, for every directory named on a line of standard input, saves there, loads
back cold, checks every bit, removes the directory, and answers with one JSON line of what both took. The parent,
table.py, alternates candidates.
"""

from __future__ import annotations

import json
import shutil
import sys
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
from benchmarks.harness.page_cache import drop_file, files_under
from benchmarks.harness.usage import Usage, measure, settle


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


def measure_round(
    chosen: Candidate, state: dict[str, Any], expected: dict[str, Any], directory: Path
) -> dict[str, Usage]:
    """Saves, drops the files from memory, loads, and compares."""
    settle(directory.parent)  # what earlier rounds left to the disk is not this one's to pay for
    saved = measure(
        lambda: dcp.save(state, storage_writer=chosen.writer(directory), planner=chosen.save_planner, no_dist=True)
    )
    for path in files_under(directory):
        drop_file(path)
    for value in state.values():
        if isinstance(value, Tensor):
            value.zero_()
    loaded = measure(
        lambda: dcp.load(state, storage_reader=chosen.reader(directory), planner=chosen.load_planner, no_dist=True)
    )
    if difference := first_difference(state, expected):
        raise SystemExit(f"what was loaded is not what was saved: {difference}")
    shutil.rmtree(directory)
    return {"save": saved, "load": loaded}


def main() -> None:
    name, checkpoint = sys.argv[1:]
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP's answer to no_dist=True
    chosen = candidate(name)
    state = load_whole(Path(checkpoint), dcp.FileSystemReader(checkpoint), dcp.DefaultLoadPlanner())
    expected = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
    for line in sys.stdin:
        steps = measure_round(chosen, state, expected, Path(line.rstrip("\n")))
        print(json.dumps({step: asdict(usage) for step, usage in steps.items()}), flush=True)


if __name__ == "__main__":
    main()
