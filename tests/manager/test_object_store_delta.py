"""Delta saves in object stores: steps name objects of older ones, and retention keeps what they name."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from harness import stores
from harness.saves import loads
from harness.states import blank, same
from harness.stores import data_files, names
from test_manager_delta import lora

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager, CorruptCheckpointError, convert
from vescale_ckpt._checkpoint.native.commit_metadata import remove_orphans
from vescale_ckpt._checkpoint.native.file_names import LEASE_MARKER, METADATA_NAME
from vescale_ckpt._convert.copy import copy
from vescale_ckpt._storage import object_leases, orphans
from vescale_ckpt._storage.open_storage import storage_at
from vescale_ckpt._storage.orphans import SAVE_GRACE
from vescale_ckpt.cli import main
from vescale_ckpt.manager import step_directories

pytest.importorskip("obstore", reason="object stores need obstore")
State = dict[str, Any]


def save_steps(url: str, steps: range, frozen: int = 0, **options: Any) -> None:
    with CheckpointManager(url, delta=True, **options) as manager:
        for step in steps:
            manager.save(step, lora(step, frozen))
            manager.wait()


def test_a_removed_step_leaves_the_objects_that_others_name(url: str, tmp_path: Path) -> None:
    save_steps(url, range(4), max_to_keep=2)
    manager = CheckpointManager(url)
    assert manager.steps() == [2, 3] and names(f"{url}/step-1") == set()
    (kept,) = data_files(f"{url}/step-0")
    assert names(f"{url}/step-0") == {kept, LEASE_MARKER}
    for step in (2, 3):
        path = f"{url}/step-{step}"
        assert loads(path, lora(step)) and vescale_ckpt.verify(path).ok and vescale_ckpt.verify(path, quick=True).ok
        assert any(kept in name for name in vescale_ckpt.inspect(path).files)
        assert sum(stores.size(path, name) for name in data_files(path)) < 100_000, "written again"
    values = blank(lora(3))
    assert manager.restore(values) == 3 and same(values, lora(3))
    # A copy needs no other step, and stock DCP reads it.
    copy(f"{url}/step-3", tmp_path / "copy")
    values = blank(lora(3))
    dcp.load(values, checkpoint_id=tmp_path / "copy", no_dist=True)
    assert same(values, lora(3))
    copy(f"{url}/step-3", f"{url}/copy")
    stores.remove(f"{url}/step-0", kept)
    assert loads(f"{url}/copy", lora(3))
    with pytest.raises(CorruptCheckpointError, match="step-0"):
        loads(f"{url}/step-3", lora(3))


def test_a_step_that_is_saved_again_keeps_what_others_name(url: str) -> None:
    vescale_ckpt.save(f"{url}/step-0", lora(0), base=f"{url}/step-0")
    stats = vescale_ckpt.save(f"{url}/step-1", lora(1), base=f"{url}/step-0").result()
    assert stats.reused_bytes == 160_000
    vescale_ckpt.save(f"{url}/step-0", lora(0, 1), base=f"{url}/step-1")
    assert loads(f"{url}/step-0", lora(0, 1)) and loads(f"{url}/step-1", lora(1))
    # Step 1 is replaced by one that names nothing: what it named alone goes with the next save into step 0.
    vescale_ckpt.save(f"{url}/step-1", lora(1))
    assert loads(f"{url}/step-0", lora(0, 1)) and loads(f"{url}/step-1", lora(1))
    assert not [name for name in names(f"{url}/step-0") if ".user." in name or ".remover." in name]


def test_objects_are_kept_where_a_tool_dropped_the_mark(url: str) -> None:
    for step in range(2):
        vescale_ckpt.save(f"{url}/step-{step}", lora(step), base=f"{url}/step-0")
    stores.remove(f"{url}/step-0", LEASE_MARKER)
    vescale_ckpt.save(f"{url}/step-0", lora(7, 1))
    assert loads(f"{url}/step-0", lora(7, 1)) and loads(f"{url}/step-1", lora(1))


def test_a_checkpoint_of_a_store_has_its_base_there(tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}/run"
    vescale_ckpt.save(tmp_path / "step-0", lora(0), base=tmp_path / "step-0")
    with pytest.raises(CheckpointError, match="same directory"):
        vescale_ckpt.save(f"{url}/step-1", lora(1), base=tmp_path / "step-0")


def test_users_and_removers_keep_out_of_each_others_way(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_leases, "_REMOVAL_SECONDS", 0.3)
    directory = storage_at(f"{url}/step-0")
    directory.keep_marker(LEASE_MARKER)
    lease = object_leases.lease(directory, LEASE_MARKER, SAVE_GRACE, make=True)
    with object_leases.removing(directory, LEASE_MARKER, SAVE_GRACE) as unused:
        assert not unused
        with pytest.raises(CheckpointError, match="being cleaned up"):
            object_leases.lease(directory, LEASE_MARKER, SAVE_GRACE, make=True)
    object_leases.lease(directory, LEASE_MARKER, SAVE_GRACE, make=True)
    lease.release()
    lease.release()
    with object_leases.removing(directory, LEASE_MARKER, SAVE_GRACE) as unused:
        assert not unused
    # The other has died: its lease counts for a day.
    with object_leases.removing(directory, LEASE_MARKER, 0.0) as unused:
        assert unused
    assert directory.names() == [LEASE_MARKER]


def test_a_save_waits_for_a_remover(url: str) -> None:
    vescale_ckpt.save(f"{url}/step-0", lora(0), base=f"{url}/step-0")
    inside = threading.Event()

    def remove() -> None:
        with object_leases.removing(storage_at(f"{url}/step-0"), LEASE_MARKER, SAVE_GRACE):
            inside.set()
            time.sleep(0.5)

    thread = threading.Thread(target=remove)
    thread.start()
    inside.wait()
    assert vescale_ckpt.save(f"{url}/step-1", lora(1), base=f"{url}/step-0").result().reused_bytes == 160_000
    thread.join()
    assert loads(f"{url}/step-1", lora(1))


def test_a_running_save_keeps_what_it_may_name(url: str) -> None:
    save_steps(url, range(2))
    with CheckpointManager(url, max_to_keep=1, async_checkpoint=False) as manager:
        lease = object_leases.lease(storage_at(f"{url}/step-0"), LEASE_MARKER, SAVE_GRACE, make=True)
        manager.save(2, lora(2, 7))
        assert manager.steps() == [0, 2], "step 1 is not used"
        assert remove_orphans(f"{url}/step-0", {next(iter(data_files(f"{url}/step-0")))}) == []
        lease.release()
        manager.save(3, lora(3, 7))
        assert manager.steps() == [3]
    assert not data_files(f"{url}/step-0"), "nobody names it"


def test_prune_leaves_what_kept_steps_name(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_steps(url, range(4))
    assert main(["prune", url, "--keep", "2", "--dry-run"]) == 0
    assert "would remove 2, 2 stay" in capsys.readouterr().out and names(f"{url}/step-1")
    assert main(["prune", url, "--keep", "2"]) == 0
    assert "removed 2, 2 stay" in capsys.readouterr().out
    (kept,) = data_files(f"{url}/step-0")
    assert names(f"{url}/step-0") == {kept, LEASE_MARKER} and not names(f"{url}/step-1")
    assert loads(f"{url}/step-2", lora(2)) and loads(f"{url}/step-3", lora(3))
    # A base of its own from now on: then nobody names the old object.
    save_steps(url, range(4, 6), frozen=1)
    assert main(["prune", url, "--keep", "2"]) == 0
    assert loads(f"{url}/step-4", lora(4, 1)) and loads(f"{url}/step-5", lora(5, 1))
    assert CheckpointManager(url).steps() == [4, 5]
    assert not any(names(f"{url}/step-{step}") for step in range(1, 4)) and kept in names(f"{url}/step-0")
    with pytest.MonkeyPatch.context() as patch:  # it goes when it is a day old
        patch.setattr(step_directories, "SAVE_GRACE", 0.0)
        patch.setattr(orphans, "SAVE_GRACE", 0.0)
        assert main(["repair", url]) == 0
    assert not data_files(f"{url}/step-0")
    assert loads(f"{url}/step-5", lora(5, 1))


def test_conversions_and_copies_of_a_step_need_no_other(url: str, tmp_path: Path) -> None:
    save_steps(url, range(2))
    step, expected = f"{url}/step-1", lora(1)
    convert(step, tmp_path / "dcp", format="dcp")
    convert(step, f"{url}/dcp", format="dcp")
    assert main(["convert", step, f"{url}/model", "--format", "safetensors"]) == 0
    assert main(["copy", step, f"{url}/copy"]) == 0
    assert main(["copy", step, str(tmp_path / "copy")]) == 0
    convert(step, step + "-again", format="dcp")
    for name in data_files(f"{url}/step-0"):
        stores.remove(f"{url}/step-0", name)
    for path in (tmp_path / "dcp", f"{url}/dcp", f"{url}/copy", tmp_path / "copy", step + "-again"):
        assert loads(str(path), expected) and vescale_ckpt.verify(path).ok, path
    tensors = {name: expected[name] for name in ("frozen", "adapter")}
    assert loads(f"{url}/model", tensors)
    # A damaged base is found by whatever reads it.
    for command in (["verify", step], ["copy", step, f"{url}/other"], ["convert", step, f"{url}/one.pt"]):
        assert main(command) != 0
    assert METADATA_NAME not in names(f"{url}/other") and not names(f"{url}/one.pt")
