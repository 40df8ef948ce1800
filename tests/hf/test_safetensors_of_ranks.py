"""Safetensors files of several ranks: random states against what was given, tied tensors, plans that are used again."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import steps
from harness.ranks import run_ranks
from harness.states import same, sharded
from test_safetensors_save import files, nothing_left, read, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale_ckpt import CheckpointError, Safetensors, SavePlanner, StorageFullError, StorageWriter, safetensors

SIZES = [1, "100KB", "5GB", 4096]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]


def _values(seed: int) -> dict[str, torch.Tensor]:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    state = {}
    for number in range(24):
        dtype = chance.choice(DTYPES)
        dims = chance.choice([0, 1, 1, 2, 2, 3])
        small = chance.random() < 0.7
        shape = [chance.choice([0, 1, 2, 3, 5, 7, 16] if small else [1, 3, 31, 64, 129, 181]) for _ in range(dims)]
        if chance.random() < 0.15:
            shape = [chance.choice([4096, 262144, 524288, 262143, 262145 + 4032, 700001])]
        count = torch.Size(shape).numel()
        raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
        state[f"t{number}"] = (raw % 2).bool().view(shape) if dtype == torch.bool else raw.view(dtype).view(shape)
    return state


def _rank_state(seed: int, values: dict[str, torch.Tensor]) -> dict[str, Any]:
    chance = random.Random(seed + 1000)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for name, value in values.items():
        way = chance.choice(["shard", "shard", "replica", "alone", "plain"])
        owner = chance.randrange(dist.get_world_size())
        if way == "shard" and value.ndim:
            placement = Shard(chance.randrange(value.ndim))
            spread = sharded(value, placement)
            if chance.random() < 0.5 and value.ndim > 1:  # strided local
                local = spread.to_local()
                local = local.transpose(0, 1).contiguous().transpose(0, 1)
                spread = DTensor.from_local(local, mesh, [placement], shape=value.shape, stride=value.stride())
            state[name] = spread
        elif way == "replica":
            state[name] = sharded(value, Replicate())
        elif way == "alone":
            if owner == dist.get_rank():
                state[name] = value
        else:
            state[name] = value.clone()
    return state


def _random(directory: str, seeds: list[int]) -> None:
    for seed in seeds:
        state = _rank_state(seed, _values(seed))
        for number, size in enumerate(SIZES):
            handle = save(
                f"{directory}/{seed}.{number}",
                state,
                max_shard_size=size,
                async_checkpoint=number % 2 == 1,
            )
            if number % 2:
                handle.staged.result(60)
                for value in state.values():  # what is saved is what was staged
                    _flip(value)
            handle.result(60)
            if number % 2:
                for value in state.values():
                    _flip(value)
        writer = StorageWriter(f"{directory}/{seed}.{len(SIZES)}", format=Safetensors(max_shard_size="50KB"))
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner())


def _flip(value: torch.Tensor) -> None:
    local = value.to_local() if isinstance(value, DTensor) else value
    storage = torch.empty(0, dtype=torch.uint8).set_(local.untyped_storage())  # type: ignore[call-overload]
    storage.bitwise_xor_(1)


@pytest.mark.parametrize(("ranks", "seeds"), [(2, [1]), (3, [3])])
def test_random_states(tmp_path: Path, ranks: int, seeds: list[int]) -> None:
    seeds = [int(seed) for seed in os.environ["SEEDS"].split(",")] if "SEEDS" in os.environ else seeds
    run_ranks(ranks, _random, str(tmp_path), seeds)
    for seed in seeds:
        expected = _values(seed)
        for number in range(len(SIZES) + 1):
            directory = tmp_path / f"{seed}.{number}"
            assert same(read(directory), expected), (seed, number)
            assert nothing_left(directory)


def _tied(directory: str) -> list[int]:
    made = []
    plan_of_all = SavePlanner.global_plan_of

    def counted(self: SavePlanner, plans: Any) -> Any:
        made.append(len(plans))
        return plan_of_all(self, plans)

    with steps.no_plans_known(), mock.patch.object(SavePlanner, "global_plan_of", counted):
        for k in range(3):
            tensor = sharded(torch.arange(10.0).view(5, 2) + k, Shard(0))
            other = sharded(torch.ones(5, 2) * k, Shard(0))
            save(directory, {"other": other, "embed": tensor, "head": tensor})
    return made


def test_ties_of_uneven_shards_are_known_and_planned_once(tmp_path: Path) -> None:
    """The last rank has nothing of them, and cannot see that they are tied."""
    made = run_ranks(4, _tied, str(tmp_path / "x"))
    found = read(tmp_path / "x")
    assert found.keys() == {"other", "embed"}
    assert found["embed"].equal(torch.arange(10.0).view(5, 2) + 2) and found["other"].equal(torch.ones(5, 2) * 2)
    with safetensors.safe_open(tmp_path / "x" / "model.safetensors") as file:
        assert file.metadata() == {"format": "pt", "head": "embed"}
    assert made == [[4], [], [], []]


def test_a_conjugate_is_not_the_tensor_whose_memory_it_has(tmp_path: Path) -> None:
    tensor = torch.randn(4, dtype=torch.complex64)
    with pytest.raises(CheckpointError, match="share memory"):
        save(tmp_path, {"a": tensor, "b": tensor.conj()})
    save(tmp_path, {"a": tensor, "b": tensor.clone().conj(), "c": tensor})
    found = read(tmp_path)
    assert found.keys() == {"a", "b"} and found["b"].equal(tensor.conj().resolve_conj())


def test_ties_that_change_while_a_save_fails(tmp_path: Path) -> None:
    """The layout of a save that failed is no layout that ranks have."""
    tensor = torch.arange(5000.0)
    one = {"a": tensor}
    tied = {"a": tensor, **{f"{'b' * 1000}{number}": tensor for number in range(20)}}
    for first, second in ((one, tied), (tied, one)):
        save(tmp_path, first)
        with steps.instead("ask for free space", lambda *_: 0), pytest.raises(StorageFullError):
            save(tmp_path, second)
        save(tmp_path, first)
        assert read(tmp_path)["a"].equal(tensor)


def test_a_stock_planner_that_keeps_its_plans_is_refused(tmp_path: Path) -> None:
    def of_stock(directory: Path) -> None:
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"a": torch.ones(3)}, storage_writer=StorageWriter(directory, format="safetensors"), planner=planner)

    of_stock(tmp_path / "first")
    with pytest.raises(dcp.api.CheckpointException, match="enable_plan_caching"):
        of_stock(tmp_path / "second")
    assert read(tmp_path / "first")["a"].equal(torch.ones(3))
    assert not files(tmp_path / "second")
