"""Tensors that somebody else works on: torch learns what a load fills, and a save of what was changed is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import steps
from harness.ranks import on_ranks, run_ranks
from harness.saves import load
from harness.snapshots import late_copies, no_snapshot_is_left
from harness.states import cut_storage
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt import CheckpointError, Gate, LoadPlanner, SavePlanner, Stager, StorageReader, StorageWriter

BOUND = 60.0

# --- Loads


def _load(path: Path, state: dict[str, Any]) -> None:
    vescale_ckpt.load(path, state)


def _load_as_dcp(planner: Callable[[], Any]) -> Callable[[Path, dict[str, Any]], None]:
    return lambda path, state: dcp.load(state, storage_reader=StorageReader(path), planner=planner())


class _OwnViews(DefaultLoadPlanner):
    """Resolves tensors in a way of its own, which are filled as they come."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return super().resolve_tensor(read_item)


WAYS = {
    "load": _load,
    "our planner": _load_as_dcp(LoadPlanner),
    "stock planner": _load_as_dcp(DefaultLoadPlanner),
    "own views": _load_as_dcp(_OwnViews),
}


@pytest.mark.parametrize("way", WAYS)
def test_autograd_learns_of_a_load(checkpoint: Path, way: str) -> None:
    vescale_ckpt.save(checkpoint, {"w": torch.full((3,), 5.0), "odd": torch.ones(4, 2)})
    weight = nn.Parameter(torch.ones(3))
    state = {"w": weight.detach(), "odd": torch.zeros(2, 4).t()}
    result = (weight * weight).sum()
    WAYS[way](checkpoint, state)
    assert weight.eq(5).all() and state["odd"].eq(1).all()
    assert state["odd"]._version > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_tensors_without_counters_are_filled(checkpoint: Path) -> None:
    vescale_ckpt.save(checkpoint, {"w": torch.full((3,), 5.0)})
    with torch.inference_mode():
        weight = torch.ones(3)
    vescale_ckpt.load(checkpoint, {"w": weight})
    assert weight.eq(5).all()
    vescale_ckpt.save(checkpoint, {"w": weight}, async_checkpoint=True).result(BOUND)


OVERLAPPING = {
    "expanded": lambda: torch.zeros(4, 1).expand(4, 3),
    "expanded in the middle": lambda: torch.zeros(4, 1, 3).expand(4, 2, 3)[:, :, :2],
    "windows": lambda: torch.zeros(6).unfold(0, 3, 1),
    "same diagonals": lambda: torch.zeros(20).as_strided((3, 4), (2, 1)),
    "between each other": lambda: torch.zeros(20).as_strided((2, 3), (3, 2)),
}
DISJOINT = {
    "transposed": lambda: torch.zeros(3, 4).t(),
    "a part": lambda: torch.zeros(4, 5)[:, 1:4],
    "expanded to one": lambda: torch.zeros(4).expand(1, 4),
    "empty": lambda: torch.zeros(1, 0).expand(4, 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_targets_that_overlap_themselves(checkpoint: Path, way: str) -> None:
    targets = {name: make() for name, make in {**OVERLAPPING, **DISJOINT}.items()}
    stored = {name: torch.arange(float(t.numel())).view(t.shape) for name, t in targets.items()}
    vescale_ckpt.save(checkpoint, {"model": stored})
    for name in OVERLAPPING:
        with pytest.raises((CheckpointError, CheckpointException), match=f"model.{name}: several elements"):
            WAYS[way](checkpoint, {"model": {name: targets[name]}})
        assert targets[name].eq(0).all()
    good = {name: targets[name] for name in DISJOINT}
    WAYS[way](checkpoint, {"model": good})
    assert all(good[name].equal(stored[name]) for name in good)


def _load_on_ranks(path: str, broadcast: bool) -> None:
    mesh = init_device_mesh("cpu", (2,))
    sharded, plain = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)]), torch.zeros(70_000)
    local = sharded.to_local()
    before = [tensor._version for tensor in (sharded, local, plain)]
    vescale_ckpt.load(path, {"sharded": sharded, "plain": plain}, broadcast_checkpoint=broadcast)
    assert sharded.full_tensor().eq(2).all() and plain.eq(3).all()
    assert all(now > then for then, now in zip(before, [t._version for t in (sharded, local, plain)], strict=True))


