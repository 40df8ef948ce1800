"""Two jobs that save in one manager's directory: one warning, and none where a job resumes or begins anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness.children import in_child
from harness.states import blank, small_state

from vescale_ckpt import CheckpointManager

WARNING = "Two jobs in one directory"


def _job(directory: Path) -> CheckpointManager:
    return CheckpointManager(directory, async_checkpoint=False)


def _save(job: CheckpointManager, *steps: int) -> None:
    for step in steps:
        job.save(step, small_state(step))


def _other_job(directory: Path, *steps: int) -> None:
    in_child(lambda: _save(_job(directory), *steps))


def _both_from_scratch(directory: Path) -> None:
    job = _job(directory)
    _other_job(directory, 10, 20)
    _save(job, 10, 20, 30)


def _one_is_behind(directory: Path) -> None:
    job = _job(directory)
    _other_job(directory, 100)
    _save(job, 10, 20)


def _one_is_ahead(directory: Path) -> None:
    job = _job(directory)
    _save(job, 100)
    _other_job(directory, 10)
    _save(job, 110)


def _a_step_of_an_earlier_run(directory: Path) -> None:
    _save(_job(directory), 10)
    _save(_job(directory), 10)


def _resumed(directory: Path) -> None:
    _other_job(directory, 10, 20, 30)
    job = _job(directory)
    job.restore(blank(small_state(0)))
    _save(job, 30, 40)


def _went_back(directory: Path) -> None:
    _other_job(directory, 10, 20, 30)
    job = _job(directory)
    job.restore(blank(small_state(0)), 10)
    _save(job, 20, 30, 40)


def _began_anew(directory: Path) -> None:
    _other_job(directory, 20, 30)
    _save(_job(directory), 10, 20, 30, 40)


def _loaded_by_itself(directory: Path) -> None:
    _other_job(directory, 10)
    _save(_job(directory), 11, 12)


def _managers_in_turn(directory: Path) -> None:
    one, other = _job(directory), _job(directory)
    _save(one, 1)
    _save(other, 2)
    _save(one, 3)


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (_both_from_scratch, "step 10 is saved over {}/step-10"),
        (_one_is_behind, "step 10 is saved beside {}/step-100"),
        (_one_is_ahead, "step 110 is saved beside {}/step-10"),
        (_a_step_of_an_earlier_run, "step 10 is saved over {}/step-10"),
        *((run, "") for run in (_resumed, _went_back, _began_anew, _loaded_by_itself, _managers_in_turn)),
    ],
)
def test_a_job_beside_another_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, run: Callable[[Path], None], told: str
) -> None:
    run(tmp_path)
    lines = [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]
    assert len(lines) == bool(told), lines
    assert all(told.format(tmp_path) in line and "(at 20" in line for line in lines), lines
