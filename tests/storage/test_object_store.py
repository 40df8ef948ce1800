"""Saves, loads and checks in object stores: in memory, and on a real S3 server."""

from __future__ import annotations

import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import stores
from harness.fault_proxy import Rule
from harness.object_server import unfinished_uploads
from harness.python_forks import run_python
from harness.ranks import on_ranks
from harness.saves import loaded
from harness.states import assert_same, blank, sharded
from harness.stores import data_files
from torch.distributed.tensor import Replicate, Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError
from vescale_ckpt._storage import object_clients, paths
from vescale_ckpt._storage.open_storage import checkpoint_path, storage_at

obstore = pytest.importorskip("obstore", reason="object stores need obstore")
from obstore.store import LocalStore, MemoryStore  # noqa: E402

MiB = 1 << 20


@pytest.fixture(autouse=True)
def no_stores_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_clients, "_registered", {})
    monkeypatch.setattr(object_clients, "_opened", {})


def state(seed: int = 0) -> dict[str, Any]:
    """Several parts of a multipart upload, small tensors between large ones, views, objects."""
    torch.manual_seed(seed)
    return {
        "large": torch.randn(5 * MiB),
        "small": [torch.randn(number) for number in range(1, 40)],
        "transposed": torch.randn(700, 900).t(),
        "strided": torch.randn(64, 300, 300)[:, ::2, 7:200],
        "scalar": torch.tensor(3.0),
        "bytes": torch.randint(0, 255, (3 * MiB + 17,), dtype=torch.uint8),
        "empty": torch.empty(0, 7),
        "object": {"step": 7, "text": "x" * 1000},
    }


# --- Round trips


@pytest.mark.parametrize("in_background", [False, True])
def test_what_was_saved_is_loaded_verified_and_listed(url: str, in_background: bool) -> None:
    saved = state()
    vescale_ckpt.save(url, saved, async_checkpoint=in_background).result()
    assert_same(loaded(url, saved), saved)
    report = vescale_ckpt.verify(url)
    assert report.ok and not report.harmless and not report.unchecked, report
    assert vescale_ckpt.verify(url, quick=True).ok
    info = vescale_ckpt.inspect(url)
    assert info.tensors["large"].shape == (5 * MiB,)
    # No zeros behind the end of the file.
    (name,) = data_files(url)
    assert info.files[name] == stores.size(url, name)


def test_the_file_is_that_of_a_local_save(url: str, checkpoint: Path) -> None:
    saved = state()
    vescale_ckpt.save(url, saved)
    vescale_ckpt.save(checkpoint, saved)
    (name,), (local,) = data_files(url), checkpoint.glob("*.distcp")
    assert stores.read(url, name) == local.read_bytes()


def test_a_save_replaces_the_one_before_and_removes_its_files(url: str) -> None:
    vescale_ckpt.save(url, state(1))
    before = data_files(url)
    vescale_ckpt.save(url, state(2))
    assert data_files(url).isdisjoint(before) and len(data_files(url)) == 1
    assert_same(loaded(url, state(2)), state(2))


def test_extra_files_and_keys(url: str) -> None:
    vescale_ckpt.save(url, {"w": torch.ones(3)}, extra_files={"config.json": b"{}"})
    assert stores.read(url, "config.json") == b"{}"
    files: dict[str, bytes] = {}
    vescale_ckpt.load(url, {"w": torch.zeros(3)}, extra_files=files)
    assert files == {"config.json": b"{}"}


def test_dcp_saves_and_loads(url: str) -> None:
    saved = {key: value for key, value in state().items() if key not in ("object", "small")}
    for one_file in (True, False):
        dcp.save(saved, storage_writer=vescale_ckpt.StorageWriter(url, single_file_per_rank=one_file))
        assert (len(data_files(url)) == 1) == one_file
        target = blank(saved)
        dcp.load(target, storage_reader=vescale_ckpt.StorageReader(url))
        assert_same(target, saved)
    vescale_ckpt.save(url + "/ours", saved)
    reader = vescale_ckpt.StorageReader("memory://nothing")
    dcp.load(blank(saved), storage_reader=reader, checkpoint_id=url + "/ours")


# --- Several ranks


@on_ranks(2)
def test_two_ranks_in_a_folder(tmp_path: Path) -> None:
    url = f"s3://{tmp_path.name}/run"
    vescale_ckpt.register_store(url.removesuffix("/run"), LocalStore(str(tmp_path / "store"), mkdir=True))
    torch.manual_seed(0)
    whole = {"a": torch.randn(2 * MiB, 2), "b": torch.randn(64)}
    saved = {"a": sharded(whole["a"], Shard(0)), "b": sharded(whole["b"], Replicate())}
    vescale_ckpt.save(url, saved)
    vescale_ckpt.save(url, saved, async_checkpoint=True).result()
    for broadcast in (False, "auto", True):
        target = {name: torch.zeros_like(value) for name, value in whole.items()}
        report = vescale_ckpt.load(url, target, broadcast_checkpoint=broadcast)
        assert all(torch.equal(target[name], whole[name]) for name in whole)
        # An object store is shared and slow: "auto" reads each byte once also on one node.
        assert bool(report.stats.shared_bytes) == (broadcast is not False)
    assert vescale_ckpt.verify(url).ok


