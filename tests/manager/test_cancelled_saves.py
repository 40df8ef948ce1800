"""`CheckpointManager` whose saves are cancelled: what is left, who is told, and what the next save does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from harness.snapshots import held
from test_manager import BOUND, restored, save_steps, steps_in

from vescale_ckpt import CheckpointManager, SaveCancelledError


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step)), "step": step}


def cancel_on_one(directory: Path, who: int) -> Any:
    rank = dist.get_rank()
    with CheckpointManager(directory) as saver:
        assert not saver.cancel()
        saver.save(1, state_of(1), metrics={"loss": 1})
        saver.wait()
        assert not saver.cancel()
        with held() as event:
            handle = saver.save(2, state_of(2), metrics={"loss": 2})
            assert handle is not None
            dist.barrier()
            said = saver.cancel() if rank == who else None
            dist.barrier()
            event.set()
            told = ""
            try:
                saver.wait()
            except SaveCancelledError as error:
                told = type(error).__name__
            saver.wait()
            with pytest.raises(SaveCancelledError):
                handle.result(BOUND)
        dist.barrier()
        left = sorted(path.name for path in directory.iterdir())
        dist.barrier()
        saver.save(3, state_of(3))
        saver.save(4, state_of(4))
    dist.barrier()
    return said, told, left, saver.steps(), saver.metrics(1)


@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_cancels_the_save_of_all(checkpoint: Path, who: int) -> None:
    for rank, (said, told, *others) in enumerate(run_ranks(2, cancel_on_one, checkpoint, who)):
        assert said is (True if rank == who else None)
        assert told == ("" if rank == who else "SaveCancelledError")
        assert others == [["step-1"], [1, 3, 4], {"loss": 1}]


def test_a_step_that_is_saved_again_stays_when_that_is_cancelled(checkpoint: Path) -> None:
    save_steps(checkpoint, 1)
    with CheckpointManager(checkpoint) as saver, held() as event:
        saver.save(1, state_of(5))
        assert saver.cancel()
        event.set()
    assert restored(checkpoint) == (1, True) and steps_in(checkpoint) == [1]


def test_a_manager_of_an_object_store_cancels(url: str) -> None:
    pytest.importorskip("obstore", reason="object stores need obstore")
    with CheckpointManager(url) as saver:
        saver.save(1, state_of(1))
        saver.wait()
        with held() as event:
            saver.save(2, state_of(2), metrics={"loss": 2})
            assert saver.cancel()
            event.set()
            saver.wait()
        assert saver.steps() == [1] and saver.latest() == 1
        saver.save(3, state_of(3))
    assert saver.steps() == [1, 3]
