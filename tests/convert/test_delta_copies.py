"""Copies and conversions of delta saves: they need no file of another checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import saves
from harness.commands import copy
from harness.files import DELTA_NAME, LEASE_MARKER, data_files, flip
from harness.states import same

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError
from vescale_ckpt.cli import main

State = dict[str, Any]


def lora(step: int) -> State:
    torch.manual_seed(5)
    return {"model": {"frozen": torch.randn(200, 300), "adapter": torch.full((3000,), float(step))}, "step": step}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in range(3):
        base = tmp_path / "run" / f"step-{max(0, step - 1)}"
        vescale_ckpt.save(tmp_path / "run" / f"step-{step}", lora(step), base=base)
    return tmp_path / "run"


def loads(path: Path, step: int) -> bool:
    return saves.loads(path, lora(step))


def test_a_copy_is_self_contained(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere" / "copy"
    report = copy(run / "step-2", copied)
    assert report.files == 4 and not vescale_ckpt.inspect(copied).referred_files
    shutil.rmtree(run)
    assert loads(copied, 2) and vescale_ckpt.verify(copied).ok and not vescale_ckpt.verify(copied).harmless
    assert same(vescale_ckpt.load(copied), lora(2)), "nested as it was saved"
    stats = vescale_ckpt.save(copied.parent / "next", lora(3), base=copied).result()
    assert stats.reused_tensors == 1, "it can be a base"
    assert main(["copy", str(copied.parent / "next"), str(copied), "--overwrite"]) == 2, "its file is named"
    assert loads(copied.parent / "next", 3) and loads(copied, 2)


def test_the_copy_of_a_delta_save_can_be_replaced(run: Path, tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "whole", lora(9))
    for source, step in [(run / "step-2", 2), (run / "step-2", 2), (run / "step-1", 1), (tmp_path / "whole", 9)]:
        copy(source, tmp_path / "copy", overwrite=True)
        assert loads(tmp_path / "copy", step) and vescale_ckpt.verify(tmp_path / "copy").ok
    assert not (tmp_path / "copy" / DELTA_NAME).exists()
    copy(run / "step-2", tmp_path / "copy", overwrite=True)
    (tmp_path / "copy" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds notes\.txt"):
        copy(run / "step-1", tmp_path / "copy", overwrite=True)


def test_a_folder_whose_mark_was_dropped_is_not_replaced(run: Path, tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "other", lora(9))
    (run / "step-0" / LEASE_MARKER).unlink()
    with pytest.raises(CheckpointError, match="name its files"):
        copy(tmp_path / "other", run / "step-0", overwrite=True)
    assert loads(run / "step-2", 2)


def test_a_copy_of_what_is_damaged_names_the_file(run: Path, tmp_path: Path) -> None:
    flip(data_files(run / "step-0")[0], 8 * 100_000)
    with pytest.raises(CorruptCheckpointError, match="frozen"):
        copy(run / "step-2", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    data_files(run / "step-0")[0].unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        copy(run / "step-2", tmp_path / "copy")
    for quick in (True, False):
        [damage] = [found for found in vescale_ckpt.verify(run / "step-2", quick=quick).damaged if found.key is None]
        assert "step-0" in damage.file


@pytest.mark.parametrize("format", ["dcp", "torch", "safetensors"])
def test_a_conversion_is_self_contained(run: Path, tmp_path: Path, format: Any) -> None:
    made = tmp_path / ("made" if format == "dcp" else f"made.{format}")
    vescale_ckpt.convert(run / "step-2", made, format=format, on_objects="drop")
    shutil.rmtree(run)
    found = torch.load(made) if format == "torch" else vescale_ckpt.load(made)
    tensors = found["model"] if format != "safetensors" else {key.split(".")[-1]: found[key] for key in found}
    assert same(tensors, lora(2)["model"])


def test_a_conversion_into_a_directory_keeps_what_others_name(run: Path, tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "other", lora(9))
    vescale_ckpt.convert(tmp_path / "other", run / "step-0", format="dcp", overwrite=True)
    assert loads(run / "step-0", 9) and loads(run / "step-2", 2)


def test_inspect_tells_what_lies_elsewhere(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = vescale_ckpt.inspect(run / "step-2")
    (name,) = info.referred_files
    assert name == f"../step-0/{data_files(run / 'step-0')[0].name}" and info.files[name] > 240_000
    assert 240_000 < info.referred_bytes < 243_000
    assert main(["inspect", str(run / "step-2")]) == 0
    assert "elsewhere" in (text := capsys.readouterr().out) and "step-0" in text
    assert main(["inspect", str(run / "step-2"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["referred_files"] == [name]
    assert main(["inspect", str(run / "step-0")]) == 0
    assert "elsewhere" not in capsys.readouterr().out
