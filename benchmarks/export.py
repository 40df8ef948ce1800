"""Exports by several ranks: ``python -m benchmarks export``.

The state, sharded by rows, by columns, or whole on every rank, saved as safetensors files that all ranks write at once
("export"); beside our own checkpoint of it ("sharded"), and torch's HuggingFaceStorageWriter: with the consolidation
after which others can read its files ("stock"), and without ("stock, shards"). Seconds from the first rank's start to
the last one's end; stock syncs nothing, what that takes is timed behind it.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import vescale_ckpt
from benchmarks import command, states
from benchmarks.command import Alternate
from benchmarks.harness import random_states
from benchmarks.harness.by_turns import STOCK, Sample, Steps
from benchmarks.harness.room import WrongContentsError
from benchmarks.harness.usage import measure, settle
from benchmarks.ranks import Rank, Ranks, Timed, distributed, ranks_on, timed, together

Save = Callable[[dict[str, Any], str], object]


def _stock(state: dict[str, Any], directory: str, consolidate: bool) -> None:
    writer = HuggingFaceStorageWriter(
        directory, thread_count=4, save_distributed=True, enable_consolidation=consolidate, thread_count_consolidation=4
    )
    dcp.save(state, storage_writer=writer)


CANDIDATES: dict[str, Save] = {
    "export": lambda state, directory: vescale_ckpt.save(directory, state, format="safetensors"),
    "sharded": lambda state, directory: vescale_ckpt.save(directory, state),
    STOCK: lambda state, directory: _stock(state, directory, True),
    "stock, shards": lambda state, directory: _stock(state, directory, False),
}
HELD = {"rows": 0, "columns": 1, "replicated": None}


def _hold(rank: Rank, kind: str, gib: float, held: str) -> int:
    """Builds this rank's state. Returns the bytes of the whole."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    whole = random_states.build(states.shapes_of(kind, gib))
    rank.kept["state"] = distributed(whole, rank.mesh, HELD[held])
    return sum(tensor.nbytes for tensor in whole.values())


def _save(rank: Rank, candidate: str, directory: str) -> Timed:
    return timed(rank.barrier.wait, lambda: CANDIDATES[candidate](rank.kept["state"], directory))


def _turn(ranks: Ranks, name: str, directory: Path, size: int) -> Steps:
    path = directory / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    settle(directory)
    saved = dataclasses.replace(together(ranks.call(_save, name, str(path))), state_bytes=size)
    return {"save": saved, "sync behind it": measure(lambda: settle(directory))} if name == STOCK else {"save": saved}


def _check(directory: Path, kind: str, gib: float) -> None:
    """Raises WrongContentsError unless the export holds the state, bit for bit."""
    found: dict[str, torch.Tensor] = {}
    for path in (directory / "export").glob("*.safetensors"):
        found.update(vescale_ckpt.safetensors.load_file(path))
    if wrong := random_states.differences(random_states.build(states.shapes_of(kind, gib)), found):
        raise WrongContentsError(f"the export is not the state: {wrong[:3]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what ``arguments`` ask for and returns the exit status."""
    parser = command.parser("benchmarks export", __doc__)
    add = parser.add_argument
    add("--state", choices=states.KINDS, default="llama", help="what to save (default %(default)s)")
    add("--gib", type=command.size, default=1.0, metavar="N", help="its size (default %(default)s)")
    add("--held", choices=HELD, nargs="+", default=list(HELD), help="how ranks hold it (default: all ways)")
    add("--ranks", type=command.positive, default=4, metavar="N", help="(default %(default)s)")
    options = parser.parse_args(arguments)
    kind, gib = options.state, options.gib

    def measured(directory: Path, alternate: Alternate) -> Iterator[Sample]:
        with ranks_on(options.ranks) as ranks:
            for held in options.held:
                size = ranks.call(_hold, kind, gib, held)[0]
                case = f"{kind}, {held}, {size / 2**20:.0f} MiB on {options.ranks} ranks"
                yield from alternate(case, {name: partial(_turn, ranks, name, directory, size) for name in CANDIDATES})
                _check(directory, kind, gib)

    return command.run(options, measured)
