"""Saves as safetensors files straight into object stores: the files of a local save, under an index or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch as stock_torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import saves
from harness.fault_proxy import Action, FaultProxy, Kind, Rule
from harness.object_server import ObjectServer, unfinished_uploads
from harness.ranks import run_ranks
from harness.states import same, sharded
from harness.stores import names, read, write
from test_joined_exports import columns
from test_safetensors_save import model, state_of_rank, whole
from torch.distributed.tensor import Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError, StorageWriter
from vescale_ckpt._checkpoint.safetensors import export_folder as hf_folder
from vescale_ckpt._checkpoint.safetensors.model_names import INDEX_NAME, SINGLE_NAME, object_names
from vescale_ckpt._routes import routed_write
from vescale_ckpt._storage import orphans
from vescale_ckpt._write import store_layout

pytest.importorskip("obstore", reason="object stores need obstore")

State = dict[str, torch.Tensor]


def save(url: str, state: dict[str, Any], **options: Any) -> Any:
    return vescale_ckpt.save(url, state, format=vescale_ckpt.Safetensors(max_shard_size="1MB"), **options)


def loads(url: str, state: State) -> bool:
    report = vescale_ckpt.verify(url)
    return report.ok and not report.unverified_bytes and saves.loads(url, state)


def download(url: str, folder: Path) -> State:
    """All tensors, as the safetensors library reads them from copies of the files that the index names."""
    folder.mkdir(parents=True)
    for name in names(url):
        (folder / name).write_bytes(read(url, name))
    index = json.loads((folder / INDEX_NAME).read_bytes())["weight_map"]
    assert names(url) == {*index.values(), INDEX_NAME}
    found: State = {}
    for name in set(index.values()):
        tensors = stock_torch.load_file(folder / name)
        assert tensors.keys() == {key for key, file in index.items() if file == name}
        found.update(tensors)
    return found


def pieces_of(bytes_: int) -> Any:
    """For many rounds."""
    return mock.patch.object(routed_write, "PIECE_BYTES", bytes_)


# --- One process


def test_the_files_are_those_of_a_local_save(url: str, tmp_path: Path) -> None:
    state: dict[str, Any] = model(1)
    state["transposed"] = torch.arange(700_000.0).view(1000, 700).t()
    state["negative"] = torch.full((50,), 1 + 2j).conj().imag  # the engine cannot read it directly
    state["tied"] = state["embed"]
    save(f"{url}/a", state)
    expected = {name: value.contiguous() for name, value in state.items() if name != "tied"}
    assert same(download(f"{url}/a", tmp_path / "a"), {name: value.resolve_neg() for name, value in expected.items()})
    assert loads(f"{url}/a", {name: value.clone() for name, value in state.items()})
    save(tmp_path / "local", state)
    local = sorted((tmp_path / "local").glob("*.safetensors"))
    copied = sorted((tmp_path / "a").glob("*.safetensors"))
    assert [file.read_bytes() for file in copied] == [file.read_bytes() for file in local] and len(local) > 2
    # Other tools, and other commands.
    assert same(vescale_ckpt.load(f"{url}/a", keys="embed"), {"embed": state["embed"]})
    assert vescale_ckpt.inspect(f"{url}/a").format == "safetensors"
    vescale_ckpt.convert(f"{url}/a", tmp_path / "dcp", format="dcp")
    assert vescale_ckpt.verify(tmp_path / "dcp").ok


def test_a_model_is_replaced_or_kept(url: str, tmp_path: Path) -> None:
    vescale_ckpt.save(url, model(0), format="safetensors")  # one file, too, has an index
    before = names(url)
    assert len(before) == 2 and INDEX_NAME in before and loads(url, model(0))
    with pytest.raises(CheckpointError, match="overwrite=False"):
        save(url, model(1), overwrite=False)
    assert names(url) == before
    stats = save(url, model(1), async_checkpoint=True).result(60)
    assert loads(url, model(1)) and not names(url) & before - {INDEX_NAME}
    assert stats.bytes == sum(value.nbytes for value in model(1).values()) <= stats.file_bytes
    vescale_ckpt.save(tmp_path, model(2), format="safetensors")
    write(f"{url}/one", SINGLE_NAME, (tmp_path / SINGLE_NAME).read_bytes())
    assert loads(f"{url}/one", model(2))
    with pytest.raises(CheckpointError, match="overwrite=False"):
        save(f"{url}/one", model(3), overwrite=False)
    save(f"{url}/one", model(3))
    assert SINGLE_NAME not in names(f"{url}/one") and loads(f"{url}/one", model(3))


def test_states_at_the_edges() -> None:
    empty = {"none": torch.empty(0, 3)}
    for state in (empty, {"bytes": torch.arange(11, dtype=torch.uint8)}, {}):
        vescale_ckpt.save("memory://edges/run", state, format="safetensors")
        assert vescale_ckpt.load("memory://edges/run", None) == {} or loads("memory://edges/run", state)
    with pytest.raises(CheckpointError, match="these are none: step"):
        save("memory://edges/objects", {"a": torch.ones(3), "step": 3})
    with pytest.raises(dcp.api.CheckpointException, match=r"vescale_ckpt\.save"):
        dcp.save(model(0), storage_writer=StorageWriter("memory://edges/dcp", format="safetensors"), no_dist=True)
    small = mock.patch.dict(os.environ, VESCALE_CKPT_SNAPSHOT_BYTES="1000000")
    with small, pytest.raises(CheckpointError, match="VESCALE_CKPT_SNAPSHOT_BYTES"):
        save("memory://edges/early", model(0), async_checkpoint=True).result(60)
    assert not names("memory://edges/early")


def test_many_small_tensors_and_a_long_header(tmp_path: Path) -> None:
    state: State = {
        f"layers.{number}.a_name_of_some_length": torch.full((40,), float(number)) for number in range(1500)
    }
    state["large"] = torch.arange(500_000)
    vescale_ckpt.save("memory://rounds/run", state, format="safetensors")
    save("memory://rounds/more", state)
    assert loads("memory://rounds/run", state) and same(download("memory://rounds/more", tmp_path / "more"), state)


def test_files_are_dealt_out_evenly() -> None:
    assert routed_write.writers_of([70_000, 5, 4096, 33_000, 100_000], 3) == [0, 1, 2, 1, 2]
    assert routed_write.writers_of([], 2) == []


def changing(tensor: torch.Tensor, when: str = "after") -> Any:
    """Changes a value while tensors are summed; "unseen": after that, in a way that raises no counter."""
    summed = store_layout.StoreLayout.sum

    def sum_and_change(files: Any, held: Any) -> bytes:
        if when == "before":
            tensor[5, 5] += 1
        blocks = summed(files, held)
        if when == "after":
            tensor[5, 5] += 1
        elif when == "unseen":
            tensor.numpy()[5, 5] += 1
        return blocks

    return mock.patch.object(store_layout.StoreLayout, "sum", sum_and_change)


@pytest.mark.parametrize(
    ("when", "error"),
    [("before", "large was changed"), ("after", "large was changed"), ("unseen", "have changed while")],
)
def test_tensors_that_change_meanwhile_are_an_error(when: str, error: str) -> None:
    url = f"memory://changed_{when}/run"
    save(url, model(0))
    before = names(url)
    state = model(1)
    with changing(state["large"], when), pytest.raises(CheckpointError, match=error):
        save(url, state)
    assert names(url) == before and loads(url, model(0))


def test_parts_of_rows_that_one_process_holds() -> None:
    """Two chunks of columns in one tensor, the last columns first."""
    expected = torch.arange(600_000.0).view(300, 2000)
    value: Any = torch.cat([expected[:, 1200:], expected[:, :1200]], 1)
    value.global_shape, value.global_offsets = (300, 2000), ((0, 1200), (0, 0))
    value.local_offsets, value.local_sizes = ((0, 0), (0, 800)), ((300, 800), (300, 1200))
    with pieces_of(64 << 10):
        vescale_ckpt.save("memory://parts/run", {"a": value}, format="safetensors")
    assert loads("memory://parts/run", {"a": expected})
    fails = mock.patch.object(store_layout.StoreLayout, "write", side_effect=OSError(errno.EIO, "the network is gone"))
    with fails, pytest.raises(CheckpointError, match="the network is gone"):
        vescale_ckpt.save("memory://parts/fails", {"a": value}, format="safetensors")
    assert names("memory://parts/fails") == set()


def test_of_two_jobs_that_race_one_commits(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = store_layout.commit_objects

    def after_another(*arguments: Any) -> None:
        monkeypatch.setattr(store_layout, "commit_objects", commit)
        save(url, model(0), overwrite=False)
        commit(*arguments)

    monkeypatch.setattr(store_layout, "commit_objects", after_another)
    with pytest.raises(CheckpointError, match="another job committed it meanwhile"):
        save(url, model(1), overwrite=False)
    index = json.loads(read(url, INDEX_NAME))["weight_map"]
    assert loads(url, model(0)) and names(url) == {*index.values(), INDEX_NAME}


def test_repair_removes_what_a_killed_save_has_left(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = object_names(2, "0123abcd")
    for name in left:
        write(url, name, b"half")
    with pytest.raises(CheckpointError, match="did not finish"):
        vescale_ckpt.load(url, model(0))
    save(url, model(0))
    assert loads(url, model(0)) and set(left) < names(url)
    assert orphans.remove(hf_folder.left_by_exports(url)) == []
    monkeypatch.setattr(hf_folder, "SAVE_GRACE", 0.0)
    assert orphans.remove(hf_folder.left_by_exports(url)) == [f"{url}/{name}" for name in left]
    assert loads(url, model(0)) and not set(left) & names(url)


# --- Several ranks


def _export(environment: dict[str, str], url: str, shape: tuple[int, ...], ranks_of_node: int) -> list[int]:
    os.environ.update(environment, VESCALE_CKPT_NODE=str(dist.get_rank() // ranks_of_node))
    state = state_of_rank(shape)
    state["tied"] = state["columns"]
    options: dict[str, Any] = {"format": "safetensors", "timeout": 60.0}
    written = []
    with pieces_of(256 << 10):
        for _ in range(2):
            small = vescale_ckpt.Safetensors(max_shard_size="5MB")
            handle = vescale_ckpt.save(f"{url}/model", state, **{**options, "format": small})
            written.append(handle.result().bytes)
        written.append(vescale_ckpt.save(f"{url}/async", state, async_checkpoint=True, **options).result(60).bytes)
    return written


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_write_a_file_each_of_what_all_hold(
    bucket_url: str, object_server: ObjectServer, tmp_path: Path, nodes: int
) -> None:
    written = run_ranks(2, _export, object_server.environment(), bucket_url, (2,), 2 // nodes)
    expected = whole()
    assert same(download(f"{bucket_url}/model", tmp_path / "model"), expected)
    assert loads(f"{bucket_url}/model", expected)
    assert same(download(f"{bucket_url}/async", tmp_path / "async"), expected)
    first, again, one_file = zip(*written, strict=True)
    total = sum(tensor.nbytes for tensor in expected.values())
    assert first == again and sum(first) == total and max(first) < 0.8 * total
    assert one_file == (total, 0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks_of_node", [4, 2, 1])
def test_four_ranks_of_a_mesh(bucket_url: str, object_server: ObjectServer, tmp_path: Path, ranks_of_node: int) -> None:
    run_ranks(4, _export, object_server.environment(), bucket_url, (2, 2), ranks_of_node)
    assert same(download(f"{bucket_url}/model", tmp_path / "model"), whole())
    assert loads(f"{bucket_url}/model", whole())


def _save_columns(environment: dict[str, str], url: str, what: str) -> str:
    os.environ.update(environment)
    state = {name: sharded(value, Shard(1)) for name, value in columns(1).items()}
    send, count = store_layout.StoreLayout.write, 0

    def fails(files: Any, boxes: bytes) -> None:
        nonlocal count
        count += 1
        if count == 3 and what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if count == 3:
            raise OSError(errno.EIO, "the network is gone")
        send(files, boxes)

    with contextlib.ExitStack() as stack:
        stack.enter_context(pieces_of(64 << 10))
        if "nodes" in what:
            stack.enter_context(mock.patch.dict(os.environ, VESCALE_CKPT_NODE=str(dist.get_rank())))
        if dist.get_rank() == 1 and what == "memory":
            stack.enter_context(mock.patch("os.memfd_create", side_effect=OSError(errno.ENOMEM, "no memory")))
        elif dist.get_rank() == 1 and what == "sum":
            stack.enter_context(
                mock.patch.object(store_layout.StoreLayout, "sum", side_effect=MemoryError("none left"))
            )
        elif dist.get_rank() == 1 and what in ("send", "send of nodes", "die"):
            stack.enter_context(mock.patch.object(store_layout.StoreLayout, "write", fails))
        elif dist.get_rank() == 1 and what == "change":
            stack.enter_context(changing(state["a"].to_local(), "unseen"))
        try:
            save(url, state, timeout=20.0)
        except CheckpointError as raised:
            return f"{type(raised).__name__} {getattr(raised, 'rank', None)}: {raised}"
        return "saved"


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("memory", "SaveFailedError 1: .*no memory"),
        pytest.param("sum", "SaveFailedError 1: .*none left", marks=pytest.mark.slow),
        pytest.param("send", "SaveFailedError 1: .*the network is gone", marks=pytest.mark.slow),
        ("send of nodes", "SaveFailedError 1: .*the network is gone"),
        ("change", "CheckpointError 0: .*have changed while"),
    ],
)
def test_the_error_of_one_rank_is_that_of_all(bucket_url: str, object_server: Any, what: str, error: str) -> None:
    save(bucket_url, columns(0))
    before = names(bucket_url)
    answers = run_ranks(2, _save_columns, object_server.environment(), bucket_url, what)
    assert all(re.match(error, answer) for answer in answers), answers
    assert names(bucket_url) == before and loads(bucket_url, columns(0))
    assert run_ranks(2, _save_columns, object_server.environment(), bucket_url, "") == ["saved"] * 2
    assert loads(bucket_url, columns(1)) and not names(bucket_url) & before - {INDEX_NAME}


@pytest.mark.slow
def test_a_rank_that_dies_in_the_middle_of_its_upload_is_named(bucket_url: str, object_server: Any) -> None:
    save(bucket_url, columns(0))
    answers = run_ranks(2, _save_columns, object_server.environment(), bucket_url, "die", check=False)
    assert "CheckpointTimeoutError" in str(answers[0]) and "rank 1" in str(answers[0]), answers
    assert loads(bucket_url, columns(0))
    save(bucket_url, columns(2))
    assert loads(bucket_url, columns(2))


# --- Harm on the way


def large(k: int) -> State:
    """Two parts of an upload, and a file of one part."""
    return {"large": torch.arange(3 << 20, dtype=torch.float32) + k, "small": torch.full((3, 5), float(k))}


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        ("upload_part", "reset_middle"),
        ("complete_upload", "lost_answer"),
        pytest.param("create_upload", "late_error", marks=pytest.mark.slow),
        pytest.param("complete_upload", "late_error", marks=pytest.mark.slow),
        ("put", "lost_answer"),  # of the small file, and of the index
    ],
)
def test_passing_harm_is_outlived(fault_proxy: FaultProxy, bucket_url: str, kind: Kind, action: Action) -> None:
    save(bucket_url, large(0), overwrite=False)
    for skip in range(2 if kind == "put" else 1):
        rule = Rule(action, kind=kind, skip=skip)
        fault_proxy.add(rule)
        save(f"{bucket_url}/{skip}", large(1), overwrite=False, async_checkpoint=bool(skip)).result(60)
        fault_proxy.clear()
        assert rule.hits == 1
        assert loads(f"{bucket_url}/{skip}", large(1))
        index = json.loads(read(f"{bucket_url}/{skip}", INDEX_NAME))["weight_map"]
        assert names(f"{bucket_url}/{skip}") == {*index.values(), INDEX_NAME}


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        ("upload_part", "denied"),
        ("complete_upload", "expired"),
        pytest.param("upload_part", "error", marks=pytest.mark.slow),
        pytest.param("create_upload", "slow_down", marks=pytest.mark.slow),
        pytest.param("complete_upload", "reset", marks=pytest.mark.slow),
        pytest.param("put", "denied", marks=pytest.mark.slow),
    ],
)
def test_lasting_harm_is_an_error_and_leaves_nothing(
    fault_proxy: FaultProxy, bucket_url: str, object_server: ObjectServer, kind: Kind, action: Action
) -> None:
    save(bucket_url, large(0))
    before = names(bucket_url)
    fault_proxy.add(Rule(action, kind=kind, times=10**6))
    with pytest.MonkeyPatch.context() as impatient, pytest.raises(CheckpointError):
        impatient.setenv("VESCALE_CKPT_OBJECT_STORE_TIMEOUT", "2")
        save(bucket_url, large(1))
    fault_proxy.clear()
    assert (
        names(bucket_url) == before
        and loads(bucket_url, large(0))
        and not unfinished_uploads(object_server, bucket_url)
    )
