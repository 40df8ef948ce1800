"""`CheckpointManager`: when it saves, what it keeps and removes, what it goes on from, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import faults, steps
from harness.children import fork, wait_for
from harness.files import data_files, flip, flipped, records
from harness.ranks import forked, on_ranks
from harness.states import blank, same, small_state

import vescale_ckpt
from vescale_ckpt import (
    CheckpointError,
    CheckpointManager,
    CorruptCheckpointError,
    IncompatibleStateError,
    LoadPlanner,
    MissingKeysError,
    Retention,
    SaveHandle,
    Schedule,
    StorageReader,
    api,
    verify,
)
from vescale_ckpt._checkpoint.record_reader import ReadOptions
from vescale_ckpt._load.source import Source
from vescale_ckpt._storage import file_system
from vescale_ckpt.manager import save_loop, schedule, step_directories

BOUND = 60.0  # seconds after which something hangs


def steps_in(directory: Path) -> list[int]:
    """Of all directories that are named as checkpoints are."""
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*") if "." not in path.name)


def restored(directory: Path, **options: Any) -> tuple[int, bool]:
    """The step that a new manager restores, and whether the state is what was saved then."""
    with CheckpointManager(directory, **options) as fresh:
        values = blank(small_state(0))
        step = fresh.restore(values)
        return step, same(values, small_state(step))


def save_steps(directory: Path, *steps: int, **options: Any) -> None:
    with CheckpointManager(directory, **options) as saver:
        for step in steps:
            saver.save(step, small_state(step))


# --- When to save


def test_intervals_by_seconds(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(save_loop, "time", schedule.time)
    with CheckpointManager(checkpoint, schedule=Schedule(seconds=10)) as saver:
        saved = []
        for step in range(30):
            if saver.save(step, small_state(step)):
                saved.append(step)
            now += 3
        assert saved == [4, 8, 12, 16, 20, 24, 28]
    with CheckpointManager(checkpoint, schedule=Schedule(seconds=10, steps=5)) as saver:
        assert saver.save(30, small_state(30)) is not None  # either is reason enough
        assert saver.save(31, small_state(31)) is None


def test_calls_that_make_no_sense(checkpoint: Path) -> None:
    saver = CheckpointManager(checkpoint)
    with pytest.raises(ValueError, match="expected a number from 0 on"):
        saver.save(-1, {})
    for step in (1.5, "1", True, None):
        with pytest.raises(TypeError, match="step: expected a whole number, got"):
            saver.save(step, {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a number"):
        saver.save(1, {}, metrics={"loss": "low"})
    saver.close()
    saver.close()
    with pytest.raises(ValueError, match="closed"):
        saver.save(1, {})
    assert not checkpoint.exists()


# --- What stays


@pytest.mark.parametrize(("mode", "kept"), [("max", [2, 3, 6]), ("min", [4, 5, 6])])
def test_the_best_stay_and_the_newest(checkpoint: Path, mode: Any, kept: list[int]) -> None:
    scores = {1: 0.5, 2: 0.9, 3: 0.7, 4: 0.1, 5: 0.2, 6: float("nan")}
    for step, score in scores.items():  # each time by a manager that knows the metrics from the disk only
        with CheckpointManager(checkpoint, max_to_keep=2, best="score", best_mode=mode) as saver:
            saver.save(step, small_state(step), metrics={"score": torch.tensor(score), "other": -score})
    assert saver.steps() == kept
    assert saver.metrics(kept[0])["score"] == pytest.approx(scores[kept[0]])
    assert saver.metrics(6) == {}


def test_a_metric_that_is_missing_is_told(checkpoint: Path) -> None:
    with CheckpointManager(checkpoint, max_to_keep=1, best="loss", best_mode="min", save_interval_steps=2) as saver:
        saver.save(2, small_state(2), metrics={"loss": 3})
        for metrics in (None, {}, {"val_loss": 1.0}):
            with pytest.raises(ValueError, match="'loss'"):
                saver.save(4, small_state(4), metrics=metrics)
        assert saver.save(5, small_state(5)) is None  # not due, so nothing is asked for
        with pytest.raises(ValueError, match="'loss'"):
            saver.save(5, small_state(5), force=True)
        saver.wait()
        assert saver.steps() == [2]


def test_the_last_save_by_a_signal_needs_no_metrics(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(checkpoint, best="loss", best_mode="min", schedule=Schedule(signal=signal.SIGTERM)) as saver:
        os.kill(os.getpid(), signal.SIGTERM)
        saver.save(1, small_state(1))
        assert saver.preempted and saver.steps() == [1]
    assert "'loss'" in caplog.text


@on_ranks(2)
def test_metrics_that_differ_over_ranks(checkpoint: Path) -> None:
    texts = []
    rank = dist.get_rank()
    with CheckpointManager(checkpoint, best="loss", best_mode="min") as saver:
        for step, metrics in ((1, {"loss": float(rank)}), (2, {"loss": 1.0} if rank == 0 else {})):
            try:
                saver.save(step, small_state(step), metrics=metrics)
            except CheckpointError as error:
                texts.append(f"{type(error).__name__}: {error}")
            except ValueError as error:
                texts.append(type(error).__name__)
        saver.save(3, small_state(3), metrics={"loss": float("nan")})
        saver.wait()
        dist.barrier()
        differing, missing, saved = texts[0], texts[1], saver.steps()
    assert "differ over ranks" in differing and f'{{"loss": {rank}.0}}' in differing
    assert missing in ("CheckpointError: step 2: nothing is saved, because of the metrics on rank 1", "ValueError")
    assert saved == [3]


def test_a_step_can_be_saved_again(checkpoint: Path) -> None:
    with CheckpointManager(checkpoint, async_checkpoint=False) as saver:
        saver.save(1, small_state(1), metrics={"loss": 3})
        saver.save(1, small_state(2), metrics={"loss": 2})
        assert saver.metrics(1) == {"loss": 2}
        saver.save(1, small_state(3))
        assert saver.metrics(1) == {}
        values = blank(small_state(0))
        assert saver.restore(values, 1) == 1 and same(values, small_state(3))


def test_the_last_good_one_is_not_removed_for_a_bad_one(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(checkpoint, 1)
    save = api.save

    def save_and_lose(path: str, *args: Any, **options: Any) -> SaveHandle:
        handle = save(path, *args, **options)
        handle.result()
        for file in data_files(Path(path)):
            file.unlink()
        return handle

    monkeypatch.setattr(api, "save", save_and_lose)
    save_steps(checkpoint, 2, max_to_keep=1)
    assert steps_in(checkpoint) == [1, 2]
    assert "nothing is removed" in caplog.text
    assert restored(checkpoint) == (1, True)


def truncate(directory: Path) -> None:
    os.truncate(data_files(directory)[0], 100)


def lose_a_file(directory: Path) -> None:
    data_files(directory)[0].unlink()


def flip_metadata(directory: Path) -> None:
    flip(directory / ".metadata")


@pytest.mark.parametrize("harm", [truncate, lose_a_file, flip_metadata])
def test_what_is_damaged_does_not_count_as_kept(
    checkpoint: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(checkpoint, 1, 2, 3)
    harm(checkpoint / "step-3")
    save_steps(checkpoint, 4, max_to_keep=2)
    assert steps_in(checkpoint) == [2, 4]
    assert "step 3" in caplog.text and "does not count" in caplog.text
    harm(checkpoint / "step-4")
    assert restored(checkpoint) == (2, True)
    save_steps(checkpoint, 5, retention=Retention(3, period=4))
    assert steps_in(checkpoint) == [2, 4, 5]  # every fourth is for good, whatever has become of it


def test_what_does_not_answer_is_neither_counted_nor_removed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(checkpoint, 1, 2, 3)
    stat = os.stat

    def away(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(checkpoint / "step-3" / "__")):
            raise OSError(errno.EIO, "away", path)
        return stat(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", away)
        save_steps(checkpoint, 4, max_to_keep=2)
    assert steps_in(checkpoint) == [2, 3, 4]
    save_steps(checkpoint, 5, max_to_keep=2)
    assert steps_in(checkpoint) == [4, 5]


# --- Going back to an earlier step


def go_back(directory: Path, origin: int, *steps: int, **options: Any) -> None:
    with CheckpointManager(directory, async_checkpoint=False, **options) as saver:
        values = blank(small_state(0))
        assert saver.restore(values, origin) == origin and same(values, small_state(origin))
        for step in steps:
            saver.save(step, small_state(step))
            assert saver.latest() == step


def test_what_was_saved_last_stays_after_going_back(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(checkpoint, 80, 90, 100)
    go_back(checkpoint, 90, 91, 92, 93, max_to_keep=3)
    assert "steps 100" in caplog.text and "abandoned" in caplog.text
    assert steps_in(checkpoint) == [91, 92, 93, 100]
    caplog.clear()
    for path in (checkpoint, checkpoint.parent / "copied"):  # in another process, and by no clock
        if not path.exists():
            shutil.copytree(checkpoint, path, copy_function=shutil.copyfile)
            os.utime(path / "step-100" / ".metadata")
        with CheckpointManager(path) as fresh:
            assert fresh.latest() == 93
        assert restored(path) == (93, True)
        assert "later steps 100 were abandoned" in caplog.text
    save_steps(checkpoint, 94, max_to_keep=3)
    assert steps_in(checkpoint) == [92, 93, 94, 100]
    save_steps(checkpoint, 101, max_to_keep=3)
    assert steps_in(checkpoint) == [93, 94, 101]
    assert restored(checkpoint) == (101, True)


def test_going_back_without_restoring(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(checkpoint, 90, 100)
    save_steps(checkpoint, 91, 92, max_to_keep=2)  # the state was loaded by other means
    assert "steps 100" in caplog.text
    assert steps_in(checkpoint) == [91, 92, 100]
    assert restored(checkpoint) == (92, True)


def test_the_line_that_training_took_is_followed_back(checkpoint: Path) -> None:
    save_steps(checkpoint, 80, 90, 100)
    go_back(checkpoint, 90, 110, 120)
    go_back(checkpoint, 100, 105)  # and then the first way again
    go_back(checkpoint, 110, 111)
    for step in (111, 110):
        truncate(checkpoint / f"step-{step}")
    assert restored(checkpoint) == (90, True)


def test_a_save_that_died_changes_no_order(checkpoint: Path) -> None:
    save_steps(checkpoint, 90, 100)
    go_back(checkpoint, 90, 91)
    assert await_exit(fork(functools.partial(save_and_die, checkpoint, 90))) == DIED
    assert restored(checkpoint) == (91, True)
    assert await_exit(fork(functools.partial(save_and_die, checkpoint, 91))) == DIED
    assert restored(checkpoint) == (91, True)


def test_an_order_that_is_damaged_is_told(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(checkpoint, 90, 100)
    go_back(checkpoint, 90, 91, 92)
    path = checkpoint / "step-92" / ".order"
    path.write_text(path.read_text().replace('"branch": 1', '"branch": 7'))
    assert restored(checkpoint) == (91, True)
    assert f"{path} is damaged" in caplog.text


def test_a_save_that_would_not_be_known_as_the_last_raises(checkpoint: Path) -> None:
    save_steps(checkpoint, 90, 100)
    with CheckpointManager(checkpoint) as saver:
        saver.restore(blank(small_state(0)), 90)
        no_order = steps.failing("note the order of steps", OSError(errno.EIO, "no order"))
        with no_order, pytest.raises(CheckpointError, match="no order"):
            saver.save(91, small_state(91))
        assert saver.steps() == [90, 100]
        saver.save(92, small_state(92))
        saver.wait()
        assert saver.latest() == 92


def test_another_manager_that_saves_meanwhile_is_no_reason_to_go_back(checkpoint: Path) -> None:
    with CheckpointManager(checkpoint) as one, CheckpointManager(checkpoint) as other:
        one.save(1, small_state(1))
        other.save(10, small_state(10))
        one.save(2, small_state(2))
        one.wait()
        assert one.latest() == 10
        one.restore(blank(small_state(0)), 2)
        one.save(3, small_state(3))
        other.save(11, small_state(11))
        other.wait()
        assert one.latest() == 11


# --- Metrics beside the checkpoint


def test_metrics_count_only_once_their_checkpoint_is_there(checkpoint: Path) -> None:
    with CheckpointManager(checkpoint) as saver:
        saver.save(1, small_state(1), metrics={"loss": 3})
        saver.wait()
        child_that_dies_in_commit = functools.partial(save_and_die, checkpoint, 1, {"loss": 2})
        assert await_exit(fork(child_that_dies_in_commit)) == DIED
        assert json.loads((checkpoint / "step-1" / "metrics.json").read_text())["metrics"] == {"loss": 2}
        assert saver.metrics(1) == {}  # those of the save that died
        assert restored(checkpoint) == (1, True)


def test_a_save_does_not_need_its_metrics(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(checkpoint) as saver:
        (checkpoint / "step-1" / "metrics.json").mkdir(parents=True)
        handle = saver.save(1, small_state(1), metrics={"loss": 3})
        assert handle is not None
        assert "metrics of step 1 are not kept" in caplog.text
    assert restored(checkpoint) == (1, True)


# --- What only looks like a checkpoint


def test_names_that_only_look_like_steps(checkpoint: Path) -> None:
    save_steps(checkpoint, 1, 7)
    (checkpoint / "step-7").rename(checkpoint / "elsewhere")
    (checkpoint / "step-7").symlink_to(checkpoint / "elsewhere")
    (checkpoint / "step-8").write_text("a file")
    for name in ("step-3.tmp", "step-", "step-09", "step--1", "Step-4", "step-5.deleting.old", "step-6 "):
        (checkpoint / name).mkdir()
        (checkpoint / name / ".metadata").touch()
    before = set(os.listdir(checkpoint))
    with CheckpointManager(checkpoint, max_to_keep=1) as saver:
        assert saver.steps() == [1] and saver.latest() == 1
        saver.save(2, small_state(2))
        saver.wait()
        assert set(os.listdir(checkpoint)) == before - {"step-1"} | {"step-2"}
    assert verify(checkpoint / "elsewhere").ok


def test_directories_of_others_are_no_orphans(checkpoint: Path) -> None:
    (checkpoint / "step-1").mkdir(parents=True)
    (checkpoint / "step-1" / "model.safetensors").touch()
    (checkpoint / "step-1" / "__0_00000000.distcp").touch()
    (checkpoint / "step-2").mkdir()  # of a save that has just begun, perhaps
    save_steps(checkpoint, 3, max_to_keep=1)
    assert steps_in(checkpoint) == [1, 2, 3]
    os.utime(checkpoint / "step-2", (0, 0))
    save_steps(checkpoint, 4, max_to_keep=1)
    assert steps_in(checkpoint) == [1, 4]
    assert (checkpoint / "step-1" / "__0_00000000.distcp").exists()


def test_an_empty_or_missing_directory(checkpoint: Path) -> None:
    with CheckpointManager(checkpoint) as fresh:
        for _ in range(2):
            assert fresh.latest() is None and fresh.steps() == []
            with pytest.raises(CheckpointError, match="holds no checkpoint"):
                fresh.restore({})
            checkpoint.mkdir(exist_ok=True)


# --- Saves and removals that are cut short

DIED = 7


def await_exit(pid: int) -> int:
    deadline = time.monotonic() + BOUND
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def save_and_die(directory: Path, step: int, metrics: Mapping[str, float] | None = None) -> None:
    steps.before("commit the metadata", lambda *_: os._exit(DIED)).start()
    save_with_metrics(directory, step, metrics)


def save_with_metrics(directory: Path, step: int, metrics: Mapping[str, float] | None, **options: Any) -> None:
    with CheckpointManager(directory, **options) as saver:
        saver.save(step, small_state(step), metrics=metrics)


def test_a_process_that_dies_anywhere_in_a_save_or_removal(checkpoint: Path) -> None:
    """At every call that changes the directory tree there is a whole checkpoint, and nothing half is one."""
    died = 0
    save_steps(checkpoint.parent / "before", 1, 2)
    for call in range(100):
        shutil.copytree(checkpoint.parent / "before", checkpoint)
        if await_exit(fork(functools.partial(die_at, call, checkpoint))) == 0:
            break
        died += 1
        newest = restored(checkpoint)
        assert newest in ((2, True), (3, True))
        for folder in checkpoint.glob("step-*/.metadata"):
            assert verify(folder.parent).ok
        save_steps(checkpoint, 4, max_to_keep=1)
        left = {path.name: sorted(path.iterdir()) for path in checkpoint.iterdir()}
        assert left.pop("step-4")
        assert not any(left.values())  # an empty directory may be one of a save that has just begun
        shutil.rmtree(checkpoint)
    else:
        pytest.fail("it never came to its end")
    assert died > 12
    assert os.listdir(checkpoint) == ["step-3"]


def die_at(number: int, directory: Path) -> None:
    calls = 0

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            if calls == number:
                os._exit(DIED)
            calls += 1
            return function(*args, **options)

        return call

    for module, name in (
        (os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"), *steps.CHANGES_BY_THE_ENGINE,
    ):  # fmt: skip
        setattr(module, name, dying(getattr(module, name)))
    save_with_metrics(directory, 3, {"loss": 1.0}, max_to_keep=1)


@pytest.mark.parametrize("name", ["rename", "unlink", "rmdir"])
def test_a_removal_that_fails_is_made_up_for(
    checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(checkpoint, 1)

    def refuse(path: Any, *args: Any, **options: Any) -> None:
        raise OSError(errno.EACCES, "not allowed", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, refuse)
        save_steps(checkpoint, 2, max_to_keep=1)
    assert "cannot remove" in caplog.text
    assert restored(checkpoint) == (2, True)
    save_steps(checkpoint, 3, max_to_keep=1)
    assert os.listdir(checkpoint) == ["step-3"]


def test_a_directory_that_cannot_be_synced_is_not_half_removed(checkpoint: Path) -> None:
    save_steps(checkpoint, 1, 2)
    with faults.fault("sync_directory", errno.EIO):
        assert step_directories.remove(str(checkpoint), [1]) == [1]
    assert verify(checkpoint / "step-1.deleting").ok  # a crash may bring its name back
    save_steps(checkpoint, 3)
    assert not (checkpoint / "step-1.deleting").exists()


# --- Others at work in the directory


class Child:
    """A process that does something, tells when it has come to a point, and goes on when it is told."""

    def __init__(self, body: Callable[[Callable[[], None]], None]) -> None:
        told_us, telling = os.pipe()
        told_it, go = os.pipe()

        def pause() -> None:
            os.write(telling, b".")
            os.read(told_it, 1)

        self.pid = fork(lambda: body(pause))
        self._go = go
        assert select.select([told_us], [], [], BOUND)[0], "the child did not come to its point"
        os.read(told_us, 1)

    def end(self) -> int:
        os.write(self._go, b".")
        return await_exit(self.pid)


def load_slowly(directory: Path, pause: Callable[[], None]) -> None:
    values = blank(small_state(1))
    reader, planner = StorageReader(directory), LoadPlanner()
    planner.set_up_planner(values, reader.read_metadata(), True)
    assert planner.metadata is not None
    reader.set_up_storage_reader(planner.metadata, True)
    pause()
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    assert same(values, small_state(1))


def test_a_folder_whose_name_could_not_be_synced_is_made_and_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock, which a save can do without, makes the folders first."""
    synced: list[str] = []
    sync_name = file_system._sync_name

    def noted(path: str) -> None:
        sync_name(path)
        synced.append(path)

    monkeypatch.setattr(file_system, "_sync_name", noted)
    with CheckpointManager(tmp_path / "run", async_checkpoint=False) as manager:
        faults.inject("sync_directory", errno.EIO, 0, 1)
        manager.save(1, {"step": 1})
    assert {str(tmp_path / "run"), str(tmp_path / "run" / "step-1")} <= {*synced}


