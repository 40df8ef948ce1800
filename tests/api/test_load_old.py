"""`load` of what other ways of training and saving leave: FSDP1, metadata of each rank, numbers, old keys, old
torch."""

from __future__ import annotations

import shutil
import tarfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.files import ranks_alone
from harness.ranks import on_ranks, run_ranks
from harness.saves import load_by, loaded
from harness.states import assert_same, bits, blank, group_of_one, sharded, train
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError, cli

# --- FSDP1, whose shards are ShardedTensors, or DTensors if it was given a mesh


def _model(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(
        nn.Linear(13, 30), nn.Tanh(), nn.Linear(30, 21), nn.LayerNorm(21), nn.Linear(21, 3)
    )
    model.register_buffer("calls", torch.tensor(seed))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind.startswith("FSDP1"):
        options = {"device_mesh": mesh if kind == "FSDP1 with a mesh" else None, "use_orig_params": True}
        if kind == "FSDP1 with a mesh":
            model[4] = checkpoint_wrapper(torch.compile(model[4], backend="eager"))
        for number, layer in enumerate(model):
            if isinstance(layer, nn.Linear) and number < 4:
                model[number] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"), **options)
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)
    elif kind == "FSDP2":
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@on_ranks(2)
def test_fsdp1_loads_and_is_loaded_by_all_others(checkpoint: Path) -> None:
    kinds = ["FSDP1", "FSDP1 with a mesh", "FSDP2", "plain"]
    for kind in kinds:
        model, optimizer = _model(kind, seed=1)
        train(model, optimizer)
        vescale_ckpt.save(checkpoint / kind, {"model": model, "optimizer": optimizer})
        if kind == "FSDP1":
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(states, storage_writer=FileSystemWriter(checkpoint / "stock", sync_files=False))
        if kind == "FSDP2":  # its parameters numbered
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.save(states, storage_writer=FileSystemWriter(checkpoint / "numbers", sync_files=False))
        expected = train(model, optimizer)
        for name in {"FSDP1": ["FSDP1", "stock"], "FSDP2": ["FSDP2", "numbers"]}.get(kind, [kind]):
            loaders = kinds if kind.startswith("FSDP1") else kinds[2:] if name == "numbers" else kinds[:2]
            for number, loader in enumerate(loaders):
                fresh, its_optimizer = _model(loader, seed=2)
                state = {"model": fresh, "optimizer": its_optimizer}
                report = vescale_ckpt.load(checkpoint / name, state, broadcast_checkpoint=number % 2 == 0)
                assert report.missing == report.unexpected == report.mismatched == []
                assert [int(buffer) for name, buffer in fresh.named_buffers() if name.endswith("calls")] == [1]
                assert train(fresh, its_optimizer) == pytest.approx(expected, rel=1e-5), f"{name} -> {loader}"


# --- Saved without collectives: each rank has metadata of its own, of its own shards


def _own_metadata(directory: Path, ours: bool) -> None:
    rank = dist.get_rank()
    full = torch.arange(70.0).view(10, 7)
    layer = nn.Linear(3, 4)
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            values = torch.arange(float(parameter.numel())) + 100 * rank + number
            parameter.copy_(values.view(parameter.shape))
    state = {
        "rows": sharded(full, Shard(0)),
        "everywhere": sharded(full, Replicate()),
        "plain": torch.full((5,), float(rank)),
        "object": {"rank": rank},
        "layer": layer.state_dict(),
    }
    if not ours:
        dcp.save(state, storage_writer=FileSystemWriter(directory), use_collectives=False)
    dist.barrier()
    for broadcast in (True, False):
        target: dict[str, Any] = {
            "rows": sharded(torch.zeros(10, 7), Shard(0)),
            "everywhere": sharded(torch.zeros(10, 7), Shard(1)),
            "plain": torch.zeros(5),
            "object": {"rank": None},
            "layer": nn.Linear(3, 4),
        }
        vescale_ckpt.load(directory, target, broadcast_checkpoint=broadcast)
        assert bits(target["rows"].to_local()) == bits(state["rows"].to_local())
        assert_same(target["everywhere"].to_local(), full.tensor_split(2, 1)[rank])
        assert_same(target["plain"], state["plain"])
        assert target["object"] == {"rank": rank}
        assert_same(target["layer"].state_dict(), layer.state_dict())
    whole = {"rows": torch.zeros(10, 7)}
    with pytest.raises(CorruptCheckpointError, match="rows: the checkpoint does not hold all of it"):
        vescale_ckpt.load(directory, whole)
    if rank == 1:  # the ranks that saved are counted anew: one process has the first one's part
        assert vescale_ckpt.load(directory, keys="object", process_group=group_of_one()) == {"object": {"rank": 0}}
    else:
        group_of_one()
    dist.barrier()
    if rank == 0:
        (directory / "__1.metadata").unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank 1: .*metadata"):
        vescale_ckpt.load(directory, {"plain": torch.zeros(5)})


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "stock"])
def test_metadata_of_each_rank(tmp_path: Path, ours: bool) -> None:
    directory = ranks_alone(tmp_path) if ours else tmp_path / "checkpoint"
    run_ranks(2, _own_metadata, directory, ours)


