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
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import vescale_ckpt
from vescale_ckpt import _C

from . import gpu_saves
from .cache import drop
from .ceiling import RawFile
from .figures import record
from .gpu_saves import timed

Candidate = tuple[Callable[[Path], object], Callable[[Path], object]]


def candidates() -> dict[str, Candidate]:
    """Name → makers of a writer and of a reader."""
    return {
        "vescale": (vescale_ckpt.StorageWriter, vescale_ckpt.StorageReader),
        "dcp-4": (lambda path: dcp.FileSystemWriter(path, thread_count=4), dcp.FileSystemReader),
    }


GiB = 1 << 30


def median_of(action: Callable[[], object], rounds: int) -> float:
    """Seconds; the first time does not count."""
    return statistics.median([timed(action) for _ in range(rounds + 1)][1:])


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

    ways: dict[str, Callable[[], object]] = {
        "pinned_to_host": lambda: pinned[0].copy_(device[0], non_blocking=True),
        "pinned_to_device": lambda: device[0].copy_(pinned[0], non_blocking=True),
        "pinned_each_way_of_both": both,
        "pageable_to_host": lambda: pageable.copy_(device[0]),
        "pageable_to_device": lambda: device[0].copy_(pageable),
    }
    record(**{f"{name}_gb_s": size / median_of(way, rounds) / 1e9 for name, way in ways.items()})
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
        ways = copy_ways(tensors)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, copy in ways.items():
                seconds[name].append(timed(copy))
        for name, times in seconds.items():
            median = statistics.median(times[1:])
            print(f"copy  {kind:22} {name:20} {median * 1e3:9.2f} ms {nbytes / median / 1e9:6.2f} GB/s")
            if name == "vescale" and kind in figure:
                record(**{f"copy_{figure[kind]}_of_peak": nbytes / median / ceiling})


class Background(ABC):
    """One way to save while training goes on."""

    @abstractmethod
    def start(self, state: dict[str, torch.Tensor], directory: Path) -> Future[Any] | vescale_ckpt.SaveHandle:
        """Returns when training may go on."""


class Ours(Background):
    def start(self, state: dict[str, torch.Tensor], directory: Path) -> vescale_ckpt.SaveHandle:
        return vescale_ckpt.save(directory, {"m": state}, async_checkpoint=True)


class OursBehindAGate(Background):
    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self._optimizer = torch.optim.SGD([torch.nn.Parameter(value) for value in state.values()])

    def start(self, state: dict[str, torch.Tensor], directory: Path) -> vescale_ckpt.SaveHandle:
        return vescale_ckpt.save(directory, {"m": state}, async_checkpoint=True, gate=self._optimizer)


class Stock(Background):
    """`dcp.async_save` with a pinned stager that is kept."""

    def __init__(self) -> None:
        self._stager = DefaultStager(StagingOptions(use_async_staging=False))

    def start(self, state: dict[str, torch.Tensor], directory: Path) -> Future[Any]:
        answer: Any = dcp.async_save(
            {"m": state},
            storage_writer=dcp.FileSystemWriter(directory, thread_count=4),
            async_stager=self._stager,
            no_dist=True,
        )
        return answer  # type: ignore[no-any-return]


def background(state: dict[str, torch.Tensor], rounds: int, directory: str) -> None:
    """How long saves stop training, how long until they are durable, and matrix products beside them."""
    ways: dict[str, Background] = {"vescale": Ours(), "vescale, gate": OursBehindAGate(state), "dcp": Stock()}
    left, right = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}

    def products() -> float:
        """Seconds of many. Waits for their stream alone: copies may go on."""
        started = time.perf_counter()
        for _ in range(200):
            left @ right
        torch.cuda.current_stream().synchronize()
        return time.perf_counter() - started

    alone = min(products() for _ in range(3))
    for _ in range(rounds + 1):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                torch.cuda.synchronize()
                started = time.perf_counter()
                handle = way.start(state, Path(folder))
                stopped = time.perf_counter() - started
                beside = products()
                handle.result()
                seconds[name].append((stopped, time.perf_counter() - started, beside / alone))
    for name, times in seconds.items():
        stopped, durable, slower = (statistics.median(column) for column in zip(*times[1:], strict=True))
        print(
            f"async {name:14} stops for {stopped * 1e3:8.1f} ms (first {times[0][0] * 1e3:8.1f}), durable after "
            f"{durable:6.3f} s, matrix products beside it take {slower:4.2f} x"
        )


def beside_stock(rounds: int, directory: str, size: int) -> None:
    """Synchronous saves and cold loads, and asynchronous saves, ours and stock's."""
    layers = max(1, size // (2 * 4096 * 4096))
    state = {f"layer.{i}": torch.randn(4096, 4096, device="cuda").bfloat16() for i in range(layers)}
    target = {key: torch.empty_like(value) for key, value in state.items()}
    gib = sum(value.nbytes for value in state.values()) / GiB
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds + 1):
        for name, (writer, reader) in candidates().items():
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                path = Path(folder)
                save = timed(lambda: dcp.save({"m": state}, storage_writer=writer(path), no_dist=True))  # noqa: B023
                drop(path)
                load = timed(lambda: dcp.load({"m": target}, storage_reader=reader(path), no_dist=True))  # noqa: B023
                for key, value in state.items():
                    if not torch.equal(value, target[key]):
                        raise SystemExit(f"{name}: {key} came back wrong")
                    target[key].zero_()
                seconds.setdefault((name, "save"), []).append(save)
                seconds.setdefault((name, "load"), []).append(load)
    background(state, rounds, directory)
    print(f"{gib:.2f} GiB on {torch.cuda.get_device_name(0)}, median of {rounds}, first round not counted")
    for (name, operation), times in seconds.items():
        median = statistics.median(times[1:])
        print(f"{operation:5} {name:8} {median:7.3f} s {gib * 1.073741824 / median:6.2f} GB/s (first {times[0]:.3f} s)")
        record(**{f"{operation}_{name}_cold_gb_s": gib * 1.073741824 / median})


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
        "stock": lambda: beside_stock(rounds, directory, min(size, 2 * GiB)),
    }
    for section in sections:
        run[section]()


if __name__ == "__main__":
    main()
