"""Checkpoints loaded to a CUDA device into many allocations of torch's; `scripts/check_gpu.py` runs these.

Allocations are often neighbours, and tensors are neighbours in files and in the memory that they are read into. No copy
may span two allocations: CUDA refuses it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vescale_ckpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = "cuda"
MiB = 1 << 20


def large(count: int = 16, nbytes: int = 32 * MiB) -> dict[str, torch.Tensor]:
    """Each fills an allocation of its own."""
    return {f"t{number:02}": torch.randn(nbytes // 4) for number in range(count)}


def small(count: int = 20_000) -> dict[str, torch.Tensor]:
    """Each fills a part of an allocation: sizes are multiples of 512 bytes."""
    values = torch.randn(count, 640)
    return {f"s{number:05}": values[number, : 128 * (1 + number % 5)].clone() for number in range(count)}


def expect_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(tensor.device.type == DEVICE for tensor in found.values())
    joined = torch.cat([found[name] for name in wanted]).cpu()
    assert torch.equal(joined, torch.cat(list(wanted.values())))


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
@pytest.mark.parametrize("make", [large, small])
def test_tensors_of_many_allocations(tmp_path: Path, format: str, make: object) -> None:
    wanted = large() if make is large else small()
    vescale_ckpt.save(tmp_path / "checkpoint", wanted, format=format)
    found = {name: torch.zeros_like(tensor, device=DEVICE) for name, tensor in wanted.items()}
    for _ in range(2):  # into memory that is not yet page-locked, and then is
        vescale_ckpt.load(tmp_path / "checkpoint", found)
        expect_equal(found, wanted)
        for tensor in found.values():
            tensor.zero_()