# --- What torch 2.1 and 2.3 wrote, and what torch.save made of the same state. 2.1 names older classes


@pytest.fixture(scope="module")
def of_old_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("old")
    with tarfile.open(Path(__file__).with_name("old_torch.tar.xz")) as archive:
        archive.extractall(directory, filter="data")
    return directory


def _of_file(path: Path | str) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return {name: dict(value) if isinstance(value, OrderedDict) else value for name, value in loaded.items()}


def _old_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).double()
    later = [*model[1].parameters(), *model[2].parameters()]
    return model, torch.optim.AdamW([{"params": model[0].parameters()}, {"params": later, "lr": 1.0}])


WAYS: dict[str, Callable[[Path, dict[str, Any]], object]] = {
    "load": vescale_ckpt.load,
    "restore": lambda path, state: _restore(path, state),
    **{how: partial(load_by, how) for how in ("dcp.load", "our reader", "our planner", "stock")},
}


def _restore(path: Path, state: dict[str, Any]) -> None:
    root = path.with_suffix(".steps")
    shutil.copytree(path, root / "step-3", dirs_exist_ok=True)
    with vescale_ckpt.CheckpointManager(root) as manager:
        assert manager.restore(state) == 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("torch_version", ["2.1", "2.3"])
def test_checkpoints_of_old_torch(of_old_torch: Path, torch_version: str, way: str) -> None:
    path = of_old_torch / f"torch-{torch_version}"
    expected = _of_file(f"{path}.pt")
    target = blank(expected)
    WAYS[way](path, target)
    assert_same(target, expected)
    target = {"model": blank(expected["model"]), "list": blank(expected["list"])}  # a part of it
    WAYS[way](path, target)
    assert_same(target, {name: expected[name] for name in target})


@pytest.mark.parametrize("way", ["load", "restore"])
@pytest.mark.parametrize("torch_version", ["2.1", "2.3"])
@pytest.mark.parametrize("with_model", [True, False])
def test_optimizers_of_old_torch(of_old_torch: Path, torch_version: str, way: str, with_model: bool) -> None:
    path = of_old_torch / f"torch-{torch_version}"
    expected = _of_file(f"{path}.pt")
    model, optimizer = _old_model()
    WAYS[way](path, {"model": model, "opt": optimizer} if with_model else {"opt": optimizer})
    by_torch = _old_model()[1]
    by_torch.load_state_dict(expected["opt"])
    assert_same(optimizer.state_dict(), by_torch.state_dict())
    if with_model:
        assert_same(dict(model.state_dict()), dict(expected["model"]))


@pytest.mark.parametrize("torch_version", ["2.1", "2.3"])
def test_tools_on_checkpoints_of_old_torch(of_old_torch: Path, tmp_path: Path, torch_version: str) -> None:
    path = of_old_torch / f"torch-{torch_version}"
    expected = _of_file(f"{path}.pt")
    assert_same(vescale_ckpt.load(path), expected)
    assert vescale_ckpt.verify(path).ok and vescale_ckpt.verify(path, quick=True).ok
    found = vescale_ckpt.inspect(path)
    assert len(found.tensors) == 33 and set(found.objects) == {"opt.param_groups", "step", "list.2", "list.3", "t"}
    vescale_ckpt.convert(path, tmp_path / "whole.pt", format="torch")
    assert_same(_of_file(tmp_path / "whole.pt"), expected)
    vescale_ckpt.convert(path, tmp_path / "dcp", format="dcp")
    assert_same(loaded(tmp_path / "dcp", expected), expected)
    assert cli.main(["diff", "--values", str(path), str(path.with_name("torch-2.3"))]) == 0
