"""The examples of the Hugging Face Hub: what they give to and take from huggingface_hub, without a server."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

huggingface_hub = pytest.importorskip("huggingface_hub")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with one of each commit of a repository, in place of the hub. Calls are checked against signatures."""
    commits = tmp_path / "hub"

    def upload(_: Any, *, folder_path: str, delete_patterns: str, **options: Any) -> None:
        number = len(list(commits.iterdir()))
        shutil.copytree(commits / f"{number - 1}", commits / f"{number}")
        for file in (commits / f"{number}").iterdir():
            if fnmatch.fnmatch(file.name, delete_patterns):
                file.unlink()
        shutil.copytree(folder_path, commits / f"{number}", dirs_exist_ok=True)

    def download(repository: str, *, revision: str | None = None, **options: Any) -> str:
        return str(commits / (revision or f"{len(list(commits.iterdir())) - 1}"))

    api, snapshot_download = huggingface_hub.HfApi, huggingface_hub.snapshot_download
    monkeypatch.setattr(api, "upload_folder", mock.create_autospec(api.upload_folder, side_effect=upload))
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", mock.create_autospec(snapshot_download, side_effect=download)
    )
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return commits


def test_checkpoints_are_pushed_and_a_job_starts_from_them(hub: Path, tmp_path: Path) -> None:
    import push_to_hub
    import resume_from_hub

    (hub / "0").mkdir(parents=True)
    (hub / "0" / "README.md").write_text("a model")
    (hub / "0" / "old.safetensors").write_text("of before")
    push_to_hub.main(str(tmp_path / "run"), "org/model")
    assert {file.name for file in (hub / "2").iterdir()} == {"README.md", "model.safetensors"}
    assert resume_from_hub.main("org/model").weight.eq(2).all()  # type: ignore[union-attr, operator]
    assert torch.equal(resume_from_hub.main("org/model", "1").weight, torch.ones(64, 64))  # type: ignore[arg-type]
