"""Stalls, rates and growth of saves and loads of a state on a device. The device "cpu" shows only that it runs."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import vescale_ckpt

from .figures import record

MiB = 1 << 20
LEAST_TELLING = 1e9  # bytes a second that a medium must take to tell a device from the host


def make_state(device: str, size: int) -> dict[str, torch.Tensor]:
    """`size` bytes of bfloat16, about, in matrices of at most 32 MiB."""
    side = 4096 if size >= 64 * MiB else 256
    layers = max(1, size // (2 * side * side))
    return {f"layer.{i}": torch.randn(side, side, device=device).bfloat16() for i in range(layers)}


def bytes_of(state: dict[str, torch.Tensor]) -> int:
    return sum(value.nbytes for value in state.values())


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(action: Callable[[], object]) -> float:
    synchronize()
    started = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - started


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


def prepared(device: str, directory: str, rounds: int, size: int) -> None:
    """The same in a process that has prepared."""
    state = make_state(device, size)
    vescale_ckpt.prepare(state)
    for began, stall in stalls(state, directory, rounds):
        record(prepared_stall_ms=began * 1e3, prepared_save_of_steady=began / stall)


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
    on_host = {name: value.to("cpu", copy=True) for name, value in on_device.items()}
    targets = {"device": on_device, "host": on_host}
    copies = {kind: {name: torch.zeros_like(value) for name, value in state.items()} for kind, state in targets.items()}
    seconds: dict[tuple[str, str], list[float]] = {}
    before, most = own_device_bytes(), 0
    for number in range(rounds + 1):
        for kind, state in targets.items():
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                save = timed(lambda: vescale_ckpt.save(folder, state))  # noqa: B023
                load = timed(lambda: vescale_ckpt.load(folder, copies[kind]))  # noqa: B023
            most = max(most, own_device_bytes() - before)
            for name, value in state.items():
                if not torch.equal(value, copies[kind][name]):
                    raise SystemExit(f"{name} came back wrong, {kind}")
                copies[kind][name].zero_()
            if number:  # the first round takes memory
                seconds.setdefault((kind, "save"), []).append(save)
                seconds.setdefault((kind, "load"), []).append(load)
        if number:
            tell_both_ways(bytes_of(on_host), seconds, peak_to_device)
            if peak_to_device is not None:
                record(own_device_mib=most / MiB)


def tell_both_ways(size: int, seconds: dict[tuple[str, str], list[float]], peak_to_device: float | None) -> None:
    """Records what is known so far. Ratios are of the same round."""
    rates = {way: size / statistics.median(times) for way, times in seconds.items()}
    record(**{f"{operation}_{kind}_gb_s": rate / 1e9 for (kind, operation), rate in rates.items()})
    for operation in ("save", "load"):
        pairs = zip(seconds["host", operation], seconds["device", operation], strict=True)
        ratio: object = statistics.median(host / device for host, device in pairs)
        if rates["host", operation] < LEAST_TELLING:  # then the medium alone makes both equal
            ratio = f"{ratio:.3g}, which tells nothing: the medium takes {rates['host', operation] / 1e9:.2g} GB/s"
        record(**{f"{operation}_of_host": ratio})
    if peak_to_device is not None:
        record(load_of_lesser=rates["device", "load"] / min(peak_to_device, rates["host", "load"]))


def small_loads(device: str, directory: str, rounds: int, scale: float, peak_to_device: float | None) -> None:
    """Loads of 20,000 x 64 KiB from the page cache, to the device and to the host."""
    count = max(20, int(20_000 * scale))
    state = {f"t.{i}": torch.randn(16 << 10, device=device) for i in range(count)}
    targets = {
        "device": {name: torch.zeros_like(value) for name, value in state.items()},
        "host": {name: torch.zeros(value.shape) for name, value in state.items()},
    }
    seconds: dict[str, list[float]] = {"device": [], "host": []}
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        vescale_ckpt.save(folder, state)
        for number in range(rounds + 1):
            for kind, target in targets.items():
                seconds[kind].append(timed(lambda: vescale_ckpt.load(folder, target)))  # noqa: B023
            if number == 0:
                if not all(torch.equal(state[name], value) for name, value in targets["device"].items()):
                    raise SystemExit("small tensors came back wrong")
                continue
            rates = {kind: bytes_of(state) / statistics.median(times[1:]) for kind, times in seconds.items()}
            record(**{f"small_load_{kind}_gb_s": rate / 1e9 for kind, rate in rates.items()})
            if peak_to_device is not None:
                record(small_load_of_lesser=rates["device"] / min(peak_to_device, rates["host"]))


def own_device_bytes() -> int:
    """What is taken of the device's memory and is not torch's."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def growth(device: str, directory: str, saves: int) -> None:
    """What a process takes after many asynchronous saves, and had taken after the first tenth of them."""
    state = make_state(device, 16 * MiB)
    before: tuple[int, int, int] | None = None
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        for number in range(saves):
            vescale_ckpt.save(folder, state, async_checkpoint=True).result()
            if (number + 1) % max(1, saves // 10) != 0:
                continue
            threads = len(os.listdir("/proc/self/task"))
            taken = own_device_bytes(), host_bytes(), len(os.listdir("/proc/self/fd")) + threads
            if before is None:
                before = taken
                continue
            grown = [after - first for after, first in zip(taken, before, strict=True)]
            record(growth_device_mib=grown[0] / MiB, growth_host_mib=grown[1] / MiB, growth_handles=grown[2])
            record(growth_saves=number + 1)


def host_bytes() -> int:
    """Resident, and pinned, which is counted as resident, too."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024
