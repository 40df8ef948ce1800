#!/usr/bin/env python3
"""Checks and measures all that needs a GPU, in one call of under eight minutes: a build, the tests, six tables.

It builds in place with the Python that runs it, which must have torch, and installs nothing. A step that fails does not
stop the next one, but a build that fails does. `report.md`, `figures.json` and the logs are written to build/check_gpu
and to $OUT after every step, so that a run that is killed leaves what it had.

    python scripts/check_gpu.py [--only STEP,...] [--seconds N]

Exit status: 1 if a step failed, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "check_gpu"
FIGURES = "figures.jsonl"  # to which benchmarks append (benchmarks/figures.py)
LEAST = 5.0  # seconds that a step needs to be begun at all
SHOWN = 4000  # characters of the log of a step that failed, and of a table
# Two ranks on one device seem to NCCL to be on hosts of their own, and talk by sockets.
TWO_ON_ONE = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}
PYTEST = ("-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "-rs", "-m", "gpu", "tests/gpu")


@dataclass(frozen=True)
class Step:
    """A process with a time limit in seconds."""

    name: str
    what: str
    limit: float
    command: tuple[str, ...]  #: after the Python
    environment: Mapping[str, str] = field(default_factory=dict)


def memory_folder() -> str:
    """Where states are saved that measure the device and not the disk."""
    roomy = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free >= 16 << 30
    return "/dev/shm" if roomy else tempfile.gettempdir()


def table(name: str, what: str, limit: float, *options: str) -> Step:
    command = ("-m", "benchmarks.gpu", "--sections", name, "--rounds=3", "--dir", memory_folder(), *options)
    return Step(name, what, limit, command)


BUILD = Step("build", "the engine in place, with the kernel", 120, ("setup.py", "-q", "build_ext", "--inplace"))
STEPS = (
    BUILD,
    Step("tests", "the tests marked gpu", 150, PYTEST, TWO_ON_ONE),
    table("copies", "copies to the host of many and of strided tensors, of the bus's peak", 120),
    table("first", "the first asynchronous save of a process and steady ones", 30),
    table("gated", "asynchronous saves behind a gate", 30),
    table("both-ways", "synchronous saves and loads, of the speed in host memory", 40),
    table("stock", "beside stock DCP", 75, "--gib=1"),
    table("fingerprints", "fingerprints on the device, of the bandwidth of a copy there", 40),
    Step("train", "FSDP2: train, save, kill, resume, losses bit for bit", 60, ("-m", "benchmarks.gpu_train")),
)


@dataclass
class Result:
    name: str
    what: str
    status: str  #: ok, failed, skipped
    seconds: float = 0.0
    text: str = ""  #: the end of its log: tables, the reason of a failure


def machine() -> tuple[str, str]:
    """What the machine is, and why nothing can be checked on it; empty if it can."""
    try:
        import torch
    except ImportError as error:
        return platform.platform(), f"torch cannot be imported: {error}"
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device"
    cores = len(os.sched_getaffinity(0))
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return (
        f"{name}, {cores} cores, torch {torch.__version__}, {system}",
        "" if torch.cuda.is_available() else "no CUDA device that torch can use",
    )


def run(step: Step, limit: float) -> Result:
    """Runs a step in a session of its own, so that what it started ends with it."""
    environment = {**os.environ, **step.environment, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(ROOT)}
    environment["GPU_CHECK_FIGURES"] = str(WORK / FIGURES)
    environment.pop("OUT", None)
    began, log = time.monotonic(), WORK / f"{step.name}.log"
    with open(log, "wb") as output:
        child = subprocess.Popen(
            [sys.executable, *step.command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = child.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # what it started may outlive it
    text = log.read_text(errors="replace").strip()[-SHOWN:]
    if status is None:
        text += f"\nnot done after {limit:.0f} s"
    return Result(step.name, step.what, "ok" if status == 0 else "failed", round(time.monotonic() - began, 1), text)


def figures() -> dict[str, object]:
    """The figures that steps have recorded. The last line may be torn, if its step was killed."""
    found: dict[str, object] = {}
    for line in (WORK / FIGURES).read_text().splitlines() if (WORK / FIGURES).exists() else ():
        try:
            found |= json.loads(line)
        except ValueError:
            continue
    return found


def report(about: str, results: list[Result]) -> str:
    lines = ["# GPU check", "", about, "", "| step | what | result | s |", "|---|---|---|---|"]
    lines += [f"| {one.name} | {one.what} | {one.status} | {one.seconds:.0f} |" for one in results]
    for one in results:
        if one.text and (one.status == "failed" or one.name not in ("build", "tests")):
            lines += ["", f"## {one.name}", "", "```", one.text, "```"]
    return "\n".join(lines) + "\n"


def write(about: str, results: list[Result]) -> None:
    out = os.environ.get("OUT")
    for folder in filter(None, (WORK, Path(out) if out else None)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.md").write_text(report(about, results))
        (folder / "figures.json").write_text(json.dumps(figures(), indent=1))
    if out:
        logs = {one.name: WORK / f"{one.name}.log" for one in results if one.status != "skipped"}
        texts = (f"===== {name}\n{path.read_text(errors='replace')}" for name, path in logs.items())
        (Path(out) / "logs.txt").write_text("\n".join(texts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(step.name for step in STEPS), help="these steps")
    parser.add_argument("--seconds", type=float, default=470, help="for all steps together (default %(default)s)")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - {step.name for step in STEPS}:
        parser.error(f"no step is named {', '.join(sorted(unknown))}")
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    until = time.monotonic() + options.seconds
    about, missing = machine()
    results: list[Result] = []
    for step in STEPS:
        if step.name not in names:
            continue
        left = until - time.monotonic()
        if left < LEAST:
            missing = missing or "no time is left"
        result = Result(step.name, step.what, "skipped", text=missing) if missing else run(step, min(step.limit, left))
        if step is BUILD and result.status == "failed":
            missing = "the build failed"
        results.append(result)
        print(f"{result.name:12} {result.status:8} {result.seconds:6.1f} s", flush=True)
        write(about, results)
    print(f"\n{report(about, results)}", flush=True)
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
