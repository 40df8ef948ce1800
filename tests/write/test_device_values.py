"""Tensors on devices, of CUDA and of another kind, that are lazily conjugate or negated, cut out, or loaded with a
cast: every bit is kept. And what torch copies to and from a device of another kind takes bounded memory on the host.

The devices are fakes, of processes of their own (tests/harness/fake_cuda.py, tests/harness/fake_device.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.fake_cuda import LEAST, fake_cuda, needs_fake_cuda
from harness.fake_device import KIND, fake_device
from harness.ranks import forked
from harness.states import MiB, assert_same, numbers, random_tensor

import vescale_ckpt
from benchmarks.harness.usage import measure

BOUND = 60.0
CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float64),
    (torch.float16, torch.float32),
    (torch.complex64, torch.complex128),
    (torch.int64, torch.float32),
]


def _values() -> dict[str, torch.Tensor]:
    """In host memory, of any bits but those of NaNs, and of zeros in complex tensors: torch negates these in several
    ways, by their layout, of which some keep the sign."""
    torch.manual_seed(7)
    values = {
        "c64": random_tensor((40, 30), torch.complex64),
        "c128": random_tensor((300,), torch.complex128),
        "f32": random_tensor((40, 30)),
        "bf16": random_tensor((500,), torch.bfloat16),
        "small": random_tensor((3,), torch.complex64),
    }
    for value in values.values():
        real = torch.view_as_real(value) if value.is_complex() else value
        real[real.isnan()] = 1.5 if value.is_complex() else -0.0
    return values


def _lazy(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same memory, lazily conjugate, negated, or both: whole, transposed and cut out."""
    found: dict[str, torch.Tensor] = {}
    for key, value in values.items():
        found[f"{key}, negated"] = torch._neg_view(value)
        if value.is_complex():
            found[f"{key}, conjugate"] = value.conj()
            found[f"{key}, both"] = torch._neg_view(value.conj())
            found[f"{key}, imaginary"] = value.conj().imag
    for key, value in list(found.items()):
        if value.dim() == 2:
            found |= {f"{key}, transposed": value.t(), f"{key}, cut out": value[3:33, 5:25]}
    return found


def _numbers() -> dict[str, torch.Tensor]:
    return {
        f"{stored} to {wanted}": numbers(30, 50, first=-40).to(stored).div(3).to(stored) for stored, wanted in CASTS
    } | {"zeros": torch.tensor([0.0, -0.0, torch.inf, -torch.inf] * LEAST)}


def _blank(values: dict[str, torch.Tensor], device: str, is_cast: bool = False) -> dict[str, torch.Tensor]:
    wanted = dict(zip(_numbers(), [wanted for _, wanted in CASTS], strict=False)) if is_cast else {}
    return {
        key: torch.zeros(value.shape, dtype=wanted.get(key, value.dtype), device=device)
        for key, value in values.items()
    }


def _saved_and_loaded(folder: Path, device: str) -> None:
    expected = {key: value.resolve_conj().resolve_neg().clone() for key, value in _lazy(_values()).items()}
    for is_async in (False, True):
        memory = {key: value.to(device) for key, value in _values().items()}
        state = _lazy(memory)
        assert sum(value.is_conj() for value in state.values()) > 5 < sum(value.is_neg() for value in state.values())
        handle = vescale_ckpt.save(folder / f"lazy {is_async}", state, async_checkpoint=is_async)
        for value in memory.values():
            value.zero_()
        handle.result(BOUND)
        for where in {"cpu", device}:
            found = _blank(expected, where)
            vescale_ckpt.load(folder / f"lazy {is_async}", found)
            assert_same({key: value.cpu() for key, value in found.items()}, expected)
        stored = {key: value.to(device) for key, value in _numbers().items()}
        vescale_ckpt.save(folder / f"cast {is_async}", stored, async_checkpoint=is_async).result(BOUND)
        found = _blank(stored, device, is_cast=True)
        vescale_ckpt.load(folder / f"cast {is_async}", found, allow_cast=True)
        cast = {key: value.to(found[key].dtype) for key, value in _numbers().items()}
        assert_same({key: value.cpu() for key, value in found.items()}, cast)


@forked
def test_every_bit_is_kept_on_devices_of_another_kind(tmp_path: Path) -> None:
    fake_device()
    _saved_and_loaded(tmp_path, KIND)


@needs_fake_cuda
@forked
def test_every_bit_is_kept_on_cuda(tmp_path: Path) -> None:
    with fake_cuda() as fake:
        _saved_and_loaded(tmp_path, "cpu")
        assert fake.count("bytes to device") > 0


@forked
def test_what_torch_copies_takes_bounded_memory(tmp_path: Path) -> None:
    """The peaks of what a save and a load take in host memory, MiB above what is there before."""
    fake_device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_CKPT_MEMORY_BYTES", str(32 * MiB))
        patch.setenv("VESCALE_CKPT_THREADS", "2")
        vescale_ckpt.save(tmp_path / "first", {"x": torch.ones(9).to(KIND)}, async_checkpoint=True).result(BOUND)
        state = {f"{i}": numbers(2 * MiB, first=i).to(KIND) for i in range(32)}

        def save(is_async: bool, snapshot_bytes: int = 0) -> None:
            patch.setenv("VESCALE_CKPT_SNAPSHOT_BYTES", str(snapshot_bytes))
            vescale_ckpt.save(tmp_path / "a", state, async_checkpoint=is_async).result(BOUND)

        steps = {
            "save": lambda: save(False),
            "little room": lambda: save(True, 64 * MiB),
            "load": lambda: vescale_ckpt.load(tmp_path / "a", state),
            "async": lambda: save(True),
        }
        steps["save"]()  # the pages of libraries that a first save touches count as its memory
        peaks = {name: measure(step).peak_extra_bytes for name, step in steps.items()}
        assert all(torch.equal(value.cpu(), numbers(2 * MiB, first=int(key))) for key, value in state.items())
    peaks = {name: None if peak is None else peak // MiB for name, peak in peaks.items()}
    if None in peaks.values():
        pytest.skip("the kernel does not tell peaks of memory")
    around = 48 + 32  # two batches and the engine's slots share 32 MiB and one tensor each; what else a save takes
    assert peaks["save"] < around and peaks["load"] < around, f"of 256 MiB: {peaks}"
    assert peaks["little room"] < 64 + around and peaks["async"] < 256 + around, peaks
