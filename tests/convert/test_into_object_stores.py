"""Conversions into object stores: files appear whole, and the last one makes a folder a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import stores

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError
from vescale_ckpt._checkpoint.view import View
from vescale_ckpt._convert import safetensors_files
from vescale_ckpt._convert.copy import FolderCopy, copy
from vescale_ckpt._storage.object_store import ObjectStore

pytest.importorskip("obstore", reason="object stores need obstore")

MiB = 1 << 20


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"large": torch.randn(3 * MiB), "small": torch.randn(7, 5), "empty": torch.empty(0, 3)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    vescale_ckpt.save(tmp_path / "source", state())
    return tmp_path / "source"


def is_sound(path: str) -> bool:
    values = {name: torch.zeros_like(value) for name, value in state().items()}
    vescale_ckpt.load(path, values)
    report = vescale_ckpt.verify(path)
    assert report.ok and not report.unverified_bytes, report
    return all(torch.equal(values[name], value) for name, value in state().items())


@pytest.mark.parametrize(("name", "format"), [("one.safetensors", "safetensors"), ("a.pt", "torch")])
def test_one_file_is_that_of_a_local_conversion(url: str, source: Path, name: str, format: Any, tmp_path: Path) -> None:
    vescale_ckpt.convert(source, f"{url}/{name}", format=format)
    vescale_ckpt.convert(source, tmp_path / name, format=format)
    assert stores.read(url, name) == (tmp_path / name).read_bytes()
    with pytest.raises(CheckpointError, match="overwrite=True"):
        vescale_ckpt.convert(source, f"{url}/{name}", format=format)
    vescale_ckpt.convert(source, f"{url}/{name}", format=format, overwrite=True)
    if format != "safetensors":
        with pytest.raises(CheckpointError, match="a disk"):
            vescale_ckpt.convert(f"{url}/{name}", tmp_path / "dcp", format="dcp")


def test_a_checkpoint_of_dcp_is_made_and_replaced(url: str, source: Path) -> None:
    for overwrite in (False, True):
        vescale_ckpt.convert(source, url, format="dcp", overwrite=overwrite)
        assert is_sound(url)
    with pytest.raises(CheckpointError, match="overwrite=True"):
        vescale_ckpt.convert(source, url, format="dcp")
    assert len(stores.data_files(url)) == 1


def test_a_model_is_that_of_a_local_conversion(url: str, source: Path, tmp_path: Path) -> None:
    vescale_ckpt.convert(source, url + "/model", format="safetensors", max_shard_size="1MB")
    assert is_sound(url + "/model")
    vescale_ckpt.convert(source, tmp_path / "model", format="safetensors", max_shard_size="1MB")
    local = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    assert {name: stores.read(url + "/model", name) for name in stores.names(url + "/model")} == local and len(
        local
    ) > 2
    with pytest.raises(CheckpointError, match="cannot be replaced in one step"):
        vescale_ckpt.convert(source, url + "/model", format="safetensors", overwrite=True)


def test_shards_without_an_index_are_no_model(url: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, count = safetensors_files.begin, 0

    def fails(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise CheckpointError("the store is down")
        return begin(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_files, "begin", fails)
        with pytest.raises(CheckpointError, match="down"):
            vescale_ckpt.convert(source, url + "/model", format="safetensors", max_shard_size="1MB")
    assert stores.names(url + "/model") == set()
    # A killed one leaves shards.
    stores.write(url + "/model", "model-00001-of-00003.safetensors", b"half")
    with pytest.raises(CheckpointError):
        vescale_ckpt.load(url + "/model", state())
    vescale_ckpt.convert(source, url + "/model", format="safetensors", max_shard_size="1MB", overwrite=True)
    assert is_sound(url + "/model")


def test_a_source_that_changes_between_the_two_reads_is_an_error(
    url: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer, passes = safetensors_files.transfer, 0

    class Changed(View):
        def __init__(self, inner: View) -> None:
            self._inner = inner

        def read(self, reads: Any) -> None:
            self._inner.read(reads)
            for read in reads:
                read.target.view(-1)[:1] += 1

    def second_is_another(segments: Any, inner: View, *others: Any) -> None:
        nonlocal passes
        passes += 1
        transfer(segments, inner if passes == 1 else Changed(inner), *others)

    monkeypatch.setattr(safetensors_files, "transfer", second_is_another)
    with pytest.raises(CheckpointError, match="has changed"):
        vescale_ckpt.convert(source, url + "/one.safetensors", format="safetensors")
    assert stores.names(url) == set()


def _convert(environment: dict[str, str], source: str, url: str) -> None:
    import os

    os.environ.update(environment)
    vescale_ckpt.convert(source, url + "/dcp", format="dcp")
    vescale_ckpt.convert(source, url + "/model", format="safetensors", max_shard_size="1MB")


def test_damage_in_the_source_leaves_nothing(url: str, source: Path) -> None:
    (data,) = source.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[MiB] ^= 1
    data.write_bytes(content)
    for to, format in (("/dcp", "dcp"), ("/model", "safetensors"), ("/a.pt", "torch")):
        with pytest.raises(CorruptCheckpointError):
            vescale_ckpt.convert(source, url + to, format=format)  # type: ignore[arg-type]
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
