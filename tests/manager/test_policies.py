"""Policies of a manager that users write: which steps are due, which stay, and which become durable."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from vescale_ckpt import CheckpointError, CheckpointManager, Retention, Schedule, Tier
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


@pytest.mark.parametrize(
    "keeps",
    [
        list,  # the checkpoints themselves
        lambda found: [checkpoint.step < 2 for checkpoint in found],
        lambda found: [str(checkpoint.step) for checkpoint in found],
        lambda found: None,
        lambda found: found.clear(),
    ],
)
def test_nothing_is_removed_if_a_rule_returns_no_steps(keeps: Callable[[Any], Any]) -> None:
    class Wrong(Retention):
        def keeps(self, checkpoints: Sequence[Candidate]) -> Collection[int]:
            found: Collection[int] = keeps(checkpoints)
            return found

    with pytest.raises((TypeError, AttributeError)):
        Wrong().surplus([Candidate(1), Candidate(2), Candidate(3)])


def test_steps_of_numpy_and_torch_are_steps() -> None:
    class Tensors(Retention):
        def keeps(self, checkpoints: Sequence[Candidate]) -> Collection[Any]:
            return [torch.tensor(1), np.uint8(2)]

    assert Tensors(pinned=[9, 3]).surplus([*map(Candidate, range(6))]) == [0, 4]
    found = [*map(Candidate, (300, 600, 900, 1000))]
    assert Retention(np.uint8(2), np.uint8(3)).surplus(found) == []  # type: ignore[arg-type]
    assert Retention(np.uint8(2)).surplus(found) == [300, 600]  # type: ignore[arg-type]
    assert Schedule(np.uint8(100)).is_due(300)  # type: ignore[arg-type]
    assert Tier("fast", durable_interval_steps=np.uint8(100)).becomes_durable(300)  # type: ignore[arg-type]


class Raises(Retention):
    def keeps(self, checkpoints: Sequence[Candidate]) -> Collection[int]:
        raise ZeroDivisionError


def test_a_rule_that_raises_hinders_the_removal_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`on_commit` is called, and `close` says that nothing is uploaded: the rule chooses among uploads, too."""
    told: list[int] = []
    manager = CheckpointManager(
        tmp_path / "durable",
        tier=Tier(tmp_path / "fast"),
        retention=Raises(),
        async_checkpoint=False,
        on_commit=lambda step, path: told.append(step),
    )
    for step in (1, 2):
        manager.save(step, {"w": torch.ones(8)})
    with pytest.raises(CheckpointError, match=r"steps .*2 could not be uploaded"):
        manager.close()
    manager.close()
    assert manager.steps() == told == [1, 2]
    assert caplog.text.count("that step 2 supersedes stay until the next save") == 1


@pytest.mark.parametrize("answer", [np.bool_(True), torch.tensor(True), 1 << 70])
@pytest.mark.parametrize("seconds", [None, 1000.0])
def test_an_answer_of_another_type_counts_as_true(tmp_path: Path, answer: Any, seconds: float | None) -> None:
    class Answers(Schedule):
        def is_due(self, step: int) -> bool:
            return answer if step else None  # type: ignore[return-value]

    with CheckpointManager(tmp_path, schedule=Answers(seconds=seconds)) as manager:
        assert [manager.should_save(step) for step in (0, 1)] == [False, True]


def test_close_does_not_wait_for_a_save_that_could_not_be_reserved(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with (
        mock.patch.object(manager._folders, "reserve", side_effect=ZeroDivisionError),
        pytest.raises(ZeroDivisionError),
    ):
        manager.save(1, {"w": torch.ones(8)})
    manager.close()


def test_a_manager_that_cannot_be_made_leaves_the_signal_as_it_was(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", tier=Tier(tmp_path / "fast")) as manager:
        manager.save(1, {"w": torch.ones(8)})
    before, schedule = signal.getsignal(signal.SIGTERM), Schedule(signal=signal.SIGTERM)
    with pytest.raises(CheckpointError, match=r"give another Tier\(local=\)"):
        CheckpointManager(tmp_path / "other", tier=Tier(tmp_path / "fast"), schedule=schedule)
    assert signal.getsignal(signal.SIGTERM) is before


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
            (Tier, {name: value})
            for name in ("copies", "copy_bytes_per_second", "upload_bytes_per_second")
            for value in (-1, 1.5, True, "1")
        ),
        *(
            (make, {name: value})
            for make, names in (
                (CheckpointManager, ("max_to_keep", "save_interval_steps")),
                (Retention, ("newest", "period")),
                (Schedule, ("steps",)),
                (Tier, ("durable_interval_steps",)),
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
