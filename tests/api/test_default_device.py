"""Under `torch.device("meta")`, and after `torch.set_default_device`, tensors appear where nobody who wrote
`torch.empty(…)` expected them. What this package makes for itself says where."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch
import torch.utils._device
from harness.saves import load
from harness.states import same, state
from torch import nn

import vescale_ckpt
from vescale_ckpt import CheckpointManager, verify

BOUND = 60.0

# Their result is on the device of what they are given.
_ON_THE_DEVICE_OF_AN_ARGUMENT = frozenset({"frombuffer", "from_numpy"})


def _factories() -> set[str]:
    named = {function.__name__ for function in torch.utils._device._device_constructors()}
    return named - _ON_THE_DEVICE_OF_AN_ARGUMENT


def test_every_tensor_that_is_made_names_its_device() -> None:
    factories, found, seen = _factories(), [], 0
    assert {"empty", "zeros", "tensor", "arange"} <= factories
    for path in sorted(Path(vescale_ckpt.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
                continue
            if node.func.attr in factories:
                seen += 1
                if all(keyword.arg != "device" for keyword in node.keywords):
                    found.append(f"{path.name}:{node.lineno}: torch.{node.func.attr}")
    assert seen > 10
    assert not found


def many(k: int) -> dict[str, Any]:
    return {**state(k), "conjugate": torch.full((9,), 1j * k).conj()}


def test_saves_and_loads(tmp_path: Path) -> None:
    values, target = many(1), many(0)
    with torch.device("meta"):
        assert torch.empty(1).is_meta
        vescale_ckpt.save(tmp_path / "a", {**values, "tuple": (values["conjugate"], 1)})
        vescale_ckpt.save(tmp_path / "b", values, async_checkpoint=True).result(BOUND)
        vescale_ckpt.load(tmp_path / "a", target)
        found = vescale_ckpt.load(tmp_path / "b")
        assert verify(tmp_path / "a").ok
        (of_tuple, _) = vescale_ckpt.load(tmp_path / "a", keys="tuple")["tuple"]
    assert same(of_tuple, values["conjugate"])
    assert same(target, many(1))
    assert found["model"]["large"].equal(values["model"]["large"])
    assert same(load(tmp_path / "b", many(0)), many(1))


def test_a_model_and_its_optimizer(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    trained, fresh = make(), make()
    trained["model"](torch.ones(2, 4)).sum().backward()
    trained["optimizer"].step()
    with torch.device("meta"):
        handle = vescale_ckpt.save(tmp_path / "a", trained, async_checkpoint=True, gate=trained["optimizer"])
        handle.result(BOUND)
        vescale_ckpt.load(tmp_path / "a", fresh)
        with CheckpointManager(tmp_path / "many") as manager:
            manager.save(1, trained)
            manager.wait()
            assert manager.restore(fresh) == 1
    assert same(fresh["model"].state_dict(), trained["model"].state_dict())
    states = (part["optimizer"].state.values() for part in (fresh, trained))
    assert all(same(one, other) for one, other in zip(*states, strict=True))
