"""Two machines for jobs that start again: processes that no test ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.node_jobs import NodeJob, started


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeJob]:
    with started(tmp_path_factory.mktemp("two"), 2) as job:
        yield job
