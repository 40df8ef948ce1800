"""scripts/check_gpu.py and what it runs, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.python_forks import run_python

from benchmarks import gpu, gpu_train

ROOT = Path(__file__).resolve().parents[2]
BOUND = 120


@pytest.fixture
def check_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import check_gpu

    monkeypatch.setattr(check_gpu, "WORK", tmp_path / "work")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(sys, "argv", ["check_gpu.py"])
    return check_gpu


def test_without_a_gpu_all_steps_are_skipped(tmp_path: Path, check_gpu: Any) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path / "out")}
    result = run_python([sys.executable, ROOT / "scripts" / "check_gpu.py"], env=environment, timeout=BOUND)
    assert result.returncode == 0, result.stderr
    report = (tmp_path / "out" / "report.md").read_text()
    assert result.stdout.endswith(report + "\n") and "no CUDA device" in report
    assert all(f"| {step.name} | {step.what} | skipped | 0 |" in report for step in check_gpu.STEPS)


def test_all_steps_fit_and_name_what_is_there(check_gpu: Any) -> None:
    assert sum(step.limit for step in check_gpu.STEPS) <= 700  # each may take long, not all of them
    for step in check_gpu.STEPS:
        options = dict(zip(step.command, step.command[1:], strict=False))
        assert options.get("--sections", "stock") in gpu.SECTIONS
        for word in step.command:
            assert not word.endswith(".py") or (ROOT / word).exists(), word


def test_steps_that_fail_or_hang_leave_what_they_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check_gpu: Any
) -> None:
    def step(name: str, program: str, limit: float = BOUND) -> Any:
        return check_gpu.Step(name, "what", limit, ("-c", f"from benchmarks.figures import record\n{program}"))

    steps = (
        step("fails", "print('the reason'); raise SystemExit(3)"),
        step("measures", "record(speed=0.7); print('a table')"),
        step("hangs", "import time\nrecord(begun=1)\ntime.sleep(1000)", 5),
    )
    monkeypatch.setattr(check_gpu, "STEPS", steps)
    monkeypatch.setattr(check_gpu, "machine", lambda: ("a machine", ""))
    assert check_gpu.main() == 1
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| fails | what | failed |" in report and "the reason" in report
    assert "| measures | what | ok |" in report and "a table" in report
    assert "| hangs | what | failed |" in report and "not done after 5 s" in report
    assert json.loads((tmp_path / "out" / "figures.json").read_text()) == {"speed": 0.7, "begun": 1}
    assert (tmp_path / "out" / "logs.txt").read_text().startswith("===== fails\nthe reason\n")


def test_after_a_build_that_failed_nothing_runs(monkeypatch: pytest.MonkeyPatch, check_gpu: Any, capsys: Any) -> None:
    build = check_gpu.Step("build", "", BOUND, ("-c", "raise SystemExit('no compiler')"))
    monkeypatch.setattr(check_gpu, "BUILD", build)
    monkeypatch.setattr(check_gpu, "STEPS", (build, check_gpu.Step("tests", "", BOUND, ("-c", "raise SystemExit(1)"))))
    monkeypatch.setattr(check_gpu, "machine", lambda: ("a machine", ""))
    assert check_gpu.main() == 1
    out = capsys.readouterr().out
    assert "| tests |  | skipped |" in out and "no compiler" in out


@pytest.mark.slow
def test_saves_are_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device=cpu", "--gib=0.005", "--rounds=1", f"--dir={tmp_path}"]
    run = run_python([*command, "--sections=copies,first,gated,both-ways,fingerprints"], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    figures: dict[str, Any] = {}
    for line in run.stdout.splitlines():
        figures |= json.loads(line) if line.startswith("{") else {}  # tables are printed, too
    assert figures.keys() >= {"first_save_of_steady", "gate_stall_ms", "copy_4k_of_peak"}
    assert figures.keys() >= {"save_of_host", "load_of_host", "stock_copy_4k_of_peak", "fingerprint_64k_of_copy"}


def test_training_that_is_killed_goes_on_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_train.subprocess, "run", run_python)
    monkeypatch.setattr(sys, "argv", ["gpu_train", "--device=cpu"])
    gpu_train.main()
    assert json.loads(capsys.readouterr().out)["train_resumed_from"] in (20, 25)
