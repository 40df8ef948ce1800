"""`vescale_ckpt.integrations.deepspeed`: a training with ZeRO goes on after a kill as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import jobs

import vescale_ckpt

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

JOB = Path(__file__).parent / "deepspeed_job.py"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with stage 2 that nothing interrupts."""
    directory = tmp_path_factory.mktemp("whole")
    jobs.run(JOB, str(directory), "2")
    return directory


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_a_killed_training_goes_on(tmp_path: Path, stage: str) -> None:
    # The stages add gradients up in different orders, so the last bits of their losses differ.
    whole = jobs.run(JOB, str(tmp_path / "whole"), stage)
    before = jobs.run_and_kill(JOB, str(tmp_path / "killed"), stage, at=6)
    assert before.items() <= whole.items()
    resumed = jobs.run(JOB, str(tmp_path / "killed"), stage)
    assert min(resumed) in (3, 5, 7), "it goes on from a checkpoint"
    jobs.assert_same(resumed, whole, first=min(resumed))


def test_parts_of_two_ranks_are_refused_by_one(finished: Path) -> None:
    with jobs.started(JOB, str(finished), "2", ranks=1) as job:
        assert job.wait() == [1]
    assert "IncompatibleStateError" in job.text
    assert "has state of 1 ranks, the checkpoint has that of 2" in job.text


def test_what_lies_in_the_checkpoint(finished: Path) -> None:
    info = vescale_ckpt.inspect(finished / "step-8")
    assert info.writer == "vescale_ckpt"
    keys = {*info.tensors, *info.objects}
    assert "module.0.weight" in keys
    for rank in range(2):
        assert f"optimizer.rank_{rank}_of_2" in keys