def test_what_another_process_reads_is_not_removed(checkpoint: Path) -> None:
    save_steps(checkpoint, 1)
    child = Child(functools.partial(load_slowly, checkpoint / "step-1"))
    save_steps(checkpoint, 2, 3, max_to_keep=1)
    assert steps_in(checkpoint) == [1, 3]
    assert child.end() == 0
    save_steps(checkpoint, 4, max_to_keep=1)
    assert steps_in(checkpoint) == [4]


def test_a_load_that_failed_or_was_forgotten_does_not_hold_for_ever(checkpoint: Path) -> None:
    save_steps(checkpoint, 1)
    record = records(checkpoint / "step-1")[0]
    with flipped(record.path, 8 * record.body.start), pytest.raises(CorruptCheckpointError):
        CheckpointManager(checkpoint).restore(blank(small_state(1)))
    reader = StorageReader(checkpoint / "step-1")
    reader.read_metadata()
    del reader
    save_steps(checkpoint, 2, max_to_keep=1)
    assert steps_in(checkpoint) == [2]


def save_slowly(directory: Path, step: int, pause: Callable[[], None]) -> None:
    steps.before("commit the metadata", lambda *_: pause()).start()
    vescale_ckpt.save(directory / f"step-{step}", small_state(step))


def begin_to_save(directory: Path, step: int, pause: Callable[[], None]) -> None:
    steps.before("write what was staged", lambda _: pause()).start()
    save_steps(directory, step)


