"""Modules, optimizers and stateful objects as they are saved, and given back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.states import assert_same
from harness.steps import saved_form
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import vescale_ckpt
from vescale_ckpt import CheckpointError, IncompatibleStateError, MissingKeysError
from vescale_ckpt._engine import torch_types
from vescale_ckpt._state.optimizers import OptimizerState

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.Adam(p, weight_decay=0.1, amsgrad=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "stateless": lambda p: torch.optim.SGD(p, lr=0.1),
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.second = nn.Linear(10, 3)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).relu())  # type: ignore[no-any-return]


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 2) -> float:
    torch.manual_seed(5)
    for _ in range(steps):
        loss = model(torch.randn(7, 6)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


def trained(make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = make(model.parameters())
    train(model, optimizer)
    return model, optimizer


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step with random gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def saved(checkpoint: Path, state: dict[str, Any]) -> Path:
    vescale_ckpt.save(checkpoint, saved_form(state))
    return checkpoint


# --- The form


@pytest.mark.parametrize("at_depth", [False, True])
@pytest.mark.parametrize(
    "wraps",
    [*list(product((torch.compile, checkpoint_wrapper), repeat=2))[1:], (torch.compile, *([checkpoint_wrapper] * 2))],
)
def test_wrappers_leave_no_names_in_any_order(checkpoint: Path, wraps: tuple[Any, ...], at_depth: bool) -> None:
    def made() -> tuple[dict[str, Any], dict[str, Any]]:
        net: Any = nn.Linear(2, 2)
        wrapped = net
        for wrap in wraps:
            wrapped = wrap(wrapped)
        modules = (nn.Sequential(net), nn.Sequential(wrapped)) if at_depth else (net, wrapped)
        optimizer = torch.optim.AdamW(net.parameters())
        plain, other = ({"m": module, "o": optimizer} for module in modules)
        return plain, other

    plain, wrapped = made()
    train_alone(plain["m"], plain["o"])
    expected = {"m": dict(plain["m"].state_dict()), "o": saved_form(plain)["o"]}
    assert_same(saved_form(wrapped), expected)
    for source in (plain, wrapped):
        vescale_ckpt.save(checkpoint, source)
        for index in (0, 1):
            fresh = made()
            vescale_ckpt.load(checkpoint, fresh[index])
            assert_same({**saved_form(fresh[0]), "m": dict(fresh[0]["m"].state_dict())}, expected)


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_has_the_names_that_torch_gives_it(wrapped: bool) -> None:
    model, optimizer = trained()
    given = checkpoint_wrapper(model) if wrapped else model
    form = saved_form({"optimizer": optimizer, "model": given})["optimizer"]
    expected = get_optimizer_state_dict(model, optimizer)
    assert_same(form, expected)
    assert form["state"].keys() == {n for n, p in model.named_parameters() if p in optimizer.state}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saving_leaves_an_optimizer_without_state_as_it_is(name: str, wrapped: bool) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    form = saved_form({"model": checkpoint_wrapper(model) if wrapped else model, "optimizer": optimizer})
    assert not optimizer.state and form["optimizer"]["state"] == {}
    assert form["optimizer"]["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_each_optimizer_finds_the_module_that_owns_its_parameters() -> None:
    one, two = Net(), Net()
    optimizers = {
        "of_two": torch.optim.AdamW(two.first.parameters()),
        "of_one": torch.optim.AdamW(one.parameters()),
        "of_both": torch.optim.AdamW([*one.second.parameters(), *two.second.parameters()]),
        "of_neither": torch.optim.AdamW(nn.Linear(2, 2).parameters()),
    }
    state = {**optimizers, "nets": {"one": one, "train": [two]}}
    groups = {name: saved_form(state)[name]["param_groups"][0]["params"] for name in optimizers}
    assert groups["of_two"] == ["first.weight", "first.bias"]
    assert groups["of_one"] == [name for name, _ in one.named_parameters()]
    assert groups["of_both"] == [
        "nets_one.second.weight",
        "nets_one.second.bias",
        "nets_train_0.second.weight",
        "nets_train_0.second.bias",
    ]
    assert groups["of_neither"] == [0, 1]


# --- There and back


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_gets_its_state_does_not_move_parameters_or_call_hooks(checkpoint: Path, name: str) -> None:
    model, optimizer = trained(OPTIMIZERS[name])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    saved(checkpoint, {"model": model, "optimizer": optimizer})
    fresh = Net()
    fresh.first.weight.data[0, :3] = torch.tensor([-0.0, torch.inf, torch.nan])
    fresh.first.bias.grad = torch.ones(10)
    its_optimizer = OPTIMIZERS[name](fresh.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(its_optimizer, 1)
    its_optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook was called"))
    before = {key: value.clone() for key, value in fresh.state_dict().items()}
    vescale_ckpt.load(checkpoint, {"model": fresh, "optimizer": its_optimizer}, keys="optimizer")
    assert_same(dict(fresh.state_dict()), before)
    assert torch.equal(fresh.first.bias.grad, torch.ones(10)) and fresh.first.weight.grad is None
    assert its_optimizer.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    assert not getattr(its_optimizer, "_opt_called", False) and scheduler.last_epoch == 0


SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"maximize": True}, {"foreach": False}, {"foreach": True}, {"fused": True}, {"weight_decay": 0.1},
    {"amsgrad": True, "maximize": True}, {"momentum": 0.9, "nesterov": True, "maximize": True}, {"centered": True},
)  # fmt: skip


class Moving(torch.optim.SGD):
    """Moves parameters whatever its learning rate is."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(1)
            self.state[parameter] = {"moved": torch.ones(1)}


