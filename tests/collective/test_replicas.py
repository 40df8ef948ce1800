"""Replicas that differ from rank to rank: never a mixture, and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import steps
from harness.logs import logged
from harness.ranks import on_ranks, run_ranks
from harness.states import random_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import vescale_ckpt
from vescale_ckpt import SavePlanner, StorageWriter

MiB = 1 << 20


def _state(values: dict[str, float], elements: int) -> dict[str, torch.Tensor]:
    return {key: torch.full((4, elements // 4), value) for key, value in values.items()}


def _saves(path: str, how: str, differs: list[bool], elements: int = MiB) -> list[tuple[dict[str, list[float]], str]]:
    """Saves again and again; what was saved, and what rank 0 has said to it."""
    planner = SavePlanner()
    results = []
    with logged() as texts:
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
                with steps.planned_by(planner):
                    vescale_ckpt.save(target, state, format="safetensors" if how == "safetensors" else "dcp")
            loaded = vescale_ckpt.load(target)
            results.append(({key: sorted(set(loaded[key].flatten().tolist())) for key in loaded}, " ".join(texts)))
            texts.clear()
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
            assert ("planned anew" in text) == (number == 0 or (differ and not warned)), text
        warned = warned or differ


#: Elements, of which those at odd places, and those at odd multiples of 1/32, are compared.
AT = {"small": (0, 3), "large": (0, MiB // 64, 31 * MiB // 64)}


@on_ranks(2)
def test_which_elements_are_compared_and_how(tmp_path: Path) -> None:
    """Rank 1 differs in one element of each tensor."""
    small, large = torch.zeros(8), torch.zeros(MiB // 2)  # 4 and 16 elements of them are compared
    state = {f"{name} {at}": whole.clone() for name, whole in (("small", small), ("large", large)) for at in AT[name]}
    state |= {"nan": torch.full((4,), float("nan")), "zero": torch.zeros(4)}
    if dist.get_rank():
        for name, at in AT.items():
            for element in at:
                state[f"{name} {element}"][element] = 1
        state["zero"] = -state["zero"]
    with logged() as texts, steps.no_plans_known():
        vescale_ckpt.save(tmp_path, state)
    seen = [name for name in state if any(f"{name} (ranks 0 and 1)" in text for text in texts)]
    assert dist.get_rank() or seen == ["small 3", *(f"large {at}" for at in AT["large"][1:]), "zero"]


@on_ranks(2)
def test_python_hashes_replicas_as_the_engine_does(tmp_path: Path) -> None:
    """Rank 1 hashes in Python, as what lies on devices is; one tensor of it differs in the last save."""
    if dist.get_rank():
        steps.hash_in_python().start()
    torch.manual_seed(3)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.int8, torch.bool,
              torch.float8_e4m3fn, torch.uint16)  # fmt: skip
    shapes = ((), (1,), (8, 30), (1 << 11, 1 << 9))
    state = {f"{dtype} {shape}": random_tensor(shape, dtype) for dtype in dtypes for shape in shapes}
    of_saves = []
    with logged() as texts, steps.no_plans_known():
        for number in range(4):
            if dist.get_rank() and number == 1:  # other strides
                state = {
                    key: value if value.dtype is torch.float8_e4m3fn or value.ndim < 2 else value.t().contiguous().t()
                    for key, value in state.items()
                }
            if dist.get_rank() and number == 3:
                state["torch.float32 (8, 30)"] = torch.zeros(8, 30)
            vescale_ckpt.save(f"{tmp_path}/{number}", state)
            of_saves.append(" ".join(texts))
            texts.clear()
    for text in of_saves[:3]:
        assert "differ" not in text
    if dist.get_rank() == 0:
        assert "plan reused" in of_saves[1] and "plan reused" in of_saves[2]
        assert "1 tensors that several ranks hold differ" in of_saves[3] and "torch.float32 (8, 30)" in of_saves[3]