@pytest.mark.parametrize("body", [save_slowly, begin_to_save], ids=["without a manager", "no file there yet"])
def test_where_another_process_saves_nothing_is_left_over(checkpoint: Path, body: Callable[..., None]) -> None:
    child = Child(functools.partial(body, checkpoint, 1))
    save_steps(checkpoint, 2, 3, max_to_keep=1)
    assert steps_in(checkpoint) == [1, 3]
    assert child.end() == 0
    assert verify(checkpoint / "step-1").ok


def test_two_managers_in_two_processes(checkpoint: Path) -> None:
    pids = [fork(functools.partial(save_and_look, checkpoint, first)) for first in (0, 1)]
    assert [await_exit(pid) for pid in pids] == [0, 0]
    left = steps_in(checkpoint)
    assert left[-1] in (38, 39) and 2 <= len(left) <= 4
    for step in left:
        assert verify(checkpoint / f"step-{step}").ok
    assert restored(checkpoint) == (left[-1], True)
    assert not list(checkpoint.glob("*.deleting"))


def save_and_look(directory: Path, first: int) -> None:
    with CheckpointManager(directory, max_to_keep=2) as saver:
        (directory.parent / f"made-{first}").touch()
        wait_for(directory.parent / f"made-{1 - first}")  # else the second would begin anew, at step 1
        for step in range(first, 40, 2):
            saver.save(step, small_state(step), metrics={"loss": step})
            saver.wait()
            newest = saver.latest()
            assert newest is not None and newest >= step


