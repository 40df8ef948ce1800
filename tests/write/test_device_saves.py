"""Saves from CUDA devices, for which a library of threads stands (tests/fake_cuda.py): all but the device itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.fake_cuda import (
    ASSERT,
    OUT_OF_MEMORY,
    FakeCuda,
    device_info,
    device_notes,
    device_of,
    fake_cuda,
    needs_fake_cuda,
    neighbours,
)
from harness.ranks import forked
from harness.snapshots import no_snapshot_is_left
from harness.states import MiB, assert_same, numbers
from torch import nn

import vescale_ckpt
from vescale_ckpt import CheckpointError, Gate

pytestmark = needs_fake_cuda

BOUND = 60.0


def _state(k: int = 0) -> dict[str, torch.Tensor]:
    """Large, small, strided and empty tensors, on two devices and on the host."""
    return {
        "large": numbers(700, 999, first=k),
        "half": numbers(300, 1001, dtype=torch.bfloat16, first=k),
        **{f"small.{i}": numbers(101 + 7 * i, first=k + i) for i in range(60)},
        "host": numbers(7, first=k),
        "empty": torch.zeros(0, 3),
        "transposed": numbers(300, 200, first=k).t(),
        "columns": numbers(100, 5000, first=k)[:, 100:2100],
    }


def _expect_saved(directory: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = {key: torch.full_like(value, 77) for key, value in wanted.items()}
    vescale_ckpt.load(directory, found)
    assert_same(found, wanted)


def _queue_changes(fake: FakeCuda, state: dict[str, torch.Tensor], delay_ms: int = 0) -> None:
    """Lets the trainer's streams overwrite all that is on devices, as a kernel does: no version is raised."""
    for tensor in state.values():
        if tensor.numel() > 100:
            memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            fake.queue_fill(fake.streams[device_of(tensor)], memory, 255, delay_ms)


# --- What the trainer does meanwhile


@forked
def test_memory_that_is_freed_and_given_out_again_after_a_save_returned(tmp_path: Path) -> None:
    with fake_cuda() as fake:
        fake.delay_copies(300)
        for number, asynchronous in enumerate((False, True, True)):
            wanted = {key: value for key, value in _state(number).items() if value.is_contiguous() and value.numel()}
            state = neighbours(wanted)
            for key, value in state.items():
                value.copy_(wanted[key])
            handle = vescale_ckpt.save(tmp_path / str(number), state, async_checkpoint=asynchronous)
            _queue_changes(fake, state)  # the blocks of the freed tensors go to the next ones, which are filled
            handle.result(BOUND)
            for stream in fake.streams:
                fake.drain(stream)
            assert state["large"].view(torch.uint8).eq(255).all()
            _expect_saved(tmp_path / str(number), wanted)


@forked
def test_replays_after_staged_do_not_reach_the_file(tmp_path: Path) -> None:
    weight = nn.Parameter(numbers(500, 999))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with fake_cuda() as fake:
        fake.delay_copies(300)
        for number, gate in enumerate((None, Gate(optimizer, allow_capturable=True))):
            wanted = weight.detach().clone()
            handle = vescale_ckpt.save(tmp_path / str(number), {"w": weight}, async_checkpoint=True, gate=gate)
            handle.staged.result(BOUND)
            _queue_changes(fake, {"w": weight.detach()})
            handle.result(BOUND)
            fake.drain(fake.streams[0])
            _expect_saved(tmp_path / str(number), {"w": wanted})
            weight.data.copy_(numbers(500, 999, first=5))


@forked
def test_saves_come_behind_what_the_trainers_streams_have_queued(tmp_path: Path) -> None:
    with fake_cuda() as fake:
        for asynchronous in (False, True):
            state = _state()
            _queue_changes(fake, state, 20)
            vescale_ckpt.save(tmp_path, state, async_checkpoint=asynchronous).result(BOUND)
            for stream in fake.streams:
                fake.drain(stream)
            _expect_saved(tmp_path, state)
            assert state["large"].view(torch.uint8).eq(255).all()


# --- What the device refuses