@pytest.mark.parametrize("broadcast", [False, True])
def test_versions_of_what_ranks_load(checkpoint: Path, broadcast: bool) -> None:
    vescale_ckpt.save(checkpoint, {"sharded": torch.full((4, 6), 2.0), "plain": torch.full((70_000,), 3.0)})
    run_ranks(2, _load_on_ranks, str(checkpoint), broadcast)


@pytest.mark.parametrize("way", WAYS)
def test_a_load_waits_for_the_copy(tmp_path: Path, way: str) -> None:
    weight = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight])
    vescale_ckpt.save(tmp_path / "old", {"weight": torch.full((1000,), 7.0)})
    with late_copies() as copy_now:
        handle = vescale_ckpt.save(tmp_path / "new", {"weight": weight}, async_checkpoint=True, gate=optimizer)
        threading.Timer(0.1, copy_now.set).start()
        WAYS[way](tmp_path / "old", {"weight": weight.detach()})
        assert handle.staged.done()
    handle.result(BOUND)
    assert weight.eq(7).all()
    assert load(tmp_path / "new", {"weight": torch.zeros(1000)})["weight"].eq(1).all()


def test_a_load_does_not_wait_for_ever(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(1000))
    vescale_ckpt.save(tmp_path / "old", {"weight": weight})
    with late_copies():
        handle = vescale_ckpt.save(
            tmp_path / "new", {"weight": weight}, async_checkpoint=True, gate=torch.optim.SGD([weight])
        )
        with pytest.raises(vescale_ckpt.CheckpointTimeoutError, match="wait until a save has copied"):
            vescale_ckpt.load(tmp_path / "old", {"weight": weight.detach()}, timeout=1)
    handle.result(BOUND)


# --- Behind a gate