def test_a_save_waits_for_its_directory_to_be_removed(checkpoint: Path) -> None:
    save_steps(checkpoint, 1)
    path = str(checkpoint / "step-1")
    with contextlib.ExitStack() as stack:
        assert stack.enter_context(step_directories.exclusive(path)) is True
        saver = threading.Thread(target=save_steps, args=(checkpoint, 1))
        saver.start()
        os.rename(path, path + ".deleting")
    saver.join(BOUND)
    assert verify(path).ok and not (checkpoint / "step-1.deleting").exists()


def test_a_file_system_without_locks(checkpoint: Path) -> None:
    faults.no_locks().start()
    assert await_exit(fork(functools.partial(save_and_die, checkpoint, 1))) == DIED
    save_steps(checkpoint, 2, 3, max_to_keep=1)
    assert steps_in(checkpoint) == [1, 3]  # nobody knows whether the save of step 1 goes on
    os.utime(checkpoint / "step-1", (0, 0))
    save_steps(checkpoint, 4, max_to_keep=1)
    assert os.listdir(checkpoint) == ["step-4"]
    assert restored(checkpoint) == (4, True)


# --- Going on from what is there


def damage(directory: Path, key: str = "model.weight") -> None:
    (record,) = (record for record in records(directory) if record.key == key)
    flip(record.path, 8 * record.body.start)


