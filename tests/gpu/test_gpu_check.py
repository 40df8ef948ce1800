"""scripts/gpu_check.sh on a machine without a GPU: what it runs, skips and leaves. And what it measures, on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness import fake_cuda
from harness.python_forks import run_python

from benchmarks import gpu, gpu_train

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
BOUND = 120


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def environment(out: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "OUT": str(out), "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, **more}


def run(out: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    command = [SCRIPTS / "gpu_check.sh", "--work", out / "work", *options]
    result = subprocess.run(command, env=environment(out / "out"), capture_output=True, text=True, timeout=BOUND)
    return result.returncode, report_in(out / "out"), result.stdout + result.stderr


def report_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text()) if (folder / "gpu.json").exists() else {}
    return found


@pytest.mark.slow
def test_without_a_gpu_all_calls_end_and_tell_what_they_would_run(tmp_path: Path, scripts: None) -> None:
    from gpu_plan import CALLS

    status, report, text = run(tmp_path)
    assert status == 0, text
    found = {step["name"]: step for step in report["steps"]}
    assert list(found) == list(dict.fromkeys(step.name for call in CALLS for step in call.steps))
    assert found["machine"]["status"] == "ok" and found["headers"]["status"] in ("ok", "skipped")
    others = [step for name, step in found.items() if name not in ("machine", "headers")]
    assert {(step["status"], step["why"]) for step in others} == {("skipped", "no CUDA device that torch can use")}
    assert report["figures"]["cores"] >= 1 and "torch" in report["figures"]["machine"]
    page = (tmp_path / "out" / "report.md").read_text()
    assert text.endswith(page) and len(page) < 12_000
    assert "| tests | skipped: no CUDA device" in page
    assert "| 1 | device to host through the arena, of the pinned peak | >= 0.95 | not measured |" in page
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == ["gpu.json", "logs.txt", "report.md"]
    assert "===== machine: ok" in (tmp_path / "out" / "logs.txt").read_text()


def test_every_call_ends_within_nine_minutes(tmp_path: Path, scripts: None) -> None:
    from gpu_plan import BUDGET, CALLS, seconds_of

    assert [call.name for call in CALLS] == ["A", "B", "C"]
    assert all(seconds_of(call.steps) <= BUDGET < 540 for call in CALLS)
    _, _, plan = run(tmp_path, "--plan")
    for call in CALLS:
        assert f"scripts/gpu_check.sh --call {call.name} " in plan
        assert f"{seconds_of(call.steps):.0f} s  in all" in plan
        assert all(step.name in plan for step in call.steps)
    _, _, names = run(tmp_path, "--list")
    assert [line[:2] for line in names.splitlines()] == ["A:", "B:", "C:"]


# --- Steps and reports


def step(name: str, program: str, limit: float = BOUND, **more: Any) -> Any:
    from gpu_plan import Step

    record = "from benchmarks.figures import record\n"
    return Step(name, "what it is", limit, ("-c", record + program), lambda machine: "", **more)


def run_steps(report: Any, *steps: Any, seconds: float = BOUND) -> dict[str, tuple[str, str]]:
    from gpu_check import run_steps
    from gpu_machine import Machine

    run_steps(steps, report, Machine(), time.monotonic() + seconds, {})
    return {name: (result.status, result.why) for name, result in report.results.items()}


def test_a_step_that_fails_or_hangs_is_told_with_what_it_had(tmp_path: Path, scripts: None) -> None:
    from gpu_report import Report

    report = Report(tmp_path, tmp_path / "out")
    found = run_steps(
        report,
        step("fails", "print('the | reason'); raise SystemExit(3)"),
        step("measures", "record(copy_4k_of_peak=0.7, save_of_host='1, which tells nothing', disk='fast')"),
        step("hangs", "import time\nrecord(begun=1)\ntime.sleep(1000)", 0.2),
    )
    assert found["fails"] == ("failed", "status 3: the / reason")
    assert found["measures"] == ("ok", "")
    assert found["hangs"] == ("failed", "not done after 0 s")
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| 2 | 20,000 x 4 KiB, of the pinned peak | >= 0.8 | 0.7 | missed |" in page
    assert "| >= 0.9 | 1, which tells nothing |" in page and "- disk: fast" in page
    logs = (tmp_path / "out" / "logs.txt").read_text()
    assert "===== fails: failed status 3: the / reason\nthe | reason\n===== measures: ok" in logs


@pytest.mark.parametrize("program", ["import os; os.abort()", "import time; time.sleep(1000)"])
def test_batches_that_crash_or_hang_are_off_from_then_on(tmp_path: Path, scripts: None, program: str) -> None:
    from gpu_report import Report

    tell = "import os; record(batches=os.environ.get('VESCALE_CKPT_COPY_BATCHES', 'on'))"
    report = Report(tmp_path)
    run_steps(report, step("before", tell))
    assert report.figures()["batches"] == "on" and "COPY_BATCHES" not in report.text()
    run_steps(report, step("raw-batches", program, 0.3), step("behind", tell))
    assert report.figures()["batches"] == "0"
    assert "**raw-batches failed (" in report.text() and "ran with VESCALE_CKPT_COPY_BATCHES=0**" in report.text()
    later = Report(tmp_path, anew=False)  # another call
    run_steps(later, step("later", tell))
    assert later.figures()["batches"] == "0"
    run_steps(later, step("raw-batches", "record(raw_batches='ok')"), step("at last", tell))
    assert later.figures()["batches"] == "on" and "COPY_BATCHES" not in later.text()


MAIN = """
import sys
import gpu_check, gpu_plan
from gpu_machine import Machine
from gpu_plan import Call, Step
Machine.found = Machine  # without a look
program = "import os, time; from benchmarks.figures import record; record(known=1); record(pid=os.getpid())"
program += "; time.sleep(1000)"
gpu_plan.CALLS = (
    Call("A", "", (
        Step("fails", "", 60, ("-c", "raise SystemExit(1)"), lambda machine: ""),
        Step("sleeps", "", 60, ("-c", program), lambda machine: ""),
    )),
)
sys.argv = ["gpu_check", *sys.argv[1:]]
sys.exit(gpu_check.main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_what_it_had(tmp_path: Path, number: signal.Signals) -> None:
    paths, out = os.pathsep.join([str(SCRIPTS), str(ROOT)]), tmp_path / "out"
    command = [sys.executable, "-c", MAIN, "--work", tmp_path / "work"]
    child = subprocess.Popen(command, env=environment(out, PYTHONPATH=paths), stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = {}
    try:
        until = time.monotonic() + BOUND
        while "pid" not in figures and time.monotonic() < until:
            time.sleep(0.05)
            figures = report_in(out).get("figures", {})
        assert figures["known"] == 1
        child.send_signal(number)
        text, _ = child.communicate(timeout=BOUND)
        assert child.returncode == (128 + number if number == signal.SIGTERM else -number)
    finally:
        child.kill()
        child.wait()
        if number == signal.SIGKILL and "pid" in figures:  # which lets it end nothing
            os.kill(figures["pid"], signal.SIGKILL)
    if number == signal.SIGTERM:
        with pytest.raises(ProcessLookupError):
            os.kill(figures["pid"], 0)
        assert report_in(out)["interrupted"] == "ended by SIGTERM before all steps were done"
        assert text.endswith((out / "report.md").read_text())
    steps = {step["name"]: step["status"] for step in report_in(out)["steps"]}
    assert steps == {"fails": "failed", "sleeps": "begun"} and report_in(out)["figures"]["known"] == 1
    assert "| fails | failed: status 1" in (out / "report.md").read_text()
    assert "===== fails: failed" in (out / "logs.txt").read_text()
    assert len(list(out.rglob("*"))) <= 8


# --- What steps do


def test_checks_of_the_runtime_alone_run_without_the_engine(tmp_path: Path) -> None:
    """Against the tests' own library, which says nothing of CUDA."""
    library = fake_cuda.library()
    paths = os.pathsep.join([str(SCRIPTS), str(ROOT)])
    figures: dict[str, Any] = {}
    for check in ("raw_pageable_batch", "raw_across_allocations"):
        command = [sys.executable, SCRIPTS / "gpu_decide.py", check]
        more = {"PYTHONPATH": paths, "GPU_CHECK_CUDART": str(library)}
        result = subprocess.run(
            command, env=environment(tmp_path, **more), capture_output=True, text=True, timeout=BOUND
        )
        assert result.returncode == 0, result.stderr
        for line in result.stdout.splitlines():
            figures |= json.loads(line)
    assert figures["raw_pageable_batch_to_host"].startswith("ok, ")
    assert figures["raw_across_neighbours_of_63"] >= 0


@pytest.mark.slow
def test_saves_are_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device=cpu", "--gib=0.005", "--rounds=1", "--saves=12"]
    sections = f"--sections=copies,odd,first,prepared,gated,both-ways,small-loads,growth --dir={tmp_path}".split()
    run = run_python([*command, *sections], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    figures: dict[str, Any] = {}
    for line in run.stdout.splitlines():
        figures |= json.loads(line) if line.startswith("{") else {}  # tables are printed, too
    wanted = {"first_save_of_steady", "prepared_save_of_steady", "gate_stall_ms", "gate_launch_p99_ratio"}
    assert figures.keys() >= wanted | {"save_of_host", "load_of_host", "growth_host_mib", "growth_handles"}
    assert figures.keys() >= {"copy_4k_of_peak", "stock_copy_4k_of_peak", "gate_launch_p99_cold_ratio"}
    assert figures["odd_equal"] == 1 and figures["small_load_device_gb_s"] > 0


def test_every_test_section_and_check_that_steps_name_is_there(scripts: None) -> None:
    import gpu_decide
    import gpu_plan
    import gpu_steps

    tests = (ROOT / "tests/gpu/test_gpu.py").read_text()
    for word in gpu_plan.SUBSET.split(" or "):
        assert word in tests, word
    assert gpu_steps.KERNELS.split("::")[1] in tests
    for found in (step for call in gpu_plan.CALLS for step in call.steps):
        options = dict(zip(found.command, found.command[1:], strict=False))
        assert options.get("--sections", "disk") in gpu.SECTIONS, found.name
        assert options.get("scripts/gpu_decide.py", "raw_batches") in gpu_decide.CHECKS, found.name
        for word in found.command:
            assert not word.endswith(".py") or (ROOT / word.removeprefix("--ignore=")).exists(), word


def test_training_that_is_killed_goes_on_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_train.subprocess, "run", run_python)
    monkeypatch.setattr(sys, "argv", ["gpu_train", "--device=cpu"])
    gpu_train.main()
    assert json.loads(capsys.readouterr().out)["train_resumed_from"] in (20, 25)
