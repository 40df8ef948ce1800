"""`.metadata` as other software writes it: plans of all ranks, a `_StorageInfo` of its own, classes that are refused.
And what one flipped byte is called."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.saves import stock_save
from harness.states import assert_same, blank
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

import vescale_ckpt
from vescale_ckpt import (
    CheckpointManager,
    CorruptCheckpointError,
    IncompatibleStateError,
    UntrustedCheckpointError,
    cli,
)
from vescale_ckpt._checkpoint.native import metadata_pickle

State = dict[str, Any]


def some_state() -> State:
    return {"model": {"weight": torch.arange(12.0).view(3, 4), "half": torch.ones(2).bfloat16()}, "step": 7}


def plans() -> list[SavePlan]:
    """The plans of two ranks, with everything that plans hold."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(some_state(), is_coordinator=True)
    plan = planner.create_local_plan()
    prefix = dcp.filesystem._StoragePrefix("__0_")
    return [plan, SavePlan(plan.items, storage_data=prefix, planner_data={"model.weight": ("model", "weight")})]


def rewrite(directory: Path, change: Callable[[Metadata], None], protocol: int = 4) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata, protocol=protocol))


def with_class_of(module: str, name: str, fill: Callable[[type], None]) -> None:
    """Calls `fill` with a class of that name in a module, which is gone afterwards."""
    made = dataclass(type(name, (), {"__annotations__": {"relative_path": str, "offset": int, "length": int}}))
    made.__module__ = module
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    assert not set(names) & set(sys.modules)
    try:
        sys.modules.update({each: types.ModuleType(each) for each in names})
        setattr(sys.modules[module], name, made)
        fill(made)
    finally:
        for each in names:
            del sys.modules[each]


def plans_as_attribute(directory: Path, protocol: int) -> None:
    rewrite(directory, lambda metadata: setattr(metadata, "all_local_plans", plans()), protocol)


def plans_beside_paths(directory: Path, protocol: int) -> None:
    rewrite(directory, lambda metadata: metadata.planner_data.update(all_local_plans=plans()), protocol)


def plans_for_paths(directory: Path, protocol: int) -> None:
    rewrite(directory, lambda metadata: setattr(metadata, "planner_data", plans()), protocol)


def plans_of_megatron(directory: Path, protocol: int) -> None:
    def fill(kind: type) -> None:
        plan = kind("", 0, 0)
        rewrite(directory, lambda metadata: vars(metadata).update(all_local_plans=[plan], mcore_data={}), protocol)

    with_class_of("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan", fill)


def storage_info_of_its_own(directory: Path, protocol: int) -> None:
    def fill(kind: type) -> None:
        def change(metadata: Metadata) -> None:
            for index, info in metadata.storage_data.items():
                metadata.storage_data[index] = kind(info.relative_path, info.offset, info.length)

        rewrite(directory, change, protocol)

    with_class_of("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo", fill)


WRITERS = [plans_as_attribute, plans_beside_paths, plans_for_paths, plans_of_megatron, storage_info_of_its_own]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("writer", WRITERS)
def test_metadata_of_other_writers_is_read_as_data(
    checkpoint: Path, tmp_path: Path, writer: Callable[[Path, int], None], protocol: int
) -> None:
    stock_save(checkpoint, some_state())
    writer(checkpoint, protocol)
    with_paths = writer is not plans_for_paths
    flat = {"model.weight": some_state()["model"]["weight"], "model.half": torch.ones(2).bfloat16(), "step": 7}
    assert_same(vescale_ckpt.load(checkpoint), some_state() if with_paths else flat)
    for planner in (vescale_ckpt.LoadPlanner(), dcp.DefaultLoadPlanner()):
        target = blank(some_state())
        dcp.load(target, storage_reader=vescale_ckpt.StorageReader(checkpoint), planner=planner, no_dist=True)
        assert_same(target, some_state())
    report = vescale_ckpt.verify(checkpoint)
    assert report.ok and report.keys == 3, report
    assert set(vescale_ckpt.inspect(checkpoint).tensors) == {"model.weight", "model.half"}
    vescale_ckpt.convert(checkpoint, tmp_path / "whole.pt", format="torch")
    assert_same(torch.load(tmp_path / "whole.pt"), some_state() if with_paths else flat)
    kept = pickle.dumps(vescale_ckpt.StorageReader(checkpoint).read_metadata())
    assert b"SavePlan" not in kept and b"WriteItem" not in kept