def test_a_damaged_newest_is_passed_over(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(checkpoint, 1, 2, 3, 4)
    damage(checkpoint / "step-4")
    data_files(checkpoint / "step-3")[0].unlink()
    with CheckpointManager(checkpoint, max_to_keep=2, async_checkpoint=False) as fresh:
        assert fresh.latest() == 4 and fresh.latest(full=True) == 2
        values = blank(small_state(0))
        assert fresh.restore(values) == 2 and same(values, small_state(2))
        assert "step 4 is passed over" in caplog.text and "step 3 is passed over" in caplog.text
        assert fresh.latest() == 2
        with pytest.raises(CorruptCheckpointError, match="checksum mismatch"):
            fresh.restore(values, 4)
        # The damaged one does not take the place of a good one.
        fresh.save(3, small_state(3))
        assert fresh.steps() == [2, 3]
        fresh.save(4, small_state(4))
        assert fresh.latest() == 4 and restored(checkpoint) == (4, True)


def test_a_sound_checkpoint_that_a_load_called_damaged_stays(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something wrote to a target while it was loaded: the checksum is wrong, the file is not."""
    save_steps(checkpoint, 1, 2, 3)
    load = api.load

    def disturbed(path: str, *args: Any, **options: Any) -> Any:
        if path.endswith("step-3"):
            raise CorruptCheckpointError("model.weight: checksum mismatch", key="model.weight", file=path, offset=0)
        return load(path, *args, **options)

    with CheckpointManager(checkpoint, max_to_keep=2, async_checkpoint=False) as fresh:
        with monkeypatch.context() as patch:
            patch.setattr(api, "load", disturbed)
            assert fresh.restore(blank(small_state(0))) == 2
        fresh.save(4, small_state(4))
        assert fresh.steps() == [2, 3, 4]
        damage(checkpoint / "step-4")
        assert fresh.restore(blank(small_state(0))) == 2
        fresh.save(5, small_state(5))
        assert fresh.steps() == [2, 3, 5], "what a verification finds damaged, too, is removed"


def test_if_none_is_good_the_last_error_is_raised(checkpoint: Path) -> None:
    save_steps(checkpoint, 1, 2)
    damage(checkpoint / "step-1")
    damage(checkpoint / "step-2", "model.scale")
    with CheckpointManager(checkpoint) as fresh, pytest.raises(CorruptCheckpointError) as raised:
        fresh.restore(blank(small_state(0)))
    assert raised.value.key == "model.weight"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda values: values["model"].update(bias=torch.zeros(8)), IncompatibleStateError),
        (lambda values: values["model"].update(bias=torch.zeros(7, dtype=torch.int8)), IncompatibleStateError),
        (lambda values: values["model"].update(new=torch.zeros(8)), MissingKeysError),
    ],
)
def test_what_is_wrong_with_the_state_is_no_reason_to_go_back(
    checkpoint: Path, change: Callable[[Any], None], error: type[Exception]
) -> None:
    save_steps(checkpoint, 1, 2)
    values = blank(small_state(0))
    change(values)
    with CheckpointManager(checkpoint) as fresh, pytest.raises(error):
        fresh.restore(values)


def test_the_directory_of_a_manager_is_no_checkpoint(checkpoint: Path) -> None:
    save_steps(checkpoint, 90, 100)
    go_back(checkpoint, 90, 91)
    advice = f"of which {checkpoint / 'step-91'} was saved last"
    for wrong in (lambda: vescale_ckpt.load(checkpoint), lambda: vescale_ckpt.load(checkpoint, small_state(0))):
        with pytest.raises(CheckpointError) as raised:
            wrong()
        assert advice in str(raised.value)
    for quick in (True, False):
        report = verify(checkpoint, quick=quick)
        assert not report.ok and advice in report.damaged[0].reason


@pytest.mark.parametrize("step", [None, 1])
def test_objects_are_trusted_only_if_told_so(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, step: int | None
) -> None:
    trusted = []

    class Noted(Source):
        def __init__(self, given_path: str, options: ReadOptions, *rest: Any) -> None:
            trusted.append(not options.weights_only)
            super().__init__(given_path, options, *rest)

    save_steps(checkpoint, 1)
    monkeypatch.setattr(api, "Source", Noted)
    with CheckpointManager(checkpoint) as saver:
        saver.restore(blank(small_state(0)), step)
        saver.restore(blank(small_state(0)), step, weights_only=False)
    assert trusted == [False, True]


def test_a_disk_that_does_not_answer_is_no_damage(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(checkpoint, 1, 2)
    load = api.load

    def flaky(path: str, *args: Any, **options: Any) -> Any:
        if path.endswith("step-2"):
            raise CheckpointError("the disk is away", errno=errno.EIO)
        return load(path, *args, **options)

    monkeypatch.setattr(api, "load", flaky)
    with CheckpointManager(checkpoint, max_to_keep=1) as fresh:
        assert fresh.restore(blank(small_state(0))) == 1
        assert fresh.latest() == 2  # still counts


@on_ranks(2)
def test_two_ranks_go_back_together(checkpoint: Path) -> None:
    def values(k: int) -> dict[str, Any]:
        return {"of rank": vescale_ckpt.PerRank(torch.full((50,), float(dist.get_rank() + k))), **small_state(k)}

    with CheckpointManager(checkpoint, max_to_keep=3) as saver:
        for step in (1, 2, 3):
            saver.save(step, values(step))
        saver.wait()
        dist.barrier()
        if dist.get_rank() == 0:
            damage(checkpoint / "step-3", "of rank.rank_1_of_2")  # what only rank 1 reads
            damage(checkpoint / "step-2")
        dist.barrier()
        found = blank(values(0))
        found["of rank"] = vescale_ckpt.PerRank(torch.zeros(50))
        results = [saver.restore(found), saver.latest()]
        assert same(found["model"], small_state(1)["model"])
        assert torch.equal(found["of rank"].obj, torch.full((50,), float(dist.get_rank() + 1)))
        saver.save(2, values(2))
        saver.wait()
        assert [*results, saver.latest(full=True), saver.restore(found)] == [1, 1, 2, 2]


# --- How long it keeps what it holds


@forked
def test_no_descriptor_is_left_open(checkpoint: Path) -> None:
    counts = []
    for _ in range(2):
        with CheckpointManager(checkpoint, max_to_keep=1) as saver:
            for step in range(5):
                saver.save(step, small_state(step), metrics={"loss": step})
                saver.restore(blank(small_state(0)))
        gc.collect()  # the fork came with what tests before it left to the collector
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[0] == counts[1]


def test_metrics_are_kept_where_the_directory_cannot_be_locked(checkpoint: Path) -> None:
    with CheckpointManager(checkpoint, async_checkpoint=False) as manager:
        manager.save(1, small_state(1), metrics={"loss": 1.0})
        steps.failing("share a lock", OSError("no locks")).start()
        manager.save(1, small_state(2), metrics={"loss": 2.0})
        assert manager.metrics(1) == {"loss": 2.0}


def test_a_metric_is_read_only_where_a_save_is_due(tmp_path: Path) -> None:
    """A tensor on a device would have to be waited for."""
    read: list[str] = []

    class Loss(torch.Tensor):
        def __float__(self) -> float:
            read.append("read")
            return 2.0

    loss = torch.ones(1).as_subclass(Loss)
    with CheckpointManager(tmp_path, save_interval_steps=10, best="loss", best_mode="min") as manager:
        assert manager.save(1, {"w": torch.ones(2)}, metrics={"loss": loss}) is None and not read
        for wrong in (torch.ones(2), "low", None):
            with pytest.raises((TypeError, ValueError, RuntimeError), match="metrics"):
                manager.save(10, {"w": torch.ones(2)}, metrics={"loss": wrong})
        assert manager.save(10, {"w": torch.ones(2)}, metrics={"loss": loss}) is not None
        manager.wait()
        assert read and manager.metrics(10) == {"loss": 2.0}
