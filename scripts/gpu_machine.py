"""What the steps of gpu_check.sh depend on, and why one cannot run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """What the steps depend on."""

    no_gpu: str = ""  #: why there is no device

    @staticmethod
    def found() -> Machine:
        program = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
        try:
            result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            return Machine("importing torch takes more than 120 s")
        if result.returncode != 0:
            return Machine(f"torch cannot be imported: {(result.stderr.strip().splitlines() or ['no message'])[-1]}")
        return Machine("" if int(result.stdout.split()[-1]) else "no CUDA device that torch can use")


def on_gpu(machine: Machine) -> str:
    return machine.no_gpu


def with_sanitizer(machine: Machine) -> str:
    return machine.no_gpu or ("" if sanitizer() else "compute-sanitizer is not found")


def sanitizer() -> str | None:
    home = cuda_home()
    folders = [os.environ.get("PATH", ""), f"{home}/bin", f"{home}/compute-sanitizer"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def nvcc() -> str | None:
    """The compiler that setup.py takes, too: CUDA_HOME's, then the one that a shell would run."""
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    if home := os.environ.get("CUDA_HOME"):
        folders.insert(0, f"{home}/bin")
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def cuda_home() -> str:
    """The toolkit of `nvcc`, which may be a link or a script somewhere else."""
    if home := os.environ.get("CUDA_HOME"):
        return home
    homes = ["/usr/local/cuda"]
    if found := nvcc():
        homes = [str(Path(path).parents[1]) for path in (found, os.path.realpath(found))] + homes
    return next((home for home in homes if Path(home, HEADER).exists()), homes[0])


HEADER = "include/cuda_runtime_api.h"


def with_cuda_headers(machine: Machine) -> str:
    header = Path(cuda_home(), HEADER)
    return "" if header.exists() else f"no CUDA headers: {header} is not there"


def memory_folder() -> tuple[str, float]:
    """Where states are saved that measure the device and not the disk, and how many GiB they have. /dev/shm is small in
    many containers: then it is the disk, with states that end in time at 1 GB/s."""
    folder = "/dev/shm"
    if os.path.isdir(folder) and shutil.disk_usage(folder).free >= 16 << 30:
        return folder, 4.0
    return tempfile.gettempdir(), 1.0
