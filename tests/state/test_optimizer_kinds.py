"""Optimizers with a state of any kind: what was saved is what is there after a load, as torch's own load has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.ranks import run_ranks
from harness.states import assert_same
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import vescale_ckpt
from vescale_ckpt import CheckpointError, IncompatibleStateError, MissingKeysError

Parameters = Any


class Momentum(torch.optim.Optimizer):
    """One moment of float32 for each parameter."""

    def __init__(self, parameters: Parameters, lr: float = 0.1, **defaults: Any) -> None:
        super().__init__(parameters, {"lr": lr, "beta": 0.9, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        self.begin(state, parameter)
                    self.update(state, parameter, group)

    def begin(self, state: dict[str, Any], parameter: torch.Tensor) -> None:
        state["m"] = torch.zeros_like(parameter, dtype=torch.float32)

    def update(self, state: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state["m"].mul_(group["beta"]).add_(parameter.grad.float())  # type: ignore[union-attr]
        parameter.sub_((group["lr"] * state["m"]).to(parameter.dtype))


class Masters(Momentum):
    """Exact copies beside bfloat16 parameters."""

    def begin(self, state: dict[str, Any], parameter: torch.Tensor) -> None:
        super().begin(state, parameter)
        state["master"] = parameter.float() + 1e-6

    def update(self, state: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state["m"].mul_(0.9).add_(parameter.grad.float())  # type: ignore[union-attr]
        state["master"].sub_(state["m"] * group["lr"])
        parameter.copy_(state["master"])


class Zoo(Momentum):
    """State of every kind that torch's load hands through or changes."""

    def begin(self, state: dict[str, Any], parameter: torch.Tensor) -> None:
        super().begin(state, parameter)
        count = parameter.numel()
        state.update(
            blocks=torch.arange(count).to(torch.int8),
            mask=torch.arange(count) % 2 == 0,
            steps=torch.tensor(0),
            number=0,
            nothing=None,
            text="linear",
            pair=(torch.ones(2), torch.arange(3)),
            recent=deque([torch.zeros(1)], maxlen=2),
            history=[],
            nested={"of": {0: torch.ones(1), 1: [torch.zeros(2)]}, "empty": {}},
        )

    def update(self, state: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(state, parameter, group)
        state["number"] += 1
        state["steps"] += 1
        state["history"].append(state["m"].sum())
        state["recent"].append(state["m"].mean())
        state["grows"] = torch.stack(state["history"])


class OfNoParameter(Momentum):
    """As MADGRAD's counter."""

    def step(self, closure: Any = None) -> None:
        self.state.setdefault("k", torch.tensor([0]))
        self.state["k"] += 1
        self.state.setdefault("all", {"rate": 0.5, "norm": torch.ones(3)})
        super().step()


class Counting(Momentum):
    """Counts steps beside the state, and moves parameters without a gradient."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.count = 0
        self.norms: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.count += 1
        self.norms["last"] = torch.tensor([float(self.count)], dtype=torch.float64)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count, "norms": dict(self.norms)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        self.count, self.norms = state_dict["count"], state_dict["norms"]


class NeedsClosure(Momentum):
    def step(self, closure: Any) -> None:
        closure()
        super().step()


class SkipsZeros(Momentum):
    def begin(self, state: dict[str, Any], parameter: torch.Tensor) -> None:
        if parameter.grad.any():  # type: ignore[union-attr]
            super().begin(state, parameter)

    def update(self, state: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> None:
        if state:
            super().update(state, parameter, group)


class Lookahead:
    """Wraps an optimizer; its state has a form of its own, and is empty before the first step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.slow: dict[int, torch.Tensor] = {}
        self.steps = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.steps += 1
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            slow = self.slow.setdefault(number, parameter.detach().clone())
            slow.add_(parameter - slow, alpha=0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"slow": dict(self.slow), "inner": self.inner.state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.slow = state_dict["slow"]
        self.inner.load_state_dict(state_dict["inner"])
        self.steps = state_dict["steps"]


class Pair:
    """Holds optimizers, and has no parameter groups of its own."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        self.inner = list(inner)

    def zero_grad(self) -> None:
        for each in self.inner:
            each.zero_grad()

    def step(self, closure: Any = None) -> None:
        for each in self.inner:
            each.step()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [each.state_dict() for each in self.inner]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for each, form in zip(self.inner, state_dict["inner"], strict=True):
            each.load_state_dict(form)


class OnPurpose(Momentum):
    """Keeps its moment in bfloat16 and saves it as float32."""

    def begin(self, state: dict[str, Any], parameter: torch.Tensor) -> None:
        state["m"] = torch.zeros_like(parameter, dtype=torch.bfloat16)

    def state_dict(self) -> dict[str, Any]:
        form = super().state_dict()
        return {**form, "state": {n: {"m": values["m"].float()} for n, values in form["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for values in self.state.values():
            assert values["m"].dtype == torch.float32, "torch's cast is undone before this"
            values["m"] = values["m"].bfloat16()


def hooked(parameters: Parameters) -> torch.optim.Optimizer:
    optimizer = Momentum(parameters)

    def add(_: Any, form: dict[str, Any]) -> dict[str, Any]:
        return {**form, "master_params": [p.detach() * 2 for p in optimizer.param_groups[0]["params"]], "scale": 8}

    def take(_: Any, form: dict[str, Any]) -> None:
        optimizer.taken = deepcopy(form)  # type: ignore[attr-defined]

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(take)
    return optimizer


KINDS: dict[str, Callable[[Parameters], Any]] = {
    "masters": Masters,
    "every kind of state": Zoo,
    "state of no parameter": OfNoParameter,
    "counters beside the state": Counting,
    "needs a closure": NeedsClosure,
    "makes no state without gradients": SkipsZeros,
    "hooks": hooked,
    "wrapper": lambda p: Lookahead(Masters(p)),
    "wrapper of a usual form": lambda p: type("Plain", (Lookahead,), {
        "state_dict": lambda self: self.inner.state_dict(),
        "load_state_dict": lambda self, form: self.inner.load_state_dict(form),
    })(Masters(p)),
    "several": lambda p: Pair(Masters((all_of := list(p))[:2]), Zoo(all_of[2:])),
    "casts on purpose": OnPurpose,
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, weight_decay=0.1, amsgrad=True),
    "adafactor": torch.optim.Adafactor,
    "adadelta": torch.optim.Adadelta,
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, dtype=dtype)
        self.second = nn.Linear(10, 3, dtype=dtype)
        self.unused = nn.Linear(2, 2, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


def made(make: Callable[[Parameters], Any], dtype: torch.dtype = torch.bfloat16) -> tuple[Net, Any]:
    model = Net(dtype)
    return model, make(model.parameters())


def train(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    torch.manual_seed(5)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(8, 6, dtype=dtype)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss  # type: ignore[no-any-return]

        closure()
        optimizer.step(closure)


def both(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    form = optimizer.state_dict()
    return deepcopy({"model": dict(model.state_dict()), "optimizer": form})


@pytest.mark.parametrize("steps", [0, 3], ids=["fresh", "stepped"])
@pytest.mark.parametrize("form", ["named", "wrapped", "alone"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_if_nothing_had_been(checkpoint: Path, kind: str, form: str, steps: int) -> None:
    def state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        given = checkpoint_wrapper(model) if form == "wrapped" else model
        return {"optimizer": optimizer} if form == "alone" else {"model": given, "optimizer": optimizer}

    model, optimizer = made(KINDS[kind])
    train(model, optimizer)
    vescale_ckpt.save(checkpoint, state(model, optimizer))
    before = both(model, optimizer)
    fresh, its_optimizer = made(KINDS[kind])
    train(fresh, its_optimizer, steps)
    if form == "alone":
        fresh.load_state_dict(model.state_dict())
    report = vescale_ckpt.load(checkpoint, state(fresh, its_optimizer))
    assert report.missing == report.unexpected == report.mismatched == []
    if kind == "hooks":
        assert_same(its_optimizer.taken["master_params"], before["optimizer"]["master_params"])
        assert its_optimizer.taken["scale"] == 8
    assert_same(both(fresh, its_optimizer), before)
    train(model, optimizer)
    train(fresh, its_optimizer)
    assert_same(both(fresh, its_optimizer), both(model, optimizer))


# --- Settings


def test_settings_that_were_added_come_back_and_those_that_lack_take_torchs_defaults(checkpoint: Path) -> None:
    """As AdamW of torch before 2.7, which knows no `decoupled_weight_decay`, with a scheduler."""
    model, optimizer = made(torch.optim.AdamW)
    optimizer.param_groups[0].update(name="all", bounds=[torch.tensor(1.0)])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer)
    saved = optimizer.state_dict()
    for setting in ("decoupled_weight_decay", "maximize"):
        del saved["param_groups"][0][setting]
    vescale_ckpt.save(checkpoint, {"optimizer": saved})
    for beside in ({}, {"model": model}):
        named = [("w", parameter) for parameter in ()] or Net(torch.bfloat16).named_parameters()
        by_torch = torch.optim.AdamW(named, maximize=True)
        its_optimizer = torch.optim.AdamW(model.named_parameters(), maximize=True, lr=7.0)
        by_torch.load_state_dict(deepcopy(saved))
        vescale_ckpt.load(checkpoint, {**beside, "optimizer": its_optimizer}, keys="optimizer")
        assert_same(its_optimizer.state_dict(), by_torch.state_dict())
        group = its_optimizer.param_groups[0]
        assert group["decoupled_weight_decay"] is True and group["maximize"] is False and group["initial_lr"] == 0.001
        assert group["param_names"][0] == "first.weight" and group["bounds"] == [torch.tensor(1.0)]


def test_parts_of_groups_leave_the_others(checkpoint: Path) -> None:
    model, optimizer = made(torch.optim.AdamW)
    optimizer.param_groups[0]["name"] = "all"
    train(model, optimizer)
    vescale_ckpt.save(checkpoint, {"model": model, "optimizer": optimizer})
    for keys, expected in {
        "optimizer.state": (9.0, True, None),
        "optimizer.param_groups.0.lr": (0.001, True, None),
    }.items():
        fresh = torch.optim.AdamW(model.parameters(), lr=9.0, maximize=True)
        vescale_ckpt.load(checkpoint, {"model": model, "optimizer": fresh}, keys=keys)
        group = fresh.param_groups[0]
        assert (group["lr"], group["maximize"], group.get("name")) == expected
        assert bool(fresh.state) is (keys == "optimizer.state")


def test_kinds_of_settings_follow_the_checkpoint(checkpoint: Path) -> None:
    model, optimizer = made(lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False))
    vescale_ckpt.save(checkpoint, {"model": model, "optimizer": optimizer})
    fresh = torch.optim.Adam(model.parameters(), lr=0.5)
    vescale_ckpt.load(checkpoint, {"model": model, "optimizer": fresh})
    assert_same(fresh.param_groups[0]["lr"], torch.tensor(0.01))


# --- Parameters


@pytest.mark.parametrize("form", ["named", "alone"])
def test_layers_are_frozen_or_trained_from_now_on(checkpoint: Path, form: str) -> None:
    model, optimizer = made(Masters)
    model.second.requires_grad_(False)
    train(model, optimizer)
    state = {"model": model, "optimizer": optimizer} if form == "named" else {"optimizer": optimizer}
    vescale_ckpt.save(checkpoint, state)
    fresh, its_optimizer = made(Masters)
    fresh.first.requires_grad_(False)
    state = {"model": fresh, "optimizer": its_optimizer} if form == "named" else {"optimizer": its_optimizer}
    vescale_ckpt.load(checkpoint, state)
    assert_same(its_optimizer.state_dict(), optimizer.state_dict())
    assert all(parameter.grad is None for parameter in fresh.parameters()) and not fresh.first.weight.requires_grad


def test_a_key_of_no_parameter_with_the_name_of_one_is_refused(checkpoint: Path) -> None:
    model = nn.Module()
    model.k = nn.Parameter(torch.ones(2))
    optimizer = OfNoParameter(model.parameters())
    model.k.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(CheckpointError, match="'k'"):
        vescale_ckpt.save(checkpoint, {"model": model, "optimizer": optimizer})
    vescale_ckpt.save(checkpoint, {"optimizer": optimizer})
    assert_same(vescale_ckpt.load(checkpoint)["optimizer"], optimizer.state_dict())


@pytest.mark.parametrize(
    "other", [torch.optim.LBFGS, NeedsClosure, torch.optim.SGD, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)]
)
def test_the_state_of_another_class_is_refused(checkpoint: Path, other: Any) -> None:
    model, optimizer = made(torch.optim.AdamW)
    train(model, optimizer)
    vescale_ckpt.save(checkpoint, {"model": model, "optimizer": optimizer})
    its_optimizer = other(model.parameters())
    before = both(model, its_optimizer)
    with pytest.raises(MissingKeysError, match=r"optimizer\.(param_groups|state)\."):
        vescale_ckpt.load(checkpoint, {"model": model, "optimizer": its_optimizer})
    assert_same(both(model, its_optimizer), before)


def test_a_parameter_of_another_dtype(checkpoint: Path) -> None:
    """The state follows the new parameter, as the optimizer makes it, if casts are allowed."""
    model, optimizer = made(torch.optim.AdamW)
    train(model, optimizer)
    vescale_ckpt.save(checkpoint, {"model": model, "optimizer": optimizer})
    fresh, its_optimizer = made(torch.optim.AdamW, torch.float32)
    with pytest.raises(IncompatibleStateError, match="bfloat16"):
        vescale_ckpt.load(checkpoint, {"optimizer": its_optimizer, "model": fresh}, keys="optimizer")
    vescale_ckpt.load(checkpoint, {"model": fresh, "optimizer": its_optimizer}, allow_cast=True)
    by_torch = torch.optim.AdamW(Net(torch.float32).parameters())
    by_torch.load_state_dict(optimizer.state_dict())
    assert_same(its_optimizer.state_dict(), by_torch.state_dict())


# --- Other names, other parts


def test_renamed_state_of_every_kind(checkpoint: Path) -> None:
    for kind in ("every kind of state", "state of no parameter", "counters beside the state", "wrapper"):
        model, optimizer = made(KINDS[kind])
        train(model, optimizer)
        vescale_ckpt.save(checkpoint, {"model": model, "optimizer": optimizer})
        fresh, its_optimizer = made(KINDS[kind])
        fresh.unused.requires_grad_(False)  # with renamed keys a trained parameter without state may have it elsewhere
        vescale_ckpt.load(checkpoint, {"net": fresh, "o": its_optimizer}, rename={"net": "model", "o": "optimizer"})
        assert_same(both(fresh, its_optimizer), both(model, optimizer))


# --- Ranks


def _sharded(make: Callable[[Parameters], Any]) -> tuple[nn.Module, Any]:
    model = Net(torch.bfloat16)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, make(model.parameters())


SHARDED = {
    "masters": Masters,
    "state of no parameter": OfNoParameter,
    "needs a closure": NeedsClosure,
    "wrapper": lambda p: Lookahead(Masters(p)),
}


def _train_sharded(directory: Path, resume: bool) -> dict[str, Any]:
    results = {}
    for kind, make in SHARDED.items():
        torch.manual_seed(2 if resume else 1)
        model, optimizer = _sharded(make)
        if resume:
            model.first.requires_grad_(False)
            vescale_ckpt.load(directory / kind, {"model": model, "optimizer": optimizer})
            model.first.requires_grad_(True)
        else:
            train(model, optimizer)
            vescale_ckpt.save(directory / kind, {"model": model, "optimizer": optimizer})
        before = _whole({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})
        train(model, optimizer)
        results[kind] = before, _whole({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})
    return results


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return "sharded", value.placements, value.full_tensor().detach().clone()
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    return [_whole(each) for each in value] if isinstance(value, list) else deepcopy(value)


def test_sharded_state_of_each_kind(checkpoint: Path) -> None:
    expected = run_ranks(2, _train_sharded, checkpoint, False)
    assert_same(run_ranks(2, _train_sharded, checkpoint, True), expected)
    for kind, make in SHARDED.items():
        model, optimizer = made(make)
        vescale_ckpt.load(checkpoint / kind, {"model": model, "optimizer": optimizer})
        assert optimizer.state_dict().keys() == expected[0][kind][0]["optimizer"].keys()


@pytest.mark.parametrize("by", ["dcp", "ours"])
def test_numbers_of_parameters_are_not_taken_for_names_that_look_like_them(checkpoint: Path, by: str) -> None:
    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ParameterList([torch.zeros(2), torch.zeros(2), torch.zeros(2)])
        groups = [{"params": [model[2]], "lr": 0.5}, {"params": [model[1], model[0]]}]
        return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    model, optimizer = built()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    by_number = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if by == "dcp":
        dcp.save(by_number, checkpoint_id=checkpoint)
    else:
        vescale_ckpt.save(checkpoint, by_number)
    found, target = built()
    vescale_ckpt.load(checkpoint, {"model": found, "optimizer": target})
    assert_same(target.state_dict(), optimizer.state_dict())

    named = checkpoint / "named"
    vescale_ckpt.save(named, {"model": model, "optimizer": optimizer})
    _, alone = built()
    with pytest.raises(IncompatibleStateError, match=r"numbers of parameters.*'0', a name"):
        vescale_ckpt.load(named, {"optimizer": alone})
    assert not alone.state


@pytest.mark.parametrize("keys", [None, "optimizer"])
def test_the_state_of_a_parameter_of_another_shape_does_not_fit(checkpoint: Path, keys: str | None) -> None:
    def built(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, width, bias=False)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = built(2)
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    vescale_ckpt.save(checkpoint, {"model": model, "optimizer": optimizer})
    wide, target = built(3)
    with pytest.raises(IncompatibleStateError, match=r"optimizer\.state\.weight\.exp_avg"):
        vescale_ckpt.load(checkpoint, {"model": wide, "optimizer": target}, keys=keys)
    report = vescale_ckpt.load(checkpoint, {"model": wide, "optimizer": target}, keys=keys, strict=False)
    assert "optimizer.state.weight.exp_avg" in [entry.key for entry in report.mismatched]
    assert target.state[wide.weight]["exp_avg"].shape == (3, 2)


@pytest.mark.parametrize("rename", [None, {"target": "optimizer"}])
def test_empty_mappings_among_settings_and_histories_come_back(checkpoint: Path, rename: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["tag"] = {"empty": {}, "history": [{"x": 1}, {}], "numbers": [1]}
    vescale_ckpt.save(checkpoint, {"model": model, "optimizer": optimizer})
    target = torch.optim.SGD(model.parameters(), lr=0.5)
    name = "target" if rename else "optimizer"
    vescale_ckpt.load(checkpoint, {"model": model, name: target}, rename=rename)
    assert_same(target.state_dict(), optimizer.state_dict())
