"""Copies from a device to the host as snapshots make them, beside plain ones."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import torch
from torch.distributed.checkpoint.staging import StagingOptions

from vescale_ckpt._engine import _C
from vescale_ckpt._engine.device_streams import new_snapshot
from vescale_ckpt._engine.options import threads_of
from vescale_ckpt._engine.rows import NO_LIMIT
from vescale_ckpt._state.tensor_table import device_number, read_tensors
from vescale_ckpt._write.host_batches import write_table

from .background import stock_stager
from .gpu_rounds import KiB, MiB

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
        snapshot = new_snapshot(table, devices, NO_LIMIT, threads_of())
        if snapshot.first:
            raise SystemExit("the system has no memory for a snapshot")
        snapshot.copy()
        snapshot.release()

    _C.prepare_snapshots(sum(tensor.nbytes + 64 for tensor in tensors), threads_of())
    on_device = tensors[0].is_cuda
    pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device) for tensor in tensors[:4096]]
    stager, state = stock_stager(StagingOptions(on_device, False, False, on_device)), dict(enumerate(tensors))

    def non_blocking() -> None:
        for number, tensor in enumerate(tensors):
            pinned[number % len(pinned)].copy_(tensor, non_blocking=True)

    return {"vescale": ours, "pinned, non_blocking": non_blocking, STOCK: lambda: stager().stage(state)}  # type: ignore[arg-type]
