"""Safetensors files loaded to a CUDA device; `scripts/check_gpu.py` runs these where there is one."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from harness.files import flip
from harness.states import MiB

from vescale_ckpt import CorruptCheckpointError, safetensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

State = dict[str, torch.Tensor]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu()


def expect_loaded(found: State, wanted: State, device: int = 0) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].device == torch.device("cuda", device), name
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(bytes_of(found[name]), bytes_of(value)), name


def test_slices(tmp_path: Path) -> None:
    wanted = {"cube": torch.randn(40, 50, 60), "wide": torch.randn(300, 5000).bfloat16(), "scalar": torch.tensor(3.5)}
    safetensors.save_file(wanted, tmp_path / "file")
    with safetensors.safe_open(tmp_path / "file", device="cuda") as file:
        expect_loaded(file.get_tensors(), wanted)
        for name, index in (
            ("cube", (slice(3, 30), slice(None, None, 7), 4)),
            ("cube", 7),
            ("wide", (slice(10, 200), slice(100, 2200))),
            ("wide", (slice(None), slice(3, 4))),
            ("scalar", ()),
        ):
            expect_loaded({name: file.get_slice(name)[index]}, {name: wanted[name][index]})


def test_memory_comes_after_what_used_it_before(tmp_path: Path) -> None:
    """Torch gives memory away again while kernels that were queued before still write it."""
    wanted = {"large": torch.arange(4 * MiB), **{f"{i}": torch.full((1000,), i) for i in range(100)}}
    safetensors.save_file(wanted, tmp_path / "file")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(3):
                used = [torch.empty(32 * MiB, dtype=torch.uint8, device="cuda") for _ in range(2)]
                torch.cuda._sleep(100_000_000)  # cycles
                for memory in used:
                    memory.fill_(0x66)
                del used, memory
                expect_loaded(safetensors.load_file(tmp_path / "file", "cuda"), wanted)


def test_what_is_loaded_is_memory_of_torch(tmp_path: Path) -> None:
    wanted = {"large": torch.arange(4 * MiB), **{f"{i}": torch.full((1000,), i) for i in range(100)}}
    safetensors.save_file(wanted, tmp_path / "file")
    safetensors.load_file(tmp_path / "file", "cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    found = safetensors.load_file(tmp_path / "file", "cuda")
    assert torch.cuda.memory_allocated() - before >= sum(value.nbytes for value in wanted.values())
    found["7"].record_stream(torch.cuda.Stream())
    found["7"].add_(1)  # which changes no other
    found["7"].sub_(1)
    torch.save(found, tmp_path / "saved")
    expect_loaded(torch.load(tmp_path / "saved"), wanted)
    found["large"].untyped_storage().resize_(0)
    del found
    torch.cuda.empty_cache()  # waits for the stream that was recorded
    assert torch.cuda.memory_allocated() == before


def test_damage_and_a_lack_of_memory_are_told(tmp_path: Path) -> None:
    wanted = {f"{i}": torch.arange(MiB) + i for i in range(8)}
    safetensors.save_file(wanted, tmp_path / "file")
    gc.collect()  # what earlier tests left in cycles
    before = torch.cuda.memory_allocated()
    flip(tmp_path / "file", 40 * MiB * 8)
    with pytest.raises(CorruptCheckpointError, match="4: checksum mismatch"):
        safetensors.load_file(tmp_path / "file", "cuda")
    flip(tmp_path / "file", 40 * MiB * 8)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            safetensors.load_file(tmp_path / "file", "cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    expect_loaded(safetensors.load_file(tmp_path / "file", "cuda"), wanted)
    gc.collect()
    assert torch.cuda.memory_allocated() == before
