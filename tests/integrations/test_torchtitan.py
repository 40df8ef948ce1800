"""Tests `vescale_ckpt.integrations.torchtitan` with torchtitan's own trainer, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

from harness import jobs, stores

import vescale_ckpt

pytestmark = pytest.mark.slow
JOB = Path(__file__).with_name("torchtitan_job.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a job with stock checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return jobs.run(JOB, str(folder), "--checkpoint.async_mode", "disabled", STOCK="1")


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_killed_job_goes_on_bit_for_bit(tmp_path: Path, undisturbed: dict[int, str], mode: str) -> None:
    flags = ["--checkpoint.async_mode", mode, "--checkpoint.keep_latest_k", "2"]
    with jobs.started(JOB, str(tmp_path), *flags) as job:
        job.wait_for_step(7)
        job.kill()
        job.wait()
        assert "plan reused" in "".join(job.output)
    resumed = jobs.run(JOB, str(tmp_path), *flags)
    first = min(resumed)
    assert first == 7 or (mode == "async" and first == 5)
    jobs.assert_same(resumed, undisturbed, first=first)
    folder = tmp_path / "checkpoint"
    # torchtitan does not purge at the last step, and a job that is killed may not have purged before.
    assert len(list(folder.iterdir())) <= (4 if mode == "async" else 3)
    for path in sorted(folder.iterdir())[-2:]:  # the kill may come while torchtitan removes an older one
        info = vescale_ckpt.inspect(path)
        assert info.writer == "vescale_ckpt" and vescale_ckpt.verify(path).ok
        assert "optimizer.state.norm.weight.exp_avg" in info.tensors


def test_a_killed_job_goes_on_from_an_object_store(
    tmp_path: Path, bucket_url: str, undisturbed: dict[int, str]
) -> None:
    flags = ["--checkpoint.folder", bucket_url, "--checkpoint.async_mode", "async", "--checkpoint.keep_latest_k", "2",
             "--checkpoint.interval", "1"]  # fmt: skip
    jobs.run_and_kill(JOB, str(tmp_path), *flags, at=5)
    resumed = jobs.run(JOB, str(tmp_path), *flags)
    assert 3 <= min(resumed) <= 6
    jobs.assert_same(resumed, undisturbed, first=min(resumed))
    steps = {name for name in stores.names(bucket_url) if stores.data_files(f"{bucket_url}/{name}")}
    assert {"step-7", "step-8"} <= steps and len(steps) <= 3  # torchtitan does not purge at the last step
    assert all(vescale_ckpt.verify(f"{bucket_url}/{name}").ok for name in steps)
    assert not (tmp_path / "checkpoint").exists()


def test_stock_goes_on_from_ours(tmp_path: Path, undisturbed: dict[int, str]) -> None:
    jobs.run_and_kill(JOB, str(tmp_path), at=5)
    resumed = jobs.run(JOB, str(tmp_path), STOCK="1")
    assert min(resumed) in (5, 7)  # the kill may come after step 6 has been saved
    jobs.assert_same(resumed, undisturbed, first=min(resumed))


def test_another_number_of_ranks_is_told_how_to_go_on(tmp_path: Path) -> None:
    jobs.run_and_kill(JOB, str(tmp_path), at=3, ranks=1)
    with jobs.started(JOB, str(tmp_path), ranks=2) as job:
        assert job.wait() != [0, 0]
        assert "--checkpoint.exclude_from_loading dataloader" in job.text
    resumed = jobs.run(JOB, str(tmp_path), "--checkpoint.exclude_from_loading", "dataloader", ranks=2)
    assert min(resumed) == 3


def test_the_last_model_as_safetensors(tmp_path: Path) -> None:
    jobs.run(JOB, str(tmp_path), "--training.steps", "1", "--checkpoint.last_save_model_only",
             "--checkpoint.last_save_in_hf", ranks=2)  # fmt: skip
    info = vescale_ckpt.inspect(tmp_path / "checkpoint" / "step-1")
    assert info.format == "safetensors" and "model.embed_tokens.weight" in info.tensors
