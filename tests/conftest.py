"""Fixtures for all tests: a directory to save to, faults cleared, nothing left of one test in the next."""

from __future__ import annotations

import gc
import logging
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from harness import faults
from harness import object_server as servers
from harness.fault_proxy import FaultProxy
from harness.ranks import close_ranks
from torch.distributed.checkpoint.planner import SavePlanner as DcpSavePlanner

from vescale_ckpt import settings


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files whose tests are all slow where slow ones do not run: each would import its framework."""
    if config.option.markexpr == "not slow" and collection_path.suffix == ".py":
        return True if "\npytestmark = pytest.mark.slow" in collection_path.read_text() else None
    return None


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    """Where a test may save: not there yet, on a real disk, removed at once (checkpoints are large)."""
    path = tmp_path / "checkpoint"
    yield path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No faults, no settings from outside, no plans that stock DCP keeps in class attributes, equal random numbers."""
    for setting in settings.SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    torch.manual_seed(0)
    yield
    faults.clear()
    mock.patch.stopall()  # what the test has started
    for name, value in vars(DcpSavePlanner).items():
        if name.startswith("_cached_"):
            value.clear()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background, whose processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def object_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ObjectServer]:
    """A real S3 server, one for all workers of the session; started by the first test that wants it."""
    if reason := servers.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.getbasetemp()
    if folder.name.startswith("popen-"):  # a worker's own
        folder = folder.parent
    with servers.running(folder / "object_server") as server:
        yield server


@pytest.fixture
def bucket_url(object_server: servers.ObjectServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """An `s3://` prefix of this test alone, on the server, which this process and its children find by environment."""
    for name, value in object_server.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://{object_server.bucket}/{uuid.uuid4().hex[:12]}"


@pytest.fixture(params=["memory", "server"])
def url(request: pytest.FixtureRequest) -> str:
    """A prefix in an object store: in the memory of this process, and on the server."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/run"
    prefix: str = request.getfixturevalue("bucket_url")
    return prefix


@pytest.fixture
def fault_proxy(
    bucket_url: str, object_server: servers.ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultProxy]:
    """A proxy in front of the server, by which `bucket_url` goes in this test."""
    with FaultProxy(object_server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def pytest_configure(config: pytest.Config) -> None:
    for warning in (
        "ignore:torch.distributed is (disabled|unavailable)",
        "ignore:Detected an existing checkpoint",
        "ignore:ComplexHalf support is experimental",
        "ignore:torch.quantize_per_tensor",
    ):
        config.addinivalue_line("filterwarnings", warning)
    logging.getLogger("c10d-NullHandler-dcp_logger").disabled = True  # a line for every step of every save


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is no garbage


def pytest_sessionfinish() -> None:
    close_ranks()
