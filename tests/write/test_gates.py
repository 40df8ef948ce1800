"""Gates in the training loops that people have: closures, scalers, accumulated gradients, averages, data loaders."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.ranks import on_ranks
from harness.saves import load
from harness.snapshots import late_copies, no_snapshot_is_left
from harness.states import assert_same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset

import vescale_ckpt
from vescale_ckpt import CheckpointError, Gate

BOUND = 60.0
SIZE = 70_000


def ones() -> nn.Parameter:
    return nn.Parameter(torch.ones(SIZE))


def stored(checkpoint: Path) -> torch.Tensor:
    return load(checkpoint, {"weight": torch.zeros(SIZE)})["weight"]  # type: ignore[no-any-return]


def begun_by(optimizer: torch.optim.Optimizer) -> threading.Event:
    """Is set when a step of the optimizer begins. Hooks run in the order in which they were registered."""
    begun = threading.Event()
    optimizer.register_step_pre_hook(lambda *_: begun.set())
    return begun


def test_two_saves_behind_one_optimizer(tmp_path: Path) -> None:
    weight = ones()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    begun = begun_by(optimizer)
    with late_copies(begun):
        first = vescale_ckpt.save(tmp_path / "a", {"weight": weight}, async_checkpoint=True, gate=Gate(optimizer))
        threading.Timer(0.2, begun.set).start()  # the second save waits for the first one
        second = vescale_ckpt.save(tmp_path / "b", {"weight": weight}, async_checkpoint=True, gate=Gate([optimizer]))
        weight.grad = torch.ones(SIZE)
        optimizer.step()
        assert first.staged.done() and second.staged.done()
        first.result(BOUND)
        second.result(BOUND)
    assert weight.eq(0).all() and stored(tmp_path / "a").eq(1).all() and stored(tmp_path / "b").eq(1).all()


def test_a_step_that_was_interrupted_waits_again(checkpoint: Path, ctrl_c: None) -> None:
    weight = ones()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(SIZE)
    with late_copies() as ready:
        handle = vescale_ckpt.save(checkpoint, {"weight": weight}, async_checkpoint=True, gate=optimizer)
        threading.Timer(0.3, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert not handle.staged.done()
        threading.Timer(0.3, ready.set).start()
        optimizer.step()
        assert handle.staged.done()
        handle.result(BOUND)
    assert weight.eq(0).all() and stored(checkpoint).eq(1).all()


@pytest.mark.parametrize("overflow", [False, True])
def test_a_step_of_a_scaler_waits(checkpoint: Path, overflow: bool) -> None:
    weight = ones()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ready = begun_by(optimizer)
    with late_copies(ready):
        saved = {"weight": weight, "scaler": scaler}
        handle = vescale_ckpt.save(checkpoint, saved, async_checkpoint=True, gate=optimizer)
        scaler.scale(weight.sum()).backward()
        if overflow:
            assert weight.grad is not None
            weight.grad[7] = float("inf")
            ready.set()  # this scaler leaves the step out, and nothing waits
        scaler.step(optimizer)
        scaler.update()
        handle.result(BOUND)
    assert weight.eq(1 if overflow else 0).all() and stored(checkpoint).eq(1).all()
    fresh = torch.amp.GradScaler("cpu", init_scale=9.0)
    vescale_ckpt.load(checkpoint, {"scaler": fresh})
    assert fresh.get_scale() == 4.0


@pytest.mark.parametrize("backend, first", [("eager", "the gate"), ("aot_eager", "the compiler")])
def test_a_compiled_step_waits(tmp_path: Path, backend: str, first: str) -> None:
    """Also if the compiler has seen the step's hooks before there was a gate, or while it was open."""
    torch._dynamo.reset()
    module = nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    model, step = torch.compile(module, backend=backend), torch.compile(optimizer.step, backend=backend)
    if first == "the gate":
        vescale_ckpt.save(tmp_path / "0", {"w": module.weight}, async_checkpoint=True, gate=optimizer).result(BOUND)
    for _ in range(2):
        model(torch.ones(300)).sum().backward()
        step()
    for number in (1, 2):
        state = {"w": module.weight, "average": optimizer.state[module.weight]["exp_avg"]}
        before = {name: tensor.detach().clone() for name, tensor in state.items()}
        with late_copies() as ready:
            handle = vescale_ckpt.save(tmp_path / str(number), state, async_checkpoint=True, gate=optimizer)
            model(torch.ones(300)).sum().backward()
            threading.Timer(0.3, ready.set).start()
            step()
            assert handle.staged.done()
            handle.result(BOUND)
        assert not torch.equal(module.weight, before["w"])
        assert_same(load(tmp_path / str(number), {name: torch.zeros(300, 300) for name in state}), before)


