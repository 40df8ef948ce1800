"""A rank that is late to commit: what the others have raised by then must be true."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import steps
from harness.ranks import TIMEOUT as RUN_TIMEOUT
from harness.ranks import on_ranks, run_ranks
from harness.saves import save_as
from harness.states import of_rank

import vescale_ckpt
from vescale_ckpt import CheckpointTimeoutError

TIMEOUT = 2.0  # seconds
FOREVER = 10 * RUN_TIMEOUT


WAYS = ("dcp", "async", "nodes", "safetensors")


def _late_to_commit(way: str, asks_first: bool, directory: Path) -> Any:
    rank, path = dist.get_rank(), directory / "c"
    save_as(way, path, of_rank(1)).result()

    def wait(_: Any) -> None:
        while len(list(directory.glob("gave up *"))) < 2:  # the run has a limit
            time.sleep(0.01)

    def save() -> CheckpointTimeoutError | None:
        try:
            timeout = TIMEOUT if rank else FOREVER
            save_as(way, path, of_rank(2), timeout=timeout).result()
        except CheckpointTimeoutError as error:
            return error
        return None

    if rank:
        error = save()
        (directory / f"gave up {rank}").touch()
    else:
        with (steps.behind if asks_first else steps.before)("may commit", wait):
            error = save()
    assert error is not None and error.late_ranks == [0], error
    values = {key: float(value[0]) for key, value in vescale_ckpt.load(path, timeout=FOREVER).items()}
    return error.committed, str(error), values, sorted(os.listdir(path))


@pytest.mark.parametrize("way", WAYS)
def test_a_late_coordinator_commits_nothing_after_the_others_gave_up(way: str, tmp_path: Path) -> None:
    answers = run_ranks(3, _late_to_commit, way, False, tmp_path)
    for committed, text, values, _ in answers:
        assert committed is False and "rank 0 of 3" in text and "known" not in text
        assert set(values.values()) == {1.0}
    assert not [name for name in answers[0][3] if ".tmp" in name]


@pytest.mark.parametrize("way", ["async", "nodes"])  # what the others know does not depend on the layout
def test_who_gives_up_while_it_is_committed_says_that_it_does_not_know(way: str, tmp_path: Path) -> None:
    answers = run_ranks(3, _late_to_commit, way, True, tmp_path)
    for rank, (committed, text, _, _) in enumerate(answers):
        assert committed is (None if rank else True), text
        assert ("is not known" if rank else "is there") in text
    # By then rank 0 has committed: it holds what it said.
    assert set(answers[0][2].values()) == {2.0}


def _error_of_save(path: Path) -> CheckpointTimeoutError:
    with pytest.raises(CheckpointTimeoutError) as caught:
        vescale_ckpt.save(path, of_rank(2), timeout=FOREVER)
    return caught.value


@on_ranks(2)
def test_nothing_is_committed_when_nobody_can_say_whether_others_still_wait(tmp_path: Path) -> None:
    path = tmp_path / "c"
    vescale_ckpt.save(path, of_rank(1))
    if dist.get_rank() == 0:
        with steps.failing("ask the store whether to commit", steps.StoreGoneError()):
            error = _error_of_save(path)
    else:
        error = _error_of_save(path)
    vescale_ckpt.save(tmp_path / "d", of_rank(3))  # the connections are good
    assert error.committed is False and "rank 0" in str(error) and "the store" in str(error)
    assert float(vescale_ckpt.load(path)["w"][0]) == 1.0
