"""No right resume is called wrong: random states, saved and resumed by random numbers of ranks with random shardings.

VESCALE_CKPT_TEST_RESUMES: how many; a thousand take a few minutes on a free processor.
"""

from __future__ import annotations

import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt import PerRank, RandomState

pytestmark = pytest.mark.slow
COUNT = int(os.environ.get("VESCALE_CKPT_TEST_RESUMES", "25"))
RANKS, BATCH = 4, 25
SHAPES = [(), (1,), (7,), (64,), (5, 3), (4, 8), (1, 9), (0, 4), (3, 5, 2), (17, 1, 3), (33, 65)]
TRAINED = [torch.float32, torch.float32, torch.bfloat16, torch.float64]
KEPT = [torch.int64, torch.bool, torch.uint8, torch.float16, torch.complex64, torch.float8_e4m3fn]
OBJECTS: list[Any] = [7, -0.0, math.nan, "text", b"\0", None, (1, "a"), [1, 2], {"a": {"b": [1.5, None]}}, 1 << 70]


class Case:
    """What is saved, equal on all ranks."""

    def __init__(self, number: int) -> None:
        self.number = number
        draw = random.Random(number)
        self.saving, self.loading = draw.randint(1, RANKS), draw.randint(1, RANKS)
        self.trained = [(draw.choice(SHAPES), draw.choice(TRAINED)) for _ in range(draw.randint(1, 4))]
        self.kept = [(draw.choice(SHAPES), draw.choice(KEPT)) for _ in range(draw.randint(0, 3))]
        self.optimizer = draw.choice(["adam", "amsgrad", "momentum", "sgd", "none"])
        self.steps = draw.choice([0, 1, 2])
        self.began = draw.choice([0, 0, 1])  # steps that the resumed state has made before the load
        self.objects = draw.sample(OBJECTS, draw.randint(0, 4))
        self.has_random_state, self.has_schedule = draw.random() < 0.5, draw.random() < 0.5
        self.finds_a_flip = draw.random() < 0.2

    def state(self, mesh: DeviceMesh, way: int, seed: int, steps: int) -> dict[str, Any]:
        """The state on a mesh. `way`: seed of placements; `seed`: of values."""
        draw, values = random.Random(f"{self.number} {way}"), torch.Generator().manual_seed(seed)
        model = torch.nn.Module()
        for number, (shape, dtype) in enumerate(self.trained):
            full = torch.randn(shape, generator=values).to(dtype)
            model.register_parameter(f"p{number}", torch.nn.Parameter(_placed(full, mesh, draw)))
        for number, (shape, dtype) in enumerate(self.kept):
            full = torch.randint(-9, 9, shape, generator=values).float().to(dtype)
            model.register_buffer(f"b{number}", _placed(full, mesh, draw))
        state: dict[str, Any] = {"model": model, "step": seed, "extra": dict(enumerate(self.objects))}
        if (optimizer := self._optimizer(model)) is not None:
            state["optimizer"] = optimizer
            if self.has_schedule:
                state["schedule"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if self.has_random_state:
            state["random"] = PerRank(RandomState())
        for _ in range(steps if optimizer is not None else 0):
            self._train(state, values)
        return state

    def _optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer | None:
        parameters = [*model.parameters()]
        if self.optimizer == "none":
            return None
        if self.optimizer in ("adam", "amsgrad"):
            return torch.optim.AdamW(parameters, lr=0.01, amsgrad=self.optimizer == "amsgrad", foreach=False)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 * (self.optimizer == "momentum"), foreach=False)

    @staticmethod
    def _train(state: dict[str, Any], values: torch.Generator) -> None:
        for parameter in state["model"].parameters():
            full = torch.randn(parameter.shape, generator=values).to(parameter.dtype)
            if isinstance(parameter.data, torch.distributed.tensor.DTensor):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.grad = full
        state["optimizer"].step()
        if "schedule" in state:
            state["schedule"].step()


def _placed(full: torch.Tensor, mesh: DeviceMesh, draw: random.Random) -> torch.Tensor:
    """A tensor by rows, by columns or replicated on each dimension of the mesh; or a plain replica."""
    ways: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(min(2, full.dim())))]
    placements = [draw.choice(ways) for _ in range(mesh.ndim)]
    if draw.random() < 0.2:
        return full
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def _resume(folder: Path, first: int, count: int) -> list[str]:
    """Makes cases, and returns what went wrong."""
    groups = [dist.new_group(range(size)) for size in range(1, RANKS + 1)]
    meshes = [[DeviceMesh("cpu", torch.arange(size))] for size in range(1, RANKS + 1)]
    meshes[RANKS - 1].append(DeviceMesh("cpu", torch.arange(RANKS).view(2, 2)))
    found = []
    for case in map(Case, range(first, first + count)):
        path = folder / f"{case.number}"
        try:
            if dist.get_rank() < case.saving:
                torch.manual_seed(1000 * case.number + dist.get_rank())
                state = case.state(meshes[case.saving - 1][-(case.number % 2)], 1, case.number, case.steps)
                vescale_ckpt.save(path, state, fingerprint=True, process_group=groups[case.saving - 1])
            dist.barrier()
            if dist.get_rank() < case.loading:
                torch.manual_seed(5)
                state = case.state(meshes[case.loading - 1][-(case.number // 2 % 2)], 2, -1, case.began)
                _load_and_prove(case, path, state, groups[case.loading - 1])
        except Exception as error:
            found.append(f"case {case.number}: {type(error).__name__}: {error}")
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
    return found


def _load_and_prove(case: Case, path: Path, state: dict[str, Any], group: Any) -> None:
    vescale_ckpt.load(path, state, process_group=group)
    proof = vescale_ckpt.prove(path, state, process_group=group)
    others = ("random",) if case.has_random_state and case.saving != case.loading else ()
    assert proof and proof.equal >= len(case.trained), proof
    assert {key.partition(".")[0] for key in proof.not_compared} == {*others}, proof
    if case.finds_a_flip:
        parameter = state["model"].p0.data
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local.view(-1).view(torch.uint8)[:1] ^= 1  # on each rank that has elements of it
        proof = vescale_ckpt.prove(path, state, process_group=group, strict=False)
        changed = math.prod(case.trained[0][0]) > 0
        assert [*proof.different] == ["model.p0"] * changed, proof


def test_no_right_resume_is_called_wrong(tmp_path: Path) -> None:
    for first in range(0, COUNT, BATCH):
        assert run_ranks(RANKS, _resume, tmp_path, first, min(BATCH, COUNT - first)) == [[]] * RANKS
