"""Tensors that cannot be saved, copied or filled are refused with their key, which torch's own errors do not name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.saves import cause
from torch.distributed.checkpoint.api import CheckpointException
from torch.masked import masked_tensor

import vescale_ckpt
from vescale_ckpt import CheckpointError, IncompatibleStateError
from vescale_ckpt.safetensors import save_file

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "uninitialized parameter": torch.nn.UninitializedParameter,
    "uninitialized buffer": torch.nn.UninitializedBuffer,
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "masked": lambda: masked_tensor(torch.ones(3), torch.tensor([True, False, True])),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
}


def save_under_dcp(path: Path, state: dict[str, Any]) -> None:
    writer, planner = vescale_ckpt.StorageWriter(path), vescale_ckpt.SavePlanner()
    try:
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise cause(error) from None


def load(path: Path, state: dict[str, Any]) -> None:
    stored = torch.ones(3, 3) if state["the.key"].layout is not torch.strided else torch.ones(3)
    vescale_ckpt.save(path, {"other": torch.ones(2), "the.key": stored})
    vescale_ckpt.load(path, state)


SAVES: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "save": vescale_ckpt.save,
    "asynchronous save": lambda path, state: vescale_ckpt.save(path, state, async_checkpoint=True).result(),
    "export": lambda path, state: vescale_ckpt.save(path, state, format="safetensors"),
    "dcp.save": save_under_dcp,
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # nested and masked tensors are prototypes
@pytest.mark.parametrize("way", SAVES)
@pytest.mark.parametrize("kind", KINDS)
def test_saves(checkpoint: Path, kind: str, way: str) -> None:
    state = {"other": torch.ones(2), "the.key": KINDS[kind]()}
    with pytest.raises(CheckpointError, match=r"^the\.key: ") as raised:
        SAVES[way](checkpoint, state)
    assert raised.value.key == "the.key"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "masked"])
def test_loads(checkpoint: Path, kind: str) -> None:
    """A masked tensor takes what is stored."""
    with pytest.raises((CheckpointError, IncompatibleStateError), match=r"^the\.key: ") as raised:
        load(checkpoint, {"other": torch.ones(2), "the.key": KINDS[kind]()})
    assert raised.value.key == "the.key"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_safetensors(tmp_path: Path, kind: str) -> None:
    with pytest.raises((CheckpointError, ValueError), match=r"^the\.key: "):
        save_file({"other": torch.ones(2), "the.key": KINDS[kind]()}, tmp_path / "x.safetensors")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["uninitialized parameter", "uninitialized buffer", "nested", "jagged", "masked"])
def test_copies_for_async_saves(kind: str) -> None:
    """What can be copied is left to planning, which raises the key."""
    state = {"other": torch.ones(2), "the.key": KINDS[kind]()}
    try:
        copied = vescale_ckpt.Stager().stage(state)
    except CheckpointError as error:
        assert str(error).startswith("the.key: ")
        assert error.key == "the.key"
    else:
        assert type(copied["the.key"]) is type(state["the.key"])
