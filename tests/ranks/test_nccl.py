"""Connections among devices without a device: what bounds them, what ends them, and what of torch's runs beside them.

Functions stand for NCCL's calls. One test makes real process groups, where this torch has NCCL.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from vescale_ckpt import CheckpointError
from vescale_ckpt._ranks import nccl
from vescale_ckpt._ranks.nccl import DeviceGroup

FOREVER = 60.0
EXTRA_DUMP = "TORCH_NCCL_EXTRA_DUMP_ON_EXEC"
ONE_BYTE = [torch.zeros(1, dtype=torch.uint8)]
#: stands for a device that is done with everything at once
HOST: Any = SimpleNamespace(queued=contextlib.nullcontext, finish=lambda seconds, swap: True)


class _Absent:
    """Stands for a backend one of whose peers is not there: its call returns when the peer comes."""

    def __init__(self, outcome: Callable[[], Any] = mock.Mock) -> None:
        self.outcome = outcome
        self.came = threading.Event()
        self.calling = threading.Event()
        self.aborted = threading.Event()
        self.aborts = 0

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
        self.calling.set()
        assert self.came.wait(FOREVER)
        return self.outcome()

    def abort(self) -> None:
        assert self.came.is_set(), "another thread is in a call with what this frees"
        self.aborts += 1
        self.aborted.set()


def _fails() -> None:
    raise RuntimeError("NCCL error: remote process exited")


# --- Connecting


@pytest.mark.parametrize("outcome", [mock.Mock, _fails], ids=["comes late", "dies"])
def test_connecting_to_a_rank_that_is_absent_is_bounded(outcome: Callable[[], Any]) -> None:
    absent = _Absent(outcome)
    group = DeviceGroup(HOST, absent, timeout=0.4)
    with pytest.raises(CheckpointError, match=r"did not connect within 0\.2 s"):
        group.connect(ONE_BYTE, ONE_BYTE)
    assert not group.usable
    group.end()  # returns, and aborts nothing
    with pytest.raises(CheckpointError, match="has failed before"):
        group.swap(ONE_BYTE, ONE_BYTE)
    absent.came.set()
    assert absent.aborted.wait(FOREVER), "the thread that connected ends the connections"
    assert absent.aborts == 1


def test_the_end_of_connections_does_not_wait_for_a_call_that_connects() -> None:
    absent = _Absent()
    group = DeviceGroup(HOST, absent, timeout=FOREVER)
    connecting = threading.Thread(target=group.connect, args=(ONE_BYTE, ONE_BYTE))
    connecting.start()
    assert absent.calling.wait(FOREVER)
    group.end()
    assert connecting.is_alive() and absent.aborts == 0
    absent.came.set()
    connecting.join(FOREVER)
    assert absent.aborts == 1 and not group.usable


def test_an_error_while_connecting_is_raised_at_once() -> None:
    absent = _Absent(_fails)
    absent.came.set()
    group = DeviceGroup(HOST, absent, timeout=FOREVER)
    with pytest.raises(RuntimeError, match="remote process exited"):
        group.connect(ONE_BYTE, ONE_BYTE)
    assert not group.usable and absent.aborted.wait(FOREVER) and absent.aborts == 1


# --- The end of connections


def test_an_abort_that_does_not_return_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl, "ABORT_SECONDS", 0.1)
    ended = threading.Event()
    group = DeviceGroup(HOST, SimpleNamespace(abort=ended.wait), timeout=FOREVER)
    group.end()
    assert not group.usable and "have not ended within" in caplog.text
    ended.set()


def test_an_abort_that_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    DeviceGroup(HOST, SimpleNamespace(abort=_fails), timeout=FOREVER).end()
    assert "remote process exited" in caplog.text


def test_connections_end_with_what_holds_them() -> None:
    backend = mock.Mock()
    group = DeviceGroup(HOST, backend, timeout=FOREVER)
    del group
    gc.collect()
    assert backend.abort.call_count == 1


@pytest.mark.parametrize("users", [None, "1"])
def test_an_abort_does_not_tell_the_users_groups_to_end_the_process(
    monkeypatch: pytest.MonkeyPatch, users: str | None
) -> None:
    monkeypatch.delenv(EXTRA_DUMP, raising=False)
    if users is not None:
        monkeypatch.setenv(EXTRA_DUMP, users)
    found = []
    DeviceGroup(HOST, SimpleNamespace(abort=lambda: found.append(os.environ.get(EXTRA_DUMP))), FOREVER).end()
    assert found == [None if users is None else "0"] and os.environ.get(EXTRA_DUMP) == users


# --- A device's work


class _Work:
    """Stands for torch's `Work` of a swap that is never done. `result`: what it gets once NCCL was asked."""

    def __init__(self, result: int | None) -> None:
        self.result = result
        self.asked = 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.result is not None and self.asked > 2

    def get_future_result(self) -> Any:
        return SimpleNamespace(done=lambda: True, value=lambda: self.result)


