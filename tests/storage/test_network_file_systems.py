"""What network file systems do besides what local ones do: stale files, errors at close, lost answers, odd locks."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import saves
from harness.faults import fault
from harness.files import data_file_names, drop_dead_locks, lock, locks_are_held
from harness.ranks import run_ranks
from harness.states import state
from torch.distributed.checkpoint.api import CheckpointException

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointTimeoutError
from vescale_ckpt._storage import locks
from vescale_ckpt._storage.open_storage import storage_at

# --- Errors that come at close


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
@pytest.mark.parametrize("error", [errno.EIO, errno.EDQUOT], ids=os.strerror)
@pytest.mark.parametrize("sync", [True, False])
def test_an_error_at_close_fails_the_save(checkpoint: Path, format: str, error: int, sync: bool) -> None:
    values = {"weight": torch.ones(300, 1000)}
    vescale_ckpt.save(checkpoint, values, format=format)
    before, back = len(os.listdir(checkpoint)), {"weight": torch.full((300, 1000), -1.0)}
    writer = vescale_ckpt.StorageWriter(checkpoint, format=format, sync_files=sync)
    with fault("close", error, times=10**6), pytest.raises(CheckpointException) as told:
        dcp.save({"weight": torch.zeros(300, 1000)}, storage_writer=writer, planner=vescale_ckpt.SavePlanner())
    assert "close" in str(told.value) and (os.strerror(error) in str(told.value) or "quota" in str(told.value))
    assert len(os.listdir(checkpoint)) == before
    vescale_ckpt.load(checkpoint, back)
    assert torch.equal(back["weight"], values["weight"])
    with fault("close", errno.EINTR, times=10**6):
        vescale_ckpt.save(checkpoint, {"weight": torch.zeros(300, 1000)}, format=format)
    vescale_ckpt.load(checkpoint, back)
    assert not back["weight"].any()


# --- Stale files


@pytest.mark.parametrize("call", ["open", "read"])
def test_a_stale_file_is_opened_again(checkpoint: Path, call: str) -> None:
    vescale_ckpt.save(checkpoint, state(1))
    for skip in range(6):
        with fault(call, errno.ESTALE, skip=skip):
            assert saves.loads(checkpoint, state(1))
    with (
        fault(call, errno.ESTALE, times=10**6),
        pytest.raises(CheckpointError, match=os.strerror(errno.ESTALE)) as told,
    ):
        saves.loads(checkpoint, state(1))
    assert data_file_names(checkpoint)[0] in str(told.value)
    assert vescale_ckpt.verify(checkpoint).ok


class Client:
    """Wraps functions of `os` as a client of a network file system would: it answers from what it remembers until
    somebody opens the directory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, error: int, times: int) -> None:
        self.left = times
        self._directory, self._error = str(directory), error
        self._open = os.open
        monkeypatch.setattr(os, "open", self.open)
        for name in ("stat", "lstat", "listdir"):
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name)))

    def open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECTORY and os.fspath(path) == self._directory:
            self.left -= 1
            return self._open(path, flags, *args, **kwargs)
        self._fail(path)
        return self._open(path, flags, *args, **kwargs)

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            self._fail(path)
            return function(path, *args, **kwargs)

        return call

    def _fail(self, path: Any) -> None:
        if self.left > 0 and isinstance(path, str) and path.startswith(self._directory):
            raise OSError(self._error, os.strerror(self._error), path)


@pytest.mark.parametrize(("error", "times"), [(errno.ENOENT, 1), (errno.ESTALE, 2)])
@pytest.mark.parametrize("look", ["names", "has", "stat", "read", "read_range"])
def test_a_client_is_made_to_ask_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, times: int, look: str
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    storage = storage_at(str(tmp_path))
    looks: dict[str, Callable[[], Any]] = {
        "names": storage.names,
        "has": lambda: storage.has("file"),
        "stat": lambda: storage.stat("file").size,
        "read": lambda: storage.read("file"),
        "read_range": lambda: storage.read_range("file", 1, 3)[1],
    }
    wanted = {"names": ["file"], "has": True, "stat": 7, "read": b"content", "read_range": b"ont"}
    Client(monkeypatch, tmp_path, error, times)
    assert looks[look]() == wanted[look]
    monkeypatch.undo()
    Client(monkeypatch, tmp_path, error, 10**6)
    if look == "has":
        assert not storage.has("file")
    else:
        with pytest.raises(OSError, match=os.strerror(error)):
            looks[look]()


