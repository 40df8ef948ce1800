"""Copies from a device to the host as snapshots make them, beside plain ones, and odd tensors that must come back."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable

import torch
from torch.distributed.checkpoint.staging import StagingOptions

import vescale_ckpt
from vescale_ckpt import settings
from vescale_ckpt._engine import _C
from vescale_ckpt._engine.rows import NO_LIMIT
from vescale_ckpt._state.tensor_table import device_number, read_tensors
from vescale_ckpt._write.host_batches import new_snapshot, write_table

from .background import stock_stager
from .figures import record
from .gpu_rounds import GiB, KiB, MiB

LIMIT = 120.0  # seconds for one size
STOCK = "stock's pinned stager"


def kinds(device: str, scale: float = 1.0) -> dict[str, Callable[[], list[torch.Tensor]]]:
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


def ways(tensors: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Name → a copy of all tensors to the host; ours into memory of snapshots, which is kept and page-locked."""
    ready = read_tensors(tensors).ready
    table, devices = write_table(tensors), array("q", map(device_number, ready))

    def ours() -> None:
        snapshot = new_snapshot(table, devices, NO_LIMIT, settings.number("threads"))
        if snapshot.first:
            raise SystemExit("the system has no memory for a snapshot")
        snapshot.copy()
        snapshot.release()

    _C.prepare_snapshots(sum(tensor.nbytes + 64 for tensor in tensors), settings.number("threads"))
    on_device = tensors[0].is_cuda
    pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device) for tensor in tensors[:4096]]
    stager, state = stock_stager(StagingOptions(on_device, False, False, on_device)), dict(enumerate(tensors))

    def non_blocking() -> None:
        for number, tensor in enumerate(tensors):
            pinned[number % len(pinned)].copy_(tensor, non_blocking=True)

    return {"vescale": ours, "pinned, non_blocking": non_blocking, STOCK: lambda: stager().stage(state)}  # type: ignore[arg-type]


def pack_sizes(device: str, gib: float) -> None:
    """The many small ones again, each size of `VESCALE_CKPT_PACK_BYTES` in a process of its own."""
    for size in (64 * KiB, 128 * KiB, 256 * KiB, 512 * KiB, MiB):
        environment = {**os.environ, "VESCALE_CKPT_PACK_BYTES": str(size)}
        options = [f"--device={device}", f"--gib={gib}", "--rounds=3", "--sections=small-copies"]
        try:
            child = subprocess.run(
                [sys.executable, "-m", "benchmarks.gpu", *options], env=environment, timeout=LIMIT,
                capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            record(**{f"pack_{size // KiB}k": f"not done within {LIMIT:g} s"})
            continue
        if child.returncode != 0:
            record(**{f"pack_{size // KiB}k": f"failed: {child.stderr.strip().splitlines()[-1:]}"})


def odd_tensors(device: str, large: int) -> dict[str, torch.Tensor]:
    """Tensors of rare dtypes and forms, and some whose offset or strides exceed `large` bytes (4 GiB on a device)."""
    tail = min(64 * MiB, large)
    base = torch.empty(large + tail, dtype=torch.uint8, device=device)
    base[large:] = torch.arange(tail, device=device) % 251
    base[:MiB] = torch.arange(MiB, device=device) % 241
    values = torch.randn(300, 257, device=device)
    found = {
        "offset": base[large + 3 :],
        "strides": base.as_strided((2, 1 * MiB), (large, 1)),
        "columns of strides": base.as_strided((MiB // 64, 2, 16), (64, large, 1)),
        "transposed": values.t(),
        "conj": torch.complex(values, values.flip(0)).conj(),
        "negated": torch.complex(values, values.flip(0)).conj().imag,
    }
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"):
        if (dtype := getattr(torch, name, None)) is not None:
            found[name] = torch.randint(0, 255, (700, 130), dtype=torch.uint8, device=device).view(dtype)
    return found


def odd(device: str, directory: str, large: int = 4 * GiB) -> None:
    """Saves them, asynchronously and not, and loads them to the device and to the host; all must be equal."""
    state = odd_tensors(device, large)
    wrong = []
    for asynchronous in (True, False):
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            handle = vescale_ckpt.save(folder, state, async_checkpoint=asynchronous)
            if asynchronous:
                handle.result()
            for place in (device, "cpu"):
                loaded = {name: torch.empty(t.shape, dtype=t.dtype, device=place) for name, t in state.items()}
                vescale_ckpt.load(folder, loaded)
                wrong += [name for name in state if not same_bytes(state[name], loaded[name])]
    record(odd_equal=int(not wrong), odd_tensors=len(state), odd_wrong=", ".join(wrong))
    if wrong:
        raise SystemExit(f"came back wrong: {wrong}")


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    def bytes_in(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach().resolve_conj().resolve_neg()
        plain = plain.view(torch.uint8) if plain.itemsize == 1 else plain
        return plain.contiguous().to("cpu").flatten().view(torch.uint8)

    return torch.equal(bytes_in(a), bytes_in(b))
