"""`vescale_ckpt.integrations.deepspeed`: a training goes on after a kill as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import jobs

import vescale_ckpt

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

JOB = Path(__file__).parent / "deepspeed_job.py"


def test_a_killed_training_goes_on(tmp_path: Path) -> None:
    whole = jobs.run(JOB, str(tmp_path / "whole"))
    before = jobs.run_and_kill(JOB, str(tmp_path / "killed"), at=6)
    assert before.items() <= whole.items()
    resumed = jobs.run(JOB, str(tmp_path / "killed"))
    assert min(resumed) in (3, 5, 7), "it goes on from a checkpoint"
    jobs.assert_same(resumed, whole, first=min(resumed))
    info = vescale_ckpt.inspect(tmp_path / "whole" / "step-8")
    assert info.writer == "vescale_ckpt" and "module.0.weight" in {*info.tensors}


def test_zero_is_refused_by_name(tmp_path: Path) -> None:
    with jobs.started(JOB, str(tmp_path), "2", ranks=2) as job:
        assert 1 in job.wait()
    assert "ZeRO stage 2" in job.text and "engine.save_checkpoint" in job.text
