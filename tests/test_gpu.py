"""What needs a CUDA device; `scripts/gpu_check.sh` runs these where there is one."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import vescale_ckpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    large = torch.randn(3000, 4096, generator=generator, device="cuda")
    return {
        "large": large,
        "bf16": large[:100].bfloat16(),
        "transposed": large[:64, :128].t(),
        "step": torch.tensor(seed, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        "host": torch.arange(10) + seed,
    }


@pytest.mark.parametrize("arena_mib", [4, 256])
def test_device_tensors_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arena_mib: int) -> None:
    monkeypatch.setenv("VESCALE_CKPT_ARENA_BYTES", str(arena_mib << 20))
    monkeypatch.setenv("VESCALE_CKPT_SLOT_BYTES", str(4 << 20))
    dcp.save(state(1), storage_writer=vescale_ckpt.StorageWriter(tmp_path), planner=vescale_ckpt.SavePlanner())
    loaded = state(2)
    dcp.load(loaded, storage_reader=vescale_ckpt.StorageReader(tmp_path), planner=vescale_ckpt.LoadPlanner())
    for key, value in state(1).items():
        assert loaded[key].device == value.device
        assert torch.equal(loaded[key], value), key


def test_stock_reads_what_was_saved_from_a_device(tmp_path: Path) -> None:
    dcp.save(state(1), storage_writer=vescale_ckpt.StorageWriter(tmp_path))
    loaded = state(2)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path))
    for key, value in state(1).items():
        assert torch.equal(loaded[key], value), key


def test_a_checkpoint_of_device_tensors_loads_on_the_host(tmp_path: Path) -> None:
    dcp.save(state(1), storage_writer=vescale_ckpt.StorageWriter(tmp_path))
    loaded = {key: torch.empty_like(value, device="cpu") for key, value in state(2).items()}
    dcp.load(loaded, storage_reader=vescale_ckpt.StorageReader(tmp_path))
    for key, value in state(1).items():
        assert torch.equal(loaded[key], value.cpu()), key
