"""A kind of device that torch knows by its open registration alone (PrivateUse1), for tests, on the host: `faraway`.

tests/cpp/fakes/fake_device.cpp says what it does. It stays in the process that loads it: use it in processes of their
own.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import torch

_SOURCE = Path(__file__).parents[1] / "cpp" / "fakes" / "fake_device.cpp"
# The library is built for one torch.
_BUILD = Path(__file__).parents[2] / "build" / "fake_device" / torch.__version__
KIND = "faraway"


class FakeDevice:
    """What the devices did."""

    def count(self, what: str) -> int:
        return int(torch.ops.fake_device.count(what))

    def reset(self) -> None:
        torch.ops.fake_device.reset()

    def queued(self, device: int) -> int:
        """How many copies of a device nobody has waited for."""
        return int(torch.ops.fake_device.queued(device))


def fake_device() -> FakeDevice:
    """Makes the devices `faraway:0` and `faraway:1` known to torch in this process."""
    torch.utils.rename_privateuse1_backend(KIND)
    torch.ops.load_library(library())
    module = ModuleType(f"torch.{KIND}")
    operators = torch.ops.fake_device
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": operators.current_device,
        "set_device": lambda device: operators.set_device(torch.device(KIND, device).index),
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "current_stream": torch.accelerator.current_stream,
        "synchronize": torch.accelerator.synchronize,
        "stream": nullcontext,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    torch._register_device_module(KIND, module)
    return FakeDevice()


def library() -> Path:
    """Builds the library if it is older than its source, and returns its path."""
    _BUILD.mkdir(parents=True, exist_ok=True)
    path = _BUILD / "libfake_device.so"
    with (_BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests of several processes build it once
        if not path.exists() or path.stat().st_mtime < _SOURCE.stat().st_mtime:
            home = Path(torch.__file__).parent
            includes = [home / "include", home / "include" / "torch" / "csrc" / "api" / "include"]
            flags = ["-std=c++20", "-O0", "-fPIC", "-shared", *(f"-isystem{folder}" for folder in includes)]
            flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
            made = path.with_suffix(".new")
            libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
            compiler = os.environ.get("CXX", "g++")
            subprocess.run([compiler, *flags, str(_SOURCE), "-o", str(made), *libraries], check=True)
            made.replace(path)
    return path
