"""Stalls, rates and growth of saves and loads of a state on a device. The device "cpu" shows only that it runs."""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

import vescale_ckpt
from benchmarks.harness import page_cache, random_states
from benchmarks.harness.by_turns import Row, Steps
from benchmarks.harness.random_states import Shapes
from benchmarks.harness.room import working_folder
from benchmarks.harness.saves_and_loads import Disk, SavesAndLoads, ours
from benchmarks.harness.usage import synchronize

from .figures import record
from .gpu_rounds import GiB, MiB, measured

LEAST_TELLING = 1e9  # bytes a second that a medium must take to tell a device from the host


def shapes_of(size: int) -> Shapes:
    """`size` bytes, about, in matrices of at most 32 MiB."""
    side = 4096 if size >= 64 * MiB else 256
    return {f"layer.{number}": (side, side) for number in range(max(1, size // (2 * side * side)))}


def stalls(device: str, directory: str, rounds: int, size: int, peak: float | None, gated: bool = False) -> None:
    """What the first asynchronous save of this process and the steady ones stop training for, each begun when the one
    before is durable. `peak`: of the bus, bytes a second. `gated`: behind a gate, of the steady ones alone."""
    state = random_states.build(shapes_of(size), device)
    state_bytes = random_states.bytes_in(shapes_of(size))
    gate = torch.optim.SGD([torch.nn.Parameter(value) for value in state.values()]) if gated else None
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        for _ in range(rounds + 1):
            synchronize()
            started = time.perf_counter()
            handle = vescale_ckpt.save(folder, state, async_checkpoint=True, gate=gate)
            seconds.append(time.perf_counter() - started)
            handle.result()
            if len(seconds) == 1:
                continue
            began, steady = seconds[0], statistics.median(seconds[1:])
            if gated:
                record(gate_stall_ms=steady * 1e3)
                continue
            record(first_stall_ms=began * 1e3, steady_stall_ms=steady * 1e3, first_save_of_steady=began / steady)
            if peak is not None:
                record(stall_of_peak_time=steady * peak / state_bytes, state_gib=state_bytes / GiB)


def both_ways(device: str, directory: str, rounds: int, size: int, peak_to_device: float | None) -> None:
    """Synchronous saves and loads of a state on the device, and of the same in host memory, from the page cache."""
    with working_folder(Path(directory)) as folder:
        disk = Disk(folder, partial(page_cache.prepare, warm=True))
        places = {"host": "cpu", "device": device}  # in this order: figures of the device need the host's
        kinds = {kind: SavesAndLoads(shapes_of(size), disk, device=place) for kind, place in places.items()}
        before, most, rates = own_device_bytes(), 0, dict[tuple[str, str], float]()

        def turn(kind: str) -> Steps:
            nonlocal most
            steps = kinds[kind].turn(kind, ours())
            most = max(most, own_device_bytes() - before)
            return steps

        def figures(row: Row) -> dict[str, object]:
            rate = rates[row.step, row.candidate] = (row.rate or 0.0) * 1e9
            found: dict[str, object] = {f"{row.step}_{row.candidate}_gb_s": row.rate}
            if row.candidate == "host":
                return found
            found[f"{row.step}_of_host"] = row.of_baseline
            on_host = rates[row.step, "host"]
            if on_host < LEAST_TELLING:  # then the medium alone makes both equal
                text = f"{row.of_baseline:.3g}, which tells nothing: the medium takes {on_host / 1e9:.2g} GB/s"
                found[f"{row.step}_of_host"] = text
            if peak_to_device is not None:
                found["own_device_mib"] = most / MiB
                if row.step == "load":
                    found["load_of_lesser"] = rate / min(peak_to_device, on_host)
            return found

        measured("saves and loads", {kind: partial(turn, kind) for kind in kinds}, rounds, figures, "host")


def own_device_bytes() -> int:
    """What is taken of the device's memory and is not torch's."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
