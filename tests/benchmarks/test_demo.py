"""The demo, with a tiny network and one round: train, kill, resume, exchange with stock DCP, measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


@pytest.mark.smoke
def test_demo_passes_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")  # the network's weights come in that format
    command = [sys.executable, str(DEMO), "--tiny", "--rounds=1", f"--dir={tmp_path}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    claims = [line for line in run.stdout.splitlines() if line.startswith("ok: ")]
    assert any("SIGKILL" in claim for claim in claims)
    assert sum("bit for bit" in claim for claim in claims) == 6
    assert "vescale_ckpt" in run.stdout.rpartition("durable s")[2]
    assert not list(tmp_path.iterdir())
