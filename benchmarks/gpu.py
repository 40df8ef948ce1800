"""Copies, saves, asynchronous saves and loads of a state on a GPU, ours beside stock.

`python -m benchmarks.gpu`, where there is one.
"""

from __future__ import annotations

import argparse
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

from .cache import drop

Candidate = tuple[Callable[[Path], object], Callable[[Path], object]]


def candidates() -> dict[str, Candidate]:
    """Name → makers of a writer and of a reader."""
    return {
        "vescale": (vescale_ckpt.StorageWriter, vescale_ckpt.StorageReader),
        "dcp-4": (lambda path: dcp.FileSystemWriter(path, thread_count=4), dcp.FileSystemReader),
    }


def timed(action: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - started


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
    kinds = {
        "16 x 128 MiB": [torch.randn(32 << 20, device="cuda") for _ in range(16)],
        "2000 x 256 KiB": [torch.randn(64 << 10, device="cuda") for _ in range(2000)],
        "20000 x 4 KiB": [torch.randn(1 << 10, device="cuda") for _ in range(20000)],
        "8 x 64 MiB, columns": [torch.randn(4096, 8192, device="cuda")[:, :4096] for _ in range(8)],
        "8 x 64 MiB, transposed": [torch.randn(4096, 4096, device="cuda").t() for _ in range(8)],
    }
    for kind, tensors in kinds.items():
        nbytes = sum(tensor.nbytes for tensor in tensors)
        ways = copy_ways(tensors)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, copy in ways.items():
                seconds[name].append(timed(copy))
        for name, times in seconds.items():
            median = statistics.median(times[1:])
            print(f"copy  {kind:22} {name:20} {median * 1e3:9.2f} ms {nbytes / median / 1e9:6.2f} GB/s")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    arguments = parser.parse_args()
    copies(arguments.rounds)
    layers = max(1, int(arguments.gib * 2**30) // (2 * 4096 * 4096))
    state = {f"layer.{i}": torch.randn(4096, 4096, device="cuda").bfloat16() for i in range(layers)}
    target = {key: torch.empty_like(value) for key, value in state.items()}
    gib = sum(value.nbytes for value in state.values()) / 2**30
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.rounds + 1):
        for name, (writer, reader) in candidates().items():
            with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
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
    background(state, arguments.rounds, arguments.dir)
    print(f"{gib:.2f} GiB on {torch.cuda.get_device_name(0)}, median of {arguments.rounds}, first round not counted")
    for (name, operation), times in seconds.items():
        median = statistics.median(times[1:])
        print(f"{operation:5} {name:8} {median:7.3f} s {gib * 1.073741824 / median:6.2f} GB/s (first {times[0]:.3f} s)")


if __name__ == "__main__":
    main()
