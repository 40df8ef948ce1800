"""What the engine says of accelerators; copies are tested in tests/cpp/device, and on a GPU in test_gpu.py."""

import torch

from vescale_ckpt._engine import _C


def test_says_which_devices_there_are_or_why_there_are_none() -> None:
    info = _C.device_info()
    assert len(info["devices"]) == torch.cuda.device_count()
    assert bool(info["reason"]) == (not info["runtime"])
    assert torch.cuda.is_available() or "CUDA" in info["reason"]
    assert info["kernel"] <= info["kernel_built"]
    assert not info["kernel"] or info["devices"]
