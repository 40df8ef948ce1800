"""Copies, saves, asynchronous saves and loads of a state on a GPU, ours beside stock.

`python -m benchmarks.gpu`, where there is one; scripts/check_gpu.py runs it section by section. `--device cpu` shows
only that what needs no GPU runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks import gpu_copies, gpu_saves
from benchmarks.background import Saves
from benchmarks.candidates import FILES, REGISTRY
from benchmarks.figures import record
from benchmarks.gpu_rounds import GiB, measured, peak, timed
from benchmarks.harness import page_cache
from benchmarks.harness.by_turns import STOCK, Row, Steps
from benchmarks.harness.room import working_folder
from benchmarks.harness.saves_and_loads import Disk, SavesAndLoads
from benchmarks.ranks import alone


def taken(action: Callable[[], object]) -> Steps:
    return {"copy": timed(action)}


def copies(device: str, rounds: int, scale: float) -> None:
    """Copies to the host of a few large, many small, and strided tensors, of the bus's peak."""
    ceiling = peak(rounds) if device == "cuda" else 1e9
    record(pinned_peak_gb_s=ceiling / 1e9)
    for kind, make in gpu_copies.kinds(device, scale).items():
        tensors = make()
        nbytes = sum(tensor.nbytes for tensor in tensors)
        turns = {name: partial(taken, copy) for name, copy in gpu_copies.ways(tensors).items()}

        def ratios(row: Row) -> dict[str, float]:
            name = {"vescale": "copy", gpu_copies.STOCK: "stock_copy"}.get(row.candidate, "plain_copy")
            return {f"{name}_{kind}_of_peak": nbytes / row.seconds / ceiling}  # noqa: B023

        measured(kind, turns, rounds, ratios)


def beside_stock(device: str, rounds: int, directory: str, size: int) -> None:
    """Synchronous saves and cold loads, and asynchronous saves beside training, ours and stock's."""
    with working_folder(Path(directory)) as folder:
        both = SavesAndLoads(
            gpu_saves.shapes_of(size), Disk(folder, partial(page_cache.prepare, warm=False)), device=device
        )
        turns = {name: partial(both.turn, name, REGISTRY[name].make(False)) for name in ("vescale", "dcp-4")}
        title = f"saves and cold loads on {device}"
        measured(title, turns, rounds, lambda row: {f"{row.step}_{row.candidate}_cold_gb_s": row.rate})
        files = SavesAndLoads(gpu_saves.shapes_of(size), Disk(folder, lambda path: 0.0), ("save",), device)
        turns = {name: partial(files.turn, name, REGISTRY[name].make(False)) for name in FILES}
        title = f"saves to files that others read, from {device}"
        measured(title, turns, rounds, lambda row: {f"files_{row.candidate}_of_ceiling": row.of_ceiling}, "safetensors")
        del files, turns
        with alone():  # stock wants a process group
            ways = Saves(folder, both.state).turns(["ours", "ours, gate", "our stager", STOCK])
            title = f"saves beside training on {device}"
            measured(
                title, ways, rounds, lambda row: {f"{row.candidate}, {row.step} beside training, ms": row.seconds * 1e3}
            )


def room(wanted: int, directory: str, device: str) -> int:
    """`wanted` bytes, or less where memory or disk have not room for a few times as much."""
    free = [shutil.disk_usage(directory).free // 3, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 6]
    if device == "cuda":
        free.append(torch.cuda.mem_get_info()[0] // 4)
    return max(1 << 20, min(wanted, *free))


SECTIONS = ("copies", "first", "gated", "both-ways", "stock")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="of " + ", ".join(SECTIONS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the state, at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    arguments = parser.parse_args()
    device, directory, rounds = arguments.device, arguments.dir, arguments.rounds
    sections = arguments.sections.split(",")
    if unknown := set(sections) - {*SECTIONS}:
        parser.error(f"no section is named {', '.join(sorted(unknown))}")
    on_gpu = device == "cuda"
    size = room(int(arguments.gib * GiB), directory, device)
    scale = min(1.0, arguments.gib / 4)
    run: dict[str, Callable[[], None]] = {
        "copies": lambda: copies(device, rounds, scale),
        "first": lambda: gpu_saves.first(device, directory, rounds, size, peak(rounds) if on_gpu else None),
        "gated": lambda: gpu_saves.gated(device, directory, rounds, size),
        "both-ways": lambda: gpu_saves.both_ways(
            device, directory, rounds, size, peak(rounds, to_host=False) if on_gpu else None
        ),
        "stock": lambda: beside_stock(device, rounds, directory, min(size, 2 * GiB)),
    }
    for section in sections:
        run[section]()


if __name__ == "__main__":
    main()
