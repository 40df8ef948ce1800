"""Stock DCP reads from an object store, by its own reader of fsspec's paths, what this package wrote there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import vescale_ckpt

pytest.importorskip("obstore", reason="object stores need obstore")
fsspec_files = pytest.importorskip("torch.distributed.checkpoint._fsspec_filesystem", reason="needs fsspec")


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_stock_dcp_reads_what_we_wrote(bucket_url: str, client: str, request: pytest.FixtureRequest) -> None:
    if client == "s3fs":
        pytest.importorskip("s3fs", reason="needs s3fs")
    else:
        _register_obstore(request)
    saved: dict[str, Any] = {
        "large": torch.arange(3 << 20, dtype=torch.float32),
        "strided": torch.randn(70, 90).t(),
        "half": torch.ones(3, 5, dtype=torch.bfloat16),
        "object": "three",
    }
    vescale_ckpt.save(bucket_url, saved)
    target = {name: torch.zeros_like(value) if name != "object" else None for name, value in saved.items()}
    dcp.load(target, storage_reader=fsspec_files.FsspecReader(bucket_url), no_dist=True)
    assert target["object"] == saved["object"]
    assert all(torch.equal(target[name], saved[name]) for name in saved if name != "object")


def _register_obstore(request: pytest.FixtureRequest) -> None:
    """obstore's own file system for fsspec, in the place of s3fs."""
    import fsspec
    from obstore.fsspec import FsspecStore, register

    before = dict(fsspec.registry._registry) if hasattr(fsspec.registry, "_registry") else None
    register("s3", asynchronous=False)
    assert issubclass(fsspec.get_filesystem_class("s3"), FsspecStore)

    def undo() -> None:
        if before is not None:
            fsspec.registry._registry.clear()
            fsspec.registry._registry.update(before)

    request.addfinalizer(undo)
