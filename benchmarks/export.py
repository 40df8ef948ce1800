"""Exports by several ranks: ``python -m benchmarks.export``.

The state, sharded by rows, by columns, or whole on every rank, saved as safetensors files that all ranks write at once
("export"); beside our own checkpoint of it ("sharded"), and torch's HuggingFaceStorageWriter: with the consolidation
after which others can read its files ("stock"), and without ("stock, shards"). Seconds from the first rank's start to
the last one's end.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import vescale_ckpt
from benchmarks import cache, report, rounds, states, timing
from benchmarks.loading.ranks import ONE_NODE, Rank, Ranks, ranks_on
from benchmarks.measure import settle

Save = Callable[[dict[str, Any], str], object]


def _stock(state: dict[str, Any], directory: str, consolidate: bool) -> None:
    writer = HuggingFaceStorageWriter(
        directory, thread_count=4, save_distributed=True, enable_consolidation=consolidate, thread_count_consolidation=4
    )
    dcp.save(state, storage_writer=writer)


CANDIDATES: dict[str, Save] = {
    "export": lambda state, directory: vescale_ckpt.save(directory, state, format="safetensors"),
    "sharded": lambda state, directory: vescale_ckpt.save(directory, state),
    timing.STOCK: lambda state, directory: _stock(state, directory, True),
    "stock, shards": lambda state, directory: _stock(state, directory, False),
}
HELD = {"rows": 0, "columns": 1, "replicated": None}


def _hold(rank: Rank, kind: str, gib: float, held: str) -> int:
    """Builds this rank's state. Returns the bytes of the whole."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    dim = HELD[held]
    whole = states.build(states.shapes_of(kind, gib), 0)
    rank.kept["state"] = {
        name: distribute_tensor(
            tensor, rank.mesh, [Replicate() if dim is None else Shard(min(dim, tensor.ndim - 1))], src_data_rank=None
        )
        for name, tensor in whole.items()
    }
    return sum(tensor.nbytes for tensor in whole.values())


def _save(rank: Rank, candidate: str, directory: str) -> tuple[float, float]:
    rank.barrier.wait()
    start = perf_counter()
    CANDIDATES[candidate](rank.kept["state"], directory)
    return start, perf_counter()


def _turn(ranks: Ranks, name: str, directory: Path) -> timing.Steps:
    path = directory / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    settle()
    times = ranks.call(_save, name, str(path))
    if name == timing.STOCK:
        settle_after = perf_counter()
        settle()  # what it has not synced
        unsynced = perf_counter() - settle_after
    else:
        unsynced = 0.0
    return {"save": max(end for _, end in times) - min(start for start, _ in times), **_synced(name, unsynced)}


def _synced(name: str, seconds: float) -> timing.Steps:
    return {"sync behind it": seconds} if name == timing.STOCK else {}


def _equal(directory: Path, kind: str, gib: float) -> bool:
    """Whether the export holds the state, bit for bit."""
    found: dict[str, torch.Tensor] = {}
    for path in (directory / "export").glob("*.safetensors"):
        found.update(vescale_ckpt.safetensors.load_file(path))
    return not states.differences(states.build(states.shapes_of(kind, gib), 0), found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what ``arguments`` ask for and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export", description=__doc__)
    add = parser.add_argument
    add("--state", choices=states.KINDS, default="llama", help="what to save (default %(default)s)")
    add("--gib", type=float, default=1.0, metavar="N", help="its size (default %(default)s)")
    add("--held", choices=HELD, nargs="+", default=list(HELD), help="how ranks hold it (default: all ways)")
    add("--ranks", type=int, default=4, metavar="N", help="(default %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="(default %(default)s)")
    add("--dir", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR", help="where (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.gib <= 0 or options.ranks < 2 or not options.dir.is_dir():
        parser.error("--rounds and --gib must be positive, --ranks at least 2, --dir a directory")
    samples: list[timing.Sample] = []
    with rounds.working_directory(options.dir) as directory, ranks_on(options.ranks, ONE_NODE) as ranks:
        for held in options.held:
            size = ranks.call(_hold, options.state, options.gib, held)[0]
            turns = {name: (lambda name=name: _turn(ranks, name, directory)) for name in CANDIDATES}
            for turn in turns.values():  # plans and connections are made now
                turn()
            if not _equal(directory, options.state, options.gib):
                print(f"the export of {held} is not the state", file=sys.stderr)
                return 1
            case = f"{options.state}, {held}, {size / 2**20:.0f} MiB on {options.ranks} ranks"
            samples += timing.alternate(case, turns, dict.fromkeys(turns, options.rounds))
    about = report.machine(options.dir, cache.file_system_of(options.dir))
    print(
        f"{timing.table(timing.summarize(samples))}\n\n" + ", ".join(f"{name} {value}" for name, value in about.items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
