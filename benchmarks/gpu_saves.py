"""Stalls, rates and growth of saves and loads of a state on a device. The device "cpu" shows only that it runs."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial

import torch

import vescale_ckpt
from benchmarks.harness.by_turns import Row, Steps

from .figures import record
from .gpu_rounds import MiB, measured, synchronize, timed

LEAST_TELLING = 1e9  # bytes a second that a medium must take to tell a device from the host


def make_state(device: str, size: int) -> dict[str, torch.Tensor]:
    """`size` bytes of bfloat16, about, in matrices of at most 32 MiB."""
    side = 4096 if size >= 64 * MiB else 256
    layers = max(1, size // (2 * side * side))
    return {f"layer.{i}": torch.randn(side, side, device=device).bfloat16() for i in range(layers)}


def bytes_of(state: dict[str, torch.Tensor]) -> int:
    return sum(value.nbytes for value in state.values())


def stalls(state: dict[str, torch.Tensor], directory: str, rounds: int) -> Iterator[tuple[float, float]]:
    """Seconds that asynchronous saves stop training for: of the first one, and the median of all others so far. Each
    begins when the one before is durable."""
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        for _ in range(rounds + 1):
            synchronize()
            started = time.perf_counter()
            handle = vescale_ckpt.save(folder, state, async_checkpoint=True)
            seconds.append(time.perf_counter() - started)
            handle.result()
            if len(seconds) > 1:
                yield seconds[0], statistics.median(seconds[1:])


def first(device: str, directory: str, rounds: int, size: int, peak: float | None) -> None:
    """The first save of this process and the steady ones; `peak`: of the bus, bytes a second."""
    state = make_state(device, size)
    for began, stall in stalls(state, directory, rounds):
        record(first_stall_ms=began * 1e3, steady_stall_ms=stall * 1e3, first_save_of_steady=began / stall)
        if peak is not None:
            record(stall_of_peak_time=stall * peak / bytes_of(state), state_gib=bytes_of(state) / 2**30)


def gated(device: str, directory: str, rounds: int, size: int) -> None:
    """The stall behind a gate, and launches of a small kernel while the copy goes on, against launches without it."""
    state = make_state(device, size)
    optimizer = torch.optim.SGD([torch.nn.Parameter(value) for value in state.values()])
    small = torch.zeros(64, device=device)
    synchronize()
    usual = percentile([launch(small) for _ in range(20_000)], 0.99)
    seconds, beside = [], []
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        for number in range(rounds + 1):
            synchronize()
            started = time.perf_counter()
            handle = vescale_ckpt.save(folder, state, async_checkpoint=True, gate=optimizer)
            stall = time.perf_counter() - started
            launches = [launch(small)]
            while not handle.staged.done():
                launches.append(launch(small))
            handle.result()
            if number == 0:  # it takes memory
                worst = percentile(launches, 0.99)
                record(gate_launch_p99_cold_ratio=worst / usual, gate_launches_cold=len(launches))
                record(gate_launch_most_cold_ms=max(launches) * 1e3)
                continue
            seconds.append(stall)
            beside += launches
            record(gate_stall_ms=statistics.median(seconds) * 1e3, gate_launches=len(beside))
            record(gate_launch_p99_ratio=percentile(beside, 0.99) / usual)


def launch(small: torch.Tensor) -> float:
    started = time.perf_counter()
    small.add_(1)
    return time.perf_counter() - started


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def both_ways(device: str, directory: str, rounds: int, size: int, peak_to_device: float | None) -> None:
    """Synchronous saves and loads of a state on the device, and of the same in host memory, from the page cache."""
    on_device = make_state(device, size)
    states = {"host": {name: value.to("cpu", copy=True) for name, value in on_device.items()}, "device": on_device}
    copies = {kind: {name: torch.zeros_like(value) for name, value in state.items()} for kind, state in states.items()}
    before, most, rates = own_device_bytes(), 0, dict[tuple[str, str], float]()

    def turn(kind: str) -> Steps:
        nonlocal most
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            save = timed(lambda: vescale_ckpt.save(folder, states[kind]))
            load = timed(lambda: vescale_ckpt.load(folder, copies[kind]))
        most = max(most, own_device_bytes() - before)
        _check(states[kind], copies[kind], kind)
        return {"save": save, "load": load}

    def figures(row: Row) -> dict[str, object]:
        rate = rates[row.step, row.candidate] = bytes_of(on_device) / row.seconds
        found: dict[str, object] = {f"{row.step}_{row.candidate}_gb_s": rate / 1e9}
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

    turns = {kind: partial(turn, kind) for kind in states}  # in this order: figures of the device need the host's
    measured("saves and loads", turns, rounds, figures, "host")


def _check(state: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor], kind: str) -> None:
    """Ends the process if something was loaded wrong, else makes the targets ready for the next load."""
    for name, value in state.items():
        if not torch.equal(value, loaded[name]):
            raise SystemExit(f"{name} came back wrong, {kind}")
        loaded[name].zero_()


def own_device_bytes() -> int:
    """What is taken of the device's memory and is not torch's."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
