"""Saves and loads on FUSE mounts: bindfs over a local folder, and SeaweedFS's mount over its server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from harness import object_server as servers
from harness import saves
from harness.children import Shared, fork, kill, wait_until
from harness.files import data_file_names
from harness.states import state

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager, convert

pytestmark = pytest.mark.root
MOUNT_TIMEOUT = 30.0  # seconds


@contextlib.contextmanager
def _mounted(command: list[str], at: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A mount that a process, which this gives, serves while this lasts. Skips if it does not come up."""
    at.mkdir(exist_ok=True)
    with (at.parent / "mount.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + MOUNT_TIMEOUT
        while not os.path.ismount(at):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.skip(f"{command[0]} cannot mount here: {(at.parent / 'mount.log').read_text()[-300:]}")
            time.sleep(0.05)
        yield process
    finally:
        subprocess.run(["umount", "-l", str(at)], check=False, capture_output=True)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(params=["bindfs", "bindfs, names cached", "weed mount"])
def mount(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("mounts need root and /dev/fuse")
    at = tmp_path / "mount"
    if request.param == "weed mount":
        if reason := servers.why_not():
            pytest.skip(reason)
        server: servers.ObjectServer = request.getfixturevalue("object_server")
        command = [
            *(str(servers.weed()), "-logtostderr=true", "mount", f"-filer=127.0.0.1:{server.filer_port}"),
            *(f"-dir={at}", f"-filer.path=/mounts/{tmp_path.name}", f"-cacheDir={tmp_path / 'cache'}"),
        ]
    else:
        cached = ["-o", "negative_timeout=1,entry_timeout=1,attr_timeout=1"] if "cached" in request.param else []
        command = _bindfs(tmp_path, cached)
    with _mounted(command, at):
        yield at


def _bindfs(folder: Path, options: Sequence[str] = ()) -> list[str]:
    """The command that mounts `folder`/source at `folder`/mount."""
    if shutil.which("bindfs") is None:
        pytest.skip("needs the command bindfs (Debian's package of that name)")
    (folder / "source").mkdir(exist_ok=True)
    return ["bindfs", "-f", *options, str(folder / "source"), str(folder / "mount")]


def test_save_load_overwrite_verify(mount: Path) -> None:
    directory = mount / "checkpoint"
    for k in range(3):
        vescale_ckpt.save(directory, state(k))
        assert saves.loads(directory, state(k)) and vescale_ckpt.verify(directory).ok
    with pytest.raises(CheckpointError, match="overwrite=False"):
        vescale_ckpt.save(directory, state(3), overwrite=False)
    handle = vescale_ckpt.save(directory, state(4), async_checkpoint=True)
    handle.result()
    assert saves.loads(directory, state(4)) and len(data_file_names(directory)) == 1

    folder = mount / "model"
    for k in range(2):
        tensors = {key: value for key, value in state(k)["model"].items() if key in ("large", "bias")}
        vescale_ckpt.save(folder, tensors, format=vescale_ckpt.Safetensors(max_shard_size=1 << 20))
        assert saves.loads(folder, tensors)
        made = mount / "converted"
        convert(directory, made, format="safetensors", overwrite=bool(k), keys="model.large")
        assert os.listdir(made) == ["model.safetensors"]
    assert sorted(os.listdir(mount)) == ["checkpoint", "converted", "model"]


def _save_for_ever(directory: Path, numbers: Shared) -> None:
    for k in range(1, 10**6):
        vescale_ckpt.save(directory, state(k))
        numbers[0] = k


def test_a_killed_save_leaves_a_whole_checkpoint(mount: Path) -> None:
    directory = mount / "checkpoint"
    vescale_ckpt.save(directory, state(0))
    for attempt in range(3):
        numbers = Shared(1)
        pid = fork(partial(_save_for_ever, directory, numbers))
        wait_until(numbers, attempt, "saves")
        time.sleep(0.013 * attempt)
        kill(pid)
        found = [k for k in (numbers[0], numbers[0] + 1) if saves.loads(directory, state(k))]
        assert len(found) == 1 and vescale_ckpt.verify(directory).ok
    vescale_ckpt.save(directory, state(7))
    assert saves.loads(directory, state(7))
    # Files of killed saves are left where locks do not prove their writers dead, for a day.
    for name in data_file_names(directory):
        os.utime(directory / name, (time.time() - 2 * 86400,) * 2)
    vescale_ckpt.save(directory, state(8))
    assert saves.loads(directory, state(8)) and len(data_file_names(directory)) == 1


def test_files_that_are_open_are_removed_under_other_names(mount: Path) -> None:
    """Silly renames: the name that an open file gets when it is removed keeps its folder from being removed."""
    manager = CheckpointManager(mount, max_to_keep=1)
    manager.save(1, state(1))
    manager.wait()
    with open(mount / "step-1" / data_file_names(mount / "step-1")[0], "rb") as reader:  # as a tool without locks does
        for step in (2, 3):
            manager.save(step, state(step))
            manager.wait()
            assert manager.steps() == [step]
            assert reader.read(10)
    manager.save(4, state(4))
    manager.close()
    assert [name for name in os.listdir(mount) if name.startswith("step-")] == ["step-4"]
    assert saves.loads(mount / "step-4", state(4))


def _during(delay: float, action: Callable[[], None], call: Callable[[], Any]) -> Any:
    """What `call` returns, while `action` runs so many seconds after it began."""
    timer = Timer(delay, action)
    timer.start()
    try:
        return call()
    finally:
        timer.join()


def _large(value: float) -> dict[str, Any]:
    return {f"{key}": torch.full((2 << 20,), value + key) for key in range(16)}


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2])
def test_a_daemon_that_stops_for_a_while_delays_and_breaks_nothing(tmp_path: Path, delay: float) -> None:
    path = tmp_path / "mount" / "checkpoint"
    with _mounted(_bindfs(tmp_path), tmp_path / "mount") as daemon:

        def stop() -> None:
            daemon.send_signal(signal.SIGSTOP)
            time.sleep(2)
            daemon.send_signal(signal.SIGCONT)

        _during(delay, stop, lambda: vescale_ckpt.save(path, _large(1.0)))
        assert _during(delay, stop, lambda: saves.loads(path, _large(1.0)))
        handle = vescale_ckpt.save(path, _large(2.0), async_checkpoint=True)
        daemon.send_signal(signal.SIGSTOP)
        if not handle.done():
            with pytest.raises(TimeoutError, match="not done after"):
                handle.result(0.1)
        daemon.send_signal(signal.SIGCONT)
        handle.result(MOUNT_TIMEOUT)
        assert saves.loads(path, _large(2.0))


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.05, 0.1, 0.2, 0.4])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_daemon_that_ends_fails_what_runs_and_loses_nothing(tmp_path: Path, delay: float, is_async: bool) -> None:
    path = tmp_path / "mount" / "checkpoint"

    def save(value: float) -> None:
        vescale_ckpt.save(path, _large(value), async_checkpoint=is_async).result(MOUNT_TIMEOUT)

    def while_it_ends(call: Callable[[], object]) -> bool:
        """Whether the daemon, which ends, let the call end well. An error names the mount."""
        with _mounted(_bindfs(tmp_path), tmp_path / "mount") as daemon:
            try:
                _during(delay, daemon.kill, call)
            except CheckpointError as error:
                assert str(path.parent) in str(error)
                return False
        return True

    with _mounted(_bindfs(tmp_path), tmp_path / "mount"):
        save(1.0)
    saved = while_it_ends(lambda: save(2.0))
    while_it_ends(lambda: vescale_ckpt.load(path))
    with _mounted(_bindfs(tmp_path), tmp_path / "mount"):
        found = [value for value in (1.0, 2.0) if saves.loads(path, _large(value))]
        assert found == [2.0] if saved else len(found) == 1, "it may end between the rename and its answer"
        assert vescale_ckpt.verify(path).ok
        save(3.0)
        assert saves.loads(path, _large(3.0))
