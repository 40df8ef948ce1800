"""For tests on a GPU: batches of copies stay off where the environment turns them off, as where they crash or hang."""

from __future__ import annotations

import os

import pytest

_BATCHES = "VESCALE_CKPT_COPY_BATCHES"
_WANTED = os.environ.get(_BATCHES)


@pytest.fixture(autouse=True)
def batches_as_wanted(clean_slate: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`clean_slate` takes all settings away."""
    if _WANTED is not None:
        monkeypatch.setenv(_BATCHES, _WANTED)
