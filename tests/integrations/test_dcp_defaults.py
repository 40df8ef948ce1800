"""Tests `vescale_ckpt.integrations.dcp_defaults`."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import steps
from harness.jobs import run
from torch.distributed.checkpoint import default_planner, filesystem

import vescale_ckpt
from vescale_ckpt.integrations import dcp as ours
from vescale_ckpt.integrations import dcp_defaults, enable


def _state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8, 8), value), "b": torch.arange(3.0)}


def test_a_checkpoint_id_goes_through_this_package_and_back(tmp_path: Path) -> None:
    with dcp_defaults() as made:
        dcp.save(_state(), checkpoint_id=tmp_path / "a")
        loaded = _state(0.0)
        dcp.load(loaded, checkpoint_id=tmp_path / "a")
    assert torch.equal(loaded["w"], _state()["w"])
    assert "torch.distributed.checkpoint._storage_utils.FileSystemWriter" in made.replaced
    assert vescale_ckpt.inspect(tmp_path / "a").writer == "vescale_ckpt"
    dcp.save(_state(), checkpoint_id=tmp_path / "b")
    assert vescale_ckpt.inspect(tmp_path / "b").writer != "vescale_ckpt"


def test_everything_is_put_back_also_after_an_error() -> None:
    before = dcp.FileSystemWriter, dcp.DefaultSavePlanner, default_planner.DefaultLoadPlanner
    with pytest.raises(KeyError), dcp_defaults():
        assert dcp.FileSystemWriter is ours.DefaultWriter
        raise KeyError
    assert (dcp.FileSystemWriter, dcp.DefaultSavePlanner, default_planner.DefaultLoadPlanner) == before
    assert dcp.FileSystemWriter is filesystem.FileSystemWriter


def test_plans_are_kept_although_each_save_has_a_planner_of_its_own(tmp_path: Path) -> None:
    made: list[int] = []
    with steps.before("plan anew", lambda *_: made.append(1)), dcp_defaults():
        for number in range(3):
            dcp.save(_state(number), checkpoint_id=tmp_path / str(number), planner=dcp.DefaultSavePlanner())
            other = {"o": torch.ones(2), "n": number}  # the optimizer, say, beside the model
            dcp.save(other, checkpoint_id=tmp_path / f"o{number}", planner=dcp.DefaultSavePlanner())
    assert len(made) <= 2  # at most one of each state: an earlier test may have made the same


def test_plans_are_kept_when_each_save_has_a_thread_of_its_own(tmp_path: Path) -> None:
    made: list[int] = []
    with steps.before("plan anew", lambda *_: made.append(1)), dcp_defaults():
        for number in range(3):
            dcp.async_save({"asynchronous": torch.ones(3)}, checkpoint_id=tmp_path / str(number)).result()
    assert len(made) == 1
    assert vescale_ckpt.load(tmp_path / "2")["asynchronous"].tolist() == [1.0] * 3


def test_names_that_other_modules_imported_before_are_reached(tmp_path: Path) -> None:
    host = types.ModuleType("host_that_imported_before")
    host.FileSystemWriter = dcp.FileSystemWriter  # type: ignore[attr-defined]
    deriving = types.ModuleType("host_that_derives")
    exec(
        "class Own(FileSystemReader): pass", deriving.__dict__ | {"FileSystemReader": dcp.FileSystemReader}, found := {}
    )
    deriving.Own, deriving.FileSystemReader = found["Own"], dcp.FileSystemReader  # type: ignore[attr-defined]
    sys.modules[host.__name__], sys.modules[deriving.__name__] = host, deriving
    try:
        with dcp_defaults() as made:
            assert host.FileSystemWriter is ours.DefaultWriter
            assert deriving.FileSystemReader is filesystem.FileSystemReader
            assert "host_that_derives.FileSystemReader" in made.not_reached
        assert host.FileSystemWriter is filesystem.FileSystemWriter
    finally:
        del sys.modules[host.__name__], sys.modules[deriving.__name__]


def test_arguments_of_torchs_classes_are_taken_by_position_too(tmp_path: Path) -> None:
    with dcp_defaults():
        writer = dcp.FileSystemWriter(tmp_path / "a", True, False, 2, 10_000_000, True)
        dcp.save(_state(), storage_writer=writer, planner=dcp.DefaultSavePlanner(True, True, None, True))
        reader = dcp.FileSystemReader(tmp_path / "a")
        loaded = _state(0.0)
        dcp.load(loaded, storage_reader=reader, planner=dcp.DefaultLoadPlanner(True, True, True))
    assert torch.equal(loaded["w"], _state()["w"])


def test_inside_each_other_the_outer_one_ends_last(tmp_path: Path) -> None:
    outer = enable()
    with dcp_defaults() as inner:
        assert inner.replaced == []
    assert dcp.FileSystemWriter is ours.DefaultWriter
    outer.disable()
    outer.disable()
    assert dcp.FileSystemWriter is filesystem.FileSystemWriter


def test_a_torch_without_the_names_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint import _storage_utils

    monkeypatch.delattr(_storage_utils, "FileSystemReader")
    with pytest.raises(vescale_ckpt.CheckpointError, match=r"_storage_utils\.FileSystemReader"), dcp_defaults():
        pass
    assert dcp.FileSystemWriter is filesystem.FileSystemWriter


_IN_A_PROCESS = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from vescale_ckpt.integrations import dcp_defaults

if __name__ == "__main__":
    dist.init_process_group("cpu:gloo")
    with dcp_defaults():
        for number in range(2):
            dcp.async_save(
                {"w": torch.full((4,), float(number))}, checkpoint_id=f"{sys.argv[1]}/{number}",
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            ).result()
            print(f"step {number} loss 0x0p+0")
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_process_that_torch_starts_for_a_save_uses_this_package(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(_IN_A_PROCESS)
    run(script, str(tmp_path), ranks=1)
    for number in range(2):
        assert vescale_ckpt.inspect(tmp_path / str(number)).writer == "vescale_ckpt"
        assert vescale_ckpt.load(tmp_path / str(number))["w"].tolist() == [float(number)] * 4


def test_a_module_with_torchs_own_derived_readers_is_reached() -> None:
    host = types.ModuleType("host_of_safetensors")
    host.Reader, host.Writer = dcp.HuggingFaceStorageReader, dcp.FileSystemWriter  # type: ignore[attr-defined]
    sys.modules[host.__name__] = host
    try:
        with dcp_defaults() as made:
            assert host.Writer is ours.DefaultWriter
            assert "host_of_safetensors.Writer" in made.replaced
    finally:
        del sys.modules[host.__name__]
