"""The benchmark of exports, tiny: it runs, compares what was written with the state, and prints a row for each way."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import export


def test_every_way_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gib", "0.002", "--ranks", "2", "--rounds", "1", "--held", "columns", "--dir", str(tmp_path)]
    assert export.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "llama, columns" in printed and "on 2 ranks" in printed
    saves = [line.split("  ")[1:] for line in printed.splitlines() if line.startswith("save ")]
    assert {next(filter(None, cells)).strip() for cells in saves} == set(export.CANDIDATES)
    assert list(tmp_path.iterdir()) == []
