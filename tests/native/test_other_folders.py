"""Checkpoints whose metadata names data files of a folder beside their own are refused, and nothing of them is removed.

`other_folders.tar.xz` holds two such runs.

`pair`: a whole step 0, and a step 1 that names its file. `pruned`: of step 0 only the file is left that steps 1 and 2
name.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.states import State, blank, same
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager, LoadPlanner, StorageReader, UntrustedCheckpointError
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
    found = blank(state(step))
    dcp.load(found, storage_reader=FileSystemReader(path), no_dist=True)
    return same(found, state(step))


def sums_of_files(*folders: Path) -> dict[str, str]:
    """The SHA-256 of each file that has any content: empty ones are locks and marks."""
    files = [file for folder in folders for file in folder.iterdir() if file.stat().st_size]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(params=["with the index", "without it"])
def path(runs: Path, request: pytest.FixtureRequest) -> Path:
    """A checkpoint that names a file of another one."""
    path = runs / "pair" / "step-1"
    if request.param == "without it":
        (path / ".metadata.index").unlink()
    return path


def test_the_folders_are_whole(runs: Path) -> None:
    assert is_whole(runs / "pair" / "step-0", 0) and is_whole(runs / "pair" / "step-1", 1)
    assert is_whole(runs / "pruned" / "step-1", 1) and is_whole(runs / "pruned" / "step-2", 2)


# --- Who reads


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


def test_a_manager_passes_it_over_for_what_is_sound(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(runs / "pair") as saver:
        assert saver.latest() == 0 and "../step-0/" in caplog.text
        assert saver.restore(found := blank(state(0))) == 0 and same(found, state(0))
        with pytest.raises(UntrustedCheckpointError, match=NAMED):
            saver.restore(blank(state(0)), step=1)
    with CheckpointManager(runs / "pruned") as saver:
        assert saver.latest() is None
        with pytest.raises(CheckpointError, match="holds no checkpoint that is complete and sound"):
            saver.restore(blank(state(0)))


# --- Who removes


@pytest.mark.parametrize("keep", ["1", "2"])
def test_prune_leaves_what_the_newest_names(runs: Path, keep: str) -> None:
    for run, step in (("pair", 1), ("pruned", 2)):
        main(["prune", str(runs / run), "--keep", keep])
        assert is_whole(runs / run / f"step-{step}", step)


def test_repair_changes_nothing(runs: Path) -> None:
    folders = [*(runs / "pair").iterdir(), *(runs / "pruned").iterdir()]
    before = sums_of_files(*folders)
    for path in (runs / "pair", runs / "pruned", *(path for path in folders if (path / ".metadata").exists())):
        main(["repair", str(path)])
    assert sums_of_files(*folders) == before


def test_a_manager_that_goes_on_beside_them_leaves_what_they_name(runs: Path) -> None:
    for run, step in (("pair", 1), ("pruned", 2)):
        with CheckpointManager(runs / run, max_to_keep=2) as saver:
            handle = saver.save(step + 1, state(step + 1))
            assert handle is not None
            handle.result()
        assert is_whole(runs / run / f"step-{step}", step)
        assert is_whole(runs / run / f"step-{step + 1}", step + 1)


def test_the_files_named_stay_while_the_folder_that_names_them_is_unreadable(runs: Path) -> None:
    (runs / "pruned" / "step-2" / ".metadata.index").unlink()
    metadata = runs / "pruned" / "step-2" / ".metadata"
    content = metadata.read_bytes()
    metadata.write_bytes(content[: len(content) // 2])
    shutil.rmtree(runs / "pruned" / "step-1")
    main(["repair", str(runs / "pruned")])
    metadata.write_bytes(content)
    assert is_whole(runs / "pruned" / "step-2", 2)
