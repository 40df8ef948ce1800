"""The examples of the Hugging Face Hub, against a server that stands in for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("huggingface_hub")

from harness.hub_server import HubServer, use

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with HubServer() as server, use(server.endpoint, str(tmp_path / "cache")):
        yield server


def test_checkpoints_are_pushed_and_a_job_starts_from_them(hub: HubServer, tmp_path: Path) -> None:
    import push_to_hub
    import resume_from_hub

    repository = hub.repository("org/model", {"README.md": b"a model", "old.safetensors": b"of before"})
    push_to_hub.main(str(tmp_path / "run"), "org/model")
    assert {"README.md", "model.safetensors"} <= repository.files().keys()
    assert "old.safetensors" not in repository.files()
    assert resume_from_hub.main("org/model").weight.eq(2).all()  # type: ignore[union-attr, operator]
    first = list(repository.commits)[1]
    assert torch.equal(resume_from_hub.main("org/model", first).weight, torch.ones(64, 64))  # type: ignore[arg-type]
