"""The life of a checkpoint's directory: what a save may touch, when it counts, and who sees what meanwhile."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import faults
from harness.files import data_files, only_named_files, read_metadata
from harness.ranks import on_ranks
from harness.saves import cause, load, outcome, save, stock_load, stock_save
from harness.states import blank, same, small_state, state
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as DcpSavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from vescale_ckpt import (
    CheckpointError,
    CorruptCheckpointError,
    LoadPlanner,
    SavePlanner,
    SaveStats,
    StorageReader,
    StorageWriter,
)
from vescale_ckpt._checkpoint.native import commit_metadata
from vescale_ckpt._engine import _C
from vescale_ckpt._storage import locks
from vescale_ckpt._write.native_layout import NativeLayout

# --- What a save touches


class Watcher(StorageWriter):
    """Looks into the directory when all data is written and nothing is committed yet."""

    def write_data(self, plan: SavePlan, planner: DcpSavePlanner) -> Future[list[WriteResult]]:
        self.before = {path.name: path.read_bytes() for path in Path(self.path).iterdir()}
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.written = {path.name: path.read_bytes() for path in Path(self.path).iterdir()}
        super().finish(metadata, results)


@pytest.mark.parametrize("single_file_per_rank", [True, False])
def test_until_the_commit_the_old_checkpoint_is_untouched(checkpoint: Path, single_file_per_rank: bool) -> None:
    save(checkpoint, small_state(1), single_file_per_rank=single_file_per_rank)
    old = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    writer = Watcher(checkpoint, single_file_per_rank=single_file_per_rank)
    dcp.save(small_state(2), storage_writer=writer, planner=SavePlanner(), no_dist=True)
    assert writer.before == old
    assert old.items() <= writer.written.items() and len(writer.written) > len(old)
    assert not old.keys() & {path.name for path in data_files(checkpoint)}
    assert only_named_files(checkpoint)
    assert outcome(checkpoint, small_state(2)) is None


def test_the_file_of_a_save_that_goes_on_is_no_orphan(checkpoint: Path) -> None:
    save(checkpoint, small_state(1))
    for name in ("__0_00000000.distcp", "__1_11111111.distcp", "__1_11111111_7.distcp"):
        (checkpoint / name).write_bytes(b"being written")
    marks = [locks.lock(str(checkpoint / name)) for name in ("__0_00000000.distcp", "__1_11111111.distcp")]
    save(checkpoint, small_state(2))
    assert len(data_files(checkpoint)) == 4
    for lock in marks:
        assert lock is not None
        lock.release()
    save(checkpoint, small_state(3))
    assert only_named_files(checkpoint)


def test_nothing_unknown_is_ever_removed(checkpoint: Path) -> None:
    checkpoint.mkdir()
    kept = {
        "notes.txt", "model.safetensors", "__init__.py", "x.distcp", "__a_0.distcp", "_0_0.distcp", "__0_0.distcp.bak",
        "metadata", ".metadata.old", "__0.metadata.old", "tmp.metadata", "0.distcp", "__0_0.distcp~",
    }  # fmt: skip
    for name in kept:
        (checkpoint / name).write_text("precious")
    (checkpoint / "__7_0.distcp.d").mkdir()
    save(checkpoint, small_state(1))
    save(checkpoint, small_state(2))
    assert kept <= set(os.listdir(checkpoint))
    assert all((checkpoint / name).read_text() == "precious" for name in kept)
    assert (checkpoint / "__7_0.distcp.d").is_dir()


def test_orphans_of_dead_saves_are_removed(checkpoint: Path) -> None:
    save(checkpoint, small_state(1))
    orphans = [
        "__0_00000000.distcp", "__12_89abcdef.distcp", "__3_89abcdef_4.distcp",
        ".metadata.tmp", ".metadata.tmp.1234.0", "__3.metadata.tmp.1234.0",
    ]  # fmt: skip
    for name in orphans:
        (checkpoint / name).write_bytes(b"left")
        os.utime(checkpoint / name, (0, 0))
    save(checkpoint, small_state(2))
    assert only_named_files(checkpoint)
    assert outcome(checkpoint, small_state(2)) is None


@pytest.mark.parametrize(("space", "stays"), [("", False), ("0000cafe", True), (None, True)])
def test_only_the_machine_of_a_writer_judges_by_its_process(checkpoint: Path, space: str | None, stays: bool) -> None:
    """On a shared disk a save of another machine may be about to rename its file, and its process is not seen here."""
    save(checkpoint, small_state(1))
    dead = subprocess.Popen(["true"])
    dead.wait()
    ending = "" if space is None else f".{space or _C.process_space()}"
    left = checkpoint / f".metadata.tmp.{dead.pid}.0{ending}"
    left.write_bytes(b"being written")
    save(checkpoint, small_state(2))
    assert left.exists() == stays
    if stays:
        os.utime(left, (0, 0))
    save(checkpoint, small_state(3))
    assert not left.exists() and only_named_files(checkpoint)


def test_a_file_of_a_process_that_lives_stays(checkpoint: Path) -> None:
    save(checkpoint, small_state(1))
    left = checkpoint / f".metadata.tmp.{os.getppid()}.0.{_C.process_space()}"
    left.write_bytes(b"being written")
    save(checkpoint, small_state(2))
    assert left.exists()


def test_a_directory_named_like_an_orphan_does_not_fail_a_save(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").mkdir(parents=True)
    save(checkpoint, small_state(1))
    assert outcome(checkpoint, small_state(1)) is None


@pytest.mark.parametrize("damage", [b"", b"no pickle", b"\x80\x04N."])
def test_before_a_damaged_metadata_is_replaced_nothing_is_removed(checkpoint: Path, damage: bytes) -> None:
    save(checkpoint, small_state(1))
    (name,) = (path.name for path in data_files(checkpoint))
    whole = (checkpoint / ".metadata").read_bytes()
    (checkpoint / ".metadata").write_bytes(damage)
    with faults.fault("rename", errno.EIO), pytest.raises(CheckpointException):
        save(checkpoint, small_state(2))  # not committed: the old data is still there for who can repair it
    assert (checkpoint / name).exists()
    (checkpoint / ".metadata").write_bytes(whole)
    assert outcome(checkpoint, small_state(1)) is None


def test_a_damaged_metadata_of_another_rank_keeps_all_files(checkpoint: Path) -> None:
    save(checkpoint, small_state(1))
    (checkpoint / "__1.metadata").write_bytes(b"damaged")
    (checkpoint / "__1_0.distcp").write_bytes(b"who knows whose")
    save(checkpoint, small_state(2))
    assert (checkpoint / "__1_0.distcp").exists()
    assert outcome(checkpoint, small_state(2)) is None


def test_data_that_the_metadata_of_a_rank_names_is_kept(checkpoint: Path) -> None:
    save(checkpoint, small_state(1))
    os.rename(checkpoint / ".metadata", checkpoint / "__0.metadata")
    (kept,) = data_files(checkpoint)
    save(checkpoint, small_state(2))
    assert kept.exists() and outcome(checkpoint, small_state(2)) is None


def test_data_in_folders_is_kept(checkpoint: Path) -> None:
    # Nobody writes such checkpoints, but metadata may name files so.
    save(checkpoint, small_state(1))
    metadata = read_metadata(checkpoint)
    (path,) = data_files(checkpoint)
    for info in metadata.storage_data.values():
        info.relative_path = f"./{path.name}"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    assert outcome(checkpoint, small_state(1)) is None
    with faults.fault("rename", errno.EIO), pytest.raises(CheckpointException):
        save(checkpoint, small_state(2))
    assert outcome(checkpoint, small_state(1)) is None


@pytest.mark.parametrize("existing", ["ours", "stock"])
def test_overwriting_can_be_forbidden(checkpoint: Path, existing: str) -> None:
    if existing == "ours":
        save(checkpoint, small_state(1))
    else:
        stock_save(checkpoint, small_state(1))
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    with pytest.raises(CheckpointException, match="overwrite=False") as caught:
        save(checkpoint, small_state(2), overwrite=False)
    assert isinstance(cause(caught.value), CheckpointError)
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_what_a_dead_save_left_does_not_count_as_a_checkpoint(checkpoint: Path) -> None:
    with faults.fault("rename", errno.EIO), pytest.raises(CheckpointException):
        save(checkpoint, small_state(1))
    gc.collect()  # the dead save's writer holds its lock
    save(checkpoint, small_state(2), overwrite=False)
    assert only_named_files(checkpoint)
    assert outcome(checkpoint, small_state(2)) is None


def test_file_modes_follow_the_umask(checkpoint: Path) -> None:
    old = os.umask(0o027)
    try:
        save(checkpoint, small_state(1))
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in checkpoint.iterdir()} == {0o640}


def test_a_checkpoint_needs_no_other_and_no_place(tmp_path: Path) -> None:
    for k in (1, 2):
        save(tmp_path / "run" / str(k), small_state(k))
    shutil.copytree(tmp_path / "run" / "2", tmp_path / "copied")
    (tmp_path / "run" / "2").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "run")
    for name in ("copied", "moved"):
        assert outcome(tmp_path / name, small_state(2)) is None


# --- Stock DCP and ours, one after the other


def test_ours_and_stock_overwrite_each_other(checkpoint: Path) -> None:
    for k in range(0, 6, 2):
        stock_save(checkpoint, state(k), thread_count=2)
        assert outcome(checkpoint, state(k)) is None
        with faults.fault(("write", "sync", "rename")[k // 2], errno.EIO), pytest.raises(CheckpointException):
            save(checkpoint, state(k + 1))
        assert outcome(checkpoint, state(k)) is None
        assert same(stock_load(checkpoint, state(0), no_dist=True), state(k))
        save(checkpoint, state(k + 1))
        assert only_named_files(checkpoint)  # stock's files are gone
        assert outcome(checkpoint, state(k + 1)) is None
        assert same(stock_load(checkpoint, state(0), no_dist=True), state(k + 1))


# --- A load while a save commits


def test_a_load_that_a_save_overtakes_gives_one_of_them_or_says_that_data_is_gone(checkpoint: Path) -> None:
    save(checkpoint, state(1))
    reader, planner, values = StorageReader(checkpoint), LoadPlanner(), blank(state(1))
    metadata = reader.read_metadata()
    planner.set_up_planner(values, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.create_local_plan()
    save(checkpoint, state(2))
    with pytest.raises(CorruptCheckpointError, match="missing"):
        reader.read_data(plan, planner)
    assert outcome(checkpoint, state(2)) is None


@on_ranks(2)
def test_a_damaged_metadata_never_lets_an_older_checkpoint_pass_for_it(checkpoint: Path) -> None:
    older = {**small_state(1), "rank": dist.get_rank()}
    dcp.save(older, storage_writer=FileSystemWriter(checkpoint), planner=DefaultSavePlanner(), use_collectives=False)
    dcp.save({**small_state(2), "rank": -1}, storage_writer=StorageWriter(checkpoint), planner=SavePlanner())
    values = {**blank(small_state(2)), "rank": None}
    dcp.load(values, storage_reader=StorageReader(checkpoint), planner=LoadPlanner())
    assert same(values, {**small_state(2), "rank": -1})
    dist.barrier()
    if dist.get_rank() == 0:
        (checkpoint / ".metadata").write_bytes(b"damaged")
    dist.barrier()
    values = {**blank(small_state(2)), "rank": None}
    with pytest.raises(CheckpointException, match="damaged"):
        dcp.load(values, storage_reader=StorageReader(checkpoint), planner=LoadPlanner())


# --- Names


@pytest.mark.parametrize("name", ["with space", "ünïcödé", "per%20cent", "a" * 200, "-rf", "new\nline", "dot."])
def test_directories_of_any_name(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    save(directory, small_state(1))
    assert outcome(directory, small_state(1)) is None
    assert (directory / ".metadata").exists()
    shutil.rmtree(directory)


def test_a_link_to_a_directory_is_saved_through(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save(tmp_path / "link", small_state(1))
    assert outcome(tmp_path / "real", small_state(1)) is None
    assert (tmp_path / "link").is_symlink()


def test_a_data_file_that_is_taken_before_it_is_marked_is_made_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another save's clean-up comes between the making of a file and its lock."""
    mark = locks.lock
    taken: list[str] = []

    def late(path: str) -> locks.FileLock | None:
        if len(taken) < 2:
            taken.append(path)
            assert os.path.basename(path) in commit_metadata.remove_orphans(os.path.dirname(path))
        return mark(path)

    monkeypatch.setattr(locks, "lock", late)
    save(checkpoint, state(1))
    assert same(load(checkpoint, state(0)), state(1)) and len(set(taken)) == 2
    taken.clear()
    monkeypatch.setattr(locks, "lock", lambda path: late(path) if not taken.clear() else None)
    with pytest.raises(CheckpointException) as raised:
        save(checkpoint, state(2))
    assert "removed" in str(cause(raised.value)) and same(load(checkpoint, state(0)), state(1))


def test_parts_of_a_save_that_goes_on_are_no_orphans(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    finish = NativeLayout.finish

    def cleaned(files: NativeLayout, *counts: int) -> SaveStats:
        removed.extend(commit_metadata.remove_orphans(str(checkpoint)))
        return finish(files, *counts)

    monkeypatch.setattr(NativeLayout, "finish", cleaned)
    save(checkpoint, state(1), single_file_per_rank=False)
    assert not removed and same(load(checkpoint, state(0)), state(1))


def test_a_file_that_was_committed_while_orphans_were_looked_for_stays(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another save commits between this one's look at what is named and its look at what is locked."""
    save(checkpoint, state(1))
    named = commit_metadata.named_by_any
    looks: list[set[str]] = []

    def outdated(directory: str) -> set[str]:
        looks.append(named(directory))
        return set() if len(looks) == 1 else looks[-1]

    monkeypatch.setattr(commit_metadata, "named_by_any", outdated)
    assert commit_metadata.remove_orphans(str(checkpoint)) == [] and len(looks) == 2
    assert same(load(checkpoint, state(0)), state(1))