@on_ranks(2)
def test_the_memory_of_each_rank_is_not_one_directory() -> None:
    with pytest.raises(CheckpointError, match="is not one directory"):
        vescale_ckpt.save("memory://shared", {"w": torch.zeros(3)})


# --- Commits


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("action", ["lost_answer", "late_error"])
def test_a_commit_whose_answer_is_lost_counts(fault_proxy: Any, bucket_url: str, action: Any, overwrite: bool) -> None:
    fault_proxy.add(Rule(action, kind="put", path=".metadata"))
    vescale_ckpt.save(bucket_url, {"w": torch.ones(5)}, overwrite=overwrite)
    assert_same(loaded(bucket_url, {"w": torch.zeros(5)}), {"w": torch.ones(5)})


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("my own error")


def test_a_save_that_is_given_up_aborts_its_upload(url: str) -> None:
    with pytest.raises(CheckpointError, match="my own error"):
        vescale_ckpt.save(url, {"w": torch.randn(5 * MiB), "bad": Unpicklable()})
    assert not stores.names(url)
    assert not [thread for thread in threading.enumerate() if thread.name == "vescale_ckpt upload"]


GIVEN_UP = """
import sys, torch, vescale_ckpt
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

class Planner(DefaultSavePlanner):
    def resolve_data(self, item):
        if item.index.fqn == "last":
            raise RuntimeError("my own error")
        return super().resolve_data(item)

state = {"w": torch.zeros(5 << 20), "last": "object"}
try:
    dcp.save(state, storage_writer=vescale_ckpt.StorageWriter(sys.argv[1]), planner=Planner())
except BaseException as error:
    print("my own error" in str(error))
"""


def test_a_save_that_is_given_up_while_it_sends_ends(bucket_url: str, object_server: Any) -> None:
    """In a process of its own: what could go wrong is that nothing goes on."""
    pytest.importorskip("boto3", reason="uploads that are left are listed by boto3")
    done = run_python([sys.executable, "-c", GIVEN_UP, bucket_url], timeout=180)
    assert done.stdout.strip().endswith("True"), done.stderr
    assert not unfinished_uploads(object_server, bucket_url)
    assert storage_at(bucket_url).folders() == [] and not data_files(bucket_url)


# --- What goes wrong when reading


def test_an_object_that_is_replaced_is_no_mixture(url: str) -> None:
    vescale_ckpt.save(url, state())
    (name,) = data_files(url)
    assert_same(loaded(url, state()), state())
    stores.write(url, name, stores.read(url, name)[::-1])
    with pytest.raises(CheckpointError) as raised:
        loaded(url, state())
    assert isinstance(raised.value, CorruptCheckpointError)
    assert name in str(raised.value)


def test_a_missing_data_file_is_named(url: str) -> None:
    vescale_ckpt.save(url, state())
    (name,) = data_files(url)
    stores.remove(url, name)
    with pytest.raises(CorruptCheckpointError, match="data file is missing"):
        loaded(url, state())
    assert not vescale_ckpt.verify(url, quick=True).ok


class _CutOff:
    """An answer whose last byte did not come."""

    def __init__(self, answer: Any) -> None:
        self.meta, self._answer = answer.meta, answer

    def bytes(self) -> bytes:
        return bytes(self._answer.bytes())[:-1]


def test_an_end_that_is_always_cut_off_is_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    get, storage = obstore.get, storage_at(url)
    storage.write("a", bytes(100))
    monkeypatch.setattr(obstore, "get", lambda *one, **more: _CutOff(get(*one, **more)))
    with pytest.raises(OSError, match="came short"):
        storage.read_range("a", -10, 10)


class NotSupportedError(Exception):
    """Of obstore, named so."""


