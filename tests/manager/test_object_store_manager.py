"""A manager whose directory is in an object store: steps, retention, metrics, going back."""

from __future__ import annotations

import errno
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager
from vescale_ckpt._storage.directory import directory_at

pytest.importorskip("obstore", reason="object stores need obstore")


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


@pytest.mark.parametrize(
    ("action", "text", "number"),
    [
        ("denied", "access was denied", errno.EACCES),
        ("no_bucket", "no such bucket", errno.ENXIO),
        ("expired", "credentials have expired", errno.EACCES),
    ],
)
def test_a_store_that_cannot_be_read_is_a_named_error(
    fault_proxy: Any, bucket_url: str, action: Any, text: str, number: int
) -> None:
    from fault_proxy import Rule

    with CheckpointManager(bucket_url, async_checkpoint=False) as manager:
        manager.save(1, state(1))
    fault_proxy.add(Rule(action, times=100_000))
    manager = CheckpointManager(bucket_url, async_checkpoint=False)  # raises nothing: other ranks would not know
    for call in (lambda: manager.restore(state(0)), manager.latest, manager.steps):
        with pytest.raises(CheckpointError, match=text) as raised:
            call()
        assert getattr(raised.value, "errno", None) == number and "Error: s3://" not in str(raised.value)
    with pytest.raises(CheckpointError, match=text):
        manager.restore(state(0), step=1)
    with pytest.raises(CheckpointError, match=text):
        manager.save(2, state(2))
    fault_proxy.clear()
    assert manager.restore(state(0)) == 1
    manager.save(2, state(2))
    assert manager.steps() == [1, 2]


# --- With a local directory before the store


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "fast"


def test_steps_are_uploaded_and_restored_from_where_they_are(url: str, local: Path) -> None:
    with CheckpointManager(url, local=local, max_to_keep=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step), metrics={"loss": float(step)}, extra_files={"config.json": b"{}"})
        manager.wait()
        assert manager.latest() == 3
        assert set(manager.tiers()) >= {2, 3}
    assert manager.tiers()[3] == "remote"
    assert CheckpointManager(url).latest() == 3
    assert directory_at(f"{url}/step-3").read("config.json") == b"{}"
    assert vescale_ckpt.verify(f"{url}/step-3").ok

    # A new node: the local directory is empty.
    shutil.rmtree(local)
    with CheckpointManager(url, local=local, max_to_keep=2) as manager:
        target = state(0)
        assert manager.steps() == manager.steps() and manager.metrics(3) == {"loss": 3.0}
        assert manager.restore(target) == 3 and torch.equal(target["w"], state(3)["w"])
        manager.save(4, state(4))
        manager.wait()
        assert manager.restore(target) == 4
    assert set(manager.tiers().values()) == {"remote"}
    assert CheckpointManager(url).latest() == 4
    # A damaged local one: the store has it whole.
    (data,) = (local / "step-4").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-5000])
    with CheckpointManager(url, local=local) as manager:
        target = state(0)
        assert manager.restore(target) == 4 and target["w"][0] == 4
        assert manager.restore(target, step=3) == 3


def test_going_back_uploads_the_step_again(url: str, local: Path) -> None:
    with CheckpointManager(url, local=local, async_checkpoint=False) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
    with CheckpointManager(url, local=local, async_checkpoint=False) as manager:
        manager.restore(state(0), step=1)
        manager.save(2, state(22))
    shutil.rmtree(local)
    target = state(0)
    assert CheckpointManager(url, local=local).restore(target) == 2 and target["w"][0] == 22


def test_a_store_that_is_away_does_not_stop_training(
    fault_proxy: Any, bucket_url: str, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fault_proxy import Rule

    monkeypatch.setenv("VESCALE_CKPT_OBJECT_STORE_TIMEOUT", "10")
    manager = CheckpointManager(bucket_url, local=local, async_checkpoint=False)
    fault_proxy.add(Rule("denied", kind="put", path="step-", times=100_000))
    manager.save(1, state(1))
    manager.save(2, state(2))
    assert set(manager.tiers().values()) <= {"local", "uploading"}
    with pytest.raises(CheckpointError, match="access was denied"):
        manager.close()
    assert manager.tiers() == {1: "local", 2: "local"}
    fault_proxy.clear()
    fault_proxy.add(Rule("denied", times=100_000))  # all requests
    manager = CheckpointManager(bucket_url, local=local, async_checkpoint=False)
    assert manager.restore(state(0)) == 2
    manager.save(3, state(3))
    with pytest.raises(CheckpointError, match="access was denied"):
        manager.close()
    fault_proxy.clear()
    with CheckpointManager(bucket_url, local=local) as manager:  # goes on with what was left
        pass
    assert manager.tiers() == {1: "remote", 2: "remote", 3: "remote"}


def test_an_upload_is_slow_on_purpose_and_seen(url: str, local: Path) -> None:
    large = {"w": torch.zeros(10 << 20)}
    with CheckpointManager(url, local=local, upload_bytes_per_second=40 << 20, async_checkpoint=False) as manager:
        manager.save(1, large)
        until = time.monotonic() + 30
        while manager.tiers() != {1: "uploading"} and time.monotonic() < until:
            time.sleep(0.01)
        assert manager.tiers() == {1: "uploading"}
    assert manager.tiers() == {1: "remote"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"directory": "/tmp/a", "local": "/tmp/b"},
        {"directory": "memory://a", "local": "memory://b"},
        {"directory": "memory://a", "upload_bytes_per_second": 5},
    ],
)
def test_tiers_are_a_disk_and_a_store(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="local"):
        CheckpointManager(**arguments)
