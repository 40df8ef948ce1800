"""Steps of gpu_check.sh that are no test and no benchmark: gpu_steps.py STEP."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from gpu_machine import cuda_home, memory_folder, nvcc, sanitizer

from benchmarks.figures import record

ROOT = Path(__file__).resolve().parents[1]
KERNELS = "tests/gpu/test_gpu.py::test_snapshots_hold_tensors_of_all_kinds"
# torch first: it loads the CUDA runtime of its own wheel, which is on no path that the engine could search.
PROBE = (
    "import json, torch; from vescale_ckpt._engine import _C; "
    "print(json.dumps([_C.capabilities(), _C.device_info()], default=str))"
)


def machine() -> int:
    """What is there. Each question may go unanswered."""

    def tell(name: str, ask: Callable[[], object]) -> None:
        try:
            record(**{name: ask()})
        except Exception as error:
            record(**{name: f"unknown ({type(error).__name__}: {error})"[:200]})

    def first_line(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()[-1]

    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    tell("cores", lambda: len(os.sched_getaffinity(0)))
    tell("free_memory_gib", lambda: round(int(memory["MemAvailable"].split()[0]) / 2**20, 1))
    tell("free_disk_gib", lambda: round(shutil.disk_usage(ROOT).free / 2**30, 1))
    tell("file_system", lambda: first_line("stat", "-f", "-c", "%T", str(ROOT)))
    tell("transparent_huge_pages", lambda: Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip())
    tell("numa_nodes", lambda: len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))
    tell("linux", platform.release)
    tell("python", platform.python_version)
    tell("nvcc", lambda: f"{nvcc()}: {first_line(str(nvcc()), '--version')}")
    tell("cuda_home", cuda_home)
    tell("measured_in", memory_folder)
    query = "name,driver_version,pcie.link.gen.current,pcie.link.width.current,memory.free"
    tell("nvidia_smi", lambda: first_line("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"))
    try:
        import torch
    except ImportError as error:
        record(torch=f"none ({error})", machine=f"{platform.platform()}, no torch")
        return 0
    record(torch=torch.__version__, torch_cuda=torch.version.cuda)
    name = "no CUDA device"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        torch.zeros(1, device="cuda")
        tell("nccl", lambda: ".".join(map(str, torch.cuda.nccl.version())))
        tell("device_free_gib", lambda: round(torch.cuda.mem_get_info()[0] / 2**30, 1))
        # cudaDevAttrCanUseHostPointerForRegisteredMem, cudaDevAttrPageableMemoryAccess
        tell("host_pointer_attributes", lambda: [device_attribute(number) for number in (91, 88)])
        libraries = {
            line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line
        }
        record(libcudart=sorted(libraries))
        if len(libraries) != 1:
            print(f"exactly one libcudart is wanted: {sorted(libraries)}")
            return 1
    record(machine=f"{name}, torch {torch.__version__}, Linux {platform.release()}, Python {platform.python_version()}")
    return 0


def device_attribute(number: int) -> int:
    value = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(value), number, 0)
    if status != 0:
        raise OSError(f"cuDeviceGetAttribute: {status}")
    return value.value


def build() -> int:
    """Builds unless what is there was built from the same sources by the same tools."""
    digest = hashlib.sha256(f"{sys.version} {nvcc()} {cuda_home()}".encode())
    for path in [ROOT / "setup.py", *sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())]:
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    stamp = ROOT / "build" / f"gpu_check.{sys.implementation.cache_tag}.digest"
    built = stamp.exists() and stamp.read_text() == digest.hexdigest()
    result = probe() if built else None
    if result is None or result.returncode != 0:
        if missing := missing_tools():
            print(f"nothing was built: {'; '.join(missing)}")
            return 1
        stamp.unlink(missing_ok=True)
        status = subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT).returncode
        if status != 0:
            print(f"setup.py ended with status {status}")
            return 1
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(digest.hexdigest())
        result = probe()
    print(result.stdout, result.stderr)
    if result.returncode != 0:
        return 1
    capabilities, device = json.loads(result.stdout.splitlines()[-1])
    record(engine=capabilities, device=device)
    if wrong := wrong_with(device):
        print(wrong)
    return int(bool(wrong))


def probe() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True)


def wrong_with(device: Mapping[str, object]) -> str:
    """Why a machine with a GPU and this `_C.device_info()` is not to be checked further; empty if it is."""
    if not device.get("runtime"):
        return f"the engine finds no CUDA: {device.get('reason')}"
    if os.environ.get("VESCALE_CKPT_NO_NVCC") or device.get("kernel"):
        return ""
    if device.get("kernel_built"):
        return "the device does not take the kernel that packs small tensors"
    return f"the kernel that packs small tensors was not built: nvcc is {nvcc() or 'not found'}"


def missing_tools() -> list[str]:
    """What a build needs and is not there, in words."""
    missing = []
    for package, least in (("setuptools", 77), ("pybind11", 3)):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        record(**{package: found})
        if found == "none" or int(found.split(".")[0]) < least:
            missing.append(f"expected {package} {least} or newer, got {found}")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    try:
        version = subprocess.run([str(compiler), "-dumpversion"], capture_output=True, text=True).stdout.strip()
    except OSError:
        version = "none"
    record(compiler=f"{compiler} {version}")
    if version == "none":
        missing.append("expected a C++ compiler, such as g++ 11 or newer, got none")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.exists():
        missing.append(f"expected Python's headers, got no {headers}")
    return missing


def headers() -> int:
    """Compiles tests/cpp/device/cuda_headers_test.cpp, with a line in place of GoogleTest, which may be missing."""
    folder = ROOT / "build" / "gpu_check_headers" / "gtest"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gtest.h").write_text("#define TEST(suite, name) [[maybe_unused]] static void suite##name()\n")
    compiler = os.environ.get("CXX", "g++")
    source = "tests/cpp/device/cuda_headers_test.cpp"
    command = [compiler, "-std=c++20", "-D_GNU_SOURCE", "-fsyntax-only", "-I", "csrc", "-I", str(folder.parent)]
    return subprocess.run([*command, "-isystem", f"{cuda_home()}/include", source], cwd=ROOT).returncode


def under_sanitizer(tool: str) -> int:
    program = sanitizer()
    assert program is not None
    options = ["--tool", tool, "--error-exitcode", "9", "--target-processes", "application-only"]
    if tool == "memcheck":  # torch and the engine ask CUDA for what it may refuse
        options += ["--report-api-errors", "no"]
    python = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", KERNELS]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # which hides writes behind a tensor's end
    return subprocess.run([program, *options, *python], cwd=ROOT, env=environment).returncode


STEPS: dict[str, Callable[[], int]] = {"machine": machine, "build": build, "headers": headers}

if __name__ == "__main__":
    step = sys.argv[1]
    sys.exit(STEPS[step]() if step in STEPS else under_sanitizer(step))
