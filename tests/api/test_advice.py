"""Mistakes that are made easily: done all the same, or answered by what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from harness.states import assert_same
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import vescale_ckpt
from vescale_ckpt import CheckpointError, MissingKeysError, UntrustedCheckpointError, load, save

MODEL = torch.nn.Linear(3, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters())


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "save": save,
    "load": load,
    "prepare": lambda path, state: vescale_ckpt.prepare(state),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("state", "advice"),
    [
        (MODEL, '"model": model'),
        (OPTIMIZER, '"optimizer": optimizer'),
        ([torch.ones(1)], '{"name": value}'),
        (3, "int"),
    ],
    ids=["module", "optimizer", "list", "number"],
)
def test_a_state_that_is_no_mapping(tmp_path: Path, function: str, state: Any, advice: str) -> None:
    with pytest.raises(TypeError, match="expected a mapping of names to values") as raised:
        FUNCTIONS[function](tmp_path / "x", state)
    assert advice in str(raised.value)
    assert not (tmp_path / "x").exists()


def test_the_advice_for_a_bare_module_helps(tmp_path: Path) -> None:
    save(tmp_path, MODEL.state_dict())
    model = torch.nn.Linear(3, 2)
    load(tmp_path, {"model": model}, rename={"model": ""})
    assert_same(model.state_dict(), MODEL.state_dict())


def test_planners_of_stock(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"dcp\.save"):
        save(tmp_path, {"a": 1}, planner=DefaultSavePlanner())  # type: ignore[arg-type]
    save(tmp_path, {"a": torch.ones(1)})
    state = {"a": torch.zeros(1)}
    load(tmp_path, state, planner=DefaultLoadPlanner())
    assert state["a"] == 1
    with pytest.raises(TypeError, match="a planner of loads"):
        load(tmp_path, state, planner=DefaultSavePlanner())  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("saved", "wanted", "rename"),
    [("model", "net", {"net": "model"}), ("model", "", {"": "model"}), ("", "model", {"model": ""}),
     ("model.module", "model", {"model": "model.module"}), ("model", "model._orig_mod", {"model._orig_mod": "model"})],
)  # fmt: skip
def test_renamed_keys(tmp_path: Path, saved: str, wanted: str, rename: dict[str, str]) -> None:
    def under(prefix: str) -> dict[str, Any]:
        return {f"{prefix}.{key}".removeprefix("."): torch.ones(2) for key in ("a.weight", "a.bias", "b.weight")}

    save(tmp_path, {**under(saved), "step": 3})
    state = under(wanted)
    with pytest.raises(MissingKeysError) as raised:
        load(tmp_path, state)
    assert f"rename={rename} " in str(raised.value)
    load(tmp_path, state, rename=rename)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", "bfloat16"), ("FP16", "float16"), ("f32", "float32"),
                                             ("torch.float64", "float64")])  # fmt: skip
def test_short_names_of_dtypes(tmp_path: Path, name: str, dtype: str) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    vescale_ckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", format="torch", dtype=name)
    assert torch.load(tmp_path / "b.pt")["a"].dtype is getattr(torch, dtype)


@pytest.mark.parametrize("dtype", ["bfloat", 16])
def test_names_that_are_no_dtypes(tmp_path: Path, dtype: Any) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises((ValueError, TypeError)):
        vescale_ckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", format="torch", dtype=dtype)


class Container(torch.optim.Optimizer):
    """As torchtitan's: an optimizer to those who drive it, with a state of its own form."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.values = torch.zeros(2)

    def step(self, closure: Any = None) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"state.weight.moment": self.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict["state.weight.moment"].clone()


def test_an_optimizer_with_a_state_of_its_own_form(tmp_path: Path) -> None:
    container = Container(MODEL.parameters())
    container.values = torch.ones(2)
    save(tmp_path, {"model": MODEL, "optimizer": container})
    fresh = Container(MODEL.parameters())
    load(tmp_path, {"model": MODEL, "optimizer": fresh})
    assert torch.equal(fresh.values, torch.ones(2))


@pytest.mark.parametrize(
    ("state", "target"),
    [
        ({"": 5}, {"": 0}),
        ({"": torch.ones(2)}, {"": torch.zeros(2)}),
        ({"": {"a": 1}}, {"": {"a": 0}}),
        ({"a": {"": torch.ones(2)}}, {"a": {"": torch.zeros(2)}}),
    ],
    ids=["object", "tensor", "mapping", "below"],
)
def test_the_empty_name(tmp_path: Path, state: dict[str, Any], target: dict[str, Any]) -> None:
    save(tmp_path, state)
    assert_same(load(tmp_path), state)
    load(tmp_path, target)
    assert_same(target, state)


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_a_module_under_the_empty_name(tmp_path: Path, format: str) -> None:
    save(tmp_path, {"": MODEL}, format=format)
    model = torch.nn.Linear(3, 2)
    load(tmp_path, {"": model})
    assert_same(model.state_dict(), MODEL.state_dict())


class Own:
    pass


def test_objects_that_take_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, {"plain": numpy.arange(3), "some": {"own": Own()}})
    assert "some.own" in caplog.text and "plain" not in caplog.text
    with pytest.raises(UntrustedCheckpointError, match=r"some\.own"):
        load(tmp_path)
    assert type(load(tmp_path, weights_only=False)["some"]["own"]) is Own
    state = {"plain": None, "some": {"own": None}}
    load(tmp_path, state, weights_only=False)
    assert type(state["some"]["own"]) is Own  # type: ignore[index]


def test_objects_that_do_not_pickle(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"some\.generator: a generator cannot be saved"):
        save(tmp_path, {"some": {"generator": (number for number in range(3))}})
