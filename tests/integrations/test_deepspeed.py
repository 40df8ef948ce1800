"""`vescale_ckpt.integrations.deepspeed`: a training with ZeRO goes on after a kill as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

import vescale_ckpt

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow_integration

JOB = Path(__file__).parent / "deepspeed_job.py"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """The directory and the losses of a run with stage 2 that nothing interrupts."""
    directory = tmp_path_factory.mktemp("whole")
    with jobs.started(JOB, str(directory), "2") as job:
        assert job.wait() == [0, 0], job.text
    return directory, job.losses


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_a_killed_training_goes_on(tmp_path: Path, finished: tuple[Path, dict[int, str]], stage: str) -> None:
    _, whole = finished  # the stages differ in who holds what, not in the numbers
    before = jobs.run_and_kill(JOB, str(tmp_path), stage, at=6)
    assert before.items() <= whole.items()
    resumed = jobs.run(JOB, str(tmp_path), stage)
    assert min(resumed) in (3, 5, 7), "it goes on from a checkpoint"
    jobs.assert_same(resumed, whole, first=min(resumed))


def test_parts_of_two_ranks_are_refused_by_one(finished: tuple[Path, dict[int, str]]) -> None:
    directory, _ = finished
    with jobs.started(JOB, str(directory), "2", ranks=1) as job:
        assert job.wait() == [1]
    assert "IncompatibleStateError" in job.text
    assert "has state of 1 ranks, the checkpoint has that of 2" in job.text


def test_what_lies_in_the_checkpoint(finished: tuple[Path, dict[int, str]]) -> None:
    directory, _ = finished
    info = vescale_ckpt.inspect(directory / "step-8")
    assert info.writer == "vescale_ckpt"
    keys = {*info.tensors, *info.objects}
    assert "module.0.weight" in keys
    for rank in range(2):
        assert f"optimizer.rank_{rank}_of_2" in keys
