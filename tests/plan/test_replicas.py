"""Replicas that differ from rank to rank: never a mixture, and told."""

from __future__ import annotations

import logging
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import run_ranks
from harness.states import random_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import vescale_ckpt
from vescale_ckpt import SavePlanner, StorageWriter
from vescale_ckpt._engine import _C
from vescale_ckpt._plan import replicas
from vescale_ckpt._state.describe import Describer, Description

MiB = 1 << 20


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _state(values: dict[str, float], elements: int) -> dict[str, torch.Tensor]:
    return {key: torch.full((4, elements // 4), value) for key, value in values.items()}


def _saves(path: str, how: str, differs: list[bool], elements: int = MiB) -> list[tuple[dict[str, list[float]], str]]:
    """Saves again and again; what was saved, and what rank 0 has said to it."""
    log = _Log()
    logger = logging.getLogger("vescale_ckpt")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    planner = SavePlanner()
    results = []
    try:
        for number, differ in enumerate(differs):
            mine = float(number + differ * (dist.get_rank() + 1) * 100)
            name = f"own {how}"  # planners are kept from test to test
            state: dict[str, Any] = {**_state({"same": number, name: mine, "other": number}, elements)}
            if how == "DTensor":
                mesh = init_device_mesh("cpu", (dist.get_world_size(),))
                state = {key: DTensor.from_local(value, mesh, [Replicate()]) for key, value in state.items()}
            target = f"{path}/{number}"
            if how == "dcp.save":
                dcp.save(state, storage_writer=StorageWriter(target), planner=planner)
            else:
                vescale_ckpt.save(
                    target, state, planner=planner, format="safetensors" if how == "safetensors" else "dcp"
                )
            loaded = vescale_ckpt.load(target)
            results.append(({key: sorted(set(loaded[key].flatten().tolist())) for key in loaded}, " ".join(log.texts)))
            log.texts.clear()
    finally:
        logger.removeHandler(log)
    return results


@pytest.mark.parametrize("elements", [8, MiB], ids=["small", "large"])
@pytest.mark.parametrize("how", ["save", "dcp.save", "DTensor", "safetensors"])
def test_one_rank_is_saved_whole_and_a_warning_names_key_and_ranks(tmp_path: Path, how: str, elements: int) -> None:
    differs = {"save": [False, False, True, True, False], "DTensor": [True, False]}.get(how, [False, True])
    told, _ = run_ranks(2, _saves, str(tmp_path), how, differs, elements)
    warned = False
    for number, (differ, (values, text)) in enumerate(zip(differs, told, strict=True)):
        assert values["same"] == values["other"] == [number]
        own = values[f"own {how}"]
        assert len(own) == 1
        assert own[0] in ([number + 100, number + 200] if differ else [number])
        assert (f"own {how} (ranks 0 and 1)" in text) == (differ and not warned), text
        if how == "save":  # and the plan is kept as long as nothing differs
            assert ("planning again" in text) == (differ and not warned), text
        warned = warned or differ


def _description(state: dict[str, Any]) -> Description:
    return Describer().describe(state)[0]


def _in_python(patch: pytest.MonkeyPatch) -> None:
    """Hashes in Python what the engine would hash, as it has to where tensors lie on devices."""
    hashes, total = _C.offered_hashes, _C.replica_sum

    def nothing_ready(tables: tuple[Any, ...]) -> tuple[Any, ...]:
        inventory, sources, table, ready, *others = tables
        return inventory, sources, table, bytes(len(ready)), *others

    patch.setattr(_C, "offered_hashes", lambda *tables: hashes(*nothing_ready(tables)))
    patch.setattr(_C, "replica_sum", lambda *tables: total(*nothing_ready(tables)))


def _plan(ranks: list[dict[str, Any]]) -> tuple[_C.GlobalPlan, list[Description]]:
    described = [_description(state) for state in ranks]
    hashes = [replicas.offered_hashes(description, True) for description in described]
    return _C.GlobalPlan([one.inventory for one in described], "balanced", hashes=hashes), described


def _sum(plan: _C.GlobalPlan, ranks: list[dict[str, Any]]) -> int:
    """Over all ranks, with what they hold at a later save."""
    summands = [replicas.replica_sum(_description(state), plan.holders(rank), True) for rank, state in enumerate(ranks)]
    assert all(complete for _, complete in summands)
    return sum(summand for summand, _ in summands) % (1 << 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128,
                                   torch.int8, torch.bool, torch.float8_e4m3fn, torch.uint16], ids=str)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (1,), (8, 30), (1 << 11, 1 << 10)], ids=str)
def test_the_same_replicas_add_up_to_nothing_and_others_do_not(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    one = torch.ones(shape).to(dtype) if not shape or shape == (1,) else random_tensor(shape, dtype)
    other = torch.zeros(shape).to(dtype) if not shape or shape == (1,) else random_tensor(shape, dtype)
    copy = one.clone() if dtype is torch.float8_e4m3fn or len(shape) < 2 else one.t().contiguous().t()
    plan, _ = _plan([{"a": one}, {"a": copy}, {"a": one.clone()}])
    assert plan.differences == []
    assert _sum(plan, [{"a": one}, {"a": copy}, {"a": one}]) == 0
    for rank in range(3):
        state = [{"a": other if rank == number else one} for number in range(3)]
        assert _sum(plan, state) != 0
        found, _ = _plan(state)
        assert found.differences == [("a", 0, max(1, rank))]
    with pytest.MonkeyPatch.context() as patch:
        _in_python(patch)
        assert _sum(plan, [{"a": one}, {"a": copy}, {"a": one}]) == 0
        _, (description, *_) = _plan([{"a": one}, {"a": one}])
        in_python = replicas.offered_hashes(description, True)
    assert in_python == replicas.offered_hashes(description, True) != bytes(8)


def _is_elsewhere(*_: Any) -> bool:
    return False


def test_on_devices_only_large_boxes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"small": torch.ones(9), "large": torch.ones(MiB)}
    plan, (description, _) = _plan([state] * 2)
    everything = array("Q", replicas.offered_hashes(description, True))
    assert 0 not in everything
    _in_python(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(_is_elsewhere))
    assert array("Q", replicas.offered_hashes(description, True)) == array("Q", [0, everything[1]])
    assert array("Q", replicas.offered_hashes(description, False)) == array("Q", [0, 0])
    assert replicas.replica_sum(description, plan.holders(0), True)[1]
    assert replicas.replica_sum(description, plan.holders(0), False) == (0, False)
