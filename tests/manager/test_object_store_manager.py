"""A manager whose directory is in an object store: steps, retention, metrics, going back."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import stores
from harness.fault_proxy import Rule

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager, Tier
from vescale_ckpt._checkpoint.native import step_order
from vescale_ckpt._checkpoint.native.extra_copies import ExtraFiles
from vescale_ckpt._storage import object_clients
from vescale_ckpt._storage.open_storage import storage_at
from vescale_ckpt.manager import step_directories
from vescale_ckpt.manager import tier as tiers
from vescale_ckpt.manager.clean_up import clean_up

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
    assert not stores.names(f"{url}/step-3")
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


# --- What the store does not say is not taken for an answer


def test_nothing_begins_anew_because_reads_are_refused(
    fault_proxy: Any, bucket_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists and HEAD are answered, GET is not: by a policy, or while the store throttles."""
    with CheckpointManager(bucket_url, async_checkpoint=False, max_to_keep=2) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    monkeypatch.setenv("VESCALE_CKPT_OBJECT_STORE_TIMEOUT", "1")
    fault_proxy.add(Rule("slow_down", kind="get", times=100_000))
    manager = CheckpointManager(bucket_url, async_checkpoint=False, max_to_keep=2)
    with pytest.raises(CheckpointError, match="throttles"):
        manager.latest()
    fault_proxy.clear()
    fault_proxy.add(Rule("denied", kind="get", times=100_000))
    for call in (manager.latest, lambda: manager.restore(state(0))):
        with pytest.raises(CheckpointError, match="access was denied"):
            call()
    report = vescale_ckpt.verify(f"{bucket_url}/step-2")
    assert report.unreadable and not report.damaged and not report.ok and "access was denied" in report.reason
    # Even a job that goes on regardless removes nothing on such knowledge.
    with contextlib.suppress(CheckpointError, OSError):
        clean_up(bucket_url, manager.retention, 3, frozenset({1, 2}))
    fault_proxy.clear()
    assert manager.steps() == [1, 2]
    assert manager.restore(state(0)) == 2


def test_the_best_step_stays_if_its_metrics_cannot_be_read(fault_proxy: Any, bucket_url: str) -> None:
    options: Any = {"max_to_keep": 2, "best": "loss", "best_mode": "min", "async_checkpoint": False}
    manager = CheckpointManager(bucket_url, **options)
    manager.save(1, state(1), metrics={"loss": 0.1})
    manager.save(2, state(2), metrics={"loss": 0.5})
    fault_proxy.add(Rule("denied", kind="get", path=r"step-1/.*metrics", times=100_000))
    manager.save(3, state(3), metrics={"loss": 0.4})
    assert manager.steps() == [1, 2, 3]
    with pytest.raises(CheckpointError, match="access was denied"):
        manager.metrics(1)
    fault_proxy.clear()
    manager.save(4, state(4), metrics={"loss": 0.6})
    assert manager.steps() == [1, 4] or manager.steps() == [1, 3, 4]
    manager.close()


def test_a_branch_that_cannot_be_read_is_an_error(fault_proxy: Any, bucket_url: str) -> None:
    """Without it a step that was abandoned would count as the newest."""
    with CheckpointManager(bucket_url, async_checkpoint=False) as manager:
        manager.save(1, state(1))
        manager.save(3, state(3))
        manager.restore(state(0), step=1)
        manager.save(2, state(2))
        assert manager.latest() == 2
    fault_proxy.add(Rule("denied", kind="get", path=r"\.order", times=100_000))
    manager = CheckpointManager(bucket_url, async_checkpoint=False)
    with pytest.raises(CheckpointError, match="access was denied"):
        manager.latest()


@pytest.mark.parametrize("action", ["flip", "shorten"])
def test_metrics_that_change_on_the_way_keep_the_best_step(fault_proxy: Any, bucket_url: str, action: Any) -> None:
    options: dict[str, Any] = {"max_to_keep": 1, "best": "loss", "best_mode": "min", "async_checkpoint": False}
    manager = CheckpointManager(bucket_url, **options)
    manager.save(1, state(1), metrics={"loss": 0.1})
    rule = Rule(action, kind="get", path=r"step-1/.*metrics")
    fault_proxy.add(rule)
    manager.save(2, state(2), metrics={"loss": 0.5})
    assert rule.hits == 1 and 1 in manager.steps(), "it is the best"
    manager.save(3, state(3), metrics={"loss": 0.4})
    assert 1 in manager.steps(), "what came is not kept"


