"""Saves and loads of a state on a GPU, ours beside stock DCP: `python -m benchmarks.gpu`, where there is one."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import vescale_ckpt

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    arguments = parser.parse_args()
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
    print(f"{gib:.2f} GiB on {torch.cuda.get_device_name(0)}, median of {arguments.rounds}, first round not counted")
    for (name, operation), times in seconds.items():
        median = statistics.median(times[1:])
        print(f"{operation:5} {name:8} {median:7.3f} s {gib * 1.073741824 / median:6.2f} GB/s (first {times[0]:.3f} s)")


if __name__ == "__main__":
    main()
