"""Fixtures for all tests: a directory to save to, faults cleared, nothing left of one test in the next."""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rank_pool import close_ranks
from torch.distributed.checkpoint.planner import SavePlanner as DcpSavePlanner

from vescale_ckpt import settings
from vescale_ckpt._engine import _C


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    """Where a test may save: not there yet, on a real disk, removed at once (checkpoints are large)."""
    path = tmp_path / "checkpoint"
    yield path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No faults, no settings from outside, no plans that stock DCP keeps in class attributes, equal random numbers."""
    for setting in settings.SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    torch.manual_seed(0)
    yield
    _C.clear_faults()
    for name, value in vars(DcpSavePlanner).items():
        if name.startswith("_cached_"):
            value.clear()


def pytest_configure(config: pytest.Config) -> None:
    for warning in (
        "ignore:torch.distributed is (disabled|unavailable)",
        "ignore:Detected an existing checkpoint",
        "ignore:ComplexHalf support is experimental",
        "ignore:torch.quantize_per_tensor",
    ):
        config.addinivalue_line("filterwarnings", warning)
    logging.getLogger("c10d-NullHandler-dcp_logger").disabled = True  # a line for every step of every save


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is no garbage


def pytest_sessionfinish() -> None:
    close_ranks()
