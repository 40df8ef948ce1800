"""Builds the C++ engine, `vescale_ckpt._engine._C`.

Engine and bindings include no header of torch or CUDA, so `pip install .` needs neither at build time and one binary
serves every torch. Where there is nvcc, the kernels of csrc/device are compiled and embedded. With torch and ninja at
hand torch's builder is used, which rebuilds exactly what a changed header concerns.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import setuptools
from setuptools import setup

if int(setuptools.__version__.split(".")[0]) < 77:  # that know pyproject.toml's form of `license`
    sys.exit(
        f"vescale_ckpt needs setuptools 77 or newer to build, found {setuptools.__version__}: pip install -U setuptools"
    )

try:
    from pybind11.setup_helpers import Pybind11Extension
except ImportError:
    sys.exit("vescale_ckpt needs pybind11 to build: pip install 'pybind11>=3.0' (pip install . does so by itself)")

try:
    import ninja  # noqa: F401  (torch's builder uses it, and is slow without)
    from torch.utils.cpp_extension import BuildExtension as build_ext
except ImportError:
    from pybind11.setup_helpers import ParallelCompile
    from setuptools.command.build_ext import build_ext

    # Compiles as many files at once as there are processors, or as MAX_JOBS says, as torch's builder does.
    ParallelCompile("MAX_JOBS").install()

ROOT = Path(__file__).parent
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
if sys.platform != "linux":
    sys.exit("vescale_ckpt runs on Linux only: its engine uses Linux system calls.")
if COMPILER is None:
    sys.exit("vescale_ckpt needs a C++20 compiler to build, such as g++ 11 or newer: none was found (set CXX).")


def kernel_image() -> Path | None:
    """The kernels of csrc/device/kernels.cu, compiled and written as a list of bytes to include; None without nvcc.

    One image for Ampere, Hopper and Blackwell, as far as this nvcc has them, and for all else since Ampere in a form
    that the driver compiles when it is loaded.
    """
    # As scripts/gpu_machine.py finds CUDA: CUDA_HOME, then the nvcc that a shell would run.
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    if home := os.environ.get("CUDA_HOME"):
        folders.insert(0, f"{home}/bin")
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    if os.environ.get("VESCALE_CKPT_NO_NVCC") or found is None:
        print(
            "vescale_ckpt: no nvcc found, building without kernels: small tensors are copied in batches, and "
            "fingerprints taken on the host"
        )
        return None
    headers = ("pack_rows.h", "pack_table.h", "word_sums.h", "word_table.h")
    sources = [ROOT / "csrc/device" / name for name in ("kernels.cu", *headers)] + [ROOT / "csrc/base/field.h"]
    image = ROOT / "build" / "kernel_image.inc"
    command = [found, "-fatbin", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-I", str(ROOT / "csrc")]
    command += [str(sources[0])]
    known = subprocess.run([found, "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    for number in ("80", "90", "100", "120"):
        if f"sm_{number}" in known:
            command += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
    command += ["-gencode", "arch=compute_80,code=compute_80"]
    if os.environ.get("VESCALE_CKPT_WERROR"):
        command += ["-Werror", "all-warnings"]
    # The image's first line tells what it was made from. Times of files do not tell that another nvcc was used.
    digest = hashlib.sha256(subprocess.run([found, "--version"], capture_output=True).stdout)
    digest.update(repr(command).encode())
    for path in sources:
        digest.update(path.read_bytes())
    title = f"// {digest.hexdigest()}\n"
    if image.exists() and image.read_text().startswith(title):
        return image
    image.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernels.fatbin"
        result = subprocess.run([*command, "-o", str(binary)], capture_output=True, text=True)
        if result.returncode == 0:
            image.write_text(title + ",".join(map(str, binary.read_bytes())))
            return image
    if os.environ.get("VESCALE_CKPT_WERROR"):
        sys.exit(f"vescale_ckpt: {' '.join(command)}\n{result.stdout}{result.stderr}")
    print(f"vescale_ckpt: {found} failed, building without kernels\n{result.stderr}")
    return None


def together(sources: list[str]) -> list[str]:
    """A file for each folder that includes the folder's sources: headers are read once, in less than half the time."""
    made = []
    for folder in sorted({Path(source).parent for source in sources}):
        members = [Path(source) for source in sources if Path(source).parent == folder]
        unit = ROOT / "build" / "units" / f"{folder.name}.cpp"
        text = "".join(f'#include "{folder.name}/{member.name}"\n' for member in members)
        if not unit.exists():
            unit.parent.mkdir(parents=True, exist_ok=True)
            unit.write_text(text)
            newest = max((ROOT / member).stat().st_mtime for member in members)
            os.utime(unit, (newest, newest))  # by itself it is no reason to build again
        elif unit.read_text() != text:
            unit.write_text(text)
        made.append(str(unit.relative_to(ROOT)))
    return made


class BuildEngine(build_ext):  # type: ignore[misc, valid-type]
    def build_extensions(self) -> None:
        for extension in self.extensions:
            extension.depends += extension.sources
            extension.sources = together(extension.sources)
        if image := kernel_image():
            for extension in self.extensions:
                extension.define_macros.append(("VESCALE_CKPT_HAVE_KERNEL_IMAGE", "1"))
                extension.include_dirs.append(str(image.parent))
                extension.depends.append(str(image))
        super().build_extensions()


compile_flags = ["-O2", "-g1", "-fvisibility=hidden", "-D_GNU_SOURCE"]
if os.environ.get("VESCALE_CKPT_WERROR"):
    compile_flags += ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]

sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))
headers = sorted(str(path.relative_to(ROOT)) for kind in ("*.h", "*.cu") for path in (ROOT / "csrc").rglob(kind))

setup(
    ext_modules=[
        Pybind11Extension(
            "vescale_ckpt._engine._C",
            sources,
            cxx_std=20,
            include_dirs=[str(ROOT / "csrc")],
            depends=headers,
            extra_compile_args=compile_flags,
            # If the compiler links the C++ library statically, its functions are the engine's alone, and none is taken
            # from another one in the process.
            extra_link_args=["-Wl,--exclude-libs,ALL"],
        )
    ],
    cmdclass={"build_ext": BuildEngine},
)