@pytest.mark.parametrize("kind", [*(kind for kind in vars(torch.optim).values() if isinstance(kind, type)), Moving])
def test_making_state_changes_no_bit_of_a_parameter_and_common_optimizers_copy_none(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.tensor([[-0.0, torch.inf, torch.nan, 1e-45], [0.0, -torch.inf, -1e-45, 3e38]])
    tried = 0
    for settings in SETTINGS:
        model = nn.Linear(4, 2, bias=False)
        model.weight.data.copy_(values)
        try:
            optimizer = kind(model.parameters(), **settings)
        except (TypeError, ValueError, RuntimeError):  # it has no such setting
            continue
        tried += 1
        state = OptimizerState(optimizer, {"model": model})
        with monkeypatch.context() as patched:
            if kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
                patched.setattr(nn.Parameter, "copy_", lambda *_: pytest.fail("a parameter was copied"))
            state.give_state({model.weight})
        assert torch.equal(model.weight.data.view(torch.int32), values.view(torch.int32)), settings
        assert kind is not Moving or optimizer.state[model.weight]
    assert tried or kind is torch.optim.Optimizer


def test_an_optimizer_loads_what_was_saved_before_its_first_step(checkpoint: Path) -> None:
    model = Net()
    saved(checkpoint, {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.5)})
    trained_model, optimizer = trained()
    vescale_ckpt.load(checkpoint, {"model": trained_model, "optimizer": optimizer})
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5


def test_a_part_of_an_optimizer_leaves_the_rest_without_state(checkpoint: Path) -> None:
    model, optimizer = trained()
    saved(checkpoint, {"model": model, "optimizer": optimizer})
    fresh = Net()
    its_optimizer = torch.optim.AdamW(fresh.parameters(), lr=3.0)
    vescale_ckpt.load(checkpoint, {"model": fresh, "optimizer": its_optimizer}, keys="optimizer.state.first.*")
    assert set(its_optimizer.state) == set(fresh.first.parameters())
    assert its_optimizer.param_groups[0]["lr"] == 3.0


def test_a_parameter_that_the_checkpoint_knows_nothing_of_is_missing_from_the_optimizer_too(checkpoint: Path) -> None:
    model, optimizer = trained()
    saved(checkpoint, {"model": model, "optimizer": optimizer})
    fresh = Net()
    fresh.added = nn.Parameter(torch.ones(2))
    its_optimizer = torch.optim.AdamW(fresh.parameters())
    with pytest.raises(MissingKeysError) as caught:
        vescale_ckpt.load(checkpoint, {"model": fresh, "optimizer": its_optimizer})
    assert set(caught.value.missing) == {
        "model.added", *(f"optimizer.state.added.{name}" for name in ("step", "exp_avg", "exp_avg_sq"))
    }  # fmt: skip
    assert not its_optimizer.state, "what was made for loading into is taken back"
    report = vescale_ckpt.load(checkpoint, {"model": fresh, "optimizer": its_optimizer}, strict=False)
    assert set(report.missing) == set(caught.value.missing)
    assert fresh.added not in its_optimizer.state and fresh.first.weight in its_optimizer.state


def groups_of(model: Net, *names: str) -> list[dict[str, Any]]:
    return [{"params": list(getattr(model, name).parameters()), "lr": 0.1 * (i + 1)} for i, name in enumerate(names)]


