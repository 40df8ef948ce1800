"""Copies, saves, asynchronous saves and loads of a state on a GPU, ours beside stock.

`python -m benchmarks.gpu`, where there is one; scripts/check_gpu.py runs it section by section. `--device cpu` shows
only that what needs no GPU runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.staging import StagingOptions

from benchmarks import gpu_saves
from benchmarks.background import Saves, stock_stager
from benchmarks.candidates import FILES, REGISTRY
from benchmarks.figures import record
from benchmarks.gpu_rounds import GiB, KiB, MiB, measured, peak, timed
from benchmarks.harness import page_cache
from benchmarks.harness.by_turns import STOCK, Row
from benchmarks.harness.room import working_folder
from benchmarks.harness.saves_and_loads import Disk, SavesAndLoads
from benchmarks.ranks import alone
from vescale_ckpt import fingerprint
from vescale_ckpt._engine import _C
from vescale_ckpt._engine.device_streams import new_snapshot
from vescale_ckpt._engine.options import threads_of
from vescale_ckpt._engine.rows import NO_LIMIT
from vescale_ckpt._state.tensor_table import device_number, read_tensors
from vescale_ckpt._write.host_batches import write_table

STAGER = "stock's pinned stager"


def kinds_of_copies(device: str, scale: float = 1.0) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Name → tensors to copy. `scale`: of their number."""

    def many(count: int, nbytes: int) -> Callable[[], list[torch.Tensor]]:
        return lambda: [torch.randn(nbytes // 4, device=device) for _ in range(max(2, int(count * scale)))]

    def matrices(rows: int, columns: int) -> list[torch.Tensor]:
        side = max(2, int(8 * scale))
        return [torch.randn(rows, columns, device=device) for _ in range(side)]

    return {
        "large": many(16, 128 * MiB if scale >= 1 else MiB),
        "1m": many(2000, MiB),
        "256k": many(2000, 256 * KiB),
        "64k": many(20_000, 64 * KiB),
        "4k": many(20_000, 4 * KiB),
        "columns": lambda: [tensor[:, :2048] for tensor in matrices(8192 if scale >= 1 else 64, 4096)],
        "transposed": lambda: [tensor.t() for tensor in matrices(4096 if scale >= 1 else 64, 4096)],
    }


def ways_to_copy(tensors: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Name → a copy of all tensors to the host; ours into memory of snapshots, which is kept and page-locked."""
    ready = read_tensors(tensors).ready
    table, devices = write_table(tensors), array("q", map(device_number, ready))

    def ours() -> None:
        snapshot = new_snapshot(table, devices, NO_LIMIT, threads_of())
        if snapshot.first:
            raise SystemExit("the system has no memory for a snapshot")
        snapshot.copy()
        snapshot.release()

    _C.prepare_snapshots(sum(tensor.nbytes + 64 for tensor in tensors), threads_of())
    on_device = tensors[0].is_cuda
    pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device) for tensor in tensors[:4096]]
    stager, state = stock_stager(StagingOptions(on_device, False, False, on_device)), dict(enumerate(tensors))

    def non_blocking() -> None:
        for number, tensor in enumerate(tensors):
            pinned[number % len(pinned)].copy_(tensor, non_blocking=True)

    return {"vescale": ours, "pinned, non_blocking": non_blocking, STAGER: lambda: stager().stage(state)}  # type: ignore[arg-type]


def copies(device: str, rounds: int, scale: float) -> None:
    """Copies to the host of a few large, many small, and strided tensors, of the bus's peak."""
    ceiling = peak(rounds) if device == "cuda" else 1e9
    record(pinned_peak_gb_s=ceiling / 1e9)
    for kind, make in kinds_of_copies(device, scale).items():
        tensors = make()
        nbytes = sum(tensor.nbytes for tensor in tensors)
        turns = {name: lambda copy=copy: {"copy": timed(copy)} for name, copy in ways_to_copy(tensors).items()}

        def ratios(row: Row) -> dict[str, float]:
            name = {"vescale": "copy", STAGER: "stock_copy"}.get(row.candidate, "plain_copy")
            return {f"{name}_{kind}_of_peak": nbytes / row.seconds / ceiling}  # noqa: B023

        measured(kind, turns, rounds, ratios)


def fingerprints(device: str, rounds: int, scale: float) -> None:
    """Fingerprints of a few large and of many small tensors, of the bandwidth of copies on the device."""
    for kind in ("large", "64k"):
        tensors = kinds_of_copies(device, scale)[kind]()
        nbytes, state = sum(tensor.nbytes for tensor in tensors), {str(i): of for i, of in enumerate(tensors)}
        source = torch.empty(max(nbytes // 4, MiB), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        turns = {
            "fingerprint": lambda state=state: {kind: timed(lambda: fingerprint(state))},  # noqa: B023
            "copy": lambda source=source, target=target: {kind: timed(lambda: target.copy_(source))},  # noqa: B023
        }
        moved = {"fingerprint": nbytes, "copy": 2 * source.nbytes}  # a copy reads and writes

        def rates(row: Row) -> dict[str, float]:
            return {f"{row.candidate}_{row.step}_gb_s": moved[row.candidate] / row.seconds / 1e9}  # noqa: B023

        rows = {row.candidate: row for row in measured(kind, turns, rounds, rates)}
        ratio = nbytes / rows["fingerprint"].seconds / (moved["copy"] / rows["copy"].seconds)
        record(**{f"fingerprint_{kind}_of_copy": ratio})


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


SECTIONS = ("copies", "first", "gated", "both-ways", "stock", "fingerprints")


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
        "first": lambda: gpu_saves.stalls(device, directory, rounds, size, peak(rounds) if on_gpu else None),
        "gated": lambda: gpu_saves.stalls(device, directory, rounds, size, None, gated=True),
        "both-ways": lambda: gpu_saves.both_ways(
            device, directory, rounds, size, peak(rounds, to_host=False) if on_gpu else None
        ),
        "fingerprints": lambda: fingerprints(device, rounds, scale),
        "stock": lambda: beside_stock(device, rounds, directory, min(size, 2 * GiB)),
    }
    for section in sections:
        run[section]()


if __name__ == "__main__":
    main()
