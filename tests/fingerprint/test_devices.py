"""Fingerprints of tensors on CUDA devices are the host's, by a kernel that reads them in place, or by copies where none
does. The kernel's code runs on the fake device, lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.fake_cuda import FakeCuda, device_info, device_notes, fake_cuda, needs_fake_cuda
from harness.ranks import forked
from harness.states import numbers

import vescale_ckpt

LAUNCHES = "cuLaunchKernel"


def _state() -> dict[str, Any]:
    """On two devices, and beside them: flat, cut by rows and columns, at odd addresses, transposed, and lazy."""
    whole = numbers(300, 517)
    return {
        "whole": whole,
        "rows": whole[17:203],
        "columns": whole[:, 100:400],
        "behind": numbers(40_001)[1:],
        "bf16": numbers(1000, 3).bfloat16(),
        "bytes": torch.arange(70_000).to(torch.uint8)[13:],
        "cut twice": numbers(6, 50, 700)[1:, 3:40, 100:600],
        "transposed": numbers(60, 70).t(),
        "few columns": numbers(900, 8)[:, 2:5],
        "negated": torch._neg_view(numbers(4000)),
        "expanded": numbers(200).expand(30, 200),
        "step": 7,
        "small": torch.arange(5),
        **{f"many.{i:03}": numbers(101 + i, first=i) for i in range(100)},
    }


def _built() -> None:
    if not device_info()["kernel_built"]:
        pytest.skip("the engine was built without kernels")


@needs_fake_cuda
@forked
def test_they_are_those_of_the_host() -> None:
    expected = vescale_ckpt.fingerprint(_state())
    with fake_cuda() as fake:
        _built()
        state = _state()
        found = vescale_ckpt.fingerprint(state)
        assert fake.count(LAUNCHES) == 2  # one for each device
    assert found == expected and not found - expected


@needs_fake_cuda
@forked
def test_they_are_taken_after_what_the_stream_has_queued() -> None:
    expected = vescale_ckpt.fingerprint({"w": torch.full((5000,), 3, dtype=torch.int8)})
    with fake_cuda() as fake:
        _built()
        state = {"w": torch.zeros(5000, dtype=torch.int8)}
        fake.queue_fill(fake.streams[0], state["w"], 3, delay_ms=100)
        assert vescale_ckpt.fingerprint(state) == expected


REFUSALS: dict[str, Callable[[FakeCuda], None]] = {
    "does not take the kernels": lambda fake: fake.fail("cuModuleLoadData", code=209),
    "has no 1 MiB": lambda fake: fake.fail("cudaMalloc", code=2),
    "computes known values wrong": lambda fake: fake.answer("kernels compute wrong", 1),
}


@needs_fake_cuda
@pytest.mark.parametrize("note", REFUSALS)
@forked
def test_where_a_kernel_is_refused_or_errs_tensors_are_copied(note: str) -> None:
    state = {"w": numbers(5000), "columns": numbers(40, 300)[:, 20:200]}
    expected = vescale_ckpt.fingerprint(state)
    with fake_cuda() as fake:
        _built()
        REFUSALS[note](fake)
        assert vescale_ckpt.fingerprint(state) == expected
        notes = device_notes()
    assert any(note in text for text in notes), notes


@needs_fake_cuda
@forked
def test_a_state_on_a_device_is_proved(tmp_path: Path) -> None:
    with fake_cuda() as fake:
        _built()
        state = {"w": numbers(5000), "v": numbers(40, 50)}
        vescale_ckpt.save(tmp_path / "a", state, fingerprint=True)
        assert vescale_ckpt.prove(tmp_path / "a", state)
        assert fake.count(LAUNCHES) >= 2
        state["w"][4321] += 1
        proof = vescale_ckpt.prove(tmp_path / "a", state, strict=False)
        assert proof.different == {"w": "rank 0: 1 of 5,000 elements"}