def test_groups_are_known_by_their_parameters(checkpoint: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(groups_of(model, "first", "second"))
    train(model, optimizer)
    saved(checkpoint, {"model": model, "optimizer": optimizer})
    fresh = Net()
    swapped = torch.optim.AdamW(groups_of(fresh, "second", "first"))
    vescale_ckpt.load(checkpoint, {"model": fresh, "optimizer": swapped})
    assert [group["lr"] for group in swapped.param_groups] == [0.2, 0.1]
    assert_same(swapped.state[fresh.first.weight], optimizer.state[model.first.weight])


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_saved_by_numbers_loads_beside_its_model(checkpoint: Path, name: str, wrapped: bool) -> None:
    model, optimizer = trained(OPTIMIZERS[name])
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=checkpoint)
    expected = train(model, optimizer)
    fresh = Net()
    its_optimizer = OPTIMIZERS[name](fresh.parameters())
    given = checkpoint_wrapper(fresh) if wrapped else fresh
    report = vescale_ckpt.load(checkpoint, {"model": given, "optimizer": its_optimizer})
    assert report.missing == report.unexpected == report.mismatched == []
    assert train(fresh, its_optimizer) == expected
    assert_same(its_optimizer.state_dict(), optimizer.state_dict())


def test_numbers_that_do_not_fit_the_parameters_are_refused(checkpoint: Path) -> None:
    model, optimizer = trained()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    vescale_ckpt.save(checkpoint, saved)
    fresh = Net()
    backwards = torch.optim.AdamW(list(fresh.parameters())[::-1])
    with pytest.raises(CheckpointError, match=r"optimizer\.state\.\d+\.exp_avg: the state to load into has shape"):
        vescale_ckpt.load(checkpoint, {"model": fresh, "optimizer": backwards})
    fewer = torch.optim.AdamW(list(fresh.parameters())[:2])
    with pytest.raises(MissingKeysError, match=r"not in the state: 'optimizer\.state\.\d+\."):
        vescale_ckpt.load(checkpoint, {"model": fresh, "optimizer": fewer})
    halves = list(fresh.parameters())
    two_groups = torch.optim.AdamW([{"params": halves[:2]}, {"params": halves[2:]}])
    with pytest.raises(MissingKeysError, match=r"missing from the checkpoint: 'optimizer\.param_groups\.1\.lr'"):
        vescale_ckpt.load(checkpoint, {"model": fresh, "optimizer": two_groups})
    assert not backwards.state and not fewer.state and not two_groups.state


