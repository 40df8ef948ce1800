"""What a training asks its manager: whether a step will be saved, which one is the best, what is being saved."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import on_ranks
from harness.snapshots import held

from vescale_ckpt import CheckpointManager, MissingKeysError, Schedule


def _state(step: int = 0) -> dict[str, Any]:
    return {"w": torch.full((8,), float(step)), "step": step}


def test_metrics_are_only_reduced_for_steps_that_are_saved(tmp_path: Path) -> None:
    reduced = []
    options: dict[str, Any] = {"save_interval_steps": 3, "best": "loss", "best_mode": "min"}
    with CheckpointManager(tmp_path, **options) as manager:
        for step in range(1, 10):
            if manager.should_save(step):
                reduced.append(step)
                manager.save(step, _state(step), metrics={"loss": abs(step - 5)})
            elif step == 5:
                assert manager.save(step, _state(step), metrics={"loss": 9}, force=True) is not None
        assert reduced == [3, 6, 9]
        assert manager.best_step() == 6
        manager.wait()
        assert manager.steps() == [3, 5, 6, 9]
    with pytest.raises(ValueError, match="closed"):
        manager.should_save(12)


def test_what_was_said_of_a_step_holds_for_it_alone(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, schedule=Schedule(seconds=1000)) as manager:
        assert not manager.should_save(1)
        manager._saves._clock.save_began(-1e9)
        assert manager.save(1, _state()) is None
        assert manager.should_save(2)
        assert manager.save(3, _state()) is not None
        assert not manager.should_save(4)
        assert manager.save(4, _state(), force=True) is not None


@on_ranks(2)
def test_all_ranks_are_told_the_same(tmp_path: Path) -> None:
    rank = dist.get_rank()
    schedule = Schedule(seconds=1000, signal=signal.SIGTERM)
    with CheckpointManager(tmp_path, schedule=schedule, best="loss", best_mode="max") as manager:
        said = []
        for step in range(1, 5):
            if (step, rank) == (2, 0):
                manager._saves._clock.save_began(-1e9)  # the coordinator's clock counts
            if (step, rank) == (4, 1):
                signal.raise_signal(signal.SIGTERM)
            dist.barrier()
            said.append(manager.should_save(step))
            if said[-1]:
                manager.save(step, _state(step), metrics={"loss": -step})
        manager.wait()
        assert (said, manager.steps(), manager.best_step()) == ([False, True, False, True], [2, 4], 2)
        assert manager.preempted


@on_ranks(2)
def test_ranks_do_not_communicate_for_a_step_that_is_not_due(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_interval_steps=10, timeout=5) as manager:
        if dist.get_rank() == 1:  # the other one would be late
            assert manager.save(1, _state()) is None and not manager.should_save(2)
        dist.barrier()


def test_the_best_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, best="acc", best_mode="max", async_checkpoint=False) as manager:
        assert manager.best_step() is None
        for step, value in ((1, 0.5), (2, 0.9), (3, 0.9), (4, float("nan"))):
            manager.save(step, _state(step), metrics={"acc": value})
        assert manager.best_step() == 3
    with CheckpointManager(tmp_path) as other, pytest.raises(ValueError, match="no best="):
        other.best_step()


def test_the_step_that_is_being_saved(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        assert manager.saving is None
        with held() as event:
            handle = manager.save(1, _state())
            assert handle is not None and manager.saving == 1 and manager.steps() == []
            event.set()
            handle.result()
        assert manager.saving is None and manager.steps() == [1]


def test_a_part_is_restored(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"old": {"w": torch.ones(8), "b": torch.ones(2)}, "step": 1})
        manager.wait()
        state = {"w": torch.zeros(8), "more": torch.zeros(3)}
        with pytest.raises(MissingKeysError):
            manager.restore(state, rename={"": "old"})
        assert manager.restore(state, strict=False, rename={"": "old"}) == 1
        assert torch.equal(state["w"], torch.ones(8)) and torch.equal(state["more"], torch.zeros(3))
        state = {"old": {"w": torch.zeros(8), "b": torch.zeros(2)}, "step": 0}
        assert manager.restore(state, keys="old.b") == 1
        assert state["step"] == 0 and torch.equal(state["old"]["w"], torch.zeros(8))
        assert torch.equal(state["old"]["b"], torch.ones(2))