def _change_by_parameter(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(2)


def _set(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.set_(torch.zeros(2))


def _free(weight: torch.Tensor) -> None:
    weight.untyped_storage().resize_(0)


def _cut_storage(weight: nn.Parameter) -> None:
    weight.untyped_storage().resize_(16)


@pytest.mark.parametrize("change", [_change_by_parameter, _set, _free, _cut_storage])
@pytest.mark.parametrize("name", ["parameter", "data", "view"])
def test_what_is_changed_behind_a_gate_is_refused(
    checkpoint: Path, name: str, change: Callable[[nn.Parameter], None]
) -> None:
    weight = nn.Parameter(torch.ones(4 << 20))  # 16 MiB: the C library gives its pages back to the system at once
    optimizer = torch.optim.SGD([weight], lr=1.0)
    values = {"parameter": weight, "data": weight.data, "view": weight.data.view(2048, 2048)[1:]}
    vescale_ckpt.save(checkpoint, {"weight": torch.ones(4 << 20)})
    with late_copies() as copy_now:
        state = {"weight": values.pop(name)}
        handle = vescale_ckpt.save(checkpoint, state, async_checkpoint=True, gate=optimizer)
        change(weight)
        copy_now.set()
        with pytest.raises(CheckpointError, match=r"weight.*(changed|given back)"):
            handle.result(BOUND)
    assert load(checkpoint, {"weight": torch.zeros(4 << 20)})["weight"].eq(1).all()
    del handle
    assert no_snapshot_is_left()


def test_other_memory_for_a_parameter_does_not_reach_the_save(checkpoint: Path) -> None:
    weight = nn.Parameter(torch.ones(4 << 20))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with late_copies() as copy_now:
        handle = vescale_ckpt.save(checkpoint, {"weight": weight}, async_checkpoint=True, gate=optimizer)
        weight.data = torch.zeros(2)
        copy_now.set()
        handle.result(BOUND)
    assert load(checkpoint, {"weight": torch.zeros(4 << 20)})["weight"].eq(1).all()


def test_strided_parameters_are_copied_when_the_save_returns(checkpoint: Path) -> None:
    weight = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = vescale_ckpt.save(checkpoint, {"w": weight}, async_checkpoint=True, gate=optimizer)
    handle.result(BOUND)
    assert load(checkpoint, {"w": torch.zeros(4, 3)})["w"].equal(torch.arange(12.0).view(3, 4).t())


@on_ranks(2)
def test_a_dtensor_that_is_changed_behind_a_gate(checkpoint: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for name, value in {"parameter": weight, "local": weight.to_local().detach()}.items():
        state = {"weight" if name == "parameter" else f"weight{dist.get_rank()}": value}
        with late_copies() as copy_now:
            handle = vescale_ckpt.save(checkpoint, state, async_checkpoint=True, gate=optimizer)
            if dist.get_rank() == 1:
                with torch.no_grad():
                    weight.mul_(2)  # counted by the DTensor, not by what it holds
            copy_now.set()
            with pytest.raises(CheckpointError, match=r"rank 1.*weight.*changed while it was copied"):
                handle.result(BOUND)


def test_the_name_of_what_was_changed(checkpoint: Path) -> None:
    flat = torch.ones(3000)
    a, b, c = (nn.Parameter(flat.data[at : at + 1000].data) for at in (0, 1000, 2000))
    optimizer = torch.optim.SGD([a, b, c], lr=1.0)
    for changed, said in ((b, "b was"), (c, "what the optimizer has in the memory of a was")):
        with late_copies() as copy_now:
            state = {"a": a.data, "b": b.data}
            handle = vescale_ckpt.save(checkpoint, state, async_checkpoint=True, gate=optimizer)
            _change_by_parameter(changed)
            copy_now.set()
            with pytest.raises(CheckpointError, match=said):
                handle.result(BOUND)


def test_optimizers_that_are_made_for_graphs(checkpoint: Path) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], capturable=True)
    with pytest.raises(ValueError, match=r"capturable=True.*allow_capturable=True"):
        vescale_ckpt.save(checkpoint, {"weight": weight}, async_checkpoint=True, gate=optimizer)
    allowed = Gate(optimizer, allow_capturable=True)
    for _ in range(2):
        vescale_ckpt.save(checkpoint, {"weight": weight}, async_checkpoint=True, gate=allowed).result(BOUND)
    assert load(checkpoint, {"weight": torch.zeros(3)})["weight"].eq(1).all()


# --- Saves that are not to be changed at all


@contextmanager
def changed_in_the_middle(change: Callable[[], None]) -> Iterator[None]:
    """By another thread, as soon as this rank has written its tensors."""

    def then_change(*_: Any) -> None:
        thread = threading.Thread(target=change)
        thread.start()
        thread.join()

    with steps.behind("write tensors", then_change):
        yield


def _by_dcp(planner: Callable[[], Any]) -> Callable[[Path, dict[str, Any]], None]:
    return lambda path, state: dcp.save(state, storage_writer=StorageWriter(path), planner=planner())


SAVES = {
    "save": lambda path, state: vescale_ckpt.save(path, state),
    "our planner": _by_dcp(SavePlanner),
    "stock planner": _by_dcp(DefaultSavePlanner),
}


def _add(tensor: torch.Tensor) -> Callable[[], None]:
    return lambda: torch.no_grad()(tensor.add_)(1)


@pytest.mark.parametrize("way", SAVES)
def test_a_state_that_changes_while_it_is_saved(checkpoint: Path, way: str) -> None:
    vescale_ckpt.save(checkpoint, {"weight": torch.ones(1000), "n": 1})
    weight = torch.full((1000,), 2.0)
    with (
        changed_in_the_middle(_add(weight)),
        pytest.raises((CheckpointError, CheckpointException), match="weight was changed while it was saved"),
    ):
        SAVES[way](checkpoint, {"weight": weight, "n": 2})
    assert load(checkpoint, {"weight": torch.zeros(1000)})["weight"].eq(1).all()
    SAVES[way](checkpoint, {"weight": weight, "n": 2})
    assert load(checkpoint, {"weight": torch.zeros(1000)})["weight"].eq(3).all()


def test_memory_that_goes_while_it_is_saved(checkpoint: Path) -> None:
    state = {"fine": torch.ones(10), "weight": torch.ones(1000), "lazy": torch.ones(10, dtype=torch.cfloat).conj()}
    freed = state["weight"][5:]
    with changed_in_the_middle(lambda: _free(freed)), pytest.raises(CheckpointError, match="weight was changed"):
        vescale_ckpt.save(checkpoint, state)


@contextmanager
def _changed_all_the_while(values: Iterable[torch.Tensor]) -> Iterator[None]:
    """Another thread changes the tensors, and no version counter."""
    hidden, over = [value.data for value in values], threading.Event()

    def change() -> None:
        while not over.is_set():
            for value in hidden:
                value.add_(1)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize("way", ["dcp", "safetensors", "by dcp", "file"])
def test_what_changes_unnoticed_is_stored_with_its_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, direct_io: bool
) -> None:
    monkeypatch.setenv("VESCALE_CKPT_DIRECT_IO", "on" if direct_io else "off")
    state = {"large": torch.zeros(4 << 20), "small": torch.zeros(999), "turned": torch.zeros(700, 1000).t()}
    path = tmp_path / "it.safetensors" if way == "file" else tmp_path
    if way == "file":
        state["turned"] = state["turned"].contiguous()
    with _changed_all_the_while(state.values()):
        for _ in range(3):
            if way == "by dcp":
                _by_dcp(SavePlanner)(path, state)
            elif way == "file":
                vescale_ckpt.safetensors.save_file(state, path)
            else:
                vescale_ckpt.save(path, state, format=way)  # type: ignore[arg-type]
            vescale_ckpt.load(path)
    assert vescale_ckpt.verify(path).ok


