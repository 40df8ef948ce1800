"""The pictures of `--plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vescale_ckpt
from vescale_ckpt import cli


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    values = torch.tensor([1e-9, -4.0, 0.0, float("nan"), 1e9])
    vescale_ckpt.save(tmp_path / "c", {"$x_^$": values, "y": torch.ones(4), "e": torch.empty(0), "\x1b[2J": values})
    return tmp_path / "c"


def test_without_matplotlib_one_line_says_what_to_install(
    checkpoint: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert cli.main(["stats", str(checkpoint), "--plot", str(tmp_path / "a.png")]) == 2
    err = capsys.readouterr().err
    assert 'pip install "vescale_ckpt[plot]"' in err and len(err.splitlines()) == 1
    assert not (tmp_path / "a.png").exists()


def test_pictures_are_drawn(checkpoint: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["stats", str(checkpoint), "--plot", str(tmp_path / "a.png")]) == 1
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