@pytest.mark.parametrize("path", [r"\.metadata$", r"\.distcp$"])
def test_one_flipped_bit_costs_no_checkpoint(
    fault_proxy: Any, bucket_url: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(bucket_url, async_checkpoint=False) as manager:
        for step in (1, 2):
            manager.save(step, {**state(step), "o": {"step": step}})
    for name in stores.names(f"{bucket_url}/step-2"):
        if name == ".metadata.index":  # else nobody reads .metadata
            stores.remove(f"{bucket_url}/step-2", name)
    for skip in range(4):
        fault_proxy.add(Rule("flip", kind="get", path="step-2/.*" + path, skip=skip))
        target = {**state(0), "o": {"step": 0}}
        assert CheckpointManager(bucket_url).restore(target) == 2 and target["w"][0] == 2
        fault_proxy.clear()
        fault_proxy.add(Rule("flip", kind="get", path="step-2/.*" + path, skip=skip))
        assert vescale_ckpt.verify(f"{bucket_url}/step-2").ok
        fault_proxy.clear()
    assert "is read again" in caplog.text


def test_a_retired_checkpoint_goes_with_few_requests(fault_proxy: Any, bucket_url: str) -> None:
    with CheckpointManager(bucket_url, async_checkpoint=False, max_to_keep=1) as manager:
        manager.save(1, state(1))
        for rank in range(1, 30):
            stores.write(f"{bucket_url}/step-1", f"__{rank}_01234567.distcp", b"")
        fault_proxy.clear()
        manager.save(2, state(2))
        assert manager.steps() == [2] and fault_proxy.count("delete_many") + fault_proxy.count("delete") < 8
        # A save that replaces a checkpoint of many files.
        manager.save(3, state(3))
        fault_proxy.clear()
        manager.save(3, state(4))
        assert manager.restore(state(0)) == 3


# --- With a local directory before the store


def test_orphans_of_a_folder_into_which_another_process_saves_now_stay(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.write(f"{url}/step-7", "__0_01234567.distcp", b"half")
    monkeypatch.setattr(step_directories, "SAVE_GRACE", -1.0)
    exclusive = step_directories.exclusive

    def after_a_save_has_begun(path: str) -> Any:
        stores.write(path, "__0_89abcdef.distcp", b"of a save under way")
        return exclusive(path)

    with monkeypatch.context() as patch:
        patch.setattr(step_directories, "exclusive", after_a_save_has_begun)
        assert step_directories.remove_orphans(url) == []
    assert stores.data_files(f"{url}/step-7") == {"__0_01234567.distcp", "__0_89abcdef.distcp"}
    assert step_directories.remove_orphans(url) == [7]
    assert stores.names(f"{url}/step-7") == set()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "fast"


def test_a_save_at_the_end_of_the_interpreter_asks_about_steps_without_threads() -> None:
    script = """
import atexit, torch
from vescale_ckpt import CheckpointManager
manager = CheckpointManager("memory://bucket/run", async_checkpoint=False)
for step in (1, 2):
    manager.save(step, {"a": torch.ones(2)})
later = CheckpointManager("memory://bucket/run", async_checkpoint=False)
atexit.register(lambda: (later.save(3, {"a": torch.ones(2)}), print(later.steps())))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[1, 2, 3]\n"


def test_questions_about_steps_keep_the_callers_limit_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    root, limits = "memory://bucket/limits", []
    storage_at(root + "/step-1").write(".metadata", b"x")
    asked = step_order.has_metadata

    def note(path: str, rank: int | None) -> bool:
        limits.append(object_clients._patience())
        return asked(path, rank)

    monkeypatch.setattr(step_order, "has_metadata", note)
    with storage_at(root).limit_wait(4):
        assert step_order.complete_steps(root) == [1]
    assert limits == [4]


def test_steps_are_uploaded_and_restored_from_where_they_are(url: str, local: Path) -> None:
    with CheckpointManager(url, tier=Tier(local), max_to_keep=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step), metrics={"loss": float(step)}, extra_files={"config.json": b"{}"})
        manager.wait()
        assert manager.latest() == 3
        assert set(manager.tiers()) >= {2, 3}
    assert manager.tiers()[3] == "durable"
    assert CheckpointManager(url).latest() == 3
    assert stores.read(f"{url}/step-3", "config.json") == b"{}"
    assert vescale_ckpt.verify(f"{url}/step-3").ok

    # A new node: the local directory is empty.
    shutil.rmtree(local)
    with CheckpointManager(url, tier=Tier(local), max_to_keep=2) as manager:
        target = state(0)
        assert manager.steps() == [2, 3] and manager.metrics(3) == {"loss": 3.0}
        assert manager.restore(target) == 3 and torch.equal(target["w"], state(3)["w"])
        manager.save(4, state(4))
        manager.wait()
        assert manager.restore(target) == 4
    assert set(manager.tiers().values()) == {"durable"}
    assert CheckpointManager(url).latest() == 4
    # A damaged local one: the store has it whole.
    (data,) = (local / "step-4").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-5000])
    with CheckpointManager(url, tier=Tier(local)) as manager:
        target = state(0)
        assert manager.restore(target) == 4 and target["w"][0] == 4
        assert manager.restore(target, step=3) == 3


def test_copies_of_extra_files_that_a_save_did_not_come_to_are_uploaded(
    url: str, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExtraFiles, "publish", lambda self: None)
    with CheckpointManager(url, tier=Tier(local)) as manager:
        manager.save(1, state(1), extra_files={"config.json": b"{}"})
        manager.wait()
    assert stores.read(f"{url}/step-1", "config.json") == (local / "step-1" / "config.json").read_bytes() == b"{}"


def test_going_back_uploads_the_step_again(url: str, local: Path) -> None:
    with CheckpointManager(url, tier=Tier(local), async_checkpoint=False) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
    with CheckpointManager(url, tier=Tier(local), async_checkpoint=False) as manager:
        manager.restore(state(0), step=1)
        manager.save(2, state(22))
    shutil.rmtree(local)
    target = state(0)
    assert CheckpointManager(url, tier=Tier(local)).restore(target) == 2 and target["w"][0] == 22


def test_a_store_that_is_away_does_not_stop_training(
    fault_proxy: Any, bucket_url: str, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VESCALE_CKPT_OBJECT_STORE_TIMEOUT", "10")
    manager = CheckpointManager(bucket_url, tier=Tier(local), async_checkpoint=False)
    fault_proxy.add(Rule("denied", kind="put", path="step-", times=100_000))
    manager.save(1, state(1))
    manager.save(2, state(2))
    assert set(manager.tiers().values()) <= {"local", "uploading"}
    with pytest.raises(CheckpointError, match="access was denied"):
        manager.close()
    assert manager.tiers() == {1: "local", 2: "local"}
    fault_proxy.clear()
    fault_proxy.add(Rule("denied", times=100_000))  # all requests
    manager = CheckpointManager(bucket_url, tier=Tier(local), async_checkpoint=False)
    assert manager.restore(state(0)) == 2
    manager.save(3, state(3))
    with pytest.raises(CheckpointError, match="access was denied"):
        manager.close()
    fault_proxy.clear()
    with CheckpointManager(bucket_url, tier=Tier(local)) as manager:  # goes on with what was left
        pass
    assert manager.tiers() == {1: "durable", 2: "durable", 3: "durable"}


def test_a_job_goes_on_from_its_own_disk_while_the_store_throttles(
    fault_proxy: Any, bucket_url: str, local: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(bucket_url, tier=Tier(local), async_checkpoint=False) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
    monkeypatch.setenv("VESCALE_CKPT_OBJECT_STORE_TIMEOUT", "30")
    monkeypatch.setattr(tiers, "_PATIENCE", 1)
    fault_proxy.add(Rule("slow_down", times=100_000))
    manager = CheckpointManager(bucket_url, tier=Tier(local), async_checkpoint=False)
    assert manager.latest() == 2 and manager.restore(state(0)) == 2
    assert caplog.text.count("do not count now") == 1, "it was asked once"
    fault_proxy.clear()
    with contextlib.suppress(CheckpointError):  # of the uploader, who asked the store, too
        manager.close()


def test_without_local_steps_a_store_that_is_away_is_an_error(fault_proxy: Any, bucket_url: str, local: Path) -> None:
    with CheckpointManager(bucket_url, async_checkpoint=False) as manager:
        manager.save(1, state(1))
    fault_proxy.add(Rule("denied", times=100_000))
    manager = CheckpointManager(bucket_url, tier=Tier(local), async_checkpoint=False)
    for call in (manager.steps, manager.tiers, manager.latest, lambda: manager.restore(state(0))):
        with pytest.raises(CheckpointError, match="access was denied"):
            call()
    fault_proxy.clear()
    # Not one step back either, where a step is only in the store, and only its data are refused.
    fault_proxy.add(Rule("denied", kind="get", path="step-1/.*distcp", times=100_000))
    with pytest.raises(CheckpointError, match="access was denied"):
        manager.restore(state(0))
    fault_proxy.clear()
    assert manager.restore(state(0)) == 1
    manager.close()


def test_an_upload_is_slow_on_purpose_and_seen(url: str, local: Path) -> None:
    large = {"w": torch.zeros(10 << 20)}
    with CheckpointManager(url, tier=Tier(local, upload_bytes_per_second=40 << 20), async_checkpoint=False) as manager:
        manager.save(1, large)
        until = time.monotonic() + 30
        while manager.tiers() != {1: "uploading"} and time.monotonic() < until:
            time.sleep(0.01)
        assert manager.tiers() == {1: "uploading"}
    assert manager.tiers() == {1: "durable"}


@pytest.mark.parametrize(("directory", "local"), [("/tmp/a", "/tmp/a"), ("memory://a", "memory://b"), ("/tmp/a", None)])
def test_tiers_are_a_disk_and_another_place(directory: str, local: Any) -> None:
    with pytest.raises(ValueError, match="local"):
        CheckpointManager(directory, tier=Tier(local))


def test_a_local_folder_of_another_run_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = tmp_path / "local"
    for place in ("one", "other"):
        with CheckpointManager(tmp_path / place, tier=Tier(local) if place == "one" else None) as manager:
            manager.save(1, state(1))
    with pytest.raises(CheckpointError, match=r"has steps of run .*/one.*Move that folder away"):
        CheckpointManager(tmp_path / "other", tier=Tier(local))
    shutil.copy(tmp_path / "one" / ".run", tmp_path / "other")  # as the error says
    for is_known in (True, False):
        with CheckpointManager(tmp_path / "other", tier=Tier(local)) as manager:
            assert manager.restore(state(0)) == 1
        assert is_known != ("without an id of their run" in caplog.text)
        for root in (local, tmp_path / "other"):
            (root / ".run").unlink(missing_ok=True)
