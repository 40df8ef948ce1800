"""Object stores: no conversion writes into one; a copy that dies leaves each checkpoint what lies beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import stores

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_ckpt._convert.copy import FolderCopy, copy
from vescale_ckpt._storage.object_store import ObjectStore

pytest.importorskip("obstore", reason="object stores need obstore")


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"large": torch.randn(3 << 20), "small": torch.randn(7, 5), "empty": torch.empty(0, 3)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    vescale_ckpt.save(tmp_path / "source", state())
    return tmp_path / "source"


@pytest.mark.parametrize(("name", "format"), [("", "dcp"), ("/m.safetensors", "safetensors"), ("/a.pt", "torch")])
def test_a_conversion_into_a_store_is_refused_with_what_to_do(url: str, source: Path, name: str, format: Any) -> None:
    with pytest.raises(CheckpointError, match=r"convert to a disk, and copy that there \(vescale-ckpt copy\)"):
        vescale_ckpt.convert(source, url + name, format=format, overwrite=True)
    assert stores.keys(url) == []


def test_a_copy_that_dies_leaves_each_checkpoint_what_lies_beside_it(
    url: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vescale_ckpt.save(tmp_path / "other", {name: value + 1 for name, value in state().items()})
    for path, content in ((source, "old"), (tmp_path / "other", "new")):
        (path / "config.json").write_text(content)
    copy(source, url)

    def config_and_first() -> tuple[bytes, bool]:
        values = {"small": torch.zeros(7, 5)}
        vescale_ckpt.load(url, values)
        return stores.read(url, "config.json"), torch.equal(values["small"], state()["small"])

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "commit", dies)
        with pytest.raises(KeyboardInterrupt):
            copy(tmp_path / "other", url, overwrite=True)
    assert config_and_first() == (b"old", True)
    with monkeypatch.context() as patched:
        patched.setattr(FolderCopy, "_copy_and_compare", _but(FolderCopy._copy_and_compare, "config.json", dies))
        with pytest.raises(KeyboardInterrupt):
            copy(tmp_path / "other", url, overwrite=True)
    assert config_and_first() == (b"old", False)
    assert copy(tmp_path / "other", url, overwrite=True).resumed_files == 2
    assert config_and_first() == (b"new", False)
    assert set(stores.names(url)) == set(os.listdir(tmp_path / "other"))


def _but(call: Any, name: str, instead: Any) -> Any:
    """The method `call`, but with this name as its first argument the other one."""
    return lambda this, found, *others: (instead if found == name else call)(this, found, *others)
