"""The example of a job that loses a machine: it runs to its end on one computer, as docs/howto/tiers.md says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lose_a_machine.py"


def _has_mount_namespaces() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not _has_mount_namespaces(), reason="this system gives no mount namespaces to its users")
def test_the_job_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), f"--dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["ok"] * 5
    assert done.stdout.rstrip().endswith("60: 1}"), done.stdout  # each step's files lie on two of three machines
    assert list(tmp_path.iterdir()) == []
