"""Where direct I/O is not to be had, a rank spreads its tensors over several data files, all written at once."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import faults, steps
from harness.children import ChildError, in_child
from harness.faults import fault
from harness.files import data_file_names, records
from harness.saves import dcp_save, load_blank, loads, stock_load
from harness.states import KiB, MiB, assert_same, mixed_state

import vescale_ckpt
from vescale_ckpt import StorageFullError, verify
from vescale_ckpt._checkpoint.native import commit_metadata

THREADS = 3
MIXED = mixed_state()


@pytest.fixture(autouse=True)
def several_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*steps.LIMITS["least bytes of one of several files"], 64 * KiB)
    monkeypatch.setenv("VESCALE_CKPT_THREADS", str(THREADS))
    monkeypatch.setenv("VESCALE_CKPT_DIRECT_IO", "off")


def state(k: int = 0) -> dict[str, Any]:
    return MIXED | {
        "number": k,
        "large": {str(i): torch.arange(700_000 + 3 * i, dtype=torch.float32) + k for i in range(5)},
        "small": {str(i): torch.full((i % 50,), float(k + i)) for i in range(3000)},
        "strided": (torch.arange(2 * MiB).reshape(1024, 2048) + k).t(),
    }


def assert_spread(folder: Path) -> None:
    """As many files as threads, named one after the other, all used and about equally long."""
    (first, *further), sizes = data_file_names(folder), [path.stat().st_size for path in folder.glob("*.distcp")]
    first, *further = sorted([first, *further], key=len)
    assert further == [f"{first.removesuffix('.distcp')}_{number}.distcp" for number in range(1, THREADS)]
    assert {record.path.name for record in records(folder)} == {first, *further}
    assert max(sizes) - min(sizes) <= 9 * MiB, "the largest tensor has 8 MiB"


def assert_the_next_save_replaces(folder: Path, wanted: dict[str, Any]) -> None:
    """The folder holds `wanted`, and the next save leaves nothing but its own files."""
    assert loads(folder, wanted)
    vescale_ckpt.save(folder, state(3))
    assert_spread(folder)


@pytest.mark.parametrize("is_async", [False, True])
def test_tensors_are_spread_and_load_by_any_way(checkpoint: Path, is_async: bool) -> None:
    saved = state()
    vescale_ckpt.save(checkpoint, saved, async_checkpoint=is_async).result()
    assert_spread(checkpoint)
    assert verify(checkpoint).ok
    assert loads(checkpoint, saved)
    assert_same(stock_load(checkpoint, saved, no_dist=True), saved)


def test_under_dcp_save(checkpoint: Path) -> None:
    saved = state()
    dcp_save(checkpoint, saved)
    assert_spread(checkpoint)
    assert_same(load_blank(checkpoint, saved), saved)


def test_one_large_tensor_leaves_no_empty_files(checkpoint: Path) -> None:
    saved = {"all": torch.arange(3 * MiB, dtype=torch.float32)}
    vescale_ckpt.save(checkpoint, saved)
    assert len(data_file_names(checkpoint)) == 1
    assert loads(checkpoint, saved)
    assert verify(checkpoint).ok


def test_few_bytes_and_direct_io_need_one_file(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vescale_ckpt.save(checkpoint / "few", {"a": torch.ones(100), "b": torch.ones(100)})
    assert len(data_file_names(checkpoint / "few")) == 1
    monkeypatch.setenv("VESCALE_CKPT_DIRECT_IO", "on")
    try:
        vescale_ckpt.save(checkpoint / "direct", state())
    except vescale_ckpt.CheckpointError as error:
        assert "direct_io" in str(error)
    else:
        assert len(data_file_names(checkpoint / "direct")) == 1


@pytest.mark.parametrize(("call", "skip"), [("allocate", 1), ("write", 9), ("sync", 1)])
def test_a_full_disk_at_a_further_file_leaves_what_was_there(checkpoint: Path, call: str, skip: int) -> None:
    vescale_ckpt.save(checkpoint, state(1))
    before = data_file_names(checkpoint)
    with fault(call, errno.ENOSPC, skip), pytest.raises(StorageFullError):
        vescale_ckpt.save(checkpoint, state(2))
    assert data_file_names(checkpoint) == before
    assert_the_next_save_replaces(checkpoint, state(1))


def test_a_file_that_cannot_be_opened_leaves_what_was_there(checkpoint: Path) -> None:
    vescale_ckpt.save(checkpoint, state(0))
    failed = newest = 0
    for skip in range(12):
        before = data_file_names(checkpoint)
        try:
            with fault("open", errno.EMFILE, skip):
                vescale_ckpt.save(checkpoint, state(skip))
            newest = skip
        except vescale_ckpt.CheckpointError:
            failed += 1
            assert data_file_names(checkpoint) == before
    assert failed >= THREADS
    assert loads(checkpoint, state(newest))


@pytest.mark.parametrize("skip", [0, 3, 7])
def test_a_kill_leaves_files_that_the_next_save_removes(checkpoint: Path, skip: int) -> None:
    vescale_ckpt.save(checkpoint, state(1))

    def killed() -> None:
        faults.inject("write", -9, skip)
        vescale_ckpt.save(checkpoint, state(2))

    with pytest.raises(ChildError, match="died by signal 9"):
        in_child(killed)
    assert len(data_file_names(checkpoint)) == 2 * THREADS
    assert_the_next_save_replaces(checkpoint, state(1))


def test_files_of_a_running_save_are_no_orphans(checkpoint: Path) -> None:
    """Another save in the same folder cleans up while this one writes: the lock of the first file counts for all."""
    vescale_ckpt.save(checkpoint, {"a": torch.ones(3)})
    beside: list[list[str]] = []

    def clean_up_beside(*_: object) -> None:
        if not beside:
            beside.append(data_file_names(checkpoint))
            commit_metadata.remove_orphans(str(checkpoint))

    with steps.before("finish files", clean_up_beside):
        vescale_ckpt.save(checkpoint, state(2))
    assert len(beside[0]) == 1 + THREADS
    assert loads(checkpoint, state(2))


def test_a_conversion(tmp_path: Path) -> None:
    saved = {str(i): torch.arange(700_000.0) + i for i in range(4)}
    vescale_ckpt.safetensors.save_file(saved, tmp_path / "model.safetensors")
    vescale_ckpt.convert(tmp_path / "model.safetensors", tmp_path / "converted", format="dcp")
    assert_spread(tmp_path / "converted")
    assert loads(tmp_path / "converted", saved)
