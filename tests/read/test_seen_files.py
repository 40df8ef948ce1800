"""Files that something else writes to while they are read: a load gives one save's values or raises, never some of
each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import on_ranks
from harness.saves import stock_save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import vescale_ckpt
from vescale_ckpt import CheckpointError, LoadPlanner, StorageReader, safetensors
from vescale_ckpt._checkpoint import torch_checkpoint
from vescale_ckpt._checkpoint.native.native_checkpoint import NativeCheckpoint
from vescale_ckpt._load import load_packed
from vescale_ckpt._load.rank_load import RankLoad
from vescale_ckpt._state import objects


def state(number: int) -> dict[str, Any]:
    return {"weight": torch.full((300, 4), float(number)), "bias": torch.full((7,), float(number)), "step": number}


def overwrite_all(directory: Path, number: int) -> None:
    stock_save(directory, state(number))


def overwrite_data(directory: Path, number: int) -> None:
    """What stock does before it commits: the same inode, other bytes."""
    stock_save(directory / "new", state(number))
    for path in (directory / "new").glob("*.distcp"):
        (directory / path.name).write_bytes(path.read_bytes())
    shutil.rmtree(directory / "new")


def by_dcp(planner: Any) -> Callable[[Path], Any]:
    def read(directory: Path) -> dict[str, Any]:
        values = state(0)
        try:
            dcp.load(values, storage_reader=StorageReader(directory), planner=planner, no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
        return values

    return read


def by_load(directory: Path) -> dict[str, Any]:
    values = state(0)
    vescale_ckpt.load(directory, values)
    return values


LOADS: dict[str, Callable[[Path], Any]] = {
    "load": by_load,
    "load all": vescale_ckpt.load,
    "dcp.load": by_dcp(LoadPlanner()),
    "dcp.load, stock planner": by_dcp(DefaultLoadPlanner()),
}


def between(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Does something once, after objects were read and before tensors are."""
    original, done = objects.load, []

    def loads(*args: Any, **kwargs: Any) -> Any:
        if not done:
            done.append(True)
            then()
        return original(*args, **kwargs)

    monkeypatch.setattr(objects, "load", loads)


@pytest.mark.parametrize("how", LOADS)
@pytest.mark.parametrize("overwrite", [overwrite_all, overwrite_data], ids=["whole save", "data only"])
def test_stock_overwrites_what_is_loaded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, how: str, overwrite: Callable[[Path, int], None]
) -> None:
    stock_save(checkpoint, state(1))
    between(monkeypatch, lambda: overwrite(checkpoint, 2))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp was changed while it was read"):
        LOADS[how](checkpoint)
    found = LOADS[how](checkpoint)
    assert torch.equal(found["weight"], state(2)["weight"])


def test_stock_commits_between_metadata_and_data(checkpoint: Path) -> None:
    stock_save(checkpoint, state(1))
    reader, planner, values = StorageReader(checkpoint), LoadPlanner(), state(0)
    metadata = reader.read_metadata()
    stock_save(checkpoint, state(2))
    planner.set_up_planner(values, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    with pytest.raises(CheckpointError, match=r"\.metadata was changed while it was read"):
        reader.read_data(planner.create_local_plan(), planner)


def test_a_save_of_ours_meanwhile_does_no_harm(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vescale_ckpt.save(checkpoint, state(1))
    between(monkeypatch, lambda: vescale_ckpt.save(checkpoint, state(2)))
    try:
        found = by_load(checkpoint)
    except CheckpointError as error:
        assert "missing" in str(error)
    else:
        assert found["step"] == 1 and torch.equal(found["weight"], state(1)["weight"])


def test_safetensors_files_that_are_overwritten(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.mkdir()
    tensors = {name: value for name, value in state(1).items() if name != "step"}
    file = checkpoint / "model.safetensors"
    safetensors.save_file(tensors, file)
    original = load_packed.fill_packed

    def fill_packed(*args: Any) -> None:
        original(*args)
        file.write_bytes(file.read_bytes())

    monkeypatch.setattr(load_packed, "fill_packed", fill_packed)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed while it was read"):
        vescale_ckpt.load(checkpoint, {name: torch.zeros_like(value) for name, value in tensors.items()})


@pytest.mark.parametrize("source", ["dcp", "torch"])
def test_conversions_of_what_is_overwritten(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    stock_save(checkpoint, state(1))
    path = checkpoint
    if source == "torch":
        path = checkpoint / "model.pt"
        torch.save(state(1), path)
    of: Any = {"dcp": NativeCheckpoint, "torch": torch_checkpoint.TorchCheckpoint}[source]
    original = of.read

    def read(self: Any, *args: Any) -> None:
        original(self, *args)
        changed = next(checkpoint.glob("*.distcp")) if source == "dcp" else path
        os.utime(changed)
        original(self, *args)

    monkeypatch.setattr(of, "read", read)
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        vescale_ckpt.convert(path, checkpoint / "out.safetensors", format="safetensors")


def test_conversions_of_what_is_cut_short(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.save does with a file before it writes over it. Reading mapped memory of it would end the process."""
    path = checkpoint / "model.pt"
    path.parent.mkdir()
    torch.save({"weight": torch.ones(300, 4), "bias": torch.ones(7)}, path)
    original = torch_checkpoint.TorchCheckpoint.read

    def read(self: Any, *args: Any) -> None:
        os.truncate(path, 0)
        original(self, *args)

    monkeypatch.setattr(torch_checkpoint.TorchCheckpoint, "read", read)
    with pytest.raises(CheckpointError, match=str(checkpoint)):
        vescale_ckpt.convert(path, checkpoint / "out.safetensors", format="safetensors")
    assert not (checkpoint / "out.safetensors").exists()


@pytest.mark.parametrize("broadcast", [True, False])
@on_ranks(2)
def test_all_ranks_raise(checkpoint: Path, broadcast: bool) -> None:
    first = dist.get_rank() == 0
    if first:
        stock_save(checkpoint, state(1))
    dist.barrier()
    objects_of = RankLoad.objects

    def overwrite_first(self: Any, *args: Any) -> Any:
        found = [*objects_of(self, *args)]
        if first:
            overwrite_data(checkpoint, 2)
        dist.barrier()
        return found

    RankLoad.objects = overwrite_first  # type: ignore[method-assign]
    try:
        with pytest.raises(CheckpointError, match="was changed while it was read"):
            vescale_ckpt.load(checkpoint, state(0), broadcast_checkpoint=broadcast)
    finally:
        RankLoad.objects = objects_of  # type: ignore[method-assign]
