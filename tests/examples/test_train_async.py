"""The example of asynchronous saves: it runs, and a run that was resumed goes on as if nothing had been."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from harness.python_forks import run_python
from harness.ranks import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def train(directory: Path, *options: str) -> int:
    """The step that it started from."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import train_async
    finally:
        sys.path.remove(str(EXAMPLES))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums are taken in one order, however many processors there are
    try:
        return int(train_async.main([f"--directory={directory}", *options]))
    finally:
        torch.set_num_threads(threads)


def last_loss(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("step 60: ")).split()[3]


def test_it_resumes_as_if_nothing_had_been(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, str(EXAMPLES / "train_async.py"), f"--directory={tmp_path / 'one'}", "--steps=50"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    run = run_python(command, env=environment)
    assert run.returncode == 0, run.stderr
    assert "state copied" in run.stdout and "at step 50; checkpoints of steps [20, 40]" in run.stdout
    assert train(tmp_path / "one", "--steps=60", "--gate") == 40
    resumed = capsys.readouterr().out
    assert "resumed from step 40" in resumed and "checkpoints of steps [40, 60]" in resumed
    assert train(tmp_path / "another", "--steps=60") == 0
    assert last_loss(resumed) == last_loss(capsys.readouterr().out)


def test_two_ranks_resume(tmp_path: Path) -> None:
    assert run_ranks(2, train, tmp_path, "--steps=50", "--gate") == [0, 0]
    assert run_ranks(2, train, tmp_path, "--steps=90") == [40, 40]
    assert train(tmp_path, "--steps=80") == 80  # on one rank
