"""Loads of safetensors files to a GPU, by ours and by the library: ``python -m benchmarks.gpu_safetensors``.

Two files, from the page cache: tensors of 32 MiB, and many of 64 KiB. `--device cpu` shows only that it runs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import safetensors.torch as stock
import torch

from benchmarks.figures import record
from benchmarks.gpu_saves import timed
from benchmarks.harness import Steps, alternate, summarize, table
from vescale_ckpt import safetensors

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


def loads(path: Path, device: str) -> dict[str, Callable[[], object]]:
    """Name → a load of all tensors. Files of the library have no checksums: ours are verified as they are loaded."""
    return {
        "ours": lambda: safetensors.load_file(path, device),
        "ours, not verified": lambda: safetensors.load_file(path, device, verify=False),
        "safetensors": lambda: stock.load_file(path, device=device),
    }


def peak(device: str, size: int, rounds: int) -> float:
    """Bytes a second of one page-locked copy to the device."""
    memory = torch.empty(size, dtype=torch.uint8, pin_memory=device != "cpu")
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / min(timed(lambda: target.copy_(memory, non_blocking=True)) for _ in range(rounds + 1))


def measure(kind: str, state: dict[str, torch.Tensor], device: str, directory: str, rounds: int) -> None:
    nbytes = sum(value.nbytes for value in state.values())
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        path = Path(folder, "model.safetensors")
        safetensors.save_file(state, path)
        for name, value in safetensors.load_file(path, device).items():
            if not torch.equal(value.cpu(), state[name]):
                raise SystemExit(f"{name} came back wrong")

        def turn(load: Callable[[], object]) -> Steps:
            return {"load": timed(load)}

        turns = {name: partial(turn, load) for name, load in loads(path, device).items()}
        rows = summarize(alternate(f"{kind} to {device}", turns, rounds, warmup=1))
    print(table(rows), flush=True)
    rates = {row.candidate: nbytes / row.seconds for row in rows}
    highest = peak(device, min(nbytes, GiB), rounds)
    for name, rate in rates.items():
        figure = f"safetensors_{kind}_{name.replace(', ', '_').replace(' ', '_')}"
        record(**{f"{figure}_gb_s": rate / 1e9, f"{figure}_of_pinned_copy": rate / highest})


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gib", type=float, default=2.0, help="size of each file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    arguments = parser.parse_args(given)
    size = int(arguments.gib * GiB)
    for kind, nbytes in (("large", 32 * MiB), ("small", 64 * KiB)):
        count = max(2, size // nbytes)
        state = {f"{i}": torch.full((nbytes // 4,), float(i)) for i in range(count)}
        measure(kind, state, arguments.device, arguments.dir, arguments.rounds)


if __name__ == "__main__":
    main()
