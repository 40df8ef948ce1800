"""Plain training loops of every parallel layout: they go on after a resume as if nothing had happened.

Each run trains a small transformer with dropout over several micro-batches a step, with two optimizers, a scheduler, a
gradient scaler, averaged weights and a data loader with a position of its own on each rank. It saves through a
`CheckpointManager` after each step. The job that resumes has new objects, whose random numbers differ until `restore`.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import vescale_ckpt
from vescale_ckpt import CheckpointManager, PerRank, RandomState

WIDTH, STEPS, MICRO_BATCHES = 16, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)  # rows that no number of ranks divides evenly
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()  # type: ignore[no-any-return]


class Stage(nn.Module):
    """A pipeline's stage: other keys on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"layer{rank}_{number}": Block() for number in range(2)})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.one_hot(tokens, WIDTH).float()
        for layer in self.layers.values():
            x = layer(x)
        return x.square().mean()


def parallel(layout: str) -> nn.Module:
    ranks = dist.get_world_size()
    if layout == "pipeline":
        return Stage(dist.get_rank())
    net = Net()
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if layout == "fsdp1":
        return FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (ranks,))
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    if layout == "fsdp_tp":
        both = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
        for block in net.blocks:
            parallelize_module(block, both["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = both["data"]
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


class Data:
    """A loader of each rank's own part of the data, which knows its position."""

    def __init__(self, data_rank: int) -> None:
        self.data_rank, self.position = data_rank, 0

    def next(self) -> torch.Tensor:
        self.position += 1
        seed = 1000 * self.data_rank + self.position
        return torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class App:
    """Model and optimizers through DCP's `get_state_dict`, as DCP's own tutorial has it."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], flat: bool) -> None:
        self.model, self.optimizers = model, optimizers
        # The list of a group's parameters is one value under one key, and differs from stage to stage.
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def state_dict(self) -> dict[str, Any]:
        model, optimizers = get_state_dict(self.model, self.optimizers, options=self.options)
        return {"model": model, "optimizers": optimizers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizers"],
            options=self.options,
        )  # fmt: skip


class Training:
    def __init__(self, layout: str, seed: int, through_state_dict: bool) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = parallel(layout)
        self.named = [
            (name.removeprefix("module."), value) for name, value in self.model.named_parameters()
        ]  # as DDP has it
        matrices = [value for name, value in self.named if "up.weight" in name or "down" in name]
        others = [value for name, value in self.named if "up.weight" not in name and "down" not in name]
        if layout == "fsdp1":  # takes only an optimizer of all parameters of its units
            matrices, others = [*matrices, *others], []
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(matrices, lr=1e-2)]
        if others:
            self.optimizers.append(torch.optim.SGD(others, lr=1e-2, momentum=0.9))
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizers[0], STEPS)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=layout != "fsdp1")
        # FSDP1's parameters are pieces of flat ones: no other layout could load averages of these.
        self.averaged = {name: value.detach().clone() for name, value in self.named if layout != "fsdp1"}
        data_rank = dist.get_rank() // 2 if layout == "fsdp_tp" else dist.get_rank()
        self.data = Data(data_rank)
        self.step = 0
        torch.manual_seed(seed + 10 * data_rank)  # dropout differs where data does
        self.state: dict[str, Any] = {
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "averaged": self.averaged,
            "data": PerRank(self.data, reshard=lambda states, rank, size: states[0]),
            "random": PerRank(RandomState()),
            "step": 0,
        }
        if through_state_dict:
            self.state["app"] = App(self.model, self.optimizers, flat=layout == "pipeline")
        else:
            self.state |= {"model": self.model, "optimizers": dict(zip("ab", self.optimizers, strict=False))}

    def train_step(self) -> float:
        total = 0.0
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            loss = self.model(self.data.next()) * (1 + random.random())
            self.scaler.scale(loss / MICRO_BATCHES).backward()
            total += float(loss)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.scheduler.step()
        with torch.no_grad():
            for name, value in self.named:
                if name in self.averaged:
                    self.averaged[name].mul_(0.9).add_(value.detach(), alpha=0.1)
        self.state["step"] += 1
        return total

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights and averages, whole."""
        found = {**dict(self.named), **{f"averaged.{k}": v for k, v in self.averaged.items()}}
        return {
            name: getattr(value, "full_tensor", lambda value=value: value)().detach().clone()
            for name, value in found.items()
        }


def _run(layout: str, directory: Path, last: int, seed: int, through_state_dict: bool, resume: bool) -> list[str]:
    training = Training(layout, seed, through_state_dict)
    losses = []
    with CheckpointManager(directory, max_to_keep=3, timeout=60) as manager:
        if resume:
            assert manager.restore(training.state) == training.state["step"] == last - 2
        while training.state["step"] < last:
            losses.append(training.train_step().hex())
            manager.save(training.state["step"], training.state)
    return losses


@pytest.mark.parametrize(
    "layout, ranks, through_state_dict",
    [
        *(("ddp", 2, False), ("fsdp1", 2, False), ("fsdp2", 2, False), ("hsdp", 4, False), ("fsdp_tp", 4, False)),
        *(("pipeline", 2, False), ("ddp", 2, True), ("fsdp2", 2, True), ("pipeline", 2, True)),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, layout: str, ranks: int, through_state_dict: bool) -> None:
    whole = run_ranks(ranks, _run, layout, tmp_path / "whole", STEPS, 1, through_state_dict, False)
    run_ranks(ranks, _run, layout, tmp_path / "part", STEPS - 2, 1, through_state_dict, False)
    resumed = run_ranks(ranks, _run, layout, tmp_path / "part", STEPS, 2, through_state_dict, True)
    assert resumed == [losses[-2:] for losses in whole]


def _trained_weights(layout: str, directory: Path) -> dict[str, torch.Tensor]:
    training = Training(layout, 1, False)
    training.train_step()
    vescale_ckpt.save(directory, training.state, timeout=60)
    return training.weights()


def _restored(layout: str, directory: Path) -> tuple[dict[str, torch.Tensor], float]:
    training = Training(layout, 2, False)
    vescale_ckpt.load(directory, training.state, timeout=60)
    return training.weights(), training.train_step()


@pytest.mark.parametrize(
    "saved, loaded",
    [
        (("fsdp2", 2), ("fsdp2", 4)), (("hsdp", 4), ("fsdp2", 2)), (("fsdp_tp", 4), ("fsdp2", 2)),
        (("ddp", 2), ("fsdp2", 4)), (("fsdp2", 4), ("ddp", 1)), (("fsdp2", 2), ("fsdp_tp", 4)),
    ],
    ids=str,
)  # fmt: skip
def test_another_layout_of_another_number_of_ranks_gets_the_same_weights(
    tmp_path: Path, saved: tuple[str, int], loaded: tuple[str, int]
) -> None:
    expected = run_ranks(saved[1], _trained_weights, saved[0], tmp_path)[0]
    for weights, loss in run_ranks(loaded[1], _restored, loaded[0], tmp_path):
        assert set(weights) == set(expected)
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        assert math.isfinite(loss)
