"""`CheckpointManager(delta=True)`: retention never removes what a kept step needs, and gives back what none needs."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import saves, steps
from harness.children import fork, killed_before
from harness.files import LEASE_MARKER, LOCK_NAME, METADATA_NAME, data_files, flip, share
from harness.ranks import run_ranks
from harness.states import blank, same

import vescale_ckpt
from vescale_ckpt import CheckpointManager, CorruptCheckpointError
from vescale_ckpt.cli import main
from vescale_ckpt.manager import step_directories

State = dict[str, Any]
EVERY = int(os.environ.get("VESCALE_CKPT_TEST_KILL_EVERY", "4"))  # 1: before each change of a directory


def lora(step: int, frozen: int = 0) -> State:
    """Most of it depends on `frozen` alone."""
    torch.manual_seed(100 + frozen)
    return {"frozen": torch.randn(40_000), "adapter": torch.full((3000,), float(step)), "step": step}


def steps_on_disk(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*") if "." not in path.name)


def loads(root: Path, step: int, state: State) -> bool:
    return saves.loads(root / f"step-{step}", state)


def save_steps(root: Path, steps: range, frozen: int = 0, **options: Any) -> None:
    with CheckpointManager(root, delta=True, **options) as saver:
        for step in steps:
            saver.save(step, lora(step, frozen))


def test_a_removed_step_leaves_the_files_that_others_name(tmp_path: Path) -> None:
    save_steps(tmp_path, range(6), max_to_keep=2)
    manager = CheckpointManager(tmp_path)
    assert manager.steps() == [4, 5] and steps_on_disk(tmp_path) == [0, 4, 5]
    (kept,) = data_files(tmp_path / "step-0")
    assert {path.name for path in (tmp_path / "step-0").iterdir()} <= {kept.name, LEASE_MARKER, LOCK_NAME}
    for step in (4, 5):
        assert loads(tmp_path, step, lora(step)) and vescale_ckpt.verify(tmp_path / f"step-{step}").ok
        values = blank(lora(step))
        dcp.load(values, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
        assert same(values, lora(step))
    values = blank(lora(5))
    assert manager.restore(values) == 5 and same(values, lora(5))
    assert manager.latest(full=True) == 5
    save_steps(tmp_path, range(6, 9), frozen=1, max_to_keep=2)  # nobody needs the old frozen part any more
    assert steps_on_disk(tmp_path) == [6, 7, 8]
    assert all(loads(tmp_path, step, lora(step, 1)) for step in (7, 8))


def test_asynchronous_and_synchronous_saves_write_little(tmp_path: Path) -> None:
    for asynchronous in (True, False):
        root = tmp_path / str(asynchronous)
        with CheckpointManager(root, delta=True, async_checkpoint=asynchronous) as saver:
            stats = [saver.save(step, lora(step)).result() for step in range(3)]  # type: ignore[union-attr]
        assert [of_step.reused_bytes for of_step in stats] == [0, 160_000, 160_000]
        with CheckpointManager(root, delta=True) as saver:  # a new process goes on from what is there
            assert saver.save(3, lora(3)).result().reused_bytes == 160_000  # type: ignore[union-attr]


def test_a_manager_without_delta_keeps_what_others_need(tmp_path: Path) -> None:
    save_steps(tmp_path, range(2), keep_period=1)
    with CheckpointManager(tmp_path, max_to_keep=1) as saver:
        saver.save(1, lora(1, 5))  # replaces the checkpoint that names the first one's file
    assert steps_on_disk(tmp_path) == [1] and loads(tmp_path, 1, lora(1, 5))


def test_a_removed_step_is_saved_again(tmp_path: Path) -> None:
    save_steps(tmp_path, range(3), max_to_keep=1)
    assert steps_on_disk(tmp_path) == [0, 2]
    with CheckpointManager(tmp_path, delta=True) as saver:
        saver.save(0, lora(0), force=True)
        saver.wait()
        assert saver.steps() == [0, 2]
    assert loads(tmp_path, 0, lora(0)) and loads(tmp_path, 2, lora(2))
    assert len(data_files(tmp_path / "step-0")) == 2, "the old file, which step 2 names, and the new one"


def test_any_rule_of_retention_keeps_what_it_needs(tmp_path: Path) -> None:
    rng = random.Random(3)
    for number, options in enumerate(
        [
            {"max_to_keep": 3},
            {"max_to_keep": 2, "keep_period": 4},
            {"max_to_keep": 2, "best": "loss", "best_mode": "min"},
        ]
    ):
        root, frozen, step = tmp_path / str(number), 0, 0
        states: dict[int, State] = {}
        saver = CheckpointManager(root, delta=True, async_checkpoint=rng.random() < 0.5, **options)  # type: ignore[arg-type]
        for _ in range(14):
            frozen += rng.random() < 0.2
            states[step] = lora(step, frozen)
            saver.save(step, states[step], metrics={"loss": rng.random()})
            saver.wait()
            for kept in saver.steps():
                assert loads(root, kept, states[kept])
                assert vescale_ckpt.verify(root / f"step-{kept}", quick=True).ok
            needed = {name.split("/")[1] for kept in saver.steps() for name in files_of(root, kept) if "/" in name}
            only_files = set(steps_on_disk(root)) - set(saver.steps())
            assert {f"step-{kept}" for kept in only_files} <= needed, "space that nobody needs"
            step = max(0, step - 3) if rng.random() < 0.15 else step + 1  # goes back now and then
        saver.close()


def files_of(root: Path, step: int) -> list[str]:
    return list(vescale_ckpt.inspect(root / f"step-{step}").files)


def test_a_step_that_is_being_read_stays_whole(tmp_path: Path) -> None:
    save_steps(tmp_path, range(2))
    lock = share(tmp_path / "step-0" / METADATA_NAME)
    assert lock is not None
    assert step_directories.remove(str(tmp_path), [0]) == []
    assert loads(tmp_path, 0, lora(0))
    lock.release()
    assert step_directories.remove(str(tmp_path), [0]) == [0]
    assert loads(tmp_path, 1, lora(1)) and data_files(tmp_path / "step-0")
    assert step_directories.remove_orphans(str(tmp_path)) == []
    shutil.rmtree(tmp_path / "step-1")
    assert step_directories.remove_orphans(str(tmp_path), dry_run=True) == [0] and steps_on_disk(tmp_path) == [0]
    assert step_directories.remove_orphans(str(tmp_path)) == [0] and not steps_on_disk(tmp_path)


def test_clean_ups_keep_files_where_a_tool_dropped_the_mark(tmp_path: Path) -> None:
    save_steps(tmp_path, range(4), max_to_keep=2)
    for path in tmp_path.glob(f"step-*/{LEASE_MARKER}"):
        path.unlink()
    assert step_directories.remove_orphans(str(tmp_path), dry_run=True) == []
    assert step_directories.remove_orphans(str(tmp_path)) == []
    assert loads(tmp_path, 2, lora(2)) and (tmp_path / "step-0" / LEASE_MARKER).exists()
    (tmp_path / "step-0" / LEASE_MARKER).unlink()
    save_steps(tmp_path, range(4, 5), max_to_keep=1)
    assert loads(tmp_path, 4, lora(4))


def test_without_locks_a_young_mark_keeps_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def no_locks(*_: Any) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    save_steps(tmp_path, range(4), max_to_keep=1)
    assert loads(tmp_path, 3, lora(3))
    assert CheckpointManager(tmp_path).steps() == [0, 1, 2, 3], "a save may be running that names them"
    for path in tmp_path.glob(f"step-*/{LEASE_MARKER}"):
        os.utime(path, (0, 0))
    assert step_directories.remove(str(tmp_path), [0, 1, 2]) == [0, 1, 2]
    assert steps_on_disk(tmp_path) == [0, 3] and loads(tmp_path, 3, lora(3))


@pytest.mark.parametrize("found_by", ["restore", "latest"])
def test_what_is_damaged_is_named_by_no_later_step(
    tmp_path: Path, found_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, range(3))
    flip(data_files(tmp_path / "step-0")[0], 8 * 100_000)  # in the frozen part
    with CheckpointManager(tmp_path, delta=True) as saver:
        if found_by == "restore":
            with pytest.raises(CorruptCheckpointError, match="frozen"):
                saver.restore(blank(lora(0)))
        else:
            assert saver.latest(full=True) is None
        reused = []
        for step in (3, 4, 5):
            handle = saver.save(step, lora(step))
            assert handle is not None
            reused.append(handle.result().reused_bytes)
    assert reused == [0, 0, 160_000] and "damage was found" in caplog.text
    assert all(loads(tmp_path, step, lora(step)) for step in (3, 4, 5))


# --- Kills


#: what changes a directory in a save or a clean-up
CHANGES = [
    *steps.CHANGES_OF_FOLDERS,
    *((os, "unlink"), (os, "rmdir")),
]


def test_a_kill_at_any_step_of_save_and_clean_up_loses_nothing(tmp_path: Path) -> None:
    """Step 3 is saved: 1 is removed whole, of 0 one file stays. Steps 4 and 5 have another frozen part: all goes."""
    killed = 0
    for number in range(0, 1000, EVERY):
        root = tmp_path / str(number)
        with CheckpointManager(root, delta=True, async_checkpoint=False) as saver:
            saver.save(0, lora(9))  # so that step 0 has two files, of which the others name one
        save_steps(root, range(3), keep_period=1, async_checkpoint=False)
        (root / "step-2" / "config.json").write_text("{}")

        def body(root: Path = root, number: int = number) -> None:
            saver = CheckpointManager(root, delta=True, max_to_keep=2, async_checkpoint=False)
            with killed_before(number, CHANGES):
                saver.save(3, lora(3))
                saver.save(4, lora(4, 1))
                saver.save(5, lora(5, 1))
            saver.close()

        _, status = os.waitpid(fork(body), 0)
        found = CheckpointManager(root).steps()
        assert len(found) >= 2
        for step in found:
            assert loads(root, step, lora(step, int(step > 3))), f"step {step}, killed at {number}"
            assert vescale_ckpt.verify(root / f"step-{step}").ok
        save_steps(root, range(6, 8), frozen=2, max_to_keep=2, async_checkpoint=False)
        assert CheckpointManager(root).steps() == [6, 7] and steps_on_disk(root) == [6, 7]
        assert all(loads(root, step, lora(step, 2)) for step in (6, 7))
        shutil.rmtree(root)
        if not os.WIFSIGNALED(status):
            break
        killed += 1
    else:
        pytest.fail("the saves never ended")
    assert killed * EVERY >= 40


# --- Commands


def test_prune_and_repair_know_what_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_steps(tmp_path, range(4))
    assert main(["prune", str(tmp_path), "--keep", "1", "--dry-run"]) == 0
    assert steps_on_disk(tmp_path) == [0, 1, 2, 3]
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert steps_on_disk(tmp_path) == [0, 3] and loads(tmp_path, 3, lora(3))
    assert main(["repair", str(tmp_path)]) == 0
    assert steps_on_disk(tmp_path) == [0, 3] and loads(tmp_path, 3, lora(3))
    assert main(["verify", str(tmp_path / "step-3")]) == 0
    shutil.rmtree(tmp_path / "step-3")
    assert main(["repair", str(tmp_path)]) == 0
    assert steps_on_disk(tmp_path) == []
    capsys.readouterr()


# --- Several ranks


def _save_on_ranks(root: str) -> list[int]:
    written = []
    with CheckpointManager(root, delta=True, max_to_keep=2) as saver:
        for step in range(5):
            handle = saver.save(step, {**lora(step), "own": vescale_ckpt.PerRank(dist.get_rank())})
            assert handle is not None
            written.append(handle.result().reused_bytes)
    return written


def test_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, _save_on_ranks, str(tmp_path))
    assert [a + b for a, b in zip(first, second, strict=True)] == [0, 160_000, 160_000, 160_000, 160_000]
    assert steps_on_disk(tmp_path) == [0, 3, 4]
    for step in (3, 4):
        assert loads(tmp_path, step, lora(step)) and vescale_ckpt.verify(tmp_path / f"step-{step}").ok
