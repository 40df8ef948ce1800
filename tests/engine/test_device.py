"""What the engine says of accelerators, and what it does where one refuses something. Copies of every kind are tested
in tests/cpp/device and by saves and loads, and on a GPU in test_gpu.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from harness.fake_cuda import (
    INSUFFICIENT_DRIVER,
    FakeCuda,
    copies_from_cuda,
    device_info,
    device_notes,
    fake_cuda,
    load_runtime,
    needs_fake_cuda,
)
from harness.ranks import forked
from harness.states import assert_same, numbers

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_ckpt._engine import _C, device_streams

BOUND = 60.0


def test_says_whether_cuda_can_be_used_or_why_it_cannot() -> None:
    reason = device_info()["reason"]
    assert "CUDA" in reason if not torch.cuda.is_available() else not reason


@needs_fake_cuda
@forked
def test_saying_so_takes_memory_on_no_device() -> None:
    with fake_cuda() as fake:
        assert not device_info()["reason"]
        assert fake.count("cuDevicePrimaryCtxRetain") == 0


@needs_fake_cuda
@forked
def test_a_runtime_that_is_too_new_for_the_driver_is_passed_over() -> None:
    newer, other = load_runtime(), load_runtime(other=True)
    newer.fail("cudaGetDeviceCount", code=INSUFFICIENT_DRIVER)
    assert copies_from_cuda() and other.count("cudaGetDeviceCount") > 0


def test_nothing_is_copied_by_cuda_where_torch_is_built_for_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls its devices "cuda", and a runtime of CUDA may be there, too."""
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setattr(_C, "copies_from_cuda", lambda *_: True)
    assert not device_streams.copies_from_cuda()


# --- What a device refuses


def _state() -> dict[str, torch.Tensor]:
    """On one device: a large tensor, one of long runs, and 51 that are packed."""
    small = {f"small.{i:02}": numbers(101 + i, first=i) for i in range(50)}
    return {
        "large": numbers(50_000),
        "columns": numbers(20, 3000)[:, 500:2500],
        **small,
        "transposed": numbers(30, 40).t(),
    }


def _save(folder: Path) -> None:
    vescale_ckpt.save(folder, _state(), async_checkpoint=True).result(BOUND)


def _expect_saved(folder: Path) -> None:
    _save(folder)
    found = {key: torch.zeros_like(value) for key, value in _state().items()}
    vescale_ckpt.load(folder, found)
    assert_same(found, _state())


@contextmanager
def _one_by_one() -> Iterator[FakeCuda]:
    with pytest.MonkeyPatch.context() as patch, fake_cuda() as fake:
        patch.setenv("VESCALE_CKPT_COPY_BATCHES", "0")
        yield fake


ERRORS = [
    ("cuDeviceGet", 0, "find device 0"),
    ("cuCtxPushCurrent_v2", 0, "use device 0"),
    ("cudaStreamWaitEvent", 0, "order copies on device 0 after an event"),
    ("cudaEventRecord", 0, "record an event on a stream of device 0"),
    ("cudaEventSynchronize", 0, "wait for copies on device 0"),
    ("cudaMemcpyAsync", 0, "copy 200000 bytes from device 0 to the host"),
    ("cudaMemcpyAsync", 1, "copy a table of 51 ranges to device 0"),
    ("cudaMemcpy2DAsync", 0, "copy 20 runs of 8000 bytes from device 0 to the host"),
    ("cuLaunchKernel", 0, "launch the pack kernel on device 0"),
]


@needs_fake_cuda
@forked
def test_errors_say_what_was_done_and_what_cuda_said(tmp_path: Path) -> None:
    with _one_by_one() as fake:
        for call, skip, operation in ERRORS:
            fake.fail(call, skip, code=77)
            with pytest.raises(CheckpointError) as caught:
                _save(tmp_path)
            assert f"{operation}: CUDA: a fake refusal, cudaErrorFakeCall (77)" in str(caught.value)
            _expect_saved(tmp_path)


@needs_fake_cuda
@forked
def test_what_other_work_left_on_the_device_is_named_as_theirs(tmp_path: Path) -> None:
    with fake_cuda() as fake:
        for code in (214, 700, 710, 719, 1, 704, 712, 713, 801):
            fake.fail("cudaEventRecord", code=code)
            with pytest.raises(CheckpointError) as caught:
                _save(tmp_path)
            theirs = "device 0 had failed before, by work of this process: CUDA: " in str(caught.value)
            assert theirs == (code in (214, 700, 710, 719)) and f"({code})" in str(caught.value)


#: how a device or its driver refuses batches, how often it is asked for one, and what is noted
REFUSALS: list[tuple[Callable[[FakeCuda], None], int, str]] = [
    (lambda fake: fake.answer("driver version", 12040), 0, "its driver is older than CUDA 12.8"),
    (lambda fake: fake.answer("host addresses are the device's", 0), 0, "it has addresses of its own for locked host"),
    (lambda fake: fake.fail("cudaMemcpyBatchAsync", code=36), 1, "device 0 takes no batches of copies"),
    (lambda fake: fake.fail("cudaMemcpyBatchAsync", code=801), 1, "device 0 takes no batches of copies"),
]


@needs_fake_cuda
@pytest.mark.parametrize("number", range(len(REFUSALS)))
@forked
def test_where_batches_are_refused_copies_are_made_one_by_one(tmp_path: Path, number: int) -> None:
    with fake_cuda() as fake:
        REFUSALS[number][0](fake)
        for _ in range(2):
            _expect_saved(tmp_path)
        asked, notes = fake.count("cudaMemcpyBatchAsync"), device_notes()
    assert asked == REFUSALS[number][1]
    assert any(REFUSALS[number][2] in note for note in notes)


@needs_fake_cuda
@forked
def test_an_image_for_other_devices_is_not_used(tmp_path: Path) -> None:
    with fake_cuda() as fake:
        fake.fail("cuModuleLoadData", code=209)  # no binary for this device
        for _ in range(2):
            _expect_saved(tmp_path)
        counts, notes = {call: fake.count(call) for call in ("cuModuleLoadData", "cuLaunchKernel")}, device_notes()
    if not device_info()["kernel_built"]:
        pytest.skip("the engine was built without the kernel")
    assert counts == {"cuModuleLoadData": 1, "cuLaunchKernel": 0}
    assert any("device 0 does not take the kernels: small tensors are copied" in note for note in notes)
