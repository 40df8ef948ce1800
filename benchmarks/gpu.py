"""Copies, saves, asynchronous saves and loads of a state on a GPU, ours beside stock.

`python -m benchmarks.gpu`, where there is one; scripts/gpu_check.sh runs it section by section. `--device cpu` shows
only that what needs no GPU runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import gpu_copies, gpu_safetensors, gpu_saves
from benchmarks.background import Saves
from benchmarks.candidates import REGISTRY
from benchmarks.figures import record
from benchmarks.gpu_rounds import GiB, measured, peak, timed
from benchmarks.harness import page_cache
from benchmarks.harness.by_turns import STOCK, Row, Steps, Turn
from benchmarks.harness.raw_file import RawFile
from benchmarks.harness.room import working_folder
from benchmarks.harness.saves_and_loads import Disk, SavesAndLoads
from vescale_ckpt import settings


def taken(action: Callable[[], object]) -> Steps:
    return {"copy": timed(action)}


def disk(directory: str, rounds: int, size: int) -> None:
    """Direct I/O of as many bytes by four threads, nothing else."""
    raw = RawFile()
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        path = Path(folder)

        def turn() -> Steps:
            return {"write": timed(lambda: raw.write(path, size)), "read": timed(lambda: raw.read(path, size))}

        measured("disk", {"disk": turn}, rounds, lambda row: {f"disk_{row.step}_gb_s": size / row.seconds / 1e9})
    record(disk_path=raw.path_taken)


def ceilings(rounds: int, size: int) -> None:
    """The bus each way and both at once, pageable memory, and how fast memory is locked."""
    device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    pageable = torch.zeros(size, dtype=torch.uint8, device="cpu")
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            pinned[0].copy_(device[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            device[1].copy_(pinned[1], non_blocking=True)

    ways: dict[str, Turn] = {
        "pinned_to_host": lambda: taken(lambda: pinned[0].copy_(device[0], non_blocking=True)),
        "pinned_to_device": lambda: taken(lambda: device[0].copy_(pinned[0], non_blocking=True)),
        "pinned_each_way_of_both": lambda: taken(both),
        "pageable_to_host": lambda: taken(lambda: pageable.copy_(device[0])),
        "pageable_to_device": lambda: taken(lambda: device[0].copy_(pageable)),
    }
    measured("copies", ways, rounds, lambda row: {f"{row.candidate}_gb_s": size / row.seconds / 1e9})
    runtime = torch.cuda.cudart()
    seconds = []
    for _ in range(rounds):
        answers: list[object] = []
        seconds.append(timed(lambda: answers.append(runtime.cudaHostRegister(pageable.data_ptr(), size, 0))))  # noqa: B023
        if int(answers[0]) != 0:
            record(page_lock=f"refused: cudaHostRegister returned {int(answers[0])}")
            return
        runtime.cudaHostUnregister(pageable.data_ptr())
        record(page_lock_gb_s=size / statistics.median(seconds) / 1e9)


def copies(device: str, rounds: int, scale: float, only: Sequence[str] = ()) -> None:
    """Copies to the host of a few large, many small, and strided tensors, of the bus's peak. `only`: of these kinds,
    and ours alone."""
    ceiling = peak(rounds) if device == "cuda" else 1e9
    prefix = f"pack_{settings.number('pack_bytes') >> 10}k_" if only else ""
    record(pinned_peak_gb_s=ceiling / 1e9)
    for kind, make in gpu_copies.kinds(device, scale).items():
        if only and kind not in only:
            continue
        tensors = make()
        nbytes = sum(tensor.nbytes for tensor in tensors)
        turns = {name: partial(taken, copy) for name, copy in gpu_copies.ways(tensors).items()}

        def ratios(row: Row) -> dict[str, float]:
            name = {"vescale": "copy", gpu_copies.STOCK: "stock_copy"}.get(row.candidate, "plain_copy")
            return {f"{prefix}{name}_{kind}_of_peak": nbytes / row.seconds / ceiling}  # noqa: B023

        measured(kind, {"vescale": turns["vescale"]} if only else turns, rounds, ratios)


def beside_stock(device: str, rounds: int, directory: str, size: int) -> None:
    """Synchronous saves and cold loads, and asynchronous saves beside training, ours and stock's."""
    shapes = {f"layer.{i}": (4096, 4096) for i in range(max(1, size // (2 * 4096 * 4096)))}
    with working_folder(Path(directory)) as folder:
        both = SavesAndLoads(shapes, Disk(folder, partial(page_cache.prepare, warm=False)), device=device)
        turns = {name: partial(both.turn, name, REGISTRY[name].make(False)) for name in ("vescale", "dcp-4")}
        title = f"saves and cold loads on {device}"
        measured(title, turns, rounds, lambda row: {f"{row.step}_{row.candidate}_cold_gb_s": row.rate})
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # stock wants one
        ways = Saves(folder, both.state).turns(["ours", "ours, gate", "our stager", STOCK])
        title = f"saves beside training on {device}"
        measured(
            title, ways, rounds, lambda row: {f"{row.candidate}, {row.step} beside training, ms": row.seconds * 1e3}
        )
        dist.destroy_process_group()


def room(wanted: int, directory: str, device: str) -> int:
    """`wanted` bytes, or less where memory or disk have not room for a few times as much."""
    free = [shutil.disk_usage(directory).free // 3, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 6]
    if device == "cuda":
        free.append(torch.cuda.mem_get_info()[0] // 4)
    return max(1 << 20, min(wanted, *free))


SECTIONS = (
    "disk", "ceilings", "copies", "pack-sizes", "odd", "first", "prepared", "gated", "both-ways", "small-loads",
    "safetensors", "growth", "stock",
)  # fmt: skip
PART = "small-copies"  # a section, for processes that `pack-sizes` starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="of " + ", ".join(SECTIONS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the state, at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=200, help="of the section growth")
    parser.add_argument("--dir", default=tempfile.gettempdir())
    arguments = parser.parse_args()
    device, directory, rounds = arguments.device, arguments.dir, arguments.rounds
    sections = arguments.sections.split(",")
    if unknown := set(sections) - {*SECTIONS, PART}:
        parser.error(f"no section is named {', '.join(sorted(unknown))}")
    on_gpu = device == "cuda"
    size = room(int(arguments.gib * GiB), directory, device if set(sections) - {"disk"} else "cpu")
    scale = min(1.0, arguments.gib / 4)
    run: dict[str, Callable[[], None]] = {
        "disk": lambda: disk(directory, rounds, min(size, GiB)),
        "ceilings": lambda: ceilings(rounds, min(size, GiB)),
        "copies": lambda: copies(device, rounds, scale),
        PART: lambda: copies(device, rounds, scale, ("4k", "64k", "256k", "1m")),
        "pack-sizes": lambda: gpu_copies.pack_sizes(device, arguments.gib),
        "odd": lambda: gpu_copies.odd(device, directory, min(4 * GiB, size)),
        "first": lambda: gpu_saves.first(device, directory, rounds, size, peak(rounds) if on_gpu else None),
        "prepared": lambda: gpu_saves.prepared(device, directory, rounds, size),
        "gated": lambda: gpu_saves.gated(device, directory, rounds, size),
        "both-ways": lambda: gpu_saves.both_ways(
            device, directory, rounds, size, peak(rounds, to_host=False) if on_gpu else None
        ),
        "small-loads": lambda: gpu_saves.small_loads(
            device, directory, rounds, scale, peak(rounds, to_host=False) if on_gpu else None
        ),
        "safetensors": lambda: gpu_safetensors.loads(device, directory, rounds, int(arguments.gib * GiB)),
        "growth": lambda: gpu_saves.growth(device, directory, arguments.saves),
        "stock": lambda: beside_stock(device, rounds, directory, min(size, 2 * GiB)),
    }
    for section in sections:
        run[section]()


if __name__ == "__main__":
    main()
