"""The limit of storage under which benchmarks run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.storage import UnavailableError, storage_limit


@pytest.mark.root
def test_storage_is_limited_for_as_long_as_asked(tmp_path: Path) -> None:
    try:
        with storage_limit(tmp_path) as limit:
            limit.set(10**6)
            (group,) = Path("/sys/fs/cgroup").rglob("vescale-ckpt-benchmark-*")
            found = (
                "".join(path.read_text() for path in group.glob("*read_bps_device")) or (group / "io.max").read_text()
            )
            assert "1000000" in found
            limit.set(None)
    except UnavailableError as error:
        pytest.skip(str(error))
    assert not group.exists()
