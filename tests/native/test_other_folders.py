"""Checkpoints whose metadata names data files of a folder beside their own. `other_folders.tar.xz` holds two such runs.

`pair`: a whole step 0, and a step 1 that names its file. `pruned`: of step 0 only the file is left that steps 1 and 2
name.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.states import State, blank, same
from torch.distributed.checkpoint import FileSystemReader

from vescale_ckpt import CheckpointManager
from vescale_ckpt.cli import main


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


def test_the_folders_are_whole(runs: Path) -> None:
    assert is_whole(runs / "pair" / "step-0", 0) and is_whole(runs / "pair" / "step-1", 1)
    assert is_whole(runs / "pruned" / "step-1", 1) and is_whole(runs / "pruned" / "step-2", 2)


@pytest.mark.parametrize("command", [["prune", "--keep", "1"], ["prune", "--keep", "2"], ["repair"]])
def test_prune_and_repair_leave_what_the_newest_names(runs: Path, command: list[str]) -> None:
    for run, step in (("pair", 1), ("pruned", 2)):
        main([command[0], str(runs / run), *command[1:]])
        assert is_whole(runs / run / f"step-{step}", step)
    main(["repair", str(runs / "pair" / "step-0")])
    assert is_whole(runs / "pair" / "step-1", 1)


def test_repair_changes_nothing(runs: Path) -> None:
    folders = [*(runs / "pair").iterdir(), *(runs / "pruned").iterdir()]
    before = sums_of_files(*folders)
    for path in (runs / "pair", runs / "pruned", *folders):
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
