"""System calls that fail, disks that are full, ranks that raise: a save is whole or has never been, and says why."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import faults, steps
from harness.children import fork, in_child, wait_for
from harness.faults import fault
from harness.files import data_files, drop_from_cache, lock, only_named_files
from harness.machines import mount_small, unmount
from harness.ranks import forked, on_ranks
from harness.saves import cause, load, outcome, save
from harness.states import State, same, small_state, state, state_of_rank
from torch.distributed.checkpoint.api import CheckpointException

import vescale_ckpt
from vescale_ckpt import CheckpointError, LoadPlanner, SavePlanner, StorageFullError, StorageReader, StorageWriter
from vescale_ckpt._engine import _C
from vescale_ckpt._storage.locks import lock_if_abandoned

MiB = 1 << 20
SAVE_CALLS = ("open", "write", "allocate", "truncate", "sync", "sync_directory", "rename", "space")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def failed_save(directory: Path, values: State, **options: Any) -> CheckpointError | None:
    """None if the save went well."""
    try:
        save(directory, values, **options)
    except CheckpointException as error:
        failure = cause(error)
        assert isinstance(failure, CheckpointError), f"an error without a name: {failure!r}"
        return failure
    return None


# --- One call fails, once


@pytest.mark.parametrize(
    ("call", "error"),
    [*((call, errno.EIO) for call in SAVE_CALLS), *((call, errno.ENOSPC) for call in ("open", "write", "allocate"))],
)
def test_a_call_that_fails_fails_the_save_and_nothing_else(checkpoint: Path, call: str, error: int) -> None:
    save(checkpoint, state(1))
    failures = 0
    for number in range(100):
        with fault(call, error, skip=number):
            failure = failed_save(checkpoint, state(2))
            reached = faults.calls_seen(call) > number
        if failure is None:  # it can do without an index, and without a file's second descriptor, for direct I/O
            assert outcome(checkpoint, state(2)) is None
            assert not reached or call == "open"
        else:
            failures += 1
            assert os.strerror(error) in str(failure) and str(checkpoint) in str(failure)
            if error in FULL:
                assert isinstance(failure, StorageFullError) and failure.path and failure.free > 0
            if call == "sync_directory":  # the last of them comes after the commit: it may have happened
                assert outcome(checkpoint, state(1), state(2)) is None
            else:
                assert outcome(checkpoint, state(1)) is None and only_named_files(checkpoint)
        save(checkpoint, state(1))
        assert only_named_files(checkpoint)
        if not reached:
            break
    assert failures >= 1 and not reached


@pytest.mark.parametrize("call", ["open", "write", "sync_directory", "rename"])
def test_what_cannot_be_removed_after_a_failure_is_removed_by_the_next_save(checkpoint: Path, call: str) -> None:
    save(checkpoint, state(1))
    failures = 0
    for number in range(100):
        faults.clear()
        faults.inject(call, errno.EIO, number)
        faults.inject("unlink", errno.EIO, 0, 1000)
        failure = failed_save(checkpoint, state(2))
        reached = faults.calls_seen(call) > number
        faults.clear()
        if not reached:
            break
        failures += failure is not None
        assert outcome(checkpoint, state(1), state(2)) is None
        save(checkpoint, state(1))
        assert only_named_files(checkpoint)
    assert failures >= 1 and not reached


def test_a_commit_that_fails_leaves_no_data(checkpoint: Path) -> None:
    for call in ("rename", "sync_directory"):
        with fault(call, errno.EIO, skip=1 if call == "sync_directory" else 0, times=1000):
            assert failed_save(checkpoint, state(1)) is not None
        assert data_files(checkpoint) == []
    save(checkpoint, state(1))
    with fault("rename", errno.EIO, times=1000):
        assert failed_save(checkpoint, state(2)) is not None
    assert only_named_files(checkpoint) and len(data_files(checkpoint)) == 1
    with fault("sync_directory", errno.EIO, skip=2, times=1000):  # behind the rename of the metadata
        assert failed_save(checkpoint, state(3)) is not None
    assert outcome(checkpoint, state(3)) is None


@pytest.mark.parametrize(("of", "call"), [(os, "listdir"), steps.STEPS["remove a file"]])
def test_a_clean_up_that_fails_fails_no_save_that_has_committed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, of: Any, call: str
) -> None:
    """Each call of its kind fails once, and all after it."""
    real, left = getattr(of, call), 0

    def failing(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO), *arguments)
        return real(*arguments)

    for number in range(30):
        for directory, format in (
            (checkpoint / "dcp", "dcp"),
            (checkpoint / "export", vescale_ckpt.Safetensors(max_shard_size=4)),
        ):
            tensors = [{str(i): torch.full((1,), float(k)) for i in range(3)} for k in (0, 1)]
            vescale_ckpt.save(directory, tensors[0], format=format)
            left = number
            with monkeypatch.context() as patched:
                patched.setattr(of, call, failing)
                try:
                    vescale_ckpt.save(directory, tensors[1], format=format)
                    failed = False
                except CheckpointError:
                    failed = True
            assert vescale_ckpt.load(directory)["0"][0] == (0 if failed else 1)
        if left > 0:
            break
    assert left > 0


def test_every_directory_that_is_made_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def note(directory: str) -> None:
        synced.append(os.path.realpath(directory))

    def made_durable(*levels: Path) -> bool:
        found, missing = set(synced), {str(level) for level in levels}
        synced.clear()
        return missing <= found

    steps.before("sync a directory", note).start()
    monkeypatch.chdir(tmp_path)
    values = {"a": torch.ones(2)}
    vescale_ckpt.save("a/b/c", values)
    assert made_durable(tmp_path, tmp_path / "a", tmp_path / "a" / "b")
    vescale_ckpt.save("a/b/c", values)
    assert not made_durable(tmp_path / "a" / "b")  # once is enough
    (tmp_path / "mine" / "own").mkdir(parents=True)  # who made it may not have synced it
    vescale_ckpt.save("mine/own", values)
    assert made_durable(tmp_path / "mine")
    vescale_ckpt.save(f"{tmp_path}/mine/own/", values)
    assert made_durable(tmp_path / "mine")
    inode = (tmp_path / "mine" / "own").stat().st_ino
    shutil.rmtree("mine/own")
    (tmp_path / "mine" / "own").mkdir()  # most file systems give it the number that the one before had
    real = os.stat("mine/own")
    again = os.stat_result([real.st_mode, inode, *real[2:]])
    with pytest.MonkeyPatch.context() as patch:
        stat = os.stat
        same = os.fspath(tmp_path / "mine" / "own")
        patch.setattr(os, "stat", lambda path, *a, **k: again if path == same else stat(path, *a, **k))
        vescale_ckpt.save("mine/own", values)
    assert made_durable(tmp_path / "mine")
    vescale_ckpt.save("x/y/z", values, format="safetensors")
    assert made_durable(tmp_path, tmp_path / "x", tmp_path / "x" / "y")
    with vescale_ckpt.CheckpointManager("m/n", async_checkpoint=False) as manager:
        manager.save(1, values)
    assert made_durable(tmp_path, tmp_path / "m", tmp_path / "m" / "n")
    for format in ("dcp", "safetensors"):
        vescale_ckpt.convert("a/b/c", f"{format}/d/made", format=format)
        assert made_durable(tmp_path, tmp_path / format, tmp_path / format / "d")


def test_a_directory_above_that_may_not_be_read_fails_no_save(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    with fault("sync_directory", errno.EACCES, skip=2):  # behind those of the index
        save(tmp_path / "a" / "b", small_state(1))
    assert outcome(tmp_path / "a" / "b", small_state(1)) is None


def test_a_directory_that_cannot_be_synced_is_as_durable_as_its_server_makes_it() -> None:
    descriptor = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    with pytest.raises(OSError, match="Invalid argument"):  # as on network file systems that do not sync directories
        os.fsync(descriptor)
    os.close(descriptor)
    _C.sync_directory("/proc")


@pytest.mark.parametrize("call", ["open", "read"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE], ids=os.strerror)
@pytest.mark.parametrize("source", ["page cache", "disk"])
def test_a_load_survives_or_names_every_call_that_fails(checkpoint: Path, call: str, error: int, source: str) -> None:
    save(checkpoint, state(1))
    failures, times = 0, 2 if error == errno.ESTALE else 1  # a stale file is opened again, once
    for number in range(100):
        if source == "disk":
            drop_from_cache(data_files(checkpoint)[0])
        with fault(call, error, skip=number, times=times):
            failure = outcome(checkpoint, state(1))
            reached = faults.calls_seen(call) > number
        if failure is not None:
            failures += 1
            assert os.strerror(error) in str(failure) and data_files(checkpoint)[0].name in str(failure)
        if not reached:
            break
    assert failures >= 1
    assert outcome(checkpoint, state(1)) is None


# --- Calls that are interrupted, short or refused


@pytest.mark.parametrize("call", [call for call in [*SAVE_CALLS, "read"] if call != "rename"])
def test_interrupted_calls_are_repeated(checkpoint: Path, call: str) -> None:
    for number in range(0, 12, 3):
        with fault(call, errno.EINTR, skip=number, times=3):
            save(checkpoint, state(number))
            assert outcome(checkpoint, state(number)) is None
    assert only_named_files(checkpoint)


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP], ids=os.strerror)
def test_refused_direct_transfers_go_another_way(checkpoint: Path, error: int) -> None:
    save(checkpoint, state(0))
    survived = {"write": 0, "read": 0}
    for number in range(8):
        with fault("write", error, skip=number):
            failure = failed_save(checkpoint, state(1))
        if failure is not None:  # that was .metadata, which is small and never direct
            assert ".metadata" in str(failure) and outcome(checkpoint, state(0)) is None
            save(checkpoint, state(1))
        survived["write"] += failure is None
        drop_from_cache(data_files(checkpoint)[0])
        with fault("read", error, skip=number):
            failure = outcome(checkpoint, state(1))
        assert failure is None or os.strerror(error) in str(failure)  # some reads are too small to be direct
        survived["read"] += failure is None
        save(checkpoint, state(0))
    assert survived["write"] >= 6 and survived["read"] >= 3


def test_file_systems_that_cannot_reserve_space_are_written_to_all_the_same(checkpoint: Path) -> None:
    with fault("allocate", errno.EOPNOTSUPP, times=100):
        save(checkpoint, state(1))
    assert outcome(checkpoint, state(1)) is None


# --- Full disks. A small tmpfs stands for the disk.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    mount = tmp_path / "disk"
    mount.mkdir()
    try:
        mount_small(str(mount), 16 * MiB)
    except OSError as error:
        pytest.skip(f"cannot mount a tmpfs here: {error}")
    yield mount
    unmount(str(mount))


@pytest.mark.root
def test_a_state_that_does_not_fit_says_so_before_anything_is_written(small_disk: Path) -> None:
    directory = small_disk / "checkpoint"
    save(directory, state(1))
    failure = failed_save(directory, {**state(2), "more": torch.zeros(5 * MiB)})
    assert isinstance(failure, StorageFullError)
    assert failure.path == str(directory)
    assert failure.needed > 20 * MiB > 16 * MiB > failure.free > 10 * MiB
    assert f"{failure.needed:,}" in str(failure) and f"{failure.free:,}" in str(failure)
    assert only_named_files(directory)
    assert outcome(directory, state(1)) is None


@pytest.mark.root
@pytest.mark.parametrize("reserves", [True, False])
def test_a_disk_that_fills_up_meanwhile_keeps_the_old_checkpoint(small_disk: Path, reserves: bool) -> None:
    directory = small_disk / "checkpoint"
    save(directory, state(1))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(8 * MiB))
    # Objects are not known before they are written: this is found out by writing.
    too_much = {**state(2), "more": b"x" * (12 * MiB)}
    with fault("allocate", errno.EOPNOTSUPP, times=0 if reserves else 100):
        failure = failed_save(directory, too_much)
    assert isinstance(failure, StorageFullError)
    assert failure.path == str(directory) and failure.needed > 12 * MiB > failure.free
    assert only_named_files(directory)
    assert outcome(directory, state(1)) is None
    ballast.unlink()
    fits = {**state(2), "more": b"x" * (7 * MiB)}
    save(directory, fits)
    assert outcome(directory, fits) is None
    assert only_named_files(directory)


@pytest.mark.root
def test_orphans_are_removed_before_the_space_is_counted(small_disk: Path) -> None:
    directory = small_disk / "checkpoint"
    save(directory, state(1))
    (directory / "__3_0123abcd.distcp").write_bytes(bytes(12 * MiB))  # of a save that was killed
    save(directory, state(2))
    assert outcome(directory, state(2)) is None
    assert only_named_files(directory)


@pytest.mark.root
def test_a_disk_that_is_full_within_the_metadata_keeps_the_old_checkpoint(small_disk: Path) -> None:
    directory, ballast, page = small_disk / "checkpoint", small_disk / "ballast", resource.getpagesize()
    long_names = {"k" * 150 + str(i): i for i in range(1000)}
    room = needed = -1

    @contextlib.contextmanager
    def nearly_full(content: bytes, _index: bytes) -> Iterator[None]:
        nonlocal room, needed
        pages, needed = -(-len(content) // page), len(content)
        room = page * min(pages - 1, int(pages * share))
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free - room)
        yield

    for share in (0.0, 0.3, 0.6, 1.0):
        save(directory, state(1))
        with steps.around_metadata(nearly_full):
            failure = failed_save(directory, long_names)
        assert isinstance(failure, StorageFullError) and failure.needed >= needed > room >= int(0.9 * share * needed)
        told = re.search(re.escape(f"{directory}/.metadata.tmp.") + r"\S+ at offset (\d+): No space left", str(failure))
        assert told and int(told[1]) <= room  # the threads share the room
        assert only_named_files(directory) and outcome(directory, state(1)) is None
        ballast.unlink()
    save(directory, long_names)
    assert outcome(directory, long_names) is None and only_named_files(directory)


def _index_of(directory: Path) -> bytes:
    return (directory / ".metadata.index").read_bytes()


@pytest.mark.parametrize("way", ["dcp", "async"])
def test_metadata_of_which_only_a_part_can_be_written_keeps_the_old_checkpoint(checkpoint: Path, way: str) -> None:
    room = -1

    def limit(content: bytes, _index: bytes) -> Any:
        nonlocal room
        room = min(len(content) - 1, int(len(content) * share))
        return faults.files_of_at_most(room)

    for share in (0.0, 0.5, 1.0):
        save(checkpoint, state(1))
        old = _index_of(checkpoint)
        with steps.around_metadata(limit):
            if way == "dcp":
                failure = failed_save(checkpoint, state(2))
            else:
                with pytest.raises(StorageFullError) as raised:
                    vescale_ckpt.save(checkpoint, state(2), async_checkpoint=True).result()
                failure = raised.value
        assert isinstance(failure, StorageFullError) and failure.needed > room and (room > 0) == (share > 0)
        assert f"{checkpoint}/.metadata.tmp." in str(failure) and f"at offset {room}: File too large" in str(failure)
        assert _index_of(checkpoint) == old
        assert only_named_files(checkpoint) and outcome(checkpoint, state(1)) is None
    save(checkpoint, state(2))
    assert outcome(checkpoint, state(2)) is None and only_named_files(checkpoint)


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def _breaks_down(*_: Any, **__: Any) -> None:
    raise RuntimeError("broken")


@pytest.mark.parametrize("action", [_interrupt, _breaks_down])
@pytest.mark.parametrize("way", ["dcp", "save", "async", "before the commit"])
def test_metadata_that_is_written_and_not_committed_is_removed(checkpoint: Path, way: str, action: Any) -> None:
    save(checkpoint, state(1))
    old, written = _index_of(checkpoint), 0

    def after_it_was_written(*arguments: Any, **options: Any) -> None:
        nonlocal written
        (file,) = checkpoint.glob(".metadata.tmp.*")
        written = file.stat().st_size
        action()

    step = steps.before("may commit", after_it_was_written)
    if way != "before the commit":
        step = steps.behind("make the metadata", after_it_was_written)
    with step, pytest.raises(BaseException) as raised:  # also KeyboardInterrupt
        if way == "dcp":
            save(checkpoint, state(2))
        elif way == "async":
            vescale_ckpt.save(checkpoint, state(2), async_checkpoint=True).result()
        else:
            vescale_ckpt.save(checkpoint, state(2))
    error = cause(raised.value) if isinstance(raised.value, CheckpointException) else raised.value
    assert isinstance(error, (KeyboardInterrupt, RuntimeError)) and written
    assert not [*checkpoint.glob(".metadata.tmp.*")] and _index_of(checkpoint) == old
    assert outcome(checkpoint, state(1)) is None
    save(checkpoint, state(2))
    assert outcome(checkpoint, state(2)) is None and only_named_files(checkpoint)


@forked
def test_a_limit_on_file_sizes_is_a_named_error(checkpoint: Path) -> None:
    save(checkpoint, state(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MiB, MiB))
    failure = failed_save(checkpoint, state(2))
    assert isinstance(failure, StorageFullError)
    assert "File too large" in str(failure) and "ulimit -f" in str(failure) and f"{MiB:,} bytes" in str(failure)
    assert "no room" not in str(failure)
    assert only_named_files(checkpoint)
    assert outcome(checkpoint, state(1)) is None


def test_a_quota_is_named(checkpoint: Path) -> None:
    with fault("write", errno.EDQUOT):
        failure = failed_save(checkpoint, state(1))
    assert isinstance(failure, StorageFullError) and "quota" in str(failure) and "no room" not in str(failure)


@pytest.mark.root
@pytest.mark.parametrize("format", ["dcp", "safetensors", "convert"])
def test_a_file_system_without_inodes_is_named(small_disk: Path, format: str) -> None:
    if subprocess.run(["mount", "-o", "remount,nr_inodes=20", str(small_disk)], check=False).returncode:
        pytest.skip("cannot limit inodes here")
    with contextlib.suppress(OSError):
        for number in range(30):
            (small_disk / str(number)).touch()
    with pytest.raises(StorageFullError, match="no inodes left") as full:
        if format == "convert":
            torch.save({"a": torch.ones(1)}, small_disk.parent / "a.pt")
            vescale_ckpt.convert(small_disk.parent / "a.pt", small_disk / "made", format="dcp")
        else:
            vescale_ckpt.save(small_disk, {"a": torch.ones(1)}, format=format)
    assert full.value.free > 0
    with pytest.raises(StorageFullError, match="no inodes left"):
        vescale_ckpt.save(small_disk / "deep" / "er", {"a": torch.ones(1)})


@forked
def test_a_limit_on_open_files_does_not_bind(checkpoint: Path) -> None:
    """More data files than the process may have open."""
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 140, used + 140))
    values = {f"tensor {i}": torch.full((3,), float(i)) for i in range(200)}
    save(checkpoint, values, single_file_per_rank=False)
    assert outcome(checkpoint, values) is None


# --- Paths that cannot be saved to


@pytest.mark.root
def test_a_read_only_disk_is_a_named_error_and_can_be_loaded_from(small_disk: Path) -> None:
    directory = small_disk / "checkpoint"
    save(directory, state(1))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for where in (directory, small_disk / "new"):
        failure = failed_save(where, state(2))
        assert failure is not None and "Read-only file system" in str(failure) and str(where) in str(failure)
    assert outcome(directory, state(1)) is None


def test_a_path_that_is_a_file_is_a_named_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    for where in (path, path / "below"):
        failure = failed_save(where, small_state(1))
        assert failure is not None and str(where) in str(failure)
        with pytest.raises(CheckpointError, match="file"):
            load(where, small_state(1))
    assert path.read_text() == "precious"


def test_a_path_that_does_not_exist_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no directory"):
        load(tmp_path / "nowhere", small_state(1))
    with pytest.raises(CheckpointException, match="no directory") as caught:
        dcp.load(small_state(1), storage_reader=StorageReader(tmp_path / "nowhere"), no_dist=True)
    assert isinstance(cause(caught.value), CheckpointError)


# --- A rank that fails

WRITER_CALLS = [
    "storage_meta",
    "set_up_storage_writer",
    "prepare_local_plan",
    "prepare_global_plan",
    "write_data",
    "finish",
]
READER_CALLS = ["read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data"]
COORDINATOR_ONLY = {"prepare_global_plan", "finish"}
BOUND = 120.0  # seconds after which a run of ranks counts as hung


class Deliberate(CheckpointError):
    pass


def raising(kind: type, method: str, rank: int) -> type:
    """A class like `kind` whose `method` raises on one rank."""

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == rank:
            raise Deliberate(f"{method} on rank {rank}")
        return getattr(kind, method)(self, *args, **kwargs)

    return type(f"Raising{kind.__name__}", (kind,), {method: fail})


def save_on_ranks(directory: Path, k: int, writer: type[StorageWriter] = StorageWriter) -> None:
    dcp.save(state_of_rank(k), storage_writer=writer(directory), planner=SavePlanner())


def check_on_ranks(directory: Path, k: int, reader: type[StorageReader] = StorageReader) -> None:
    values = state_of_rank(-1)
    dcp.load(values, storage_reader=reader(directory), planner=LoadPlanner())
    expected = state_of_rank(k)
    for held in (values, expected):
        held["rows"] = held["rows"].to_local()
    assert same(values, expected)


def expect_failure(message: str, function: Any, *args: Any) -> None:
    with pytest.raises(CheckpointException, match=message):
        function(*args)


@pytest.mark.parametrize(("kind", "failures"), [(StorageWriter, 10), (StorageReader, 9)])
@on_ranks(4, timeout=BOUND)
def test_a_rank_that_raises_fails_all_and_changes_nothing(checkpoint: Path, kind: type, failures: int) -> None:
    """Each failure on one rank, the first and the last, in one method of a writer or reader."""
    tried = 0
    save_on_ranks(checkpoint, 1)
    for method in WRITER_CALLS if kind is StorageWriter else READER_CALLS:
        for rank in (0,) if method in COORDINATOR_ONLY else (0, dist.get_world_size() - 1):
            failing = raising(kind, method, rank)
            if kind is StorageWriter:
                expect_failure(f"{method} on rank {rank}", save_on_ranks, checkpoint, 2, failing)
            else:
                told = f"{method} on rank {rank}"
                if method == "read_metadata":  # torch 2.11 tells in other words that there is none
                    told += "|metadata is None"
                expect_failure(told, check_on_ranks, checkpoint, 1, failing)
            check_on_ranks(checkpoint, 1)
            save_on_ranks(checkpoint, 1)
            if dist.get_rank() == 0:
                assert only_named_files(checkpoint)
            dist.barrier()
            tried += 1
    save_on_ranks(checkpoint, 3)
    check_on_ranks(checkpoint, 3)
    assert tried == failures


# --- Forks


def save_and_load_again(directory: Path, k: int) -> bool:
    save(directory, state(k))
    return outcome(directory, state(k)) is None


def test_children_forked_in_the_middle_of_a_save_do_their_own(checkpoint: Path, tmp_path: Path) -> None:
    stop = threading.Event()
    saved = []

    def keep_saving() -> None:
        while not stop.is_set():
            save(checkpoint, state(len(saved)))
            saved.append(len(saved))

    thread = threading.Thread(target=keep_saving)
    thread.start()
    try:
        for k in range(12):
            assert in_child(save_and_load_again, tmp_path / "child", k).value
    finally:
        stop.set()
        thread.join(60)
    assert saved and outcome(checkpoint, state(saved[-1])) is None
    assert only_named_files(checkpoint)


def test_a_child_keeps_no_lock_of_its_parent_and_takes_none_away(tmp_path: Path) -> None:
    """A data loader's worker may live longer than the save that it was forked in: its files must become orphans."""
    there, over = tmp_path / "there", tmp_path / "over"
    held = lock(tmp_path)
    child = fork(lambda: (there.touch(), wait_for(over)))
    wait_for(there)
    with lock_if_abandoned(str(tmp_path), 0) as abandoned:
        assert not abandoned
    held.release()
    with lock_if_abandoned(str(tmp_path), 0) as abandoned:
        assert abandoned
    over.touch()
    assert os.waitpid(child, 0)[1] == 0