@pytest.fixture
def stuck_device(monkeypatch: pytest.MonkeyPatch) -> nccl.CudaDevice:
    """A CUDA device whose work is never done."""
    event = SimpleNamespace(record=lambda stream: None, query=lambda: False)
    monkeypatch.setattr(torch.cuda, "Stream", mock.Mock())
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return nccl.CudaDevice(torch.device("cuda", 0))


def test_an_error_of_nccl_ends_the_wait_for_a_swap(stuck_device: nccl.CudaDevice) -> None:
    failed = _Work(2)
    with pytest.raises(CheckpointError, match="a connection among the devices failed"):
        stuck_device.finish(FOREVER, failed)
    assert failed.asked == 3, "in the round in which NCCL reported it"


@pytest.mark.parametrize("swap", [None, _Work(None), _Work(0)], ids=["no swap", "a swap", "a swap that is done"])
def test_the_wait_for_a_device_is_bounded(stuck_device: nccl.CudaDevice, swap: _Work | None) -> None:
    assert not stuck_device.finish(0.01, swap)
    assert swap is None or swap.asked


def test_a_stream_that_is_captured_is_refused_by_name(
    stuck_device: nccl.CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    stuck_device.begin()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CheckpointError, match="a CUDA graph is being captured in the current stream of cuda:0"):
        stuck_device.begin()


# --- NCCL's process group


def test_what_torch_reads_when_the_process_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_CUDA_EVENT_CACHE": "1"}
    made: list[tuple[dict[str, str | None], Any]] = []

    class Group:
        class Options:
            def __init__(self) -> None:
                self.config = SimpleNamespace(blocking=0)

        def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
            made.append(({name: os.environ.get(name) for name in wanted}, options))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    for users in (None, "0"):
        for name in wanted:
            if users is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, users)
        store = mock.Mock()
        nccl.nccl_backend(store, 0, 2, 30.0)
        assert {os.environ.get(name) for name in wanted} == {users}, "the user's own groups are as the user wants them"
        found, options = made.pop()
        assert found == wanted and options.config.blocking == 1 and options.config.max_ctas == 8
        assert store.set_timeout.call_args == mock.call(timedelta(seconds=15))


_THREADS_OF_GROUPS = """
import json, os, sys
import torch.distributed as dist
from types import SimpleNamespace
from vescale_ckpt._ranks.nccl import DeviceGroup, nccl_backend

store = dist.TCPStore("127.0.0.1", 0, 1, True)

def threads_of(make):
    clone = dist.PrefixStore("group", store.clone())
    before = set(os.listdir("/proc/self/task"))
    made.append(make(clone, 0, 2))
    return len(set(os.listdir("/proc/self/task")) - before)

def users(*where):
    return dist.ProcessGroupNCCL(*where, dist.ProcessGroupNCCL.Options())

def ours(*where):
    return nccl_backend(*where, 20.0)

made = []
found = {"first of the process": threads_of(ours), "user's": threads_of(users), "after it": threads_of(ours)}
os.environ["TORCH_NCCL_DESYNC_DEBUG"] = "1"
found["with TORCH_NCCL_DESYNC_DEBUG"] = threads_of(ours)
dist.set_debug_level(dist.DebugLevel.DETAIL)
found["with TORCH_DISTRIBUTED_DEBUG"] = threads_of(ours)
os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "0"
found["with TORCH_NCCL_BLOCKING_WAIT"] = threads_of(ours)
os.environ["TORCH_NCCL_EXTRA_DUMP_ON_EXEC"] = "1"
DeviceGroup(SimpleNamespace(), made[-1], 20.0).end()
found["signals to the job"] = int(store.check(["exception_dump"]))
print(json.dumps(found), flush=True)
os._exit(0)  # the user's group was not destroyed
"""


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL"), reason="this torch is built without NCCL")
def test_no_thread_of_torchs_watches_the_process_group(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/trace"}
    for name in (EXTRA_DUMP, "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_DESYNC_DEBUG", "TORCH_DISTRIBUTED_DEBUG"):
        environment.pop(name, None)
    if not torch.cuda.is_available():  # all that a process group asks of CUDA until its first call
        source, library = tmp_path / "count.cpp", tmp_path / "count.so"
        source.write_text('extern "C" int cudaGetDeviceCount(int* count) { return *count = 1, 0; }')
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        environment["LD_PRELOAD"] = str(library)
    command = [sys.executable, "-c", _THREADS_OF_GROUPS]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=FOREVER)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found.pop("user's") >= 1, "threads of a group are found"
    assert not any(found.values()), found
