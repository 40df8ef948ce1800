"""Checkpoints that several modules damage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.saves import save, stock_save
from harness.states import state


@pytest.fixture(scope="module", params=["ours", "ours, a file each", "stock"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of `state(1)`, written by one of the writers. Tests leave it as they found it."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoint"
    if request.param == "stock":
        stock_save(directory, state(1))
    else:
        save(directory, state(1), single_file_per_rank=request.param == "ours")
    yield directory
    shutil.rmtree(directory)