@pytest.fixture
def no_ranges_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Azure."""
    get = obstore.get

    def refuse(store: Any, key: str, *, options: dict[str, Any] | None = None) -> Any:
        if "suffix" in str(options):
            raise NotSupportedError("Azure does not support suffix range requests")
        return get(store, key, options=options)

    monkeypatch.setattr(obstore, "get", refuse)


@pytest.mark.usefixtures("no_ranges_from_the_end")
def test_saves_and_loads_without_ranges_from_the_end(url: str) -> None:
    for _ in range(2):
        vescale_ckpt.save(url, state())
    assert_same(loaded(url, state()), state())


@pytest.mark.usefixtures("no_ranges_from_the_end")
def test_an_end_is_that_of_one_version_where_it_takes_two_requests(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, storage = obstore.head, storage_at(url)
    storage.write("a", b"1" * 100)

    def replaced_behind(store: Any, key: str) -> Any:
        found = head(store, key)
        if found["size"] == 100:
            obstore.put(store, key, b"2" * 100 + b"3" * 100)
        return found

    monkeypatch.setattr(obstore, "head", replaced_behind)
    found, end = storage.read_range("a", -10, 10)
    assert (found.size, end) == (200, b"3" * 10)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("denied", "access was denied"),
        ("expired", "credentials have expired"),
        ("skewed", "clock is wrong"),
        ("wrong_key", "access was denied"),
        ("no_bucket", "no such bucket"),
        ("redirect", "another region"),
        # These are tried again as long as the setting says.
        pytest.param("slow_down", "throttles", marks=pytest.mark.slow),
        pytest.param("error", "the store failed", marks=pytest.mark.slow),
        pytest.param("stall", "did not answer in time", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("way", ["save", "load"])
def test_what_lasts_raises_in_bounded_time_and_says_what_it_is(
    fault_proxy: Any, bucket_url: str, monkeypatch: pytest.MonkeyPatch, way: str, action: Any, text: str
) -> None:
    monkeypatch.setenv("VESCALE_CKPT_OBJECT_STORE_TIMEOUT", "5")
    if way == "load":
        vescale_ckpt.save(bucket_url, {"w": torch.ones(5)})
    kind = "get" if way == "load" else "put"
    fault_proxy.add(Rule(action, kind=kind, times=100_000))
    with pytest.raises(CheckpointError, match=text):
        if way == "save":
            vescale_ckpt.save(bucket_url, {"w": torch.ones(5)})
        else:
            loaded(bucket_url, {"w": torch.zeros(5)})


def test_a_store_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "VESCALE_CKPT_OBJECT_STORE_TIMEOUT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match="cannot be reached"):
        vescale_ckpt.save("s3://bucket/run", {"w": torch.ones(5)})
    with pytest.raises(CheckpointError, match="cannot be reached"):
        vescale_ckpt.load("s3://bucket/run", {"w": torch.ones(5)})


# --- What cannot be done there says so


def test_refusals() -> None:
    url = f"memory://{uuid.uuid4().hex}/run"
    with pytest.raises(CheckpointError, match="another name first"):
        vescale_ckpt.safetensors.save_file({"w": torch.ones(3)}, url + "/model.safetensors")


# --- Paths and stores


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3://bucket", "s3://bucket"),
        ("memory://a", "memory://a"),
        ("gs://bucket/a b", "gs://bucket/a b"),
        ("az://container/a", "az://container/a"),
    ],
)
def test_urls_are_paths(given: str, path: str) -> None:
    assert checkpoint_path(given) == path


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("s3://", "no bucket"),
        ("s3:///key", "no bucket"),
        ("gs:///a/b", "no bucket"),
        ("memory://", "no folder"),
        ("s3://bucket/a//b", "mean nothing"),
        ("s3://bucket/../b", "mean nothing"),
        ("s3://bucket/a?b=c", "cannot be part"),
        ("s3:/bucket/a", "write s3://bucket/a"),
        ("http://host/a", "no storage for http://"),
    ],
)
def test_urls_that_mean_nothing_are_refused(given: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        checkpoint_path(given)


@pytest.mark.parametrize("root", ["bucket", "s3://bucket/key", "file:///a", 3])
def test_only_roots_are_registered(root: Any) -> None:
    with pytest.raises(ValueError, match="bucket"):
        vescale_ckpt.register_store(root, MemoryStore())


def test_without_obstore_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['obstore'] = None\n"
        "import vescale_ckpt\n"
        "try: vescale_ckpt.load('s3://bucket/run', {})\n"
        "except vescale_ckpt.CheckpointError as error: print(error)"
    )
    done = run_python([sys.executable, "-c", code])
    assert "pip install 'vescale_ckpt[object-stores]'" in done.stdout, done.stderr


def test_local_paths_do_not_import_it(checkpoint: Path) -> None:
    code = (
        f"import torch, sys, vescale_ckpt\nvescale_ckpt.save({str(checkpoint)!r}, {{'w': torch.ones(3)}})\n"
        "print('obstore' in sys.modules)"
    )
    done = run_python([sys.executable, "-c", code])
    assert done.stdout.strip() == "False", done.stderr


# --- The directory


def test_large_metadata_is_checked_before_it_is_read(url: str) -> None:
    found, sizes = storage_at(url), []
    found.write("a", b"x" * (3 * MiB))

    def check(beginning: bytes, size: int) -> None:
        sizes.append((len(beginning), size))

    assert found.read("a", check) == b"x" * (3 * MiB)
    assert sizes == [(MiB, 3 * MiB)]


def test_what_obstore_says_is_in_one_line() -> None:
    url = "s3://bucket/a"
    error = object_clients.named(RuntimeError("it is\n  so\n\nDebug source:\nX {}"), url)
    assert str(error) == f"{url}: it is so"
    assert paths.split("memory://a/b") == ("memory://", "a/b")


# --- Stock DCP reads, by its own reader of fsspec's paths, what was written here


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