# --- Lost answers


def test_a_rename_that_was_done_counts_although_its_answer_was_lost(checkpoint: Path) -> None:
    vescale_ckpt.save(checkpoint, state(1))
    with fault("rename", errno.ENOENT, times=10**6):
        vescale_ckpt.save(checkpoint, state(2))
        vescale_ckpt.save(checkpoint / "model", {"weight": torch.ones(3)}, format="safetensors")
    assert saves.loads(checkpoint, state(2)) and len(data_file_names(checkpoint)) == 1
    assert os.listdir(checkpoint / "model") == ["model.safetensors"]


# --- Locks


def dead_save(directory: Path) -> str:
    """The data file of a save that died, without its lock."""
    name = "__0_deadbeef.distcp"
    (directory / name).write_bytes(bytes(1000))
    return name


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], ids=os.strerror)
def test_locks_that_fail_are_no_locks(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    vescale_ckpt.save(checkpoint, state(1))
    left = dead_save(checkpoint)

    def flock(descriptor: int, how: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    vescale_ckpt.save(checkpoint, state(2))
    assert left in data_file_names(checkpoint), "its writer may be alive"
    os.utime(checkpoint / left, (time.time() - 2 * 86400,) * 2)
    vescale_ckpt.save(checkpoint, state(3))
    assert left not in data_file_names(checkpoint) and saves.loads(checkpoint, state(3))
    manager = vescale_ckpt.CheckpointManager(checkpoint / "steps", max_to_keep=1)
    for step in (1, 2):
        manager.save(step, state(step))
    manager.close()
    assert [name for name in os.listdir(checkpoint / "steps") if name.startswith("step")] == ["step-2"]


def test_locks_of_this_machine_alone_do_not_prove_that_a_writer_is_dead(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vescale_ckpt.save(checkpoint, state(1))
    left = dead_save(checkpoint)
    with monkeypatch.context() as local:
        local.setattr(locks, "locks_reach_others", lambda status: False)
        vescale_ckpt.save(checkpoint, state(2))
        assert left in data_file_names(checkpoint)
        held = os.open(checkpoint / left, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_SH)
        os.utime(checkpoint / left, (time.time() - 2 * 86400,) * 2)
        vescale_ckpt.save(checkpoint, state(3))
        assert left in data_file_names(checkpoint), "locked on this machine"
        os.close(held)
        vescale_ckpt.save(checkpoint, state(4))
        assert left not in data_file_names(checkpoint)
    left = dead_save(checkpoint)
    vescale_ckpt.save(checkpoint, state(5))
    assert left not in data_file_names(checkpoint) and saves.loads(checkpoint, state(5))


def test_exclusive_locks_are_asked_for_by_those_who_may_write(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS refuses them (EBADF) to others; and no lock is waited for."""
    real = fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        assert how & fcntl.LOCK_NB
        if how & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(descriptor, how)

    vescale_ckpt.save(checkpoint, state(1))
    left = dead_save(checkpoint)
    monkeypatch.setattr(fcntl, "flock", flock)
    vescale_ckpt.save(checkpoint, state(2))
    assert left not in data_file_names(checkpoint) and saves.loads(checkpoint, state(2))


def _save_where_a_lock_hangs(directory: Path, rank_that_hangs: int) -> str:
    rank = torch.distributed.get_rank()
    hangs = mock.patch.object(fcntl, "flock", lambda descriptor, how: time.sleep(12))  # as a server that is down does
    try:
        with hangs if rank == rank_that_hangs else nullcontext():
            vescale_ckpt.save(directory, {f"tensor {rank}": torch.ones(1000)}, timeout=2)
    except CheckpointTimeoutError as error:
        return str(error.late_ranks)
    return "saved"


def test_a_lock_that_blocks_is_bounded_on_the_other_ranks(checkpoint: Path) -> None:
    answers = run_ranks(2, _save_where_a_lock_hangs, checkpoint, 1, check=False)
    assert answers[0] == "[1]", answers
    assert not (checkpoint / ".metadata").exists()
    vescale_ckpt.save(checkpoint, state(2))
    assert saves.loads(checkpoint, state(2))


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:41 / /nfs rw,relatime shared:9 - nfs4 server:/a rw,vers=4.2,hard,local_lock=none,addr=192.0.2.1
31 22 0:42 / /nfs3 rw,relatime - nfs server:/b rw,vers=3,hard,nolock,addr=192.0.2.1
32 22 0:43 / /nfs3l rw,relatime - nfs server:/b rw,vers=3,local_lock=all,addr=192.0.2.1
33 22 0:44 / /lustre rw - lustre 192.0.2.2@tcp:/fs rw,flock,lazystatfs
34 22 0:45 / /lustre2 rw - lustre 192.0.2.2@tcp:/fs rw,localflock
35 22 0:46 / /mnt/with\\040space rw,nosuid master:2 - fuse.bindfs /src rw,user_id=0
36 22 0:47 / /jfs rw - fuse.juicefs JuiceFS:x rw
37 22 0:48 / /gpfs rw - gpfs fs1 rw
38 22 0:49 / /tmp rw - tmpfs none rw
"""


@pytest.mark.parametrize(
    ("device", "file", "folder"),
    [
        *[((254, 0), True, True), ((0, 41), True, False), ((0, 42), False, False), ((0, 43), False, False)],
        *[((0, 44), True, True), ((0, 45), False, False), ((0, 46), False, False), ((0, 47), True, True)],
        *[((0, 48), False, False), ((0, 49), True, True), ((9, 99), True, True)],
    ],
)
def test_which_locks_other_machines_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: tuple[int, int], file: bool, folder: bool
) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    monkeypatch.setattr(locks, "_MOUNTS", str(tmp_path / "mountinfo"))
    locks._mount_of.cache_clear()
    try:
        for mode, wanted in ((0o100644, file), (0o040755, folder)):
            status = SimpleNamespace(st_dev=os.makedev(*device), st_mode=mode)
            assert locks.locks_reach_others(status) is wanted  # type: ignore[arg-type]
    finally:
        locks._mount_of.cache_clear()


# --- Locks that this process holds


def test_threads_lock_while_a_save_looks_for_locks_of_failed_ones(tmp_path: Path) -> None:
    files = [tmp_path / str(k) for k in range(200)]
    for file in files:
        file.touch()
    ended, taken = threading.Event(), []

    def lock_and_release() -> None:
        while not ended.is_set():
            held = [lock(file) for file in files]
            taken.append(len(held))
            for one in held:
                assert one is not None
                one.release()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=lock_and_release) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        while len(taken) < 60:
            drop_dead_locks(tmp_path / "of another save")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not locks_are_held()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO, errno.ESTALE], ids=os.strerror)
@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_a_file_that_cannot_be_opened_to_lock_it_is_not_called_removed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: int, format: str
) -> None:
    tried: list[str] = []
    real = os.open

    def failing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags == os.O_RDONLY | os.O_CLOEXEC and os.fspath(path).startswith(str(checkpoint)):
            tried.append(path)
            raise OSError(error, os.strerror(error), path)
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(CheckpointError) as told:
        vescale_ckpt.save(checkpoint, {"weight": torch.ones(3)}, format=format)
    removed = error == errno.ESTALE  # another machine removed the file, and the next attempt takes another name
    assert ("was removed while it was written" in str(told.value)) == removed
    assert os.strerror(error) in str(told.value) and str(checkpoint) in str(told.value)
    assert (len(tried), getattr(told.value, "errno", None)) == ((3, None) if removed else (1, error))
