"""Loads whose ranks swap from device to device: all but the device itself and NCCL, for which memory and gloo stand."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.files import flip
from harness.ranks import on_ranks, run_ranks
from harness.states import MiB, assert_same, numbers, sharded_by

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointTimeoutError, CorruptCheckpointError
from vescale_ckpt._ranks import exchange, nccl
from vescale_ckpt._ranks.nccl import DeviceGroup
from vescale_ckpt._routes import device_buffer, routes
from vescale_ckpt._routes.device_buffer import DeviceBuffer

FOREVER = 60.0


class _Host:
    """Stands for a device. What it is asked to queue is done at once."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.begun = 0
        self.slow = False

    def host_memory(self, size: int) -> torch.Tensor:
        return torch.full((size,), 99, dtype=torch.uint8)

    def identity(self) -> str:
        return str(dist.get_rank() // int(os.environ.get("TEST_RANKS_A_DEVICE", "1")))

    def begin(self) -> None:
        self.begun += 1

    def queued(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self, seconds: float, swap: Any = None) -> bool:
        assert seconds <= nccl.MOST_SECONDS
        return not self.slow


class _Gloo:
    """Stands for NCCL."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.connect = lambda: dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
        self.group: dist.ProcessGroupGloo | None = None
        self.swaps = 0
        self.bytes = 0
        self.aborts = 0

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
        if self.group is None:
            self.group = self.connect()
        works = []
        for peer, (output, given) in enumerate(zip(outputs, inputs, strict=True)):
            if peer == self.rank:
                assert output.numel() == given.numel()
                output.copy_(given)
                continue
            if output.numel():
                works.append(self.group.recv([output], peer, 0))
            if given.numel():
                works.append(self.group.send([given], peer, 0))
                self.bytes += given.numel()
        for work in works:
            work.wait(timedelta(seconds=5))
        self.swaps += 1
        return mock.Mock()

    def abort(self) -> None:
        self.aborts += 1
        self.group = None


@contextlib.contextmanager
def _devices() -> Iterator[tuple[_Host, list[_Gloo]]]:
    """From now on; connections that were made before are forgotten, as ranks outlive tests."""
    host, made = _Host(), []
    exchange._groups.clear()

    def backend(*args: Any) -> _Gloo:
        made.append(_Gloo(*args))
        return made[-1]

    with (
        mock.patch.object(nccl, "device_for", lambda tensors: host),
        mock.patch.object(nccl, "nccl_backend", backend),
    ):
        yield host, made


def _full() -> dict[str, torch.Tensor]:
    return {"w": numbers(1024, 999), "v": numbers(77, 33, 5, dtype=torch.int16), "s": numbers(3, 4)}


def _load(directory: Path, state: dict[str, Any], way: Any = True, **options: Any) -> Any:
    return vescale_ckpt.load(directory, state, broadcast_checkpoint=way, timeout=FOREVER, **options).stats


def _all_ways(directory: Path) -> list[tuple[int, int, int]]:
    os.environ["VESCALE_CKPT_MEMORY_BYTES"] = str(8 * MiB)  # half of it for other ranks
    full = _full()
    results = []
    for number, saved in enumerate((0, None)):
        path = directory / str(number)
        vescale_ckpt.save(path, {name: sharded_by(tensor, saved) for name, tensor in full.items()})
        with _devices() as (host, made):
            for wanted in (None, 1, 0):
                state = {name: sharded_by(torch.zeros_like(tensor), wanted) for name, tensor in full.items()}
                begun = host.begun
                stats = _load(path, state)
                shares = stats.shared_bytes > 0
                assert host.begun - begun == 1 + shares, "memory is taken where something is shared, after connecting"
                for name, tensor in full.items():
                    assert_same(state[name].to_local(), sharded_by(tensor, wanted).to_local())
                results.append((stats.read_bytes, stats.bytes, stats.shared_bytes))
            wide = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in full.items()}
            _load(path, wide, allow_cast=True)
            assert_same(wide, {name: tensor.double() for name, tensor in full.items()})
            assert sum(group.swaps for group in made) > 4 and sum(group.bytes for group in made) > 0
            assert all(group.group is None for group in made), "each load gives the connections' memory back"
    return results


def _on_two_nodes(directory: Path) -> int:
    os.environ["VESCALE_CKPT_NODE"] = str(dist.get_rank() // 2)
    full = _full()
    vescale_ckpt.save(directory, dict(full))
    state = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    with _devices(), mock.patch.object(routes, "_MOST_NODES", 1):
        read: int = _load(directory, state).read_bytes
    assert_same(state, full)
    return read


def test_devices_of_every_so_many_nodes_read_once(checkpoint: Path) -> None:
    stored = sum(tensor.nbytes for tensor in _full().values())
    read = run_ranks(4, _on_two_nodes, checkpoint)
    for of_node in (read[:2], read[2:]):
        assert stored <= sum(of_node) <= 1.2 * stored


def test_each_byte_is_read_once_and_swapped(tmp_path: Path) -> None:
    results = run_ranks(4, _all_ways, tmp_path)
    stored = sum(tensor.nbytes for tensor in _full().values())
    for case in range(6):
        read, got, shared = (sum(result[case][column] for result in results) for column in range(3))
        assert read <= 1.3 * stored, case  # blocks with a checksum are larger than some pieces here
        assert got == (4 * stored if case in (0, 3) else stored), case
        assert shared == {0: got, 2: 0, 3: got}.get(case, shared), case


@on_ranks(2)
def test_auto_swaps_between_devices_of_one_node(checkpoint: Path) -> None:
    full = {"w": numbers(2048, 1024)}
    os.environ["VESCALE_CKPT_MEMORY_BYTES"] = str(8 * MiB)  # half of it for other ranks
    vescale_ckpt.save(checkpoint, dict(full))
    with _devices():
        state = {"w": torch.zeros(2048, 1024)}
        stats = _load(checkpoint, state, "auto")
        assert_same(state, full)
    shared: int = stats.shared_bytes
    assert shared == 8 * MiB


@contextlib.contextmanager
def _no_answer() -> Iterator[None]:
    """Calls of the backend do not return in time."""
    alltoall, may_return = _Gloo.alltoall, threading.Event()

    def late(self: _Gloo, *args: Any) -> Any:
        work = alltoall(self, *args)
        assert may_return.wait(FOREVER)
        return work

    with mock.patch.object(_Gloo, "alltoall", late), mock.patch.object(nccl, "MOST_SECONDS", 0.5):
        yield
    may_return.set()


#: what keeps rank 1 from swapping between devices
_HINDRANCES: dict[str, Callable[[_Host], Any]] = {
    "its tensors are elsewhere": lambda host: mock.patch.object(nccl, "device_for", lambda tensors: None),
    "no library": lambda host: mock.patch.object(nccl, "nccl_backend", side_effect=RuntimeError("no such library")),
    "no memory": lambda host: mock.patch.object(host, "host_memory", side_effect=torch.OutOfMemoryError("no room")),
    "no answer": lambda host: _no_answer(),
    "one device for two": lambda host: contextlib.nullcontext(),
}


@pytest.mark.parametrize("hindrance", _HINDRANCES)
@on_ranks(2)
def test_where_one_rank_cannot_swap_all_go_through_the_host(checkpoint: Path, hindrance: str) -> None:
    os.environ["TEST_RANKS_A_DEVICE"] = "2" if hindrance == "one device for two" else "1"
    full = _full()
    vescale_ckpt.save(checkpoint, dict(full))
    with (
        _devices() as (host, made),
        _HINDRANCES[hindrance](host) if dist.get_rank() == 1 else contextlib.nullcontext(),
    ):
        for _ in range(2):
            state = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
            stats = _load(checkpoint, state)
            assert_same(state, full)
    assert not made or hindrance.startswith("no ")
    stored = sum(tensor.nbytes for tensor in full.values())
    shared = 0 if hindrance == "no memory" else stored  # of the host either: each reads for itself
    connecting = int(hindrance == "no answer")
    assert (host.begun if stats.shared_bytes else 0, stats.shared_bytes) == (connecting, shared)


# --- Failures


def _fail(directory: Path) -> list[tuple[type, str]]:
    os.environ["VESCALE_CKPT_MEMORY_BYTES"] = str(8 * MiB)  # half of it for other ranks
    full = {"w": numbers(2048, 1024)}
    vescale_ckpt.save(directory, dict(full))
    state = {"w": torch.zeros(2048, 1024)}
    mine, errors = dist.get_rank() == 1, []

    def error() -> None:
        with pytest.raises(CheckpointError) as caught:
            _load(directory, state)
        errors.append((type(caught.value), str(caught.value)))
        dist.barrier()

    with _devices() as (host, made):
        file = max(directory.glob("*.distcp"), key=lambda path: path.stat().st_size)
        for attempt in range(2):  # damages it, and undoes that
            if mine:
                flip(file)
            dist.barrier()
            if attempt == 0:
                error()
        host.slow = mine  # its device does not finish
        with (
            mock.patch.object(DeviceBuffer, "placing", lambda self: contextlib.nullcontext()),
            mock.patch.object(DeviceGroup, "connect", lambda self, outputs, inputs: None),
        ):
            error()
        host.slow = False
        swaps = [group.swaps for group in made]
        _load(directory, state)  # over the host's memory from now on
        assert_same(state, full)
        assert swaps == [group.swaps for group in made] and made[-1].group is None
    return errors


def test_failures_are_told_to_all(checkpoint: Path) -> None:
    first, second = run_ranks(2, _fail, checkpoint)
    assert first == second
    (damaged, damage), (slow, text) = first
    assert damaged is CorruptCheckpointError and "checksum mismatch" in damage
    assert slow is CheckpointError and "rank 1" in text and "did not swap their bytes" in text


def _one_dies(directory: Path, stuck: bool) -> tuple[str, int]:
    os.environ["VESCALE_CKPT_MEMORY_BYTES"] = str(8 * MiB)  # half of it for other ranks
    full = numbers(4096, 1024)
    vescale_ckpt.save(directory, {"w": full})
    state = {"w": torch.zeros_like(full)}
    swap = DeviceGroup.swap
    count = 0

    def die_in_the_third(self: DeviceGroup, *args: Any) -> None:
        nonlocal count
        count += 1
        if count == 3 and dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        swap(self, *args)

    with _devices() as (host, made):
        alltoall = _Gloo.alltoall

        def never_ends(self: _Gloo, *args: Any) -> Any:  # as NCCL's do where a peer died
            try:
                return alltoall(self, *args)
            except Exception:
                host.slow = True
            return mock.Mock()

        with (
            mock.patch.object(DeviceGroup, "swap", die_in_the_third),
            mock.patch.object(_Gloo, "alltoall", never_ends if stuck else alltoall),
            pytest.raises(CheckpointTimeoutError) as caught,
        ):
            _load(directory, state)
        host.slow = False
        assert caught.value.late_ranks == [2], caught.value
    state["w"].add_(1)  # it lives on
    return str(caught.value), made[-1].aborts


@pytest.mark.parametrize("stuck", [False, True])
def test_a_rank_that_dies_in_a_swap_is_named(checkpoint: Path, stuck: bool) -> None:
    *survivors, dead = run_ranks(3, _one_dies, checkpoint, stuck, check=False)
    assert "died" in str(dead)
    for text, aborts in survivors:
        assert "died" in text, "nobody has waited for it in vain"
        assert aborts == 1, "of our own connections"


# --- What is copied to the device


@pytest.mark.parametrize(
    ("memory", "received", "parts"),
    [(100, [], [(0, 100)]), (100, [(0, 100)], []), (100, [(60, 20), (10, 30)], [(0, 10), (40, 60), (80, 100)])],
)
def test_what_comes_from_others_is_not_copied_to_the_device(
    memory: int, received: list[tuple[int, int]], parts: list[tuple[int, int]]
) -> None:
    of = mock.Mock(memory_bytes=memory, messages=lambda table: [(7, *part) for part in received])
    assert device_buffer._not_received(of) == parts
