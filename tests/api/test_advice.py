"""Errors of common mistakes say what the caller gave, and what mends it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, AdamW
from torch.testing import assert_close

import vescale_ckpt
from vescale_ckpt import CheckpointError, MissingKeysError, PerRank


def _trained(kind: Callable[..., torch.optim.Optimizer] = AdamW, **options: Any) -> dict[str, Any]:
    model = torch.nn.Linear(4, 4)
    optimizer = kind(model.parameters(), **options)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    vescale_ckpt.save(path, _trained())
    return path


def test_another_kind_of_optimizer(saved: Path) -> None:
    state = _trained(SGD, lr=0.1, momentum=0.9)
    with pytest.raises(
        MissingKeysError, match="another kind of optimizer, without momentum, dampening, nesterov"
    ) as error:
        vescale_ckpt.load(saved, state)
    assert "keys='!optimizer'" in str(error.value)
    vescale_ckpt.load(saved, state, keys="!optimizer")


def test_a_path_that_a_shell_would_expand() -> None:
    for call in (vescale_ckpt.save, vescale_ckpt.load):
        with pytest.raises(ValueError, match="expanduser"):
            call("~/checkpoint", _trained())


def test_a_gate_of_other_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vescale_ckpt.save(tmp_path / "one", state := _trained(), async_checkpoint=True, gate=state["optimizer"]).result()
    assert "gate:" not in caplog.text
    vescale_ckpt.save(tmp_path / "two", state, async_checkpoint=True, gate=_trained()["optimizer"]).result()
    assert "no tensor of the state belongs to the optimizers" in caplog.text


def test_a_rank_outside_of_the_group(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this rank is not in it"):
        vescale_ckpt.save(tmp_path, _trained(), process_group=dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]


# --- Names that differ by prefixes: the advice is taken, and finds everything


@pytest.mark.parametrize("layers", [2, 12])
@pytest.mark.parametrize("prefix", ["module.", "module._orig_mod."])
def test_prefixes_that_the_checkpoint_has(tmp_path: Path, layers: int, prefix: str) -> None:
    """As DDP, torch.compile and old scripts have saved them: the optimizer resumes, too."""
    model, optimizer = _layers(layers)
    names = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    state = {"model": names, "optimizer": optimizer.state_dict()}
    averaged = {name: value + 1 for name, value in model.state_dict().items()}
    torch.save({"averaged": averaged, **state, "step": 7}, tmp_path / "old.pt")
    vescale_ckpt.convert(tmp_path / "old.pt", tmp_path / "old", format="dcp")

    _assert_resumes(tmp_path / "old", layers, model, optimizer)


@pytest.mark.parametrize("prefix", ["model.", "module.", ""])
def test_other_places(tmp_path: Path, prefix: str) -> None:
    """As Lightning and old scripts have saved them."""
    model, optimizer = _layers(2)
    names = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": names, "optimizer_states": [optimizer.state_dict()], "step": 7}, tmp_path / "old.pt")
    vescale_ckpt.convert(tmp_path / "old.pt", tmp_path / "old", format="dcp")
    _assert_resumes(tmp_path / "old", 2, model, optimizer)


def test_prefixes_that_the_state_has(tmp_path: Path) -> None:
    model, _ = _layers(2)
    vescale_ckpt.save(tmp_path / "saved", {"model": model, "step": 7})
    blank = {f"_orig_mod.{name}": torch.zeros_like(value) for name, value in model.state_dict().items()}
    target: dict[str, Any] = {"model": blank, "step": 0}
    vescale_ckpt.load(tmp_path / "saved", target, rename=_advised(tmp_path / "saved", target))
    assert target.pop("step") == 7
    _assert_equal([*target["model"].values()], [*model.state_dict().values()])


def test_advice_leaves_what_is_found(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "saved", {"net": {"a": torch.ones(2)}, "step": 7})
    target = {"a": torch.zeros(2), "step": 0}
    assert _advised(tmp_path / "saved", target) == {"a": "net.a"}
    with pytest.raises(MissingKeysError, match=r"1 of the missing keys .* rename= does not give that name, as 'net.a'"):
        vescale_ckpt.load(tmp_path / "saved", target, rename={"a": "a"})


def _advised(path: Path, target: dict[str, Any]) -> Any:
    """The `rename=` that the error of a load names, which finds all missing keys."""
    with pytest.raises(MissingKeysError) as error:
        vescale_ckpt.load(path, target)
    text = re.search(
        r"(\d+) of the missing keys are stored under another name: .*?rename=(.*) finds them$", str(error.value)
    )
    assert text is not None and int(text[1]) == len(error.value.missing), error.value
    return eval(text[2])


def _assert_resumes(path: Path, layers: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    new, of_new = _layers(layers, seed=1)
    target = {"model": new, "optimizer": of_new, "step": 0}
    vescale_ckpt.load(path, target, rename=_advised(path, target))
    assert target["step"] == 7
    _assert_equal(new.state_dict(), model.state_dict())
    _assert_equal(of_new.state_dict(), optimizer.state_dict())


def _layers(count: int, seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(count)))
    optimizer = AdamW(model.parameters(), lr=0.1 + seed)
    if seed == 0:
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return model, optimizer


def _assert_equal(one: Any, other: Any) -> None:
    assert_close(one, other, rtol=0, atol=0)


# --- Values that are of another kind, or were not saved


def test_a_checkpoint_without_an_optimizer(tmp_path: Path) -> None:
    state = _trained()
    scheduler = torch.optim.lr_scheduler.StepLR(state["optimizer"], 1)
    vescale_ckpt.save(tmp_path / "saved", {"model": state["model"], "step": 7})
    target = {**state, "rest": {"scheduler": scheduler}, "step": 0}
    why = "has no optimizer under 'optimizer', nothing under 'rest', it was saved without"
    with pytest.raises(MissingKeysError, match=why) as error:
        vescale_ckpt.load(tmp_path / "saved", target)
    assert "keys=['!optimizer', '!rest']" in str(error.value)
    vescale_ckpt.load(tmp_path / "saved", target, keys=["!optimizer", "!rest"])
    assert target["step"] == 7
    torch.save(torch.nn.DataParallel(state["model"]).state_dict(), tmp_path / "weights.pt")  # under other names besides
    vescale_ckpt.convert(tmp_path / "weights.pt", tmp_path / "weights", format="dcp")
    with pytest.raises(MissingKeysError, match="has no optimizer under 'optimizer', it was saved") as error:
        vescale_ckpt.load(tmp_path / "weights", state)
    assert "rename={'model': 'module'} finds them" in str(error.value)


@pytest.mark.parametrize(
    ("saved", "given", "text"),
    [
        *((PerRank(1), given, "of each rank under 'x': wrap it in PerRank") for given in (0, {"a": 0}, [0], None)),
        *((each, PerRank(0), "one value of all ranks under 'x': load it") for each in (1, {"a": 1}, torch.ones(2))),
        (torch.ones(2), 0, "an object of type int, .* a tensor of shape .2,. and dtype torch.float32"),
        (1, torch.ones(()), "x: the state .* has a tensor, .* an object that is no tensor, as a number"),
    ],
)  # fmt: skip
def test_values_of_another_kind(tmp_path: Path, saved: Any, given: Any, text: str) -> None:
    vescale_ckpt.save(tmp_path / "saved", {"x": saved, "y": PerRank(2), "z": {"a": 1}})
    with pytest.raises(CheckpointError, match=text) as error:
        vescale_ckpt.load(tmp_path / "saved", {"x": given})
    assert "rename" not in str(error.value)


# --- Keys that are selected and excluded


@pytest.mark.parametrize(
    ("keys", "selected"),
    [
        (["a", "!a"], None),
        (["!a", "a"], None),
        (["a.*", "!*"], None),
        (["!*"], None),
        (["!"], {"a.x", "a.y", "b"}),
        ([], None),
        (["!c"], {"a.x", "a.y", "b"}),
        (["a", "!a.x"], {"a.y"}),
        (["!a.x", "a"], {"a.y"}),
        (["a.x", "b", "!a"], {"b"}),
        (["*", "!a.?", "!c.*"], {"b"}),
        (["a", "c.*"], "c.*"),
        (["!b", "c"], "c"),
    ],
)
def test_exclusions_count_wherever_they_stand(tmp_path: Path, keys: list[str], selected: set[str] | str | None) -> None:
    """None: nothing is selected. A text: the name that no key has. In each public function alike."""
    vescale_ckpt.save(tmp_path / "saved", {"a": {"x": torch.ones(2), "y": torch.ones(2)}, "b": torch.ones(2)})
    target = {"a": {"x": torch.zeros(2), "y": torch.zeros(2)}, "b": torch.zeros(2)}
    out = tmp_path / "out.safetensors"
    calls: list[Callable[[], Any]] = [
        lambda: vescale_ckpt.load(tmp_path / "saved", target, keys=keys),
        lambda: vescale_ckpt.load(tmp_path / "saved", keys=keys),
        lambda: vescale_ckpt.convert(tmp_path / "saved", out, format="safetensors", keys=keys),
        lambda: vescale_ckpt.inspect(tmp_path / "saved", keys),
    ]
    if not isinstance(selected, set):
        text = (
            "selects nothing: " if selected is None else re.escape(f"1 key missing from the checkpoint: {selected!r}")
        )
        for call in calls:
            with pytest.raises(MissingKeysError, match=text):
                call()
        return
    _, loaded, _, found = [call() for call in calls]
    filled = {"a.x": target["a"]["x"], "a.y": target["a"]["y"], "b": target["b"]}
    assert {key for key, value in filled.items() if value.any()} == selected
    assert (
        {".".join(path) for path in _leaves(loaded)}
        == {*found.tensors}
        == {*vescale_ckpt.inspect(out).tensors}
        == selected
    )


def _leaves(values: Any) -> list[tuple[str, ...]]:
    if not isinstance(values, dict):
        return [()]
    return [(name, *path) for name, value in values.items() for path in _leaves(value)]
