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
import time
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import gpu_saves
from benchmarks.background import Saves
from benchmarks.candidates import REGISTRY
from benchmarks.figures import record
from benchmarks.gpu_saves import timed
from benchmarks.harness import STOCK, Row, Steps, Turn, alternate, summarize, table, working_directory
from benchmarks.one_process import SavesAndLoads
from vescale_ckpt._bench.raw_file import RawFile
from vescale_ckpt._engine import _C

GiB = 1 << 30


def taken(action: Callable[[], object]) -> Steps:
    return {"copy": timed(action)}


def median_of(action: Callable[[], object], rounds: int) -> float:
    """Seconds; the first time does not count."""
    return summarize(alternate("", {"": lambda: taken(action)}, rounds, warmup=1))[0].seconds


def disk(directory: str, rounds: int, size: int) -> None:
    """Direct I/O of as many bytes by four threads, nothing else."""
    raw = RawFile()
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        path = Path(folder)
        write = median_of(lambda: raw.write(path, size), rounds)
        read = median_of(lambda: raw.read(path, size), rounds)
    record(disk_write_gb_s=size / write / 1e9, disk_read_gb_s=size / read / 1e9, disk_path=raw.path_taken)


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
    record(**{f"{row.candidate}_gb_s": size / row.seconds / 1e9 for row in shown("copies", ways, rounds)})
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        lock = _C.PageLock(0, pageable.data_ptr() // 4096 * 4096, size // 4096 * 4096, 64 << 20)
        seconds.append(time.perf_counter() - started)
        if lock.refusal:
            record(page_lock=f"refused: {lock.refusal}")
            return
        del lock
    record(page_lock_gb_s=size / statistics.median(seconds) / 1e9)


def peak(rounds: int, *, to_host: bool = True) -> float:
    """Bytes a second of one large pinned copy, in this process."""
    device = torch.empty(GiB, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(GiB, dtype=torch.uint8, pin_memory=True)
    source, target = (device, pinned) if to_host else (pinned, device)
    return GiB / median_of(lambda: target.copy_(source, non_blocking=True), rounds)


def copy_ways(tensors: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Name → a copy of all tensors to the host. Ours and the plain ones copy into the same pinned memory."""
    offsets = [0]
    for tensor in tensors:
        offsets.append(offsets[-1] + -(-tensor.nbytes // 64) * 64)
    pinned = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=True)
    places = [pinned[o : o + t.nbytes].view(t.dtype).view(t.shape) for o, t in zip(offsets, tensors, strict=False)]
    rows = array("q")
    for tensor, place in zip(tensors, places, strict=True):
        rows.extend([tensor.data_ptr(), place.data_ptr(), tensor.itemsize, tensor.dim()])
        rows.extend([*tensor.shape, *tensor.stride()])
    packing, plain = _C.DeviceCopies(0, True), _C.DeviceCopies(0, True, slab_bytes=0)

    def ours(copies: _C.DeviceCopies) -> None:
        copies.start(rows, [torch.cuda.current_stream().cuda_stream], alignment=64)
        copies.wait(600)

    def non_blocking() -> None:
        for tensor, place in zip(tensors, places, strict=True):
            place.copy_(tensor, non_blocking=True)

    return {
        "vescale": lambda: ours(packing),
        "vescale, no slab": lambda: ours(plain),
        "pinned, non_blocking": non_blocking,
        "tensor.cpu()": lambda: [tensor.cpu() for tensor in tensors],
    }


def copies(rounds: int) -> None:
    """Copies to the host of a few large, many small, and strided tensors."""
    ceiling = peak(rounds)
    record(pinned_peak_gb_s=ceiling / 1e9)
    kinds: dict[str, Callable[[], list[torch.Tensor]]] = {
        "16 x 128 MiB": lambda: [torch.randn(32 << 20, device="cuda") for _ in range(16)],
        "2000 x 1 MiB": lambda: [torch.randn(256 << 10, device="cuda") for _ in range(2000)],
        "2000 x 256 KiB": lambda: [torch.randn(64 << 10, device="cuda") for _ in range(2000)],
        "20000 x 64 KiB": lambda: [torch.randn(16 << 10, device="cuda") for _ in range(20000)],
        "20000 x 4 KiB": lambda: [torch.randn(1 << 10, device="cuda") for _ in range(20000)],
        "8 x 64 MiB, columns": lambda: [torch.randn(8192, 4096, device="cuda")[:, :2048] for _ in range(8)],
        "8 x 64 MiB, transposed": lambda: [torch.randn(4096, 4096, device="cuda").t() for _ in range(8)],
    }
    figure = {
        "20000 x 4 KiB": "4k", "20000 x 64 KiB": "64k", "2000 x 256 KiB": "256k", "2000 x 1 MiB": "1m",
        "8 x 64 MiB, columns": "columns", "8 x 64 MiB, transposed": "transposed",
    }  # fmt: skip
    for kind, make in kinds.items():
        tensors = make()
        nbytes = sum(tensor.nbytes for tensor in tensors)
        for row in shown(kind, {name: partial(taken, copy) for name, copy in copy_ways(tensors).items()}, rounds):
            if row.candidate == "vescale" and kind in figure:
                record(**{f"copy_{figure[kind]}_of_peak": nbytes / row.seconds / ceiling})


def beside_stock(device: str, rounds: int, directory: str, size: int) -> None:
    """Synchronous saves and cold loads, and asynchronous saves beside training, ours and stock's."""
    shapes = {f"layer.{i}": (4096, 4096) for i in range(max(1, size // (2 * 4096 * 4096)))}
    with working_directory(Path(directory)) as folder:
        both = SavesAndLoads(shapes, folder, ["save", "load"], warm=False, seed=0, device=device)
        turns = {name: partial(both.turn, name, REGISTRY[name].make(False)) for name in ("vescale", "dcp-4")}
        rows = shown(f"saves and cold loads on {device}", turns, rounds)
        record(**{f"{row.step}_{row.candidate}_cold_gb_s": row.rate for row in rows})
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # stock wants one
        saves = Saves(folder, both.state)
        shown(f"saves beside training on {device}", saves.turns(["ours", "ours, gate", "our stager", STOCK]), rounds)
        dist.destroy_process_group()


def shown(case: str, turns: Mapping[str, Turn], rounds: int) -> list[Row]:
    """Rows of the candidates alternated, the first round not counted; their table is printed."""
    rows = summarize(alternate(case, turns, rounds, warmup=1))
    print(table(rows), flush=True)
    return rows


def room(wanted: int, directory: str, device: str) -> int:
    """`wanted` bytes, or less where memory or disk have not room for a few times as much."""
    free = [shutil.disk_usage(directory).free // 3, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 6]
    if device == "cuda":
        free.append(torch.cuda.mem_get_info()[0] // 4)
    return max(1 << 20, min(wanted, *free))


SECTIONS = ("disk", "ceilings", "copies", "first", "prepared", "gated", "both-ways", "growth", "stock")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="of " + ", ".join(SECTIONS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gib", type=float, default=8.0, help="size of the state, at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=200, help="of the section growth")
    parser.add_argument("--dir", default=tempfile.gettempdir())
    arguments = parser.parse_args()
    device, directory, rounds = arguments.device, arguments.dir, arguments.rounds
    sections = arguments.sections.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"no section is named {', '.join(sorted(unknown))}")
    on_gpu = device == "cuda"
    size = room(int(arguments.gib * GiB), directory, device if set(sections) - {"disk"} else "cpu")
    run: dict[str, Callable[[], None]] = {
        "disk": lambda: disk(directory, rounds, min(size, GiB)),
        "ceilings": lambda: ceilings(rounds, min(size, GiB)),
        "copies": lambda: copies(rounds),
        "first": lambda: gpu_saves.first(device, directory, rounds, size, peak(rounds) if on_gpu else None),
        "prepared": lambda: gpu_saves.prepared(device, directory, rounds, size),
        "gated": lambda: gpu_saves.gated(device, directory, rounds, size),
        "both-ways": lambda: gpu_saves.both_ways(
            device, directory, rounds, size, peak(rounds, to_host=False) if on_gpu else None
        ),
        "growth": lambda: gpu_saves.growth(device, directory, arguments.saves),
        "stock": lambda: beside_stock(device, rounds, directory, min(size, 2 * GiB)),
    }
    for section in sections:
        run[section]()


if __name__ == "__main__":
    main()
