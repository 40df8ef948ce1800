"""What the steps of gpu_check.sh depend on, and why one cannot run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """What the steps depend on."""

    no_torch: str = ""  #: why torch cannot be imported
    no_gpu: str = ""  #: why there is no device
    devices: int = 0

    @staticmethod
    def found() -> Machine:
        program = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
        try:
            result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            return Machine("importing torch takes more than 120 s", "importing torch takes more than 120 s")
        if result.returncode != 0:
            why = f"torch cannot be imported: {(result.stderr.strip().splitlines() or ['no message'])[-1]}"
            return Machine(why, why)
        devices = int(result.stdout.split()[-1])
        return Machine("", "" if devices else "no CUDA device that torch can use", devices)


def on_gpu(machine: Machine) -> str:
    return machine.no_gpu


def with_two_gpus(machine: Machine) -> str:
    return machine.no_gpu or (f"{machine.devices} device: two are wanted" if machine.devices < 2 else "")


def with_sanitizer(machine: Machine) -> str:
    return machine.no_gpu or ("" if sanitizer() else "compute-sanitizer is not found")


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:{cuda_home()}/bin")


def cuda_home() -> str:
    return os.environ.get("CUDA_HOME", "/usr/local/cuda")


def with_cuda_headers(machine: Machine) -> str:
    header = Path(cuda_home(), "include", "cuda_runtime_api.h")
    return "" if header.exists() else f"no CUDA headers: {header} is not there"
