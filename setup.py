"""Builds the C++ engine, `vescale_ckpt._C`.

Engine and bindings include no torch header, so `pip install .` needs neither torch nor CUDA at build time and one
binary serves every torch. With torch at hand its builder is used for ninja's parallel, header-accurate rebuilds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import setup

try:
    from pybind11.setup_helpers import Pybind11Extension
except ImportError:
    sys.exit("vescale_ckpt needs pybind11 to build: pip install 'pybind11>=3.0' (pip install . does so by itself)")

try:
    from torch.utils.cpp_extension import BuildExtension as build_ext
except ImportError:
    from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
if sys.platform != "linux":
    sys.exit("vescale_ckpt runs on Linux only: its engine uses Linux system calls.")
if COMPILER is None:
    sys.exit("vescale_ckpt needs a C++20 compiler to build, such as g++ 11 or newer: none was found (set CXX).")


def links_liburing() -> bool:
    """Whether a program with liburing compiles and links. The io_uring backend is left out otherwise."""
    if os.environ.get("VESCALE_CKPT_NO_LIBURING"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <liburing.h>\nint main() { io_uring r; return io_uring_queue_init(1, &r, 0); }\n")
        command = [COMPILER, str(source), "-l:liburing.a", "-o", str(Path(folder) / "probe")]
        return subprocess.run(command, capture_output=True).returncode == 0


uring = links_liburing()
if not uring:
    print("vescale_ckpt: no liburing.a found, building without the io_uring backend (threads are the default anyway)")

compile_flags = ["-O2", "-g1", "-fvisibility=hidden", "-D_GNU_SOURCE"]
if os.environ.get("VESCALE_CKPT_WERROR"):
    compile_flags += ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]

sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))
headers = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h"))

setup(
    ext_modules=[
        Pybind11Extension(
            "vescale_ckpt._C",
            sources,
            cxx_std=20,
            include_dirs=[str(ROOT / "csrc")],
            depends=headers,
            define_macros=[("VESCALE_CKPT_HAVE_LIBURING", "1")] if uring else [],
            extra_compile_args=compile_flags,
            extra_link_args=["-l:liburing.a"] if uring else [],
        )
    ],
    cmdclass={"build_ext": build_ext},
)
