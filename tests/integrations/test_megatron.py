"""`vescale_ckpt.integrations.megatron`: Megatron saves through this package, and loads on any number of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import vescale_ckpt

pytest.importorskip("megatron.core", reason="megatron-core")
pytestmark = pytest.mark.slow  # its import takes longer than the test

JOB = Path(__file__).parent / "megatron_job.py"


def _run(directory: Path, what: str, ranks: int) -> list[dict[str, object]]:
    jobs = [
        subprocess.Popen(
            [sys.executable, JOB, what, directory, str(rank), str(ranks)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    texts = [job.communicate(timeout=240)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * ranks, texts
    return [json.loads(text.splitlines()[-1]) for text in texts]


def test_megatron_loads_what_it_saved_through_us(tmp_path: Path) -> None:
    directory = tmp_path / "iter_0000007"
    _run(directory, "save", 2)
    assert vescale_ckpt.inspect(directory).writer == "vescale_ckpt"
    assert vescale_ckpt.verify(directory).ok
    assert {"common.pt", "metadata.json", ".metadata"} <= {path.name for path in directory.iterdir()}
    same = _run(directory, "load", 2)
    assert same == [{"equal": True, "iteration": 7, "objects": [rank], "async": "CheckpointError"} for rank in range(2)]
    (other,) = _run(directory, "load", 1)
    assert other == {"equal": True, "iteration": 7, "objects": [0, 1], "async": "CheckpointError"}
