"""Checkpoints whose metadata names data files of a folder beside their own are refused.

`other_folders.tar.xz` holds such a run, `pair`: a whole step 0, and a step 1 that names its file.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.saves import stock_load
from harness.states import State, blank, same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import vescale_ckpt
from vescale_ckpt import CheckpointError, LoadPlanner, StorageReader, UntrustedCheckpointError
from vescale_ckpt._inspect.diff import diff
from vescale_ckpt.cli import main

NAMED = r"\.\./step-0/__0_6347b4cd\.distcp"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("other_folders.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def state(step: int) -> State:
    model = {"frozen": torch.arange(4096, dtype=torch.float32), "trained": torch.full((2048,), float(step))}
    return {"model": model, "step": step}


def is_whole(path: Path, step: int) -> bool:
    """Whether stock DCP, which follows `..`, reads what was saved."""
    return same(stock_load(path, state(step), no_dist=True), state(step))


@pytest.fixture(params=["with the index", "without it"])
def path(runs: Path, request: pytest.FixtureRequest) -> Path:
    """A checkpoint that names a file of another one."""
    path = runs / "pair" / "step-1"
    if request.param == "without it":
        (path / ".metadata.index").unlink()
    return path


def test_the_folders_are_whole(runs: Path) -> None:
    assert is_whole(runs / "pair" / "step-0", 0) and is_whole(runs / "pair" / "step-1", 1)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("keys", [None, "model.frozen", "model"])
def test_loads_refuse_it_and_fill_nothing(path: Path, keys: str | None, verify: bool) -> None:
    found = blank(state(1))
    with pytest.raises(UntrustedCheckpointError, match=NAMED):
        vescale_ckpt.load(path, found, keys=keys, verify=verify)
    with pytest.raises(UntrustedCheckpointError, match=NAMED):
        vescale_ckpt.load(path, keys=keys, verify=verify)
    assert same(found, blank(state(1)))


@pytest.mark.parametrize("planner", [LoadPlanner, DefaultLoadPlanner])
def test_dcp_loads_refuse_it_and_fill_nothing(path: Path, planner: Any) -> None:
    found = blank(state(1))
    with pytest.raises(CheckpointException, match=NAMED):
        dcp.load(found, storage_reader=StorageReader(path), planner=planner(), no_dist=True)
    assert same(found, blank(state(1)))


def test_each_way_to_read_it_refuses_it_by_name(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for call in (
        lambda: vescale_ckpt.inspect(path),
        lambda: vescale_ckpt.convert(path, tmp_path / "made", format="safetensors"),
        lambda: vescale_ckpt.convert(path, tmp_path / "made", format="dcp"),
        lambda: vescale_ckpt.copy(path, tmp_path / "made"),
        lambda: diff(path, path),
    ):
        with pytest.raises(UntrustedCheckpointError, match=NAMED):
            call()
    assert not (tmp_path / "made").exists()
    for quick in (True, False):
        report = vescale_ckpt.verify(path, quick=quick)
        assert not report.ok and not report.damaged and not report.unreadable
        assert report.refused and "../step-0/" in report.reason
    for command in (["inspect"], ["verify"], ["diff", str(path)], ["copy", str(tmp_path / "made"), "--overwrite"]):
        assert main([command[0], str(path), *command[1:]]) in (1, 2)
        answer = capsys.readouterr()
        assert "../step-0/" in answer.out + answer.err
    main(["list", str(path.parent)])
    assert "refused" in capsys.readouterr().out


def test_a_copy_does_not_replace_it(path: Path, tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "other", state(7))
    with pytest.raises(CheckpointError, match=NAMED):
        vescale_ckpt.copy(tmp_path / "other", path, overwrite=True)
    assert is_whole(path, 1)