def test_gradients_may_come_meanwhile(checkpoint: Path) -> None:
    weight = ones()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.full((SIZE,), 5.0)
    copy = threading.Event()
    with late_copies(copy):
        saved = {"weight": weight, "grad": weight.grad}
        handle = vescale_ckpt.save(checkpoint, saved, async_checkpoint=True, gate=optimizer)
        for _ in range(3):
            (weight * 2).sum().backward()  # adds to what was saved
        copy.set()
        optimizer.step()
        handle.result(BOUND)
    found = load(checkpoint, {"weight": torch.zeros(SIZE), "grad": torch.zeros(SIZE)})
    assert found["weight"].eq(1).all() and found["grad"].eq(5).all()
    assert weight.eq(1 - 11).all()


def test_an_average_may_be_updated_and_not_be_swapped_in(checkpoint: Path) -> None:
    weight = ones()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    average = torch.optim.swa_utils.AveragedModel(nn.ParameterList([weight]))
    saved = {"weight": weight, "average": average}
    copy = threading.Event()
    with late_copies(copy):
        handle = vescale_ckpt.save(checkpoint, saved, async_checkpoint=True, gate=optimizer)
        with torch.no_grad():
            next(average.module.parameters()).fill_(8)  # it is no parameter of the optimizer: copied already
        copy.set()
        handle.result(BOUND)
    assert load(checkpoint, {"average.module.0": torch.zeros(SIZE)})["average.module.0"].eq(1).all()

    copy.clear()
    with late_copies(copy):
        handle = vescale_ckpt.save(checkpoint, saved, async_checkpoint=True, gate=optimizer)
        with torch.no_grad():
            weight.copy_(next(average.module.parameters()))  # to evaluate the average
        copy.set()
        with pytest.raises(CheckpointError, match="weight was changed while it was copied"):
            handle.result(BOUND)
    assert stored(checkpoint).eq(1).all()
    assert no_snapshot_is_left()


def test_tensors_of_inference_are_copied_before_the_save_returns(checkpoint: Path) -> None:
    weight = ones()
    with torch.inference_mode():
        average = torch.ones(SIZE)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.state[weight]["average"] = average  # it belongs to the optimizer, and has no counter
    with late_copies() as copy:
        saved = {"weight": weight, "average": average}
        handle = vescale_ckpt.save(checkpoint, saved, async_checkpoint=True, gate=optimizer)
        assert not handle.staged.done()
        with torch.inference_mode():
            average.zero_()
        copy.set()
        handle.result(BOUND)
    assert load(checkpoint, {"average": torch.zeros(SIZE)})["average"].eq(1).all()


class _Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def test_data_loaders_fork_meanwhile(checkpoint: Path) -> None:
    weight = ones()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    copy = begun_by(optimizer)
    with late_copies(copy):
        handle = vescale_ckpt.save(checkpoint, {"weight": weight}, async_checkpoint=True, gate=optimizer)
        loader = DataLoader(_Numbers(), num_workers=2, multiprocessing_context="fork", timeout=BOUND)
        assert sorted(int(number) for number in loader) == list(range(8))
        assert not handle.staged.done()
        weight.grad = torch.ones(SIZE)
        optimizer.step()
        handle.result(BOUND)
    assert weight.eq(0).all() and stored(checkpoint).eq(1).all()


@on_ranks(2)
def test_parameters_that_are_offloaded_to_the_host(checkpoint: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 8))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(4, 300)
    model(x).sum().backward()
    optimizer.step()
    before = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    with late_copies(begun_by(optimizer)):
        handle = vescale_ckpt.save(
            checkpoint, {"model": model, "optimizer": optimizer}, async_checkpoint=True, gate=optimizer
        )
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        handle.result(BOUND)
    found = vescale_ckpt.load(checkpoint, keys=["model"])
    assert isinstance(found, dict)
    assert all(found["model"][name].equal(value) for name, value in before.items())


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "scatter"])
@on_ranks(2)
def test_a_collective_into_weights_behind_a_gate_fails_the_save(checkpoint: Path, collective: str) -> None:
    """gloo writes to the tensors and raises no version counter."""
    weight = nn.Parameter(torch.full((SIZE,), 1.0 + dist.get_rank()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    state = {f"weight of {dist.get_rank()}": weight}
    counter = weight._version
    with late_copies() as begin:
        handle = vescale_ckpt.save(checkpoint, state, async_checkpoint=True, gate=optimizer)
        if collective == "all_reduce":
            dist.all_reduce(weight.data)
        elif collective == "broadcast":
            dist.broadcast(weight.detach(), src=1)
        else:
            dist.scatter(weight.detach(), [torch.zeros(SIZE), torch.zeros(SIZE)] if dist.get_rank() == 0 else None)
        assert weight._version == counter, "torch tells of it: another test"
        begin.set()
        with pytest.raises(CheckpointError) as caught:
            handle.result(BOUND)
    assert "was changed while it was copied" in str(caught.value) and "weight of" in str(caught.value)
    assert not (checkpoint / ".metadata").exists()
