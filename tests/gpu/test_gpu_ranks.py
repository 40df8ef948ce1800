"""Two ranks on one GPU; `scripts/check_gpu.py` runs these where there is one.

NCCL wants a device a rank. With an `NCCL_HOSTID` for each rank, and with the variables that the script sets, it takes
two ranks of one device for two hosts. Where it refuses that, loads go through the host's memory and gloo, and
`nccl_refuses` is recorded.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.ranks import RanksFailedError, on_ranks, run_ranks
from harness.states import numbers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import vescale_ckpt
from benchmarks.figures import record
from vescale_ckpt import CheckpointError, CheckpointTimeoutError
from vescale_ckpt._engine import _C
from vescale_ckpt._ranks import exchange, nccl
from vescale_ckpt._ranks.nccl import DeviceGroup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = "cuda"
BOUND = 120.0  # NCCL's kernels of two processes take turns on one device
MiB = 1 << 20


@contextlib.contextmanager
def _two_on_one(with_nccl: bool) -> Iterator[None]:
    """Lets this rank seem to be a host with a device of its own; without NCCL, one without NCCL."""
    rank = dist.get_rank()
    os.environ["NCCL_HOSTID"] = f"host{rank}"
    exchange._groups.clear()  # ranks outlive tests: in another one they may have found that they share their device
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.zeros(1, device="cuda")
    with contextlib.ExitStack() as stack:
        if with_nccl:
            stack.enter_context(mock.patch.object(nccl.CudaDevice, "identity", lambda self: f"device of {rank}"))
        else:
            stack.enter_context(mock.patch.object(nccl, "device_for", lambda tensors: None))
        yield


def _group(name: str, timeout: float) -> DeviceGroup:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store().clone())
    device = nccl.CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    return DeviceGroup(device, nccl.nccl_backend(store, dist.get_rank(), 2, timeout), timeout)


def _connect(group: DeviceGroup) -> list[int]:
    """Swaps one byte, the number of the rank that sends it. Returns the bytes that came."""
    sent = torch.full((2,), dist.get_rank(), dtype=torch.uint8, device="cuda")
    received = torch.full((2,), 9, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    group.connect(list(torch.split(received, 1)), list(torch.split(sent, 1)))
    return received.tolist()  # type: ignore[no-any-return]


def _probe() -> str:
    """Why two ranks cannot swap over NCCL; empty if they can."""
    with _two_on_one(True):
        try:
            group = _group("probe", 40.0)
            received = _connect(group)
            group.end()
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300]
        return "" if received == [0, 1] else f"it delivered {received}"


@pytest.fixture(scope="module")
def with_nccl() -> bool:
    try:
        reasons = [reason for reason in run_ranks(2, _probe, timeout=BOUND) if reason]
    except RanksFailedError as error:
        reasons = [str(error)[:300]]
    if reasons:
        record(nccl_refuses=reasons[0])
        print(f"NCCL refuses two ranks on one device, gloo instead: {reasons[0]}")
    return not reasons


def _sharded(full: torch.Tensor, dim: int | None, device: str) -> DTensor:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    placement = Replicate() if dim is None else Shard(dim)
    return distribute_tensor(full.to(device), mesh, [placement], src_data_rank=None)


def _full() -> dict[str, torch.Tensor]:
    return {"w": numbers(2048, 999), "v": numbers(77, 33, 5, dtype=torch.int16), "s": numbers(3, 4), "e": numbers(0, 4)}


def _all_ways(directory: Path, with_nccl: bool) -> list[tuple[int, int, int]]:
    """Replicas, the same rows, and rows to columns; three loads on one Exchange."""
    os.environ["VESCALE_CKPT_MEMORY_BYTES"] = str(8 * MiB)  # half of it for other ranks
    full, results = _full(), []
    vescale_ckpt.save(directory, {name: _sharded(tensor, 0, "cpu") for name, tensor in full.items()})
    swaps = mock.patch.object(DeviceGroup, "swap", autospec=True, side_effect=DeviceGroup.swap)
    with _two_on_one(with_nccl), swaps as swapped:
        for dim in (None, 0, 1):
            dims = {name: dim if tensor.dim() > 1 else None for name, tensor in full.items()}
            state = {name: _sharded(torch.zeros_like(t), dims[name], DEVICE) for name, t in full.items()}
            stats = vescale_ckpt.load(directory, state, broadcast_checkpoint=True, timeout=BOUND).stats
            for name, tensor in full.items():
                wanted = _sharded(tensor, dims[name], "cpu").to_local()
                assert torch.equal(state[name].to_local().cpu(), wanted), (name, dim)
            assert stats is not None
            results.append((stats.read_bytes, stats.bytes, swapped.call_count))
    return results


def _one_dies(directory: Path, with_nccl: bool) -> str:
    os.environ["VESCALE_CKPT_MEMORY_BYTES"] = str(8 * MiB)  # half of it for other ranks
    full = {"w": numbers(8192, 1024)}
    vescale_ckpt.save(directory, dict(full))
    state = {"w": torch.zeros(8192, 1024, device=DEVICE)}
    swap, count = DeviceGroup.swap, 0

    def die_in_the_third(self: DeviceGroup, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        swap(self, *arguments)

    def die(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with _two_on_one(with_nccl), contextlib.ExitStack() as stack:
        if with_nccl:
            stack.enter_context(mock.patch.object(nccl, "MOST_SECONDS", 15.0))
            stack.enter_context(mock.patch.object(DeviceGroup, "swap", die_in_the_third))
        elif dist.get_rank() == 1:
            stack.enter_context(mock.patch.object(_C.State, "place_table", die))
        caught = stack.enter_context(pytest.raises(CheckpointTimeoutError))
        vescale_ckpt.load(directory, state, broadcast_checkpoint=True, timeout=BOUND)
    assert caught.value.late_ranks == [1], caught.value
    assert torch.ones(3, device=DEVICE).add_(1).eq(2).all()  # this rank lives on
    store = dist.distributed_c10d._get_default_store()
    assert not store._underlying_non_prefix_store.check(["exception_dump"]), "monitors of groups would end it later"
    return str(caught.value)


def test_each_byte_is_read_once_for_each_other(tmp_path: Path, with_nccl: bool) -> None:
    results = run_ranks(2, _all_ways, tmp_path, with_nccl)
    stored = sum(tensor.nbytes for tensor in _full().values())
    for case in range(3):
        # Twice for each for itself; a block with a checksum is larger than some pieces here.
        assert sum(result[case][0] for result in results) <= 1.5 * stored, "each byte is read once"
    assert all((result[0][2] > 0) == with_nccl for result in results)


@on_ranks(2)
def test_targets_on_devices_and_hosts(tmp_path: Path, with_nccl: bool) -> None:
    """Rank 0 on the device, rank 1 in host memory; then tensors of both kinds on each."""
    full = _full()
    vescale_ckpt.save(tmp_path, dict(full))
    rank = dist.get_rank()
    with _two_on_one(with_nccl):
        for places in ([DEVICE if rank == 0 else "cpu"] * 4, [DEVICE, "cpu", DEVICE, "cpu"]):
            state = {
                name: torch.zeros_like(tensor, device=place)
                for (name, tensor), place in zip(full.items(), places, strict=True)
            }
            vescale_ckpt.load(tmp_path, state, broadcast_checkpoint=True, timeout=BOUND)
            for name, tensor in full.items():
                assert torch.equal(state[name].cpu(), tensor), name


@on_ranks(2)
def test_swaps_of_uneven_sizes(with_nccl: bool) -> None:
    """Of nothing, of one byte and of many, straight over a device group."""
    if not with_nccl:
        return
    rank = dist.get_rank()
    with _two_on_one(True):
        group = _group("uneven", BOUND)
        assert _connect(group) == [0, 1]
        # What rank a sends to rank b.
        for sizes in ({(0, 1): 5 * MiB + 1, (1, 0): 1}, {(0, 1): 0, (1, 0): 77}, {(0, 1): 0, (1, 0): 0}, {(0, 0): 9}):
            sent = [torch.full((sizes.get((rank, to), 0),), 10 * rank + to, dtype=torch.uint8) for to in (0, 1)]
            got = [torch.zeros(sizes.get((of, rank), 0), dtype=torch.uint8).cuda() for of in (0, 1)]
            inputs = [tensor.cuda() for tensor in sent]
            torch.cuda.synchronize()
            group.swap(got, inputs)
            assert all(tensor.eq(10 * of + rank).all() for of, tensor in enumerate(got))
        group.end()


@on_ranks(2)
def test_a_rank_that_comes_late_is_not_waited_for(with_nccl: bool) -> None:
    """Rank 0 does not wait for it, and is not harmed when it comes."""
    if not with_nccl:
        return
    with _two_on_one(True):
        if dist.get_rank() == 0:
            group = _group("late", 4.0)
            with pytest.raises(CheckpointError, match="did not connect within 2 s"):
                _connect(group)
            group.end()
            dist.barrier()
        else:
            group = _group("late", 20.0)
            dist.barrier()
            with contextlib.suppress(Exception):  # rank 0 ends the connections as soon as there are any
                _connect(group)
            group.end()
        for thread in threading.enumerate():
            if thread.name == "vescale_ckpt connecting devices":
                thread.join(BOUND)
                assert not thread.is_alive()
        assert torch.ones(3, device="cuda").add_(1).eq(2).all()
        dist.barrier()


def test_a_stream_that_is_captured_is_refused() -> None:
    device = nccl.CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ones = torch.ones(3, device="cuda")
        with pytest.raises(CheckpointError, match="a CUDA graph is being captured"):
            device.begin()
    graph.replay()
    assert ones.eq(1).all(), "the capture goes on"
    device.begin()


@on_ranks(2)
def test_beside_the_users_collectives(tmp_path: Path, with_nccl: bool) -> None:
    """The user's own collectives go on while ranks load."""
    full = {"w": numbers(4096, 1024)}
    vescale_ckpt.save(tmp_path, dict(full))
    with _two_on_one(with_nccl):
        users = dist.new_group(backend="nccl" if with_nccl else "gloo")
        device = DEVICE if with_nccl else "cpu"
        of_users = [torch.ones(1 << 20, device=device) for _ in range(8)]
        work = [dist.all_reduce(tensor, group=users, async_op=True) for tensor in of_users]
        state = {"w": torch.zeros(4096, 1024, device=DEVICE)}
        vescale_ckpt.load(tmp_path, state, broadcast_checkpoint=True, timeout=BOUND)
        for one in work:
            one.wait()
        assert all(tensor.eq(2).all() for tensor in of_users) and torch.equal(state["w"].cpu(), full["w"])
        dist.destroy_process_group(users)


def test_a_rank_that_dies_is_named_and_the_other_lives(tmp_path: Path, with_nccl: bool) -> None:
    text, dead = run_ranks(2, _one_dies, tmp_path, with_nccl, check=False)
    assert "died" in str(dead) and "rank 1" in text
