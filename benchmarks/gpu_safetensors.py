"""Loads of safetensors files to a device, by ours and by the library, from the page cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import safetensors.torch as stock
import torch

from benchmarks.gpu_rounds import GiB, KiB, MiB, measured, peak, timed
from benchmarks.harness.by_turns import Row, Steps
from vescale_ckpt import safetensors


def loads(device: str, directory: str, rounds: int, size: int) -> None:
    """Two files of `size` bytes: tensors of 32 MiB, and many of 64 KiB."""
    for kind, nbytes in (("large", 32 * MiB), ("small", 64 * KiB)):
        count = max(2, size // nbytes)
        _measure(kind, {f"{i}": torch.full((nbytes // 4,), float(i)) for i in range(count)}, device, directory, rounds)


def _measure(kind: str, state: dict[str, torch.Tensor], device: str, directory: str, rounds: int) -> None:
    size = sum(value.nbytes for value in state.values())
    highest = peak(rounds, device=device, size=min(size, GiB), to_host=False)

    def turn(load: Callable[[], object]) -> Steps:
        return {"load": timed(load)}

    def figures(row: Row) -> dict[str, object]:
        figure = f"safetensors_{kind}_{row.candidate.replace(', ', '_').replace(' ', '_')}"
        rate = size / row.seconds
        return {f"{figure}_gb_s": rate / 1e9, f"{figure}_of_pinned_copy": rate / highest}

    with tempfile.TemporaryDirectory(dir=directory) as folder:
        path = Path(folder, "model.safetensors")
        safetensors.save_file(state, path)
        for name, value in safetensors.load_file(path, device).items():
            if not torch.equal(value.cpu(), state[name]):
                raise SystemExit(f"{name} came back wrong")
        ways: dict[str, Callable[[], object]] = {  # files of the library have no checksums: ours are verified
            "ours": lambda: safetensors.load_file(path, device),
            "ours, not verified": lambda: safetensors.load_file(path, device, verify=False),
            "safetensors": lambda: stock.load_file(path, device=device),
        }
        turns = {name: partial(turn, load) for name, load in ways.items()}
        measured(f"{kind} to {device}", turns, rounds, figures, "safetensors")
