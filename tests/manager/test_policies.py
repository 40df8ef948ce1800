"""Policies of a manager that users write: which steps are due, which stay, and which become durable."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from vescale_ckpt import CheckpointManager, Retention, Schedule, Tier
from vescale_ckpt.manager.retention import Candidate


class First(Retention):
    def keeps(self, checkpoints: Sequence[Candidate]) -> Collection[int]:
        return [checkpoint.step for checkpoint in checkpoints[:1]]


class PowersOfTwo(Schedule):
    def is_due(self, step: int) -> bool:
        return step & (step - 1) == 0


class Even(Tier):
    def becomes_durable(self, step: int) -> bool:
        return step % 2 == 0


def test_policies_of_a_users_own(tmp_path: Path) -> None:
    state = {"w": torch.ones(8)}
    with CheckpointManager(
        tmp_path / "run", retention=First(), schedule=PowersOfTwo(), async_checkpoint=False
    ) as manager:
        saved = [step for step in range(1, 10) if manager.save(step, state) is not None]
        assert (saved, manager.steps()) == ([1, 2, 4, 8], [1, 8])
    with CheckpointManager(tmp_path / "durable", tier=Even(tmp_path / "fast"), async_checkpoint=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, state)
    assert manager.tiers() == {1: "local", 2: "durable", 3: "local"}


@pytest.mark.parametrize("kept", [set(), {2}])
def test_what_was_saved_last_stays_whatever_a_rule_says(kept: set[int]) -> None:
    class Keeps(Retention):
        def keeps(self, checkpoints: Sequence[Candidate]) -> Collection[int]:
            return kept

    found = [Candidate(5), Candidate(1), Candidate(2), Candidate(3)]
    assert Keeps().surplus(found) == sorted({1, 2} - kept) and Keeps(period=1).surplus(found) == []
    assert Keeps().surplus([]) == [] and Retention().keeps_all and not Keeps().keeps_all


def test_when_steps_are_due() -> None:
    found = {
        schedule: [step for step in range(6) if schedule.is_due(step)]
        for schedule in (Schedule(), Schedule(signal=signal.SIGTERM), Schedule(3), Schedule(seconds=1), Schedule(4, 1))
    }
    assert list(found.values()) == [[*range(6)], [*range(6)], [0, 3], [], [0, 4]]


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (Retention, {"best_mode": "most"}),
        (Retention, {"best_mode": None, "best": "loss"}),
        (Retention, {"best": "", "best_mode": "min"}),
        (Schedule, {"signal": "SIGTERM"}),
        (Schedule, {"deadline_seconds": 1}),
        (Schedule, {"seconds": -1}),
        (CheckpointManager, {"max_to_keep": 1, "retention": Retention(1)}),
        (CheckpointManager, {"best": "loss", "retention": Retention(best="loss", best_mode="min")}),
        (CheckpointManager, {"save_interval_steps": 1, "schedule": Schedule(1)}),
        *((CheckpointManager, {"timeout": value}) for value in (0, True, float("nan"), "1")),
        *((Schedule, {"signal": signal.SIGTERM, "deadline_seconds": value}) for value in (0, -1)),
        *((Schedule, {"seconds": value}) for value in (True, float("nan"), "1")),
        *(
            (make, {name: value})
            for make, names in (
                (CheckpointManager, ("max_to_keep", "save_interval_steps")),
                (Retention, ("newest", "period")),
                (Schedule, ("steps",)),
                (Tier, ("durable_interval_steps", "local_max_bytes")),
            )
            for name in names
            for value in (0, -1, 1.5, True, float("nan"), "3")
        ),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, make: Any, wrong: dict[str, Any]) -> None:
    places = {CheckpointManager: [tmp_path / "run"], Tier: [tmp_path / "fast"]}.get(make, [])
    with pytest.raises(ValueError, match="|".join(wrong)):
        make(*places, **wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["retention", "schedule", "tier"])
def test_what_is_no_policy_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: expected a {name.title()}, or None, got dict"):
        CheckpointManager(tmp_path, **{name: {}})
