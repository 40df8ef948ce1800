"""scripts/gpu_check.sh on a machine without a GPU: what it runs, skips and leaves. And what it measures, on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from python_forks import run_python

from benchmarks import gpu, gpu_train

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
BOUND = 120


@pytest.fixture
def check() -> Iterator[Any]:
    sys.path.insert(0, str(SCRIPTS))
    try:
        import gpu_check

        yield gpu_check
    finally:
        sys.path.remove(str(SCRIPTS))


def environment(out: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "OUT": str(out), "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, **more}


def run(out: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    result = subprocess.run(
        [SCRIPTS / "gpu_check.sh", *options], env=environment(out), capture_output=True, text=True, timeout=BOUND
    )
    report = json.loads((out / "gpu.json").read_text()) if (out / "gpu.json").exists() else {}
    return result.returncode, report, result.stdout + result.stderr


@pytest.mark.slow
def test_without_a_gpu_its_steps_say_so_and_the_others_run(tmp_path: Path) -> None:
    status, report, text = run(tmp_path, "--only", "machine,tests,copies,train")
    assert status == 0, text
    assert [(step["name"], step["status"]) for step in report["steps"]] == [
        ("machine", "ok"), ("tests", "skipped"), ("copies", "skipped"), ("train", "skipped")
    ]  # fmt: skip
    assert report["steps"][1]["why"] == "no CUDA device that torch can use"
    assert report["figures"]["cores"] >= 1 and "torch" in report["figures"]["machine"]
    page = (tmp_path / "report.md").read_text()
    assert "| tests | all tests marked gpu | skipped: no CUDA device" in page
    assert "| 1 | device to host through the arena, of the pinned peak | >= 0.95 | not measured |" in page
    assert "cores" in (tmp_path / "machine.log").read_text()


def test_options(tmp_path: Path) -> None:
    status, _, text = run(tmp_path, "--only", "machine,nonsense")
    assert status == 2 and "no step is named nonsense; there are machine, build" in text
    status, report, _ = run(tmp_path, "--budget", "0", "--only", "machine")
    assert status == 0 and report["steps"][0]["why"] == "no time is left of 0 s"


def step(check: Any, program: str, limit: float = BOUND) -> Any:
    record = "from benchmarks.figures import record\n"
    return check.Step("a-step", "what it is", limit, ("-c", record + program))


def test_a_step_that_fails_or_hangs_is_told_with_what_it_had(check: Any, tmp_path: Path) -> None:
    report = check.Report(tmp_path)
    result = check.run_step(step(check, "print('the | reason'); raise SystemExit(3)"), report, BOUND)
    assert (result.status, result.why) == ("failed", "status 3: the / reason")
    assert check.run_step(step(check, "record(copy_4k_of_peak=0.7, disk='fast')"), report, BOUND).status == "ok"
    result = check.run_step(step(check, "import time\ntime.sleep(1000)"), report, 0.5)
    assert (result.status, result.why) == ("failed", "not done after 0.5 s")
    report.results.append(result)
    report.write()
    page = (tmp_path / "report.md").read_text()
    assert "| 2 | 20,000 x 4 KiB, of the pinned peak | >= 0.8 | 0.7 | missed |" in page
    assert "| disk | fast |" in page


def test_half_a_line_of_figures_is_left_out(check: Any, tmp_path: Path) -> None:
    report = check.Report(tmp_path)
    (tmp_path / "figures.jsonl").write_text('{"whole": 1}\n{"half": ')
    report.refresh()
    assert json.loads((tmp_path / "gpu.json").read_text())["figures"] == {"whole": 1}


MAIN = """
import sys
import gpu_check
from gpu_check import Step
program = "import os, time; from benchmarks.figures import record; record(known=1); record(pid=os.getpid())"
program += "; time.sleep(1000)"
gpu_check.STEPS = (
    Step("fails", "", 60, ("-c", "raise SystemExit(1)"), lambda machine: ""),
    Step("sleeps", "", 60, ("-c", program), lambda machine: ""),
)
sys.argv = ["gpu_check", *sys.argv[1:]]
sys.exit(gpu_check.main())
"""


def test_a_run_that_is_ended_leaves_what_it_had(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(SCRIPTS), str(ROOT)])
    child = subprocess.Popen([sys.executable, "-c", MAIN], env=environment(tmp_path, PYTHONPATH=paths))
    try:
        until = time.monotonic() + BOUND
        figures: dict[str, Any] = {}
        while "pid" not in figures and time.monotonic() < until:
            time.sleep(0.05)
            if (tmp_path / "gpu.json").exists():
                figures = json.loads((tmp_path / "gpu.json").read_text())["figures"]
        assert figures["known"] == 1
        child.terminate()
        assert child.wait(BOUND) == 128 + signal.SIGTERM
    finally:
        child.kill()
        child.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(figures["pid"], 0)
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["steps"][0]["status"] == "failed" and report["figures"]["known"] == 1
    assert report["interrupted"] == "ended by SIGTERM before all steps were done"


def test_a_failed_step_is_the_exit_status_and_stops_no_other(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(SCRIPTS), str(ROOT)])
    program = MAIN.replace("time.sleep(1000)", "None")
    result = subprocess.run([sys.executable, "-c", program], env=environment(tmp_path, PYTHONPATH=paths), timeout=BOUND)
    assert result.returncode == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert [found["status"] for found in report["steps"]] == ["failed", "ok"]


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


def test_step_times_are_measured(tmp_path: Path) -> None:
    small = "--device=cpu --width=16 --layers=2 --rows=8 --steps=4 --every=2 --rounds=1"
    run = run_python([sys.executable, "-m", "benchmarks.gpu_step_time", *small.split(), f"--dir={tmp_path}"], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    figures: dict[str, Any] = {}
    for line in run.stdout.splitlines():
        figures |= json.loads(line)
    for name in ("ours", "ours_gate", "stock"):
        assert isinstance(figures[f"step_time_{name}_slower_percent"], float)
    assert figures["step_time_parameters"] > 0


def test_every_test_and_section_that_steps_name_is_there(check: Any) -> None:
    tests = (ROOT / "tests/gpu/test_gpu.py").read_text()
    for word in check.SUBSET.split(" or "):
        assert word in tests, word
    sys.path.insert(0, str(SCRIPTS))
    try:
        import gpu_steps
    finally:
        sys.path.remove(str(SCRIPTS))
    assert gpu_steps.KERNELS.split("::")[1] in tests
    for found in check.STEPS:
        if "benchmarks.gpu" in found.command:
            assert set(found.command[-1].split(",")) <= set(gpu.SECTIONS), found.name
        for word in found.command:
            assert not word.endswith(".py") or (ROOT / word).exists(), word


def test_training_that_is_killed_goes_on_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_train.subprocess, "run", run_python)
    monkeypatch.setattr(sys, "argv", ["gpu_train", "--device=cpu"])
    gpu_train.main()
    assert json.loads(capsys.readouterr().out)["train_resumed_from"] in (20, 25)
