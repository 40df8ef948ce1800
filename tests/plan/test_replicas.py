"""Replicas that differ from rank to rank: never a mixture, and told."""

from __future__ import annotations

import logging
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_pool import run_ranks
from states import random_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import vescale_ckpt
from vescale_ckpt import SavePlanner, StorageWriter
from vescale_ckpt._plan import replicas
from vescale_ckpt._state.describe import Describer

MiB = 1 << 20


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _state(values: dict[str, float]) -> dict[str, torch.Tensor]:
    return {key: torch.full((4, MiB // 4), value) for key, value in values.items()}


def _saves(path: str, how: str, differs: list[bool]) -> list[tuple[dict[str, list[float]], str]]:
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
            state: dict[str, Any] = {**_state({"same": number, name: mine, "other": number})}
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


@pytest.mark.parametrize("how", ["save", "dcp.save", "DTensor", "safetensors"])
def test_one_rank_is_saved_whole_and_a_warning_names_key_and_ranks(tmp_path: Path, how: str) -> None:
    differs = {"save": [False, False, True, True, False], "DTensor": [True, False]}.get(how, [False, True])
    told, _ = run_ranks(2, _saves, str(tmp_path), how, differs)
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


def _split(tensor: torch.Tensor, cuts: list[int], key: str = "a") -> list[int]:
    """The sum over ranks, each of which holds `tensor` and writes the rows between two cuts."""
    return [_part(tensor, start, stop, key) for start, stop in pairwise(cuts)]


def _part(tensor: torch.Tensor, start: int, stop: int, key: str = "a") -> int:
    description, _ = Describer().describe({key: tensor})
    boxes = replicas.split_boxes(description, array("q", [0, 0, start, stop - start]).tobytes())
    hashes, complete = boxes.hashes(description, True)
    assert complete and len(hashes) == 1
    return boxes.sum(hashes)


def _part_in_python(tensor: torch.Tensor, start: int, stop: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "ON_HOST", -1)
        return _part(tensor, start, stop)


def _sum(values: list[int]) -> int:
    return sum(values) % (1 << 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128,
                                   torch.int8, torch.bool, torch.float8_e4m3fn, torch.uint16], ids=str)  # fmt: skip
def test_the_same_replicas_add_up_to_nothing_and_others_do_not(dtype: torch.dtype) -> None:
    one, other = random_tensor((8, 30), dtype), random_tensor((8, 30), dtype)
    assert _sum(_split(one, [0, 3, 8])) == _sum(_split(one, [0, 1, 2, 3, 7, 8])) == 0
    assert _sum([_part(one, 0, 3), _part(other, 3, 8)]) != 0
    other_way = [_part(one, 0, 3), _part_in_python(one, 3, 8)]
    assert _sum(other_way) == 0
    copy = torch.empty(30, 8, dtype=dtype).t().copy_(one) if dtype is not torch.float8_e4m3fn else one
    assert _sum([_part(one, 0, 3), _part(copy, 3, 8)]) == 0  # however it lies


def test_differences_that_are_easily_overlooked() -> None:
    value = torch.arange(1.0, 241, dtype=torch.float64).view(8, 30)
    assert _sum([_part(value, 0, 3), _part(-value, 3, 8)]) != 0  # one bit each, the highest
    a, b = value, value + 1
    swapped = [_part(a, 0, 3, "a"), _part(b, 3, 8, "a"), _part(b, 0, 3, "b"), _part(a, 3, 8, "b")]
    assert _sum(swapped) != 0
    conjugated = torch.complex(value, value + 1).conj()
    assert _sum([_part(conjugated, 0, 3), _part(conjugated.resolve_conj(), 3, 8)]) == 0


def test_what_cannot_be_looked_at_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    description, _ = Describer().describe({"a": torch.ones(8, 30)})
    boxes = replicas.split_boxes(description, array("q", [0, 0, 0, 3]).tobytes())

    def fails(*_: Any) -> torch.Tensor:
        raise RuntimeError("no")

    monkeypatch.setattr(replicas, "_elements", fails)
    monkeypatch.setattr(replicas, "ON_HOST", -1)
    assert boxes.hashes(description, True) == ([], True) and boxes.sum([]) == 0
