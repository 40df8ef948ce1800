"""Errors of common mistakes say what the caller gave, and what mends it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, AdamW

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager, CorruptCheckpointError, MissingKeysError


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


def test_an_optimizer_without_its_module(saved: Path) -> None:
    with pytest.raises(MissingKeysError, match="load the optimizer together with the module that owns them") as error:
        vescale_ckpt.load(saved, {"optimizer": _trained()["optimizer"]})
    assert "rename" not in str(error.value)


def test_another_kind_of_optimizer(saved: Path) -> None:
    state = _trained(SGD, lr=0.1, momentum=0.9)
    with pytest.raises(
        MissingKeysError, match="another kind of optimizer, without momentum, dampening, nesterov"
    ) as error:
        vescale_ckpt.load(saved, state)
    assert "keys='!optimizer'" in str(error.value)
    vescale_ckpt.load(saved, state, keys="!optimizer")


@pytest.mark.parametrize(("given", "meant"), [("modell", "model"), ("model.wieght", "model.weight")])
def test_keys_that_are_misspelled(saved: Path, given: str, meant: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: vescale_ckpt.load(saved, _trained(), keys=given),
        lambda: vescale_ckpt.load(saved, keys=given),
        lambda: vescale_ckpt.inspect(saved, given),
    ]
    for call in calls:
        with pytest.raises(MissingKeysError, match=f"was it '{meant}' for '{given}'"):
            call()


def test_arguments_of_the_manager(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(ValueError, match=r"metrics\['loss'\]: expected a number, got 'low'"):
        manager.save(1, _trained(), metrics={"loss": "low"})
    for step in (1.0, "1", True, None):
        with pytest.raises(TypeError, match="step: expected a whole number, got"):
            manager.save(step, _trained())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"save_on_signal: expected a signal, as signal\.SIGTERM, got 'SIGTERM'"):
        CheckpointManager(tmp_path, save_on_signal="SIGTERM")  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_places_where_no_folder_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=r"cannot be made: .*/file is no folder"):
            vescale_ckpt.save(path, _trained())
    with pytest.raises(CheckpointError, match="the folder /proc/checkpoint cannot be made"):
        vescale_ckpt.save("/proc/checkpoint", _trained())


def test_a_path_that_a_shell_would_expand() -> None:
    for call in (vescale_ckpt.save, vescale_ckpt.load):
        with pytest.raises(ValueError, match="expanduser"):
            call("~/checkpoint", _trained())


def test_metadata_that_is_none(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x13no pickle" * 30)
    with pytest.raises(CorruptCheckpointError, match="it does not begin as a pickle"):
        vescale_ckpt.load(tmp_path, _trained())


def test_a_gate_of_other_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vescale_ckpt.save(tmp_path / "one", state := _trained(), async_checkpoint=True, gate=state["optimizer"]).result()
    assert "gate:" not in caplog.text
    vescale_ckpt.save(tmp_path / "two", state, async_checkpoint=True, gate=_trained()["optimizer"]).result()
    assert "no tensor of the state belongs to the optimizers" in caplog.text


def test_a_rank_outside_of_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="this rank is not in it"):
        vescale_ckpt.save(tmp_path, _trained(), process_group=dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
