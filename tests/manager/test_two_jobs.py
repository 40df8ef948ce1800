"""Two jobs that save in one manager's directory: one warning, and none where a job resumes or begins anew."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from harness.children import in_child
from harness.states import blank, small_state

from vescale_ckpt import CheckpointManager

WARNING = "Two jobs in one directory"


def _save(directory: Path, *steps: int) -> None:
    job = CheckpointManager(directory, async_checkpoint=False)
    for step in steps:
        job.save(step, small_state(step))


def _run(directory: Path, *acts: str) -> None:
    """What jobs do, by name: `a saves 10 20`, `a restores 10`, `a begins`. `another` is another process."""
    jobs: dict[str, CheckpointManager] = {}
    for act in acts:
        who, does, *steps = act.split()
        if who == "another":
            in_child(partial(_save, directory, *map(int, steps)))
            continue
        if who not in jobs:
            jobs[who] = CheckpointManager(directory, async_checkpoint=False)
        if does == "restores":
            jobs[who].restore(blank(small_state(0)), *map(int, steps))
        for step in map(int, steps if does == "saves" else ()):
            jobs[who].save(step, small_state(step))


@pytest.mark.parametrize(
    ("acts", "told"),
    [
        (("a begins", "another saves 10 20", "a saves 10 20 30"), "step 10 is saved over {}/step-10"),
        (("a begins", "another saves 100", "a saves 10 20"), "step 10 is saved beside {}/step-100"),
        (("a saves 100", "another saves 10", "a saves 110"), "step 110 is saved beside {}/step-10"),
        (("a saves 10", "b saves 10"), "step 10 is saved over {}/step-10"),  # of an earlier run
        (("another saves 10 20 30", "a restores", "a saves 30 40"), ""),
        (("another saves 10 20 30", "a restores 10", "a saves 20 30 40"), ""),
        (("another saves 20 30", "a saves 10 20 30 40"), ""),  # it began anew
        (("another saves 10", "a saves 11 12"), ""),  # it has loaded by itself
        (("a begins", "b begins", "a saves 1", "b saves 2", "a saves 3"), ""),
    ],
)
def test_a_job_beside_another_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, acts: tuple[str, ...], told: str
) -> None:
    _run(tmp_path, *acts)
    lines = [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]
    assert len(lines) == bool(told), lines
    assert all(told.format(tmp_path) in line for line in lines), lines
