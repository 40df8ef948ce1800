"""What a machine with a GPU is to check, step after step: see gpu_check.sh.

No step stops the next. Each has a time limit, a log, and ends as ok, failed or skipped, with the reason. Figures are in
gpu.json as soon as they are known, so that a killed run leaves what it had. Exit status: 1 if a step failed, 2 for
wrong options, 128 + number for a signal, else 0. Only the standard library is used here: torch is for the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from gpu_machine import Machine, on_gpu, with_cuda_headers, with_sanitizer, with_two_gpus
from gpu_report import Report, Result

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 530.0  # seconds
LEAST = 3.0  # seconds that a step needs to be begun at all
PYTEST = ("-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "gpu")
SUBSET = "come_back or tensors_of_all_kinds or behind_what_the_current_stream or a_gate_guards or loads_come_after"
#: So that NCCL takes two ranks on one device: they seem to be on hosts of their own, and talk by sockets.
TWO_ON_ONE = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}


@dataclass(frozen=True)
class Step:
    name: str
    what: str
    limit: float  #: seconds
    command: tuple[str, ...]  #: after the Python
    missing: Callable[[Machine], str] = lambda machine: machine.no_torch  #: why it cannot run; empty if it can
    environment: Mapping[str, str] = field(default_factory=dict)


def tests(name: str, what: str, limit: float, environment: Mapping[str, str], subset: str = SUBSET) -> Step:
    options = ("-k", subset) if subset else ()
    return Step(f"tests{name}", what, limit, (*PYTEST, *options, "tests/gpu/test_gpu.py"), on_gpu, environment)


def figures(name: str, what: str, limit: float, *sections: str) -> Step:
    return Step(name, what, limit, ("-m", "benchmarks.gpu", "--sections", ",".join(sections)), on_gpu)


STEPS = (
    Step("machine", "what is there", 60, ("scripts/gpu_steps.py", "machine"), lambda machine: ""),
    Step("build", "the engine in place, with the kernel where there is nvcc", 200, ("scripts/gpu_steps.py", "build")),
    Step(
        "headers",
        "what we declare of CUDA against its headers",
        40,
        ("scripts/gpu_steps.py", "headers"),
        with_cuda_headers,
    ),
    tests("", "all tests marked gpu", 120, {}, ""),
    tests("-expandable", "expandable_segments", 40, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    tests("-async-allocator", "cudaMallocAsync", 40, {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    tests("-blocking", "CUDA_LAUNCH_BLOCKING", 40, {"CUDA_LAUNCH_BLOCKING": "1"}),
    tests("-one-connection", "one hardware queue", 40, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    Step("disk", "the disk's ceiling", 30, ("-m", "benchmarks.gpu", "--sections", "disk")),
    figures("ceilings", "the bus's ceilings", 30, "ceilings"),
    figures("copies", "copies of many and of strided tensors", 60, "copies"),
    figures("first-save", "the first save of a process and steady ones, 8 GiB", 60, "first"),
    figures("prepared-save", "the same after prepare", 60, "prepared"),
    figures("odd", "rare dtypes, offsets and strides beyond 4 GiB", 40, "odd"),
    figures("gated-save", "saves behind a gate, launches beside them", 60, "gated"),
    figures("both-ways", "synchronous saves and loads, device and host", 90, "both-ways"),
    figures("small-loads", "loads of 20,000 small tensors", 40, "small-loads"),
    Step(
        "step-time",
        "1B bf16 FSDP2: what saves every 10 steps cost training",
        100,
        ("-m", "benchmarks.gpu_step_time"),
        on_gpu,
    ),
    figures("growth", "200 asynchronous saves", 40, "growth"),
    figures("stock", "beside stock DCP", 90, "stock"),
    Step(
        "nccl",
        "ranks read for each other over NCCL",
        60,
        (*PYTEST, "-k", "for_each_other", "tests/gpu/test_gpu.py"),
        with_two_gpus,
    ),
    Step(
        "nccl-one-gpu",
        "two ranks on one device",
        90,
        (*PYTEST, "-rA", "tests/gpu/test_gpu_ranks.py"),
        on_gpu,
        TWO_ON_ONE,
    ),
    *(
        Step(
            f"sanitizer-{tool}",
            f"compute-sanitizer {tool} on the kernels",
            60,
            ("scripts/gpu_steps.py", tool),
            with_sanitizer,
        )
        for tool in ("memcheck", "racecheck", "initcheck")
    ),
    Step("train", "FSDP2: train, save, kill, resume, losses bit for bit", 60, ("-m", "benchmarks.gpu_train"), on_gpu),
    figures("pack-sizes", "many small tensors by VESCALE_CKPT_PACK_BYTES", 60, "pack-sizes"),
)


class Interrupted(BaseException):
    pass


def run_step(step: Step, report: Report, limit: float) -> Result:
    """Runs it in a session of its own, so that what it started ends with it."""
    log = report.folder / f"{step.name}.log"
    environment = {**os.environ, **step.environment, "GPU_CHECK_FIGURES": str(report.folder / "figures.jsonl")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    environment["PYTHONFAULTHANDLER"] = "1"
    began = time.monotonic()
    with open(log, "wb") as output:
        child = subprocess.Popen(
            [sys.executable, *step.command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            while (status := _waited(child, 0.2)) is None and time.monotonic() - began < limit:
                report.refresh()
        finally:
            _end(child)
    seconds = time.monotonic() - began
    result = Result(step.name, step.what, "ok", seconds=round(seconds, 1))
    if status is None:
        result.status, result.why = "failed", f"not done after {limit:g} s"
    elif status == 5 and "pytest" in step.command:
        result.status, result.why = "failed", "there was no such test"
    elif status != 0:
        result.status, result.why = "failed", f"status {status}: {_last_line(log)}"
    elif "pytest" in step.command and " passed" not in _last_line(log):
        result.status, result.why = "skipped", _last_line(log)
    return result


def _waited(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what it started may outlive it
    child.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip(" =").replace("|", "/")[:200] if lines else "no output"


def chosen(only: str | None) -> list[Step]:
    if only is None:
        return list(STEPS)
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in {step.name for step in STEPS}]
    if unknown or not names:
        known = ", ".join(step.name for step in STEPS)
        print(f"gpu_check: --only: no step is named {', '.join(unknown) or 'so'}; there are {known}", file=sys.stderr)
        raise SystemExit(2)
    return [step for step in STEPS if step.name in names]


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--only", metavar="STEP,...", help="these steps")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all (default %(default)s)")
    parser.add_argument("--list", action="store_true", help="the names of the steps")
    options = parser.parse_args()
    steps = chosen(options.only)
    if options.list:
        print("\n".join(f"{step.name:24} {step.what}" for step in steps))
        return 0
    began = time.monotonic()
    folder = Path(os.environ.get("OUT") or ROOT / "build" / "gpu_check").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(folder)

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    status = 0
    try:
        found = Machine.found()
        for step in steps:
            left = options.budget - (time.monotonic() - began)
            if left < LEAST:
                result = Result(step.name, step.what, "skipped", f"no time is left of {options.budget:.0f} s")
            elif why := step.missing(found):
                result = Result(step.name, step.what, "skipped", why)
            else:
                result = run_step(step, report, min(step.limit, left))
            report.results.append(result)
            report.write()
            print(f"{result.name:24} {result.status:8} {result.seconds:6.1f} s  {result.why}", flush=True)
    except Interrupted as signal_:
        status = 128 + int(signal_.args[0])
        report.interrupted = f"ended by {signal.Signals(signal_.args[0]).name} before all steps were done"
        report.write()
    print(f"report: {folder / 'report.md'}")
    return status or int(any(result.status == "failed" for result in report.results))


if __name__ == "__main__":
    sys.exit(main())
