"""A manager whose directory is in an object store: steps, retention, metrics, going back."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import pytest
import torch

import vescale_ckpt
from vescale_ckpt import CheckpointManager
from vescale_ckpt._storage.directory import directory_at

pytest.importorskip("obstore", reason="object stores need obstore")


@pytest.fixture(params=["memory", "server"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/run"
    prefix: str = request.getfixturevalue("bucket_url")
    return prefix


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(step))}


def test_a_run(url: str) -> None:
    with CheckpointManager(url, max_to_keep=2, best="loss", best_mode="min") as manager:
        assert manager.latest() is None and manager.steps() == []
        for step, loss in [(1, 0.5), (2, 0.3), (3, 0.9), (4, 0.4)]:
            manager.save(step, state(step), metrics={"loss": loss})
            manager.wait()
        assert manager.steps() == [2, 4] and manager.latest() == 4
        assert manager.metrics(2) == {"loss": 0.3}
    with pytest.raises(FileNotFoundError):
        directory_at(f"{url}/step-3").names()
    with CheckpointManager(url) as manager:
        target = state(0)
        assert manager.restore(target) == 4
        assert torch.equal(target["w"], state(4)["w"])
        assert manager.restore(target, step=2) == 2
        # A lower step than the last begins a branch.
        manager.save(3, state(33))
        manager.wait()
        assert manager.latest() == 3
        assert manager.restore(target) == 3 and target["w"][0] == 33


def test_a_damaged_checkpoint_is_passed_over(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(url, async_checkpoint=False) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
        storage = directory_at(f"{url}/step-2")
        (name,) = (name for name in storage.names() if name.endswith(".distcp"))
        storage.remove(name)
        with caplog.at_level(logging.WARNING):
            assert manager.latest() == 1
            assert manager.restore(state(0)) == 1
    assert "passed over" in caplog.text


def test_a_save_that_died_is_no_checkpoint_and_stays_for_a_day(url: str) -> None:
    directory_at(f"{url}/step-7").write("__0_01234567.distcp", b"half")
    with CheckpointManager(url, max_to_keep=1, async_checkpoint=False) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
        assert manager.steps() == [2]
    # It may be that of a save under way: there are no locks to ask.
    assert directory_at(f"{url}/step-7").names() == ["__0_01234567.distcp"]


def test_a_run_moves_from_a_disk_to_a_store(url: str, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", async_checkpoint=False) as manager:
        manager.save(1, state(1))
    for file in (tmp_path / "run" / "step-1").iterdir():
        directory_at(f"{url}/step-1").write(file.name, file.read_bytes())
    assert CheckpointManager(url).latest() == 1
    assert vescale_ckpt.verify(f"{url}/step-1").ok
