"""What the engine says of accelerators; copies are tested in tests/cpp/device, and on a GPU in test_gpu.py."""

from typing import Any

import torch
from harness.fake_cuda import (
    INSUFFICIENT_DRIVER,
    copies_from_cuda,
    device_info,
    fake_cuda,
    load_runtime,
    needs_fake_cuda,
)
from harness.ranks import in_fork


def test_says_which_devices_there_are_or_why_there_are_none() -> None:
    info = device_info()
    assert len(info["devices"]) == torch.cuda.device_count()
    assert bool(info["reason"]) == (not info["runtime"])
    assert torch.cuda.is_available() or "CUDA" in info["reason"]
    assert info["kernel"] <= info["kernel_built"]
    assert not info["kernel"] or info["devices"]


def _info() -> tuple[dict[str, Any], int]:
    with fake_cuda() as fake:
        return device_info(), fake.count("cuDevicePrimaryCtxRetain")


@needs_fake_cuda
def test_memory_is_taken_on_one_device_to_tell_of_all() -> None:
    info, contexts = in_fork(_info)
    assert info["devices"] == ["Fake", "Fake"] and info["kernel"] == info["kernel_built"]
    assert contexts == 1, "each takes hundreds of MiB"


def _second_runtime() -> tuple[bool, int]:
    newer, other = load_runtime(), load_runtime(other=True)
    newer.fail("cudaGetDeviceCount", code=INSUFFICIENT_DRIVER)
    return copies_from_cuda(), other.count("cudaGetDeviceCount")


@needs_fake_cuda
def test_a_runtime_that_is_too_new_for_the_driver_is_passed_over() -> None:
    works, asked = in_fork(_second_runtime)
    assert works and asked > 0
