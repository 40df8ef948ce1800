"""Loads of optimizers whose parameters have other names than when they were saved: each group gets its own settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vescale_ckpt
from vescale_ckpt import IncompatibleStateError


def _model(*names: str) -> nn.Module:
    model = nn.Module()
    for name in names:
        model.add_module(name, nn.Linear(3, 3))
    return model


def _optimizer(model: nn.Module, momentum: float, **rates: Any) -> torch.optim.Optimizer:
    """A group for each part of the model, in the order of the rates."""
    groups = [{"params": list(getattr(model, name).parameters()), "lr": lr} for name, lr in rates.items()]
    return torch.optim.SGD(groups, momentum=momentum)


def _rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [group["lr"] for group in optimizer.param_groups]


def _replace(key: str) -> str:
    return key.replace(".enc.", ".encoder.").replace(".out.", ".head.")


@pytest.fixture(params=[0.9, 0.0], ids=["momentum", "no state"])
def saved(request: pytest.FixtureRequest, checkpoint: Path) -> tuple[Path, float]:
    model = _model("encoder", "head")
    optimizer = _optimizer(model, request.param, encoder=0.1, head=0.9)
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    vescale_ckpt.save(checkpoint, {"model": model, "optimizer": optimizer})
    return checkpoint, request.param


OF_MODULES = {"model.enc": "model.encoder", "model.out": "model.head"}
OF_STATE = {"optimizer.state.enc": "optimizer.state.encoder", "optimizer.state.out": "optimizer.state.head"}


@pytest.mark.parametrize("rename", [_replace, OF_MODULES | OF_STATE, OF_MODULES], ids=["function", "all", "modules"])
def test_groups_are_found_by_renamed_names(saved: tuple[Path, float], rename: Any) -> None:
    """Names of modules are enough for an optimizer without state, whose state is mapped to nothing that is stored."""
    path, momentum = saved
    model = _model("enc", "out")
    optimizer = _optimizer(model, 0.0 if rename is OF_MODULES else momentum, out=0.5, enc=0.6)  # in the other order
    vescale_ckpt.load(path, {"model": model, "optimizer": optimizer}, rename=rename)
    assert _rates(optimizer) == [0.9, 0.1]


def test_a_name_that_was_another_parameters_counts_as_renamed(saved: tuple[Path, float]) -> None:
    """Parts that exchange their names: the names that rename= does not touch would find the other group."""
    path, momentum = saved
    swapped = {"encoder": "head", "head": "encoder"}
    model = _model("encoder", "head")
    optimizer = _optimizer(model, momentum, encoder=0.5, head=0.6)
    rename = {f"{under}{new}": f"{under}{old}" for new, old in swapped.items() for under in ("m.", "o.state.")}
    rename = {key: name.replace("m.", "model.").replace("o.", "optimizer.") for key, name in rename.items()}
    rename |= {"m": "model", "o": "optimizer"}
    vescale_ckpt.load(path, {"m": model, "o": optimizer}, rename=rename)
    assert _rates(optimizer) == [0.9, 0.1]


def test_a_group_that_the_state_lacks_is_not_needed_to_find_the_others(checkpoint: Path) -> None:
    model = _model("a", "b", "c")
    vescale_ckpt.save(checkpoint, {"model": model, "optimizer": _optimizer(model, 0, a=0.1, b=0.2, c=0.3)})
    fewer = _model("b", "c")
    optimizer = _optimizer(fewer, 0, b=0.5, c=0.6)
    vescale_ckpt.load(checkpoint, {"net": fewer, "sgd": optimizer}, rename={"net": "model", "sgd": "optimizer"})
    assert _rates(optimizer) == [0.2, 0.3]


def test_what_is_ambiguous_is_an_error(saved: tuple[Path, float]) -> None:
    path, _ = saved
    model = _model("enc", "out")
    optimizer = _optimizer(model, 0.0, out=0.5, enc=0.6)
    state = {"net": {"encoder": 0}, "optimizer": optimizer, "model": model}
    with pytest.raises(IncompatibleStateError, match=r"optimizer\.param_groups\.0.*its group in the checkpoint"):
        vescale_ckpt.load(path, state, rename={"model": "gone"}, strict=False)
    assert _rates(optimizer) == [0.5, 0.6]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_tensor_that_groups_share_gets_the_value_of_each(checkpoint: Path, compiled: bool) -> None:
    """As `Optimizer.load_state_dict` does, which leaves the shared tensor alone."""
    model = _model("encoder", "head")
    rates = {"encoder": torch.tensor(0.1), "head": torch.tensor(0.9)}
    vescale_ckpt.save(checkpoint, {"model": model, "optimizer": _optimizer(model, 0.9, **rates)})
    shared = torch.tensor(0.5)
    loaded: Any = torch.compile(model) if compiled else model
    optimizers = [_optimizer(model, 0.9, encoder=shared, head=shared) for _ in range(2)]
    vescale_ckpt.load(checkpoint, {"model": loaded, "optimizer": optimizers[0]})
    assert _rates(optimizers[0]) == [torch.tensor(0.1), torch.tensor(0.9)]
    assert _rates(optimizers[1]) == [shared, shared] == [torch.tensor(0.5)] * 2