def test_an_export_of_what_changes(tmp_path: Path) -> None:
    weight = torch.ones(1000)
    vescale_ckpt.save(tmp_path, {"weight": weight}, format="safetensors")
    steps.behind("write tensors of an export", lambda *_: weight.add_(1)).start()
    with pytest.raises(CheckpointError, match="weight was changed"):
        vescale_ckpt.save(tmp_path, {"weight": weight}, format="safetensors")
    assert vescale_ckpt.load(tmp_path)["weight"].eq(1).all()


def test_a_file_of_what_changes(tmp_path: Path) -> None:
    weight, path = torch.ones(1000), tmp_path / "x.safetensors"
    vescale_ckpt.safetensors.save_file({"weight": weight}, path)
    steps.behind("write a safetensors file", lambda *_, **__: weight.add_(1)).start()
    with pytest.raises(CheckpointError, match="weight was changed"):
        vescale_ckpt.safetensors.save_file({"weight": weight}, path)
    assert vescale_ckpt.safetensors.load_file(path)["weight"].eq(1).all()


def test_a_copy_of_what_changes(checkpoint: Path) -> None:
    weight = torch.ones(1000)
    steps.behind("copy", lambda _: weight.add_(1)).start()
    with pytest.raises(CheckpointError, match="weight was changed"):
        vescale_ckpt.save(checkpoint, {"weight": weight}, async_checkpoint=True).result(BOUND)
    with pytest.raises(CheckpointError, match=r"model\.weight was changed"):
        Stager().stage({"model": {"weight": weight}})
    assert no_snapshot_is_left()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: cut_storage(torch.ones(4 << 20)), "storage was freed"),
        (lambda: cut_storage(torch.ones(4 << 20), 64), "storage was freed, or is smaller"),
        (lambda: torch.quantize_per_tensor(torch.ones(10), 0.1, 0, torch.quint8), "dtype torch.quint8"),
        (lambda: torch.empty(8, dtype=torch.uint4), "dtype torch.uint4"),
    ],
)
def test_what_has_nothing_to_stage(make: Callable[[], torch.Tensor], said: str) -> None:
    state = {"fine": torch.ones(3), "m": [{"x": make()}]}
    with pytest.raises(CheckpointError, match=rf"^m\.0\.x.*{said}") as raised:
        Stager().stage(state)
    assert raised.value.key == "m.0.x"  # type: ignore[attr-defined]
    assert no_snapshot_is_left()


@on_ranks(2)
def test_all_ranks_refuse(checkpoint: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    scale = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
    vescale_ckpt.save(checkpoint, {"weight": weight, "scale": scale})
    change = _add(weight) if dist.get_rank() == 1 else lambda: None
    with (
        changed_in_the_middle(change),
        pytest.raises(CheckpointError, match=r"rank 1: .*weight was changed while it was saved"),
    ):
        vescale_ckpt.save(checkpoint, {"weight": weight, "scale": scale})
    assert load(checkpoint, {"weight": torch.zeros(8, 4)})["weight"].eq(1).all()


def test_what_a_rank_does_not_write_may_change(checkpoint: Path) -> None:
    state = {"weight": torch.ones(10), "note": "text"}
    other = torch.ones(10)
    with changed_in_the_middle(_add(other)):
        vescale_ckpt.save(checkpoint, state)
