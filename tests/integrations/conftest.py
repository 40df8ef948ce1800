"""Fixtures for tests of frameworks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Frameworks set variables such as `LOCAL_RANK`, by which others take this process for a rank of a job: the
    variables are as before after each test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
