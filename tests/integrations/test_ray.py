"""`vescale_ckpt.integrations.ray`: a run of Ray Train goes on after its worker dies, and when it is started again."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from harness import jobs, stores
from harness.object_server import ObjectServer

import vescale_ckpt

pytest.importorskip("ray.train")
fs = pytest.importorskip("pyarrow.fs")
pytestmark = pytest.mark.slow  # Ray takes its time to start

EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "train_ray.py"
# Ray lets its workers wait for all others: on a machine in use they miss the time limits of Ray itself.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_worker_niceness": "0"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a run that nothing interrupts, which also keeps two checkpoints of this package and no others."""
    directory = tmp_path_factory.mktemp("whole")
    with jobs.started(EXAMPLE, str(directory), ranks=1, **QUIET) as job:
        assert job.wait() == [0], job.text
    assert "plan reused" in job.text
    assert sorted(path.name for path in directory.glob("run/step-*")) == ["step-6", "step-8"]
    assert vescale_ckpt.inspect(directory / "run" / "step-8").writer == "vescale_ckpt"
    return job.losses


def test_a_worker_that_dies_is_replaced(tmp_path: Path, whole: dict[int, str]) -> None:
    with jobs.started(EXAMPLE, str(tmp_path), ranks=1, **QUIET) as job:
        job.wait_for_step(6)
        worker = re.search(r"RayTrainWorker pid=(\d+)[^\n]* step 6 loss", job.text)
        assert worker is not None
        os.kill(int(worker[1]), signal.SIGKILL)
        assert job.wait() == [0], job.text
    jobs.assert_same(job.losses, whole, first=1)
    assert len(set(re.findall(r"RayTrainWorker pid=(\d+)[^\n]* step \d", "".join(job.output)))) == 2


def test_a_run_is_started_again_with_fewer_workers(tmp_path: Path, whole: dict[int, str]) -> None:
    jobs.run_and_kill(EXAMPLE, str(tmp_path), at=6, ranks=1, **QUIET)
    resumed = jobs.run(EXAMPLE, str(tmp_path), "1", ranks=1, **QUIET)
    assert min(resumed) in (3, 5, 7), "it goes on from a checkpoint"
    jobs.assert_close(resumed, whole, first=min(resumed), most=0.05)  # other dropout


def test_a_run_is_started_again_in_an_object_store(
    bucket_url: str, object_server: ObjectServer, whole: dict[int, str]
) -> None:
    storage = f"{bucket_url}?endpoint_override=127.0.0.1:{object_server.port}&scheme=http"
    jobs.run_and_kill(EXAMPLE, storage, at=6, ranks=1, **QUIET)
    resumed = jobs.run(EXAMPLE, storage, ranks=1, **QUIET)
    assert min(resumed) in (3, 5, 7)
    jobs.assert_same(resumed, whole, first=min(resumed))
    steps = {name for name in stores.names(f"{bucket_url}/run") if name.startswith("step-")}
    assert "step-8" in steps and len([name for name in steps if stores.names(f"{bucket_url}/run/{name}")]) == 2
    assert vescale_ckpt.verify(f"{bucket_url}/run/step-8").ok


def test_a_storage_that_is_unknown_here_is_refused() -> None:
    from vescale_ckpt.integrations.ray import _url

    with pytest.raises(vescale_ckpt.CheckpointError, match=r"file system 'mock'.*s3://, gs:// and az://"):
        _url(fs._MockFileSystem(), "run")


def test_outside_of_a_run_there_is_one_error() -> None:
    from vescale_ckpt.integrations.ray import report

    with pytest.raises(RuntimeError, match="outside of a Ray Train training function"):
        report({}, {}, step=1)
