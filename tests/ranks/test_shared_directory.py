"""Ranks that should write to one directory, and do not: nothing is written, and the error says who and what to do."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import on_ranks
from harness.saves import save_as
from harness.states import of_rank
from torch.distributed.checkpoint.api import CheckpointException

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager, SavePlanner, StorageFullError, StorageWriter, api
from vescale_ckpt._checkpoint.native import file_names
from vescale_ckpt._checkpoint.native.commit_metadata import remove_orphans
from vescale_ckpt._ranks import shared_directory
from vescale_ckpt._ranks.shared_directory import MarkerFile, SeparateDirectoriesError
from vescale_ckpt._storage.file_system import FileSystem
from vescale_ckpt._storage.storage import MARKER_PREFIX


def _files_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("way", ["dcp", "safetensors", "nodes"])
@on_ranks(3)
def test_ranks_that_see_another_directory_are_named_before_anything_is_written(way: str, tmp_path: Path) -> None:
    """The ranks from 1 on see another directory under the path, as without a mount."""
    rank, path = dist.get_rank(), tmp_path / "c"
    save_as(way, path, of_rank(1))  # plans are kept from here on
    before = _files_in(tmp_path)
    dist.barrier()
    elsewhere = tmp_path / "elsewhere" if rank else path
    with (
        mock.patch.object(api, "checkpoint_path", lambda _: str(elsewhere)),
        mock.patch.object(shared_directory, "_VISIBLE_SECONDS", 0.2),
        pytest.raises(SeparateDirectoriesError) as caught,
    ):
        save_as(way, elsewhere if way == "nodes" else path, of_rank(2))
    dist.barrier()
    assert _files_in(tmp_path) == before, "something was written, or left"
    assert caught.value.path in (str(path), str(tmp_path / "elsewhere"))
    dist.barrier()
    save_as(way, path, of_rank(3))
    assert float(vescale_ckpt.load(path)["w"][0]) == 3
    assert not [name for name in _files_in(tmp_path) if ".tmp" in name]
    ranks, text = caught.value.ranks, str(caught.value)
    if way == "nodes":
        assert ranks == [1] and "ranks 0 and 1" in text and "VESCALE_CKPT_NODE" in text
    else:
        assert ranks == [1, 2] and "ranks 1, 2 " in text
        assert "directory that all nodes share" in text and "local=" in text


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
@on_ranks(2)
def test_under_dcp_save_nothing_is_committed(format: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / ("elsewhere" if dist.get_rank() else "c")
    with pytest.raises(CheckpointException) as caught:
        dcp.save(of_rank(1), storage_writer=StorageWriter(elsewhere, format=format), planner=SavePlanner())
    dist.barrier()
    assert not (tmp_path / "c/.metadata").exists() and not (tmp_path / "c/model.safetensors").exists()
    text = str(caught.value)
    assert "rank 1 would write to another than rank 0" in text


def test_what_a_network_file_system_shows_late_is_found(tmp_path: Path) -> None:
    token = MarkerFile(str(tmp_path))
    names = os.listdir(tmp_path)
    late = threading.Timer(0.2, token.make)
    late.start()
    patient = mock.patch.object(shared_directory, "_VISIBLE_SECONDS", 60.0)
    with patient, mock.patch.object(shared_directory.secrets, "randbelow", return_value=5):
        MarkerFile(str(tmp_path)).look(5, 1)
        late.join()
        token.remove()
    assert os.listdir(tmp_path) == names == []


def test_a_token_that_a_dead_save_left_is_an_orphan_after_a_while(tmp_path: Path) -> None:
    token = MarkerFile(str(tmp_path))
    token.make()
    (left,) = os.listdir(tmp_path)
    assert file_names.is_of_a_save(left)
    assert remove_orphans(str(tmp_path)) == []  # its save may go on, on another machine
    past = time.time() - 3600
    os.utime(tmp_path / left, (past, past))
    assert remove_orphans(str(tmp_path)) == [left]


# --- Alone, and not on purpose


def test_one_of_several_processes_does_not_save_alone_by_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, state = tmp_path / "c", {"w": torch.ones(3)}
    vescale_ckpt.save(path, state)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call in (
        lambda: vescale_ckpt.save(path, state),
        lambda: vescale_ckpt.save(path, state, on_busy="skip"),
        lambda: vescale_ckpt.save(path, state, format="safetensors"),
        lambda: vescale_ckpt.prepare(state),
        lambda: CheckpointManager(tmp_path / "m").save(1, state),
    ):
        with pytest.raises(CheckpointError, match=r"init_process_group.*VESCALE_CKPT_ALONE=1"):
            call()
    with pytest.raises(CheckpointException, match="init_process_group"):
        dcp.save(state, storage_writer=StorageWriter(path), planner=SavePlanner())
    assert not (tmp_path / "m").exists()
    assert vescale_ckpt.load(path)["w"].tolist() == [1, 1, 1]
    monkeypatch.setenv("VESCALE_CKPT_ALONE", "1")
    vescale_ckpt.save(path, state)
    monkeypatch.delenv("VESCALE_CKPT_ALONE")
    monkeypatch.setenv("WORLD_SIZE", "1")
    vescale_ckpt.save(path, state)


@on_ranks(2)
def test_no_room_for_the_token_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "c"
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(MarkerFile, "make", side_effect=full), pytest.raises(StorageFullError) as caught:
        vescale_ckpt.save(path, of_rank(1))
    text = str(caught.value)
    assert "rank 0" in text and str(tmp_path) in text


@on_ranks(2)
def test_a_token_that_cannot_be_removed_fails_no_rank(tmp_path: Path) -> None:
    """An object store may allow a job to write, and not to delete."""
    path, remove = tmp_path / "c", FileSystem.remove

    def refuses(storage: FileSystem, name: str) -> bool:
        if name.startswith(MARKER_PREFIX):
            raise PermissionError(errno.EACCES, "this job may not delete anything")
        return remove(storage, name)

    with mock.patch.object(FileSystem, "remove", refuses):
        vescale_ckpt.save(path, of_rank(1), timeout=20.0)
    assert vescale_ckpt.load(path)["w"][0] == 1
