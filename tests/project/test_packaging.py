"""The wheel does its work away from its sources, beside torch alone: no numpy, nothing of development."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
(ENGINE,) = Path(importlib.util.find_spec("vescale_ckpt").origin).parent.glob("_engine/_C.*.so")  # type: ignore[union-attr, arg-type]

OLD_SETUPTOOLS = """
import runpy, setuptools
setuptools.__version__ = "76.1.0"
runpy.run_path("setup.py")
"""

KERNEL_IMAGE = """
import runpy, sys
sys.modules["ninja"] = None  # without it torch is not imported
sys.argv = ["setup.py", "-q", "--version"]
runpy.run_path("setup.py")["kernel_image"]()
"""

NVCC = """#!/bin/sh
case "$1" in
--version) echo "$VERSION" ;;
--list-gpu-code) echo sm_80 ;;
*) echo . >> "$CALLS"; for last; do :; done; echo image > "$last" ;;
esac
"""

USE = """
import importlib.metadata, importlib.util, pathlib, sys
import torch
import vescale_ckpt
from vescale_ckpt import cli, convert, load, save

assert importlib.util.find_spec("numpy") is None, "this environment is not bare"
assert pathlib.Path(vescale_ckpt.__file__).is_relative_to(sys.prefix), vescale_ckpt.__file__
assert pathlib.Path(vescale_ckpt.__file__).with_name("py.typed").exists()
assert pathlib.Path(vescale_ckpt.__file__).with_name("__init__.pyi").exists()
assert importlib.metadata.version("vescale_ckpt") == vescale_ckpt.__version__

weights = torch.nn.Linear(5, 3).state_dict()
state = {"model": weights, "step": 7, "note": ["a", {"b": 1}]}
save("checkpoint", state)
save("later", state, async_checkpoint=True).result()
target = {"model": torch.nn.Linear(5, 3).state_dict(), "step": 0, "note": ["", {"b": 0}]}
load("checkpoint", target)
assert target["step"] == 7 and target["note"] == state["note"]
assert all(torch.equal(target["model"][name], value) for name, value in weights.items())

assert cli.main(["convert", "checkpoint", "two.safetensors"]) == 0
assert pathlib.Path("two.safetensors").stat().st_size > 0

save("export", weights, format="safetensors")
exported = load("export")
assert all(torch.equal(exported[name], value) for name, value in weights.items()), exported

for name, format in (("one.safetensors", "safetensors"), ("one.pt", "torch")):
    convert("checkpoint", name, format=format)
assert torch.equal(torch.load("one.pt", weights_only=True)["model"]["weight"], weights["weight"])
convert("one.pt", "again", format="dcp")
assert torch.equal(load("again")["model"]["weight"], weights["weight"])
"""


def of_torch() -> set[str]:
    """torch and all that it requires, by the names of their distributions."""
    wanted, found = ["torch"], set[str]()
    while wanted:
        name = wanted.pop()
        if name not in found:
            found.add(name)
            required = metadata.requires(name) or []
            wanted += [re.split(r"[\s<>=!~;\[(]", line)[0] for line in required if "extra ==" not in line]
            wanted = [name for name in wanted if any(True for _ in metadata.distributions(name=name))]
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with torch, links to what is installed here, and the wheel."""
    folder = tmp_path_factory.mktemp("packaging")
    venv.create(folder / "bare", symlinks=True, with_pip=False)
    python = folder / "bare" / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "bare")}))
    for name in of_torch():
        for top in {Path(file.parts[0]) for file in metadata.files(name) or [] if file.parts[0] != ".."}:
            if top.name != "__pycache__":
                (packages / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))

    source = folder / "source"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.so", "*.egg-info", "tests", "docs", "shared")
    )
    # Newer than its sources: it is packed as it is, and nothing is compiled.
    built = (
        source
        / "build"
        / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        / "vescale_ckpt"
        / "_engine"
        / ENGINE.name
    )
    built.parent.mkdir(parents=True)
    shutil.copyfile(ENGINE, built)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    environment = {**os.environ, "CXX": shutil.which("true") or "true"}
    make = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(folder), str(source)]
    subprocess.run(make, check=True, env=environment, timeout=300)
    (wheel,) = folder.glob("*.whl")
    shutil.rmtree(source)
    # What it declares has to be there.
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-index", str(wheel)],
        check=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        timeout=300,
    )
    return folder


def run(bare: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = (str(bare / "bare" / "bin" / command[0]), *command[1:])
    result = subprocess.run(command, cwd=bare, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def test_the_wheel_does_its_work_beside_torch_alone(bare: Path) -> None:
    run(bare, "python", "-c", USE)
    run(bare, "vescale-ckpt", "verify", "checkpoint")


def test_setuptools_that_is_too_old_is_named() -> None:
    result = subprocess.run(
        [sys.executable, "-c", OLD_SETUPTOOLS], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1 and "needs setuptools 77 or newer" in result.stderr and "76.1.0" in result.stderr


def test_the_kernels_are_compiled_again_by_another_nvcc(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    folder = tmp_path / "csrc" / "device"
    folder.mkdir(parents=True)
    (tmp_path / "csrc" / "base").mkdir()
    for name in ("kernels.cu", "pack_rows.h", "pack_table.h", "word_sums.h", "word_table.h", "../base/field.h"):
        (folder / name).touch()
    shutil.copy(ROOT / "setup.py", tmp_path)
    for home in ("one", "two"):
        (tmp_path / home / "bin").mkdir(parents=True)
        (tmp_path / home / "bin" / "nvcc").write_text(NVCC)
        (tmp_path / home / "bin" / "nvcc").chmod(0o755)

    def compiled(home: str, version: str, **more: str) -> int:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VESCALE_CKPT")}
        environment |= {"CUDA_HOME": str(tmp_path / home), "VERSION": version, "CALLS": str(calls), **more}
        command = [sys.executable, "-c", KERNEL_IMAGE]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)
        return len(calls.read_text().splitlines())

    assert [compiled("one", "13.0"), compiled("one", "13.0")] == [1, 1]
    assert compiled("two", "13.0") == 2
    assert compiled("two", "13.1") == 3
    assert compiled("two", "13.1", VESCALE_CKPT_WERROR="1") == 4
    (folder / "pack_rows.h").write_text("// changed")
    os.utime(folder / "pack_rows.h", (0, 0))
    assert compiled("two", "13.1", VESCALE_CKPT_WERROR="1") == 5
