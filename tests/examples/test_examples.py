"""The examples run, and do what their pages and texts say."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness.python_forks import run_python
from harness.ranks import run_ranks

import vescale_ckpt

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def beside_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


# --- A folder for transformers, out of a training's checkpoint


@pytest.mark.slow
@pytest.mark.usefixtures("beside_the_examples")
def test_transformers_loads_what_it_exports(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    from minilm import random_tiny

    model = random_tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(24).view(2, 12)).sum().backward()
    optimizer.step()
    state = {"train": {"model": model, "optimizer": optimizer, "step": 3}}  # as train_fsdp.py saves it
    vescale_ckpt.save(tmp_path / "checkpoint", state)
    weights = dict(model.state_dict())
    folder = tmp_path / "folder"
    command = [sys.executable, str(EXAMPLES / "export_hf.py"), str(tmp_path / "checkpoint"), str(folder), "--head=8"]
    command += ["--dtype=bfloat16", "--max-shard-size=40KB"]
    run = run_python(command, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert run.returncode == 0, run.stderr
    assert not (folder / "model.safetensors").exists()
    read, report = transformers.BertModel.from_pretrained(folder, output_loading_info=True, dtype=torch.bfloat16)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    loaded = read.state_dict()
    assert len(loaded) > 30
    for name, tensor in loaded.items():
        assert torch.equal(tensor, weights[name].to(torch.bfloat16)), name


# --- The Hugging Face Hub: what is given to and taken from huggingface_hub, without a server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with one of each commit of a repository, in place of the hub. Calls are checked against signatures."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
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
    return commits


@pytest.mark.usefixtures("beside_the_examples")
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


# --- A job that loses a machine, on one computer, as docs/howto/tiers.md says


def _has_mount_namespaces() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not _has_mount_namespaces(), reason="this system gives no mount namespaces to its users")
def test_a_job_that_loses_a_machine_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "lose_a_machine.py"), f"--dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["ok"] * 5
    assert done.stdout.rstrip().endswith("60: 1}"), done.stdout  # each step's files lie on two of three machines
    assert list(tmp_path.iterdir()) == []


# --- Asynchronous saves: a run that was resumed goes on as if nothing had been


def train(directory: Path, *options: str) -> int:
    """The step that it started from."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import train_async
    finally:
        sys.path.remove(str(EXAMPLES))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums are taken in one order, however many processors there are
    try:
        return int(train_async.main([f"--directory={directory}", *options]))
    finally:
        torch.set_num_threads(threads)


def last_loss(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("step 60: ")).split()[3]


def test_it_resumes_as_if_nothing_had_been(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, str(EXAMPLES / "train_async.py"), f"--directory={tmp_path / 'one'}", "--steps=50"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    run = run_python(command, env=environment)
    assert run.returncode == 0, run.stderr
    assert "state copied" in run.stdout and "at step 50; checkpoints of steps [20, 40]" in run.stdout
    assert train(tmp_path / "one", "--steps=60", "--gate") == 40
    resumed = capsys.readouterr().out
    assert "resumed from step 40" in resumed and "checkpoints of steps [40, 60]" in resumed
    assert train(tmp_path / "another", "--steps=60") == 0
    assert last_loss(resumed) == last_loss(capsys.readouterr().out)


def test_two_ranks_resume(tmp_path: Path) -> None:
    assert run_ranks(2, train, tmp_path, "--steps=50", "--gate") == [0, 0]
    assert run_ranks(2, train, tmp_path, "--steps=90") == [40, 40]
    assert train(tmp_path, "--steps=80") == 80  # on one rank
