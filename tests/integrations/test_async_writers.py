"""`.metadata` of the real asynchronous writers of NVRx and Megatron-core, and with OLMo-core's class, is data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vescale_ckpt

pytestmark = pytest.mark.slow

JOB = Path(__file__).parent / "async_writer_job.py"
WRITERS = {
    "nvidia_resiliency_ext.checkpointing.async_ckpt": b"WriteItem",
    "megatron.core.dist_checkpointing.strategies": b"WriteItem",
    "olmo_core": b"olmo_core.distributed.checkpoint.filesystem",
}


@pytest.mark.parametrize("writer", WRITERS)
def test_metadata_of_real_writers(tmp_path: Path, writer: str) -> None:
    pytest.importorskip(writer.split(".")[0], reason=writer)
    directory = tmp_path / "saved"
    jobs = [
        subprocess.Popen(
            [sys.executable, JOB, writer, directory, str(rank), "2"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    texts = [job.communicate(timeout=240)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], texts
    assert WRITERS[writer] in (directory / ".metadata").read_bytes()
    rows, numbers, thing = torch.arange(64.0).reshape(16, 4), torch.arange(5), {"n": 7, "values": [1, 2]}
    loaded = vescale_ckpt.load(directory)
    assert torch.equal(loaded["rows"], rows) and torch.equal(loaded["all"], numbers) and loaded["object"] == thing
    into = {"rows": torch.zeros(16, 4), "all": torch.zeros(5, dtype=torch.long), "object": {"n": 0, "values": []}}
    vescale_ckpt.load(directory, into)
    assert torch.equal(into["rows"], rows) and torch.equal(into["all"], numbers) and into["object"] == thing
    assert vescale_ckpt.verify(directory).ok and len(vescale_ckpt.inspect(directory).tensors) == 2
    vescale_ckpt.convert(directory, tmp_path / "whole.pt", format="torch")
    assert torch.equal(torch.load(tmp_path / "whole.pt")["rows"], rows)
