"""`verify` takes files of every format that `convert` takes, as the command does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vescale_ckpt
from vescale_ckpt import CheckpointError, cli

FORMATS = {"torch": "x.pt", "safetensors": "x.safetensors"}


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_verify_knows_every_format(checkpoint: Path, tmp_path: Path, format: Any, quick: bool) -> None:
    vescale_ckpt.save(checkpoint, {"weight": torch.arange(1000.0)})
    path = tmp_path / FORMATS[format]
    vescale_ckpt.convert(checkpoint, path, format=format)
    report = vescale_ckpt.verify(path, quick=quick)
    assert report.ok and (report.keys, report.files, report.bytes) == (1, 1, 0 if quick else 4000)
    assert cli.main(["verify", str(path)]) == 0


def test_verify_lists_damage_of_files_of_torch(checkpoint: Path, tmp_path: Path) -> None:
    vescale_ckpt.save(checkpoint, {"weight": torch.arange(1000.0)})
    path = tmp_path / "x.pt"
    vescale_ckpt.convert(checkpoint, path, format="torch")
    content = bytearray(path.read_bytes())
    content[content.index(torch.tensor([999.0]).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert [damage.key for damage in vescale_ckpt.verify(path).damaged] == ["weight"]
    path.write_bytes(content[:100])
    assert vescale_ckpt.verify(path).damaged and cli.main(["verify", str(path)]) == 1


def test_verify_lists_what_is_missing_and_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    assert vescale_ckpt.verify(tmp_path / "missing").damaged and vescale_ckpt.verify(tmp_path).damaged
    torch.save({"weight": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"before torch 1\.6"):
        vescale_ckpt.verify(tmp_path / "old.pt")
