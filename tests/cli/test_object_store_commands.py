"""Commands on paths of object stores."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import steps, stores
from harness.saves import loads, stock_save

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager, StorageWriter
from vescale_ckpt._convert.copy import copy
from vescale_ckpt._storage.object_store import ObjectStore
from vescale_ckpt.cli import main

pytest.importorskip("obstore", reason="object stores need obstore")

MiB = 1 << 20


@pytest.fixture(params=["memory", pytest.param("server", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/run"
    prefix: str = request.getfixturevalue("bucket_url")
    return prefix


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"large": torch.randn(5 * MiB), "small": torch.randn(10)}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main([*map(str, arguments)])
    return status, capsys.readouterr().out


def test_what_shows_a_checkpoint(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with CheckpointManager(url, async_checkpoint=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.full((1000,), float(step))}, metrics={"loss": 1.0 / step})
    status, shown = run(capsys, "inspect", f"{url}/step-3")
    assert status == 0 and "w" in shown
    assert run(capsys, "verify", f"{url}/step-3")[0] == 0
    assert run(capsys, "verify", "--quick", f"{url}/step-3")[0] == 0
    assert run(capsys, "latest", url) == (0, f"{url}/step-3\n")
    assert run(capsys, "diff", f"{url}/step-2", f"{url}/step-3")[0] == 1
    assert run(capsys, "prune", url, "--keep", "1", "--dry-run")[0] == 0
    assert run(capsys, "prune", url, "--keep", "1")[0] == 0
    assert CheckpointManager(url).steps() == [3]
    assert run(capsys, "repair", url)[0] == 0
    assert run(capsys, "inspect", url + "/nothing")[0] == 2


def test_repair_removes_what_is_old_and_unnamed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    vescale_ckpt.save(url, state())
    stores.write(url, "__3_01234567.distcp", b"of a save that died")
    named = stores.names(url)
    run(capsys, "repair", url)
    assert stores.names(url) == named, "it may be that of a save under way"
    steps.limit("seconds until what a dead save left is removed from a store", 0.0).start()
    run(capsys, "repair", "--dry-run", url)
    assert stores.names(url) == named
    status, shown = run(capsys, "repair", "--json", url)
    assert json.loads(shown)["removed"] == [f"{url}/__3_01234567.distcp"] and status == 0
    assert stores.names(url) == named - {"__3_01234567.distcp"}
    assert loads(url, state())


def test_copies_both_ways(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vescale_ckpt.save(tmp_path / "one", state(), extra_files={"config.json": b"{}"})
    assert run(capsys, "copy", tmp_path / "one", f"{url}/one")[0] == 0
    assert loads(f"{url}/one", state())
    assert stores.read(f"{url}/one", "config.json") == b"{}"
    assert run(capsys, "copy", f"{url}/one", tmp_path / "back")[0] == 0
    assert loads(tmp_path / "back", state())
    assert run(capsys, "copy", f"{url}/one", f"{url}/two")[0] == 0
    assert loads(f"{url}/two", state())
    with pytest.raises(CheckpointError, match="overwrite=True"):
        copy(tmp_path / "one", f"{url}/one")
    assert copy(tmp_path / "one", f"{url}/one", overwrite=True).resumed_files == 3, "all but the metadata"
    assert loads(f"{url}/one", state())
    stock_save(tmp_path / "stock", state())  # all its saves give files the same names
    copy(tmp_path / "stock", f"{url}/stock")
    with pytest.raises(CheckpointError, match="remove it first"):
        copy(tmp_path / "stock", f"{url}/stock", overwrite=True)
    vescale_ckpt.save(tmp_path / "other", state(1))
    copy(tmp_path / "other", f"{url}/one", overwrite=True)
    assert loads(f"{url}/one", state(1))
    assert len(stores.data_files(f"{url}/one")) == 1


def test_a_copy_sends_only_files_that_differ(url: str, tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "one", state(), extra_files={"a": b"1", "b": b"2"})
    (data,) = (tmp_path / "one").glob("*.distcp")
    for name, content in ((data.name, data.read_bytes()), ("a", b"1"), ("b", b"3")):
        stores.write(url, name, content)
    report = copy(tmp_path / "one", url)
    assert report.resumed_files == 2 and report.resumed_bytes == data.stat().st_size + 1
    assert stores.read(url, "b") == b"2"
    assert loads(url, state())


def test_a_folder_of_safetensors_is_copied_and_converted(url: str, tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "model", state(), format=vescale_ckpt.Safetensors(max_shard_size="1MB"))
    copy(tmp_path / "model", url)
    assert loads(url, state())
    vescale_ckpt.convert(url, tmp_path / "converted", format="dcp")
    assert loads(tmp_path / "converted", state())
    vescale_ckpt.save(f"{url}/dcp", state(2))
    vescale_ckpt.convert(f"{url}/dcp", tmp_path / "exported", format="safetensors")
    assert loads(tmp_path / "exported", state(2))


def test_what_holds_a_checkpoint_is_not_replaced_by_a_model(url: str, tmp_path: Path) -> None:
    """Readers prefer one file to an index, and metadata to both."""
    vescale_ckpt.save(tmp_path / "one", state(1), format="safetensors")
    vescale_ckpt.save(tmp_path / "many", state(2), format=vescale_ckpt.Safetensors(max_shard_size="1MB"))
    vescale_ckpt.save(tmp_path / "dcp", state(3))
    for there, values in (("one", state(1)), ("many", state(2)), ("dcp", state(3))):
        copy(tmp_path / there, f"{url}/{there}")
        for model in ("one", "many"):
            with pytest.raises(CheckpointError, match="overwrite=True"):
                copy(tmp_path / model, f"{url}/{there}")
            with pytest.raises(CheckpointError, match="remove it first"):
                copy(tmp_path / model, f"{url}/{there}", overwrite=True)
        assert loads(f"{url}/{there}", values)
    stores.write(f"{url}/resumed", "config.json", b"{}")  # of a copy that died
    (tmp_path / "one" / "config.json").write_bytes(b"{}")
    assert copy(tmp_path / "one", f"{url}/resumed").resumed_files == 1
    assert loads(f"{url}/resumed", state(1))


def test_a_model_appears_with_its_index(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, files = tmp_path / "model", vescale_ckpt.Safetensors(max_shard_size="1MB")
    for save in (
        lambda: vescale_ckpt.save(url, state(), format=files),
        lambda: dcp.save(state(), storage_writer=StorageWriter(url, format="safetensors"), no_dist=True),
    ):
        with pytest.raises((CheckpointError, dcp.api.CheckpointException), match=r"copy\(DIR, .*vescale-ckpt copy DIR"):
            save()
    vescale_ckpt.save(model, state(), format=files)

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "commit", dies)
        with pytest.raises(KeyboardInterrupt):
            copy(model, url)
    with pytest.raises(CheckpointError, match="did not finish"):
        vescale_ckpt.load(url)
    copy(model, url)
    assert loads(url, state())