@forked
def test_a_full_device_has_no_slab_and_is_saved_all_the_same(tmp_path: Path) -> None:
    with fake_cuda() as fake:
        fake.fail("cudaMalloc", code=OUT_OF_MEMORY)
        for asynchronous in (True, False):
            handle = vescale_ckpt.save(tmp_path, _state(), async_checkpoint=asynchronous)
            if asynchronous:
                handle.result(BOUND)
                assert fake.count("cuLaunchKernel") == 0
            _expect_saved(tmp_path, _state())
        assert not device_info()["kernel_built"] or fake.count("cuLaunchKernel") > 0, "it is tried again"
        notes = device_notes() if device_info()["kernel_built"] else ["has no 9 MiB for a kernel's table"]
    assert sum("has no 9 MiB for a kernel's table" in note for note in notes) == 1


@forked
def test_a_refused_page_lock_makes_saves_slower_not_wrong(tmp_path: Path) -> None:
    with fake_cuda() as fake:
        fake.fail("cudaHostRegister")
        for asynchronous in (True, False):
            vescale_ckpt.save(tmp_path, _state(), async_checkpoint=asynchronous).result(BOUND)
            _expect_saved(tmp_path, _state())
        assert fake.count("copies of memory that is not locked") > 0
        assert fake.count("cudaMemcpyBatchAsync") == 0
    notes = device_notes()
    assert sum("memory of snapshots could not be page-locked" in note for note in notes) == 1
    assert sum("copies from and to devices are made one by one from now on" in note for note in notes) == 1


@forked
def test_errors_of_a_device_are_named_and_leave_the_old_checkpoint(tmp_path: Path) -> None:
    texts = {}
    with fake_cuda() as fake:
        vescale_ckpt.save(tmp_path, _state())

        def failed(case: str) -> None:
            state = {key: value for key, value in _state(1).items() if device_of(value) == 0}
            for asynchronous in (False, True):
                with pytest.raises(CheckpointError) as caught:
                    vescale_ckpt.save(tmp_path, state, async_checkpoint=asynchronous).result(BOUND)
                texts[f"{case}, {asynchronous}"] = str(caught.value)

        fake.fail("captured")
        with pytest.raises(CheckpointError, match="the current stream is being captured"):
            vescale_ckpt.save(tmp_path, _state(1))
        fake.stick(ASSERT)
        failed("left by the trainer")
        fake.stick(0)
        _expect_saved(tmp_path, _state())
        vescale_ckpt.save(tmp_path, _state(2))
        _expect_saved(tmp_path, _state(2))
        fake.fail("on the device", 3)
        failed("in the copies")
    assert no_snapshot_is_left()
    for case, text in texts.items():
        if case.startswith("left"):
            assert "device 0 had failed before, by work of this process: CUDA" in text and "(710)" in text, case
    assert "perhaps by other work of this process (719)" in texts["in the copies, False"]
    assert "had failed before" in texts["in the copies, True"]


# --- What is made beforehand


@forked
def test_the_first_save_after_prepare_makes_nothing_on_the_devices(tmp_path: Path) -> None:
    calls = ("cudaStreamCreateWithPriority", "cudaEventCreateWithFlags", "cuModuleLoadData", "cudaMalloc",
             "cudaHostAlloc", "cudaHostRegister")  # fmt: skip
    with fake_cuda() as fake:
        state = {**_state(), "large": numbers(MiB)}
        vescale_ckpt.prepare(state)
        before = {call: fake.count(call) for call in calls}
        vescale_ckpt.save(tmp_path, state, async_checkpoint=True).result(BOUND)
        vescale_ckpt.prepare(state)
        kernel = device_info()["kernel_built"]
        assert not kernel or fake.count("cudaMemsetAsync") > 0, "nothing of the device's lies in gaps of a slab"
        then = {call: fake.count(call) - before[call] for call in calls}
    assert before["cudaStreamCreateWithPriority"] == 4 and before["cudaEventCreateWithFlags"] == 14, "of two devices"
    assert before["cudaMalloc"] in (0, 6)  # without a kernel none
    assert not any(then.values()), then


@forked
def test_prepare_names_the_errors_of_devices() -> None:
    with fake_cuda() as fake:
        fake.stick(ASSERT)
        with pytest.raises(CheckpointError) as caught:
            vescale_ckpt.prepare(_state())
    assert "device 0 had failed before, by work of this process" in str(caught.value)