def test_only_a_load_that_needs_it_fails_by_what_metadata_of_stock_lacks(checkpoint: Path) -> None:
    stock_save(checkpoint, some_state())

    def change(metadata: Metadata) -> None:
        for index in [index for index in metadata.storage_data if index.fqn == "model.half"]:
            del metadata.storage_data[index]
        metadata.state_dict_metadata["model.odd"] = TensorStorageMetadata(
            TensorProperties(dtype=torch.qint8), torch.Size([2]), []
        )
        metadata.state_dict_metadata["model.none"] = TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), torch.Size([2]), []
        )

    rewrite(checkpoint, change)
    target = {"model": {"weight": torch.zeros(3, 4)}, "step": 0}
    vescale_ckpt.load(checkpoint, target)
    assert_same(target, {"model": {"weight": some_state()["model"]["weight"]}, "step": 7})
    assert vescale_ckpt.load(checkpoint, keys="step") == {"step": 7}
    with pytest.raises(CorruptCheckpointError, match=r"model\.half: the metadata in .* does not say where"):
        vescale_ckpt.load(checkpoint, {"model": {"half": torch.ones(2).bfloat16()}})
    with pytest.raises(UntrustedCheckpointError, match=r"model\.half: metadata claims 4 bytes for it, but .* only 0"):
        vescale_ckpt.load(checkpoint, keys="model.half")
    with pytest.raises(CorruptCheckpointError, match=r"model\.none: the checkpoint does not hold all of it"):
        vescale_ckpt.load(checkpoint, {"model": {"none": torch.ones(2)}})
    with pytest.raises(IncompatibleStateError, match=r"model\.odd.* dtype torch\.qint8"):
        vescale_ckpt.load(checkpoint, {"model": {"odd": torch.ones(2)}})
    with pytest.raises(IncompatibleStateError, match=r"model\.odd.*a tensor of shape \(2,\) and dtype torch\.qint8"):
        vescale_ckpt.load(checkpoint, {"model": {"odd": 3}})


def test_what_is_refused_is_not_damaged_and_is_never_removed(tmp_path: Path, capsys: Any) -> None:
    with CheckpointManager(tmp_path, async_checkpoint=False) as manager:
        for step in (1, 2):
            manager.save(step, some_state())
    refused = tmp_path / "step-2"
    rewrite(refused, lambda metadata: setattr(metadata, "extra", torch.nn.Linear))
    for quick in (True, False):
        report = vescale_ckpt.verify(refused, quick=quick)
        assert not report.ok and not report.damaged and not report.unreadable
        assert "torch.nn.modules.linear.Linear" in report.reason and "refused" in report.reason
    assert cli.main(["verify", str(refused)]) == 2
    assert "refused: loads do not trust it" in capsys.readouterr().out
    assert cli.main(["list", str(tmp_path)]) in (0, 1) and "refused" in capsys.readouterr().out
    with pytest.raises(UntrustedCheckpointError, match="Linear"):
        vescale_ckpt.convert(refused, tmp_path / "whole.pt", format="torch")
    with CheckpointManager(tmp_path, max_to_keep=2, async_checkpoint=False) as manager:
        assert manager.latest() == 1
        manager.save(3, some_state())
    assert refused.is_dir() and (tmp_path / "step-1").is_dir()  # it neither counts as kept nor goes as damaged


@pytest.mark.parametrize("ours", [True, False], ids=["with a checksum", "of stock"])
def test_a_flipped_byte_is_damage(checkpoint: Path, ours: bool) -> None:
    (vescale_ckpt.save if ours else stock_save)(checkpoint, some_state())
    data = (checkpoint / ".metadata").read_bytes()
    for at in range(len(data)):
        for flip in (0xFF, *(1 << bit for bit in range(8))) if ours else (0x01, 0x20, 0x80, 0xFF):
            changed = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
            try:
                metadata_pickle.loads(changed, ".metadata")
                assert not ours, at
            except CorruptCheckpointError:
                pass
            except UntrustedCheckpointError as error:
                assert not ours and "If nobody tampered with the file, it is damaged" in str(error)
