"""Paths are what they were when they were given, and URLs of other storages are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import saves, steps
from harness.snapshots import held
from harness.states import small_state

import vescale_ckpt
from vescale_ckpt import CheckpointManager, StorageReader, StorageWriter, verify
from vescale_ckpt.safetensors import load_file, safe_open, save_file


@pytest.fixture
def here_and_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two directories, of which the first is the working directory."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    return here, there


def test_an_asynchronous_save_goes_where_it_was_sent(here_and_there: tuple[Path, Path]) -> None:
    here, there = here_and_there
    with held() as event:
        handle = vescale_ckpt.save("run/checkpoint", small_state(1), async_checkpoint=True)
        os.chdir(there)
        event.set()
        handle.result(60)
    assert saves.loads(here / "run" / "checkpoint", small_state(1))
    assert os.listdir(there) == []


def test_what_was_made_with_a_path_keeps_it(here_and_there: tuple[Path, Path]) -> None:
    here, there = here_and_there
    vescale_ckpt.save("checkpoint", small_state(1))
    save_file({"a": torch.ones(3)}, "file.safetensors")
    writer, reader, file = StorageWriter("other"), StorageReader("checkpoint"), safe_open("file.safetensors")
    os.chdir(there)
    assert (writer.path, reader.path) == (str(here / "other"), str(here / "checkpoint"))
    assert torch.equal(file.get_tensor("a"), torch.ones(3))
    os.chdir(here)
    writer.reset("third")
    reader.reset("checkpoint")
    os.chdir(there)
    assert (writer.path, reader.path) == (str(here / "third"), str(here / "checkpoint"))
    assert verify(reader.path).path == reader.path


def test_a_parent_of_a_link_is_that_of_its_target(here_and_there: tuple[Path, Path]) -> None:
    here, there = here_and_there
    (there / "deep").mkdir()
    (here / "link").symlink_to(there / "deep")
    vescale_ckpt.save("link/../checkpoint", small_state(1))
    assert saves.loads(there / "checkpoint", small_state(1))


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("file:///ckpts/run1", "written alone"),
        (Path("file:///ckpts/run1"), "written alone"),
        (Path("s3://bucket/run1"), "write s3://bucket/run1, as text"),
        ("hdfs://host/run1", "no storage for hdfs"),
        ("", "expected a path"),
        ("a\0b", "no path"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda path: vescale_ckpt.save(path, {"a": torch.ones(3)}),
        lambda path: vescale_ckpt.load(path),
        lambda path: save_file({"a": torch.ones(3)}, path),
        load_file,
        verify,
        CheckpointManager,
        StorageWriter,
        StorageReader,
    ],
    ids=["save", "load", "save_file", "load_file", "verify", "manager", "writer", "reader"],
)
def test_what_is_no_local_path_is_refused(
    here_and_there: tuple[Path, Path], path: Any, advice: str, use: Callable[[Any], Any]
) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        use(path)
    assert advice in str(raised.value)
    assert os.listdir(here_and_there[0]) == []


@pytest.mark.parametrize("path", ["/a#1?x", "/a/s3://b"])
def test_all_parts_count(path: str) -> None:
    assert steps.checkpoint_path(path) == path


def test_a_working_directory_that_is_gone(here_and_there: tuple[Path, Path]) -> None:
    here, there = here_and_there
    here.rmdir()
    with pytest.raises(ValueError, match="absolute"):
        CheckpointManager("run")
    os.chdir(there)