def test_an_optimizer_saved_by_names_and_loaded_without_its_model_says_what_to_do(checkpoint: Path) -> None:
    model, optimizer = trained()
    saved(checkpoint, {"model": model, "optimizer": optimizer})
    with pytest.raises(MissingKeysError, match=r"optimizer\.state\.\* by names .* together with the module") as caught:
        vescale_ckpt.load(checkpoint, {"optimizer": torch.optim.AdamW(model.parameters())})
    assert caught.value.missing[0] == "optimizer.state.1.step", "its first parameter is frozen"
    assert "optimizer.state.first.weight.step" in caught.value.unexpected
    before = {number: dict(values) for number, values in optimizer.state_dict()["state"].items()}
    vescale_ckpt.load(checkpoint, {"optimizer": optimizer}, strict=False)
    assert_same(optimizer.state_dict()["state"], before)
    model.added = nn.Parameter(torch.ones(1))
    with pytest.raises(MissingKeysError) as other:
        vescale_ckpt.load(checkpoint, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    assert "by names" not in str(other.value)


@pytest.mark.parametrize("by_number", [False, True])
def test_groups_that_an_optimizer_does_not_have_are_not_forgotten(checkpoint: Path, by_number: bool) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(groups_of(model, "first", "second"))
    train(model, optimizer)
    form = saved_form({"model": model, "optimizer": optimizer})
    vescale_ckpt.save(checkpoint, {**form, "optimizer": optimizer.state_dict()} if by_number else form)
    fresh = Net()
    in_one = torch.optim.AdamW([*fresh.first.parameters(), *fresh.second.parameters()])
    with pytest.raises(IncompatibleStateError, match=r"optimizer.param_groups.0.*groups \[0, 1\]"):
        vescale_ckpt.load(checkpoint, {"model": fresh, "optimizer": in_one})
    if not by_number:
        of_second = torch.optim.AdamW(fresh.second.parameters())
        report = vescale_ckpt.load(checkpoint, {"model": fresh, "optimizer": of_second}, strict=False)
        assert of_second.param_groups[0]["lr"] == 0.2 and len(of_second.param_groups) == 1
        assert all(key.startswith("optimizer.state.first.") for key in report.unexpected)
        assert_same(of_second.state[fresh.second.weight], optimizer.state[model.second.weight])


class Counter:
    def __init__(self, number: int) -> None:
        self.number = number
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "history": torch.full((3,), float(self.number))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self.number = state["number"]
        assert_same(state["history"], torch.full((3,), float(self.number)))


def test_stateful_objects_at_any_depth(checkpoint: Path) -> None:
    saved(checkpoint, {"a": Counter(1), "deep": {"list": [Counter(2), {"b": Counter(3), "plain": 4}]}})
    state = {"a": Counter(0), "deep": {"list": [Counter(0), {"b": Counter(0), "plain": 0}]}}
    deep: Any = state["deep"]
    inner = deep["list"][1]
    vescale_ckpt.load(checkpoint, state)
    assert [state["a"].number, deep["list"][0].number, inner["b"].number, inner["plain"]] == [1, 2, 3, 4]
    vescale_ckpt.load(checkpoint, state, keys="a")
    assert [state["a"].loads, deep["list"][0].loads] == [2, 1]


# --- On the meta device


def test_a_model_on_the_meta_device_and_its_optimizer_become_real(checkpoint: Path) -> None:
    model, optimizer = trained()
    saved(checkpoint, {"model": model, "optimizer": optimizer})
    with torch.device("meta"):
        fresh = Net()
    its_optimizer = torch.optim.AdamW(fresh.parameters())
    weight = fresh.first.weight
    vescale_ckpt.load(checkpoint, {"model": fresh, "optimizer": its_optimizer})
    assert fresh.first.weight is weight and weight.requires_grad and not fresh.frozen.requires_grad
    assert_same(fresh.state_dict(), model.state_dict())
    assert_same(its_optimizer.state[weight], optimizer.state[model.first.weight])
    train(fresh, its_optimizer)


def test_what_is_not_loaded_stays_on_the_meta_device(checkpoint: Path) -> None:
    model = Net()
    saved(checkpoint, {"model": model})
    with torch.device("meta"):
        fresh = Net()
    vescale_ckpt.load(checkpoint, {"model": fresh}, keys="model.first")
    assert not fresh.first.weight.is_meta and fresh.second.weight.is_meta
    assert_same(fresh.first.state_dict(), model.first.state_dict())


class Hooked(nn.Module):
    """Its state has other entries than its tensors."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.w = nn.Parameter(torch.randn(2, 3))
        self.register_buffer("made", torch.ones(1), persistent=False)
        self._register_state_dict_hook(self.to_state)
        self._register_load_state_dict_pre_hook(self.from_state)

    @staticmethod
    def to_state(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        w = state.pop(prefix + "w")
        made = {"renamed": [w], "transposed": [w.t()], "cloned": [w.clone()], "split": list(w), "left out": []}
        state.update({f"{prefix}w{i}": value for i, value in enumerate(made[module.form])})

    def from_state(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        values = [state.pop(prefix + name) for name in ("w0", "w1") if prefix + name in state]
        w = self.w.detach() if not values else torch.stack(values) if len(values) > 1 else values[0]
        state[prefix + "w"] = w.t() if self.form == "transposed" else w


@pytest.mark.parametrize("form", ["renamed", "transposed", "cloned", "split", "left out"])
def test_hooks_of_a_module_on_the_meta_device(checkpoint: Path, form: str, caplog: pytest.LogCaptureFixture) -> None:
    def made() -> nn.ModuleDict:
        return nn.ModuleDict({"a": Hooked(form), "b": nn.Linear(1, 1)})

    model = made()
    vescale_ckpt.save(checkpoint, {"model": model})
    with torch.device("meta"):
        fresh, part = made(), made()
    parameters = dict(fresh.named_parameters())
    vescale_ckpt.load(checkpoint, {"model": fresh})
    assert all(parameter is parameters[name] for name, parameter in fresh.named_parameters())
    kept = {"model.a.made"} | ({"model.a.w"} if form == "left out" else set())
    assert all(parameter.is_meta == (f"model.{name}" in kept) for name, parameter in parameters.items())
    assert form == "left out" or torch.equal(parameters["a.w"], model.get_parameter("a.w"))
    (line,) = [record.getMessage() for record in caplog.records if "meta device" in record.getMessage()]
    assert set(line.split(": ")[1].split(", ")) == kept
    if form in ("renamed", "left out"):
        vescale_ckpt.load(checkpoint, {"model": part}, keys="model.b")
    else:
        with pytest.raises(IncompatibleStateError, match=r"model\.a\.w0.*load the whole module"):
            vescale_ckpt.load(checkpoint, {"model": part}, keys="model.a")


class Delegating:
    """Gives what it lacks from another object, as wrappers do."""

    def __init__(self, of: object) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._of, name)


def test_an_object_is_stateful_where_dcp_takes_it_for_one(tmp_path: Path) -> None:
    class Half:
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

    own = Half()
    own.load_state_dict = lambda state: None  # type: ignore[attr-defined]
    for value in (Delegating(nn.Linear(1, 1)), nn.Linear(1, 1), Half(), own):
        assert isinstance(value, torch_types.Stateful) == isinstance(value, Stateful), value
    state = {"of": Delegating(nn.Linear(1, 1)), "w": torch.ones(1)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    vescale_ckpt.save(tmp_path / "own", state)
    stock, own_keys = (
        dcp.FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata.keys() for name in ("dcp", "own")
    )
    assert stock == own_keys
