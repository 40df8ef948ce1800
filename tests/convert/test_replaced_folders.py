"""Conversions that replace a folder: killed at any call, refused by the system, behind a link."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import faults, steps

from vescale_ckpt import CheckpointError, StorageFullError, convert


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, exchanges: bool) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    torch.save({"b": torch.ones(1)}, tmp_path / "b.pt")
    made = tmp_path / "made"
    convert(tmp_path / "a.pt", made, format="safetensors")
    for error in (errno.EIO, errno.ENOSPC):
        faults.inject("exchange", error if exchanges else errno.EINVAL)
        faults.inject("rename", error, 1)
        with pytest.raises(StorageFullError if error == errno.ENOSPC else CheckpointError, match="made"):
            convert(tmp_path / "b.pt", made, format="safetensors", overwrite=True)
        faults.clear()
        assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt", "made"] and os.listdir(made) == ["model.safetensors"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_while_a_folder_is_replaced_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    torch.save({"b": torch.ones(3)}, tmp_path / "b.pt")
    made = tmp_path / "made"
    calls = 0

    def replace(kill_at: int) -> None:
        nonlocal calls
        calls = 0

        def killed(call: Any) -> Any:
            def stand_in(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > kill_at:
                    raise Killed
                return call(*arguments, **options)

            return stand_in

        with monkeypatch.context() as patched:
            if not exchanges:
                patched.setattr(*steps.STEPS["exchange names"], lambda first, second: False)
            for owner, name in steps.CALLS_OF_A_REPLACEMENT:
                patched.setattr(owner, name, killed(getattr(owner, name)))
            patched.setattr(shutil, "rmtree", killed(shutil.rmtree))
            convert(tmp_path / "b.pt", made, format="safetensors", max_shard_size=4, overwrite=True)

    def keys(path: Path) -> list[str]:
        convert(path, tmp_path / "again.pt", format="torch", overwrite=True)
        return list(torch.load(tmp_path / "again.pt"))

    gaps = 0
    for kill_at in range(100):
        convert(tmp_path / "a.pt", made, format="safetensors", overwrite=True)
        try:
            replace(kill_at)
            break
        except Killed:
            pass
        if made.exists():
            assert keys(made) in (["a"], ["b"])
        else:
            gaps += 1
        with pytest.raises(CheckpointError, match="overwrite"):  # what was there is there again
            convert(tmp_path / "b.pt", made, format="safetensors")
        assert keys(made) in (["a"], ["b"])
        convert(tmp_path / "b.pt", made, format="safetensors", overwrite=True)
        assert keys(made) == ["b"] and not [name for name in os.listdir(tmp_path) if ".tmp." in name]
    assert kill_at > 2 and keys(made) == ["b"]
    assert gaps == 0 if exchanges else gaps > 0


def test_a_mount_that_renames_where_it_should_exchange_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    made = tmp_path / "made"
    convert(tmp_path / "a.pt", made, format="safetensors")
    renamed: list[str] = []

    def rename(first: str, second: str) -> bool:
        renamed.append(second)
        os.rename(first, second)
        return True

    monkeypatch.setattr(*steps.STEPS["exchange names"], rename)
    convert(tmp_path / "a.pt", made, format="safetensors", rename={"a": "b"}, overwrite=True)
    assert renamed and str(made) not in renamed
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "made"] and os.listdir(made) == ["model.safetensors"]


def test_a_link_to_a_folder_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "old", format="safetensors")
    (tmp_path / "link").symlink_to("old")
    convert(tmp_path / "a.pt", tmp_path / "link", format="safetensors", rename={"a": "b"}, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "link", "old"]
    assert os.listdir(tmp_path / "old") == ["model.safetensors"] and os.listdir(tmp_path / "link") == [
        "model.safetensors"
    ]
