"""What the options, the environment and the ways of calling DCP promise: bytes on every path, files, stats, threads,
processes, asynchronous saves and groups of ranks."""

from __future__ import annotations

import concurrent.futures
import errno
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import faults, steps
from harness.files import data_file_names
from harness.ranks import on_ranks
from harness.saves import cause, dcp_load, dcp_save, load_blank
from harness.states import MiB, assert_same, blank, mixed_state
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat

import vescale_ckpt
from vescale_ckpt import (
    CheckpointError,
    LoadPlanner,
    LoadStats,
    SavePlanner,
    SaveStats,
    StorageFullError,
    StorageReader,
    StorageWriter,
)
from vescale_ckpt._engine.options import threads_of
from vescale_ckpt.integrations.dcp import DefaultPlanner, DefaultReader, DefaultWriter

# --- Ways to and from the disk


@pytest.mark.parametrize("direct_io", ["auto", True, False])
def test_direct_io(checkpoint: Path, direct_io: Any) -> None:
    state = mixed_state()
    try:
        writer = dcp_save(checkpoint, state, direct_io=direct_io)
    except CheckpointException as error:
        if direct_io is True and "page cache" in str(cause(error)):
            pytest.skip("this file system has no direct I/O")
        raise
    target = blank(state)
    reader = dcp_load(checkpoint, target, direct_io=False if direct_io is False else "auto")
    assert_same(target, state)
    for stats in (writer.last_stats, reader.last_stats):
        assert stats is not None
        if direct_io is False:
            assert stats.direct_bytes == 0
        assert stats.direct_bytes + stats.uncached_bytes + stats.buffered_bytes >= stats.bytes
    if direct_io is True:
        assert writer.last_stats is not None
        assert writer.last_stats.direct_bytes > 0
        assert writer.last_stats.buffered_bytes == 0


def test_direct_io_true_goes_past_the_page_cache_that_holds_the_file(checkpoint: Path) -> None:
    state = {"a": torch.randn(MiB), "b": torch.ones(3), "object": 1}
    try:
        dcp_save(checkpoint / "probe", state, direct_io=True)
    except CheckpointException:
        pytest.skip("this file system has no direct I/O")
    dcp_save(checkpoint, state, direct_io=False)
    target = blank(state)
    reader = dcp_load(checkpoint, target, direct_io=True)
    assert_same(target, state)
    assert reader.last_stats is not None
    assert reader.last_stats.buffered_bytes == reader.last_stats.uncached_bytes == 0


def test_direct_io_true_raises_where_it_is_refused(checkpoint: Path) -> None:
    state = {"a": torch.randn(MiB)}
    dcp_save(checkpoint, state)
    with faults.fault("write", errno.EINVAL), pytest.raises(CheckpointException, match="past the page cache"):
        dcp_save(checkpoint, {"a": torch.zeros(MiB)}, direct_io=True)
    assert_same(load_blank(checkpoint, state), state)


@pytest.mark.parametrize("length", [0, 1, 5, 1000, MiB + 1])
def test_direct_io_true_reads_safetensors_files_of_any_length(checkpoint: Path, length: int) -> None:
    values = {"a": torch.randn(length), "b": torch.ones(3)}
    try:
        dcp_save(checkpoint / "probe", values, direct_io=True)
        dcp_load(checkpoint / "probe", blank(values), direct_io=True)
    except CheckpointException:
        pytest.skip("this file system has no direct I/O")
    vescale_ckpt.save(checkpoint, values, format="safetensors")
    target = blank(values)
    reader = dcp_load(checkpoint, target, direct_io=True)
    assert_same(target, values)
    assert reader.last_stats is not None and reader.last_stats.direct_bytes >= 4 * length


@pytest.mark.parametrize(
    ("slot_bytes", "environment"),
    [
        (4 * MiB, {"MEMORY_BYTES": str(4 * MiB)}),
        (64 * MiB, {"MEMORY_BYTES": str(4 * MiB)}),
        (5 * MiB, {"THREADS": "7"}),
    ],
    ids=["one slot", "slot above the budget", "odd numbers"],
)
def test_small_memory(
    checkpoint: Path, slot_bytes: int, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*steps.LIMITS["bytes of a slot"], slot_bytes)
    for name, value in environment.items():
        monkeypatch.setenv(f"VESCALE_CKPT_{name}", value)
    state = mixed_state() | {
        "strided": torch.randn(3000, 1500).t(),
        "conj": torch.randn(9, 99_999).to(torch.cfloat).conj(),
    }
    dcp_save(checkpoint, state)
    assert_same(load_blank(checkpoint, state), state)
    cast = {key: torch.zeros(value.shape, dtype=torch.complex128) for key, value in state.items() if key == "conj"}
    dcp.load(cast, storage_reader=StorageReader(checkpoint), planner=LoadPlanner(allow_cast=True))
    assert torch.equal(cast["conj"], state["conj"].to(torch.complex128))


@pytest.mark.parametrize(
    ("cores", "machine", "ranks", "threads"),
    [
        *((2, 2, 1, 4), (12, 12, 1, 12), (192, 192, 8, 16), (64, 64, 8, 8), (64, 64, 32, 4)),
        pytest.param(8, 64, 8, 8, id="each rank is bound to its own"),
    ],
)
def test_threads_are_the_share_of_a_rank(
    cores: int, machine: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VESCALE_CKPT_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert (threads_of(), threads_of(3)) == (threads, 3)
    monkeypatch.setenv("VESCALE_CKPT_THREADS", "7")
    assert threads_of() == 7


@pytest.mark.parametrize("number", [20, 300])
def test_a_file_for_each_item(checkpoint: Path, number: int) -> None:
    state: dict[str, Any] = {f"{i}": torch.full((i,), i) for i in range(number)} | {"object": 1, "other": "x"}
    writer = dcp_save(checkpoint, state, single_file_per_rank=False, sync_files=False)
    assert len(data_file_names(checkpoint)) == number + 2
    assert_same(load_blank(checkpoint, state), state)
    assert writer.last_stats is not None
    assert writer.last_stats.file_bytes == sum(
        (checkpoint / name).stat().st_size for name in data_file_names(checkpoint)
    )


def test_sync_files_decides_whether_data_is_synced(checkpoint: Path) -> None:
    def syncs(sync_files: bool) -> int:
        faults.inject("write", 0, skip=1 << 40)  # never reached, but calls are counted
        dcp_save(checkpoint, {"a": torch.ones(3)}, sync_files=sync_files)
        seen = int(faults.calls_seen("sync"))
        faults.clear()
        return seen

    assert syncs(True) > syncs(False)


# --- What the options and objects promise


def test_one_writer_and_one_reader_serve_many_directories(tmp_path: Path) -> None:
    writer, planner = StorageWriter(tmp_path / "unused"), SavePlanner()
    for step in range(3):
        state = {"a": torch.full((10,), step), "step": step} | ({"extra": "x"} if step == 2 else {})
        dcp.save(state, storage_writer=writer, planner=planner, checkpoint_id=tmp_path / f"step_{step}")
    assert sorted(os.listdir(tmp_path)) == ["step_0", "step_1", "step_2"]
    reader, load_planner = StorageReader(tmp_path / "unused"), LoadPlanner()
    for step in (2, 0, 1):
        target: dict[str, Any] = {"a": torch.zeros(10, dtype=torch.int64), "step": None}
        dcp.load(target, storage_reader=reader, planner=load_planner, checkpoint_id=str(tmp_path / f"step_{step}"))
        assert_same(target, {"a": torch.full((10,), step), "step": step})


def test_writer_reader_and_planners_can_be_pickled_between_uses(checkpoint: Path) -> None:
    state = mixed_state()
    writer, reader, save_planner, load_planner = (
        StorageWriter(checkpoint, thread_count=2, direct_io=False),
        StorageReader(checkpoint, verify=False),
        SavePlanner(),
        LoadPlanner(allow_cast=True),
    )
    for _ in range(2):
        writer, reader, save_planner, load_planner = pickle.loads(
            pickle.dumps((writer, reader, save_planner, load_planner))
        )
        dcp.save(state, storage_writer=writer, planner=save_planner)
        target = blank(state)
        dcp.load(target, storage_reader=reader, planner=load_planner)
        assert_same(target, state)
    assert b"vescale_ckpt._plan" not in pickle.dumps((writer, save_planner))  # `async_save` sends them to its process
    assert (writer.options.thread_count, writer.options.direct_io, reader.verify) == (2, False, False)
    assert load_planner.allow_cast


def test_stats(checkpoint: Path) -> None:
    state = {"a": torch.randn(1000), "b": torch.randn(MiB), "object": 1}
    writer = dcp_save(checkpoint, state)
    assert isinstance(writer.last_stats, SaveStats)
    assert writer.last_stats.tensors == 2
    assert writer.last_stats.objects == 1
    assert writer.last_stats.bytes == 4 * MiB + 4000
    (name,) = data_file_names(checkpoint)
    assert writer.last_stats.file_bytes == (checkpoint / name).stat().st_size
    assert writer.last_stats.in_place_bytes + writer.last_stats.slot_bytes >= writer.last_stats.bytes
    assert writer.last_stats.io_path
    reader = dcp_load(checkpoint, blank(state))
    assert isinstance(reader.last_stats, LoadStats)
    assert reader.last_stats.bytes == writer.last_stats.bytes
    assert reader.last_stats.seconds > 0
    assert pickle.loads(pickle.dumps(reader.last_stats)) == reader.last_stats


@pytest.mark.parametrize("kind", [StorageWriter, StorageReader])
def test_validate_checkpoint_id(kind: type, tmp_path: Path) -> None:
    assert kind.validate_checkpoint_id(tmp_path)
    assert kind.validate_checkpoint_id(str(tmp_path / "new"))
    assert kind.validate_checkpoint_id("file:///tmp/x")
    assert not kind.validate_checkpoint_id("hdfs://host/key")


def test_reading_data_before_set_up_is_an_error(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="set_up_storage_reader"):
        StorageReader(checkpoint).read_data(dcp.planner.LoadPlan([]), LoadPlanner())


# --- Several saves at once, and other processes


@pytest.mark.parametrize("arena", [4 * MiB, 256 * MiB], ids=["one slot", "usual memory"])
def test_saves_and_loads_in_several_threads(tmp_path: Path, arena: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*steps.LIMITS["bytes of a slot"], 4 * MiB)
    monkeypatch.setenv("VESCALE_CKPT_MEMORY_BYTES", str(arena))
    states = [{"a": torch.randn(700, 1000).t(), "b": torch.randn(MiB), "c": torch.randn(10)} for _ in range(4)]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(2):
                dcp_save(tmp_path / str(number), states[number], sync_files=False)
                assert_same(load_blank(tmp_path / str(number), states[number]), states[number])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors, errors


# --- Asynchronous saves, groups, ranks


@on_ranks(1)
def test_async_save_that_fails_raises_in_its_future(checkpoint: Path) -> None:
    faults.inject("write", 28)  # ENOSPC
    saving: Any = dcp.async_save({"a": torch.ones(3)}, storage_writer=StorageWriter(checkpoint), planner=SavePlanner())
    with pytest.raises(CheckpointException) as caught:
        saving.result(100)
    assert type(cause(caught.value)) is StorageFullError and os.listdir(checkpoint) == []


@on_ranks(2)
def test_ranks_that_save_alone_to_one_directory_leave_a_whole_checkpoint(checkpoint: Path) -> None:
    # Every rank believes that it is the only one. Stock DCP writes equal files over one another, and all is well.
    outcomes = []
    for number in range(5):
        state = {"a": torch.full((1000,), float(number)), "b": torch.full((MiB,), float(number)), "object": number}
        try:
            dcp.save(
                state, storage_writer=StorageWriter(checkpoint, sync_files=False), planner=SavePlanner(), no_dist=True
            )
            outcomes.append("saved")
        except CheckpointException as error:
            outcomes.append(repr(cause(error)))
        dist.barrier()
        target = blank(state)
        try:
            dcp.load(target, storage_reader=StorageReader(checkpoint), planner=LoadPlanner(), no_dist=True)
            assert_same(target, state)
        except (CheckpointException, AssertionError) as error:
            outcomes.append(str(error)[-300:])
        dist.barrier()
    assert outcomes == ["saved"] * 5


def test_lazy_conjugates_survive_an_asynchronous_save_without_a_stager(tmp_path: Path) -> None:
    state = {"conjugated": torch.tensor([1 + 2j]).conj(), "negated": torch.tensor([1 + 2j]).conj().imag}
    saving: Any = dcp.async_save(state, storage_writer=StorageWriter(tmp_path), no_dist=True)
    saving.result(100)
    plain = {"conjugated": torch.tensor([1 - 2j]), "negated": torch.tensor([-2.0])}
    assert_same(load_blank(tmp_path, plain), plain)


def test_the_id_of_a_save_is_that_of_the_metadata(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "a")
    saved = []
    for name in "ab":
        dcp.save({"a": torch.ones(3)}, storage_writer=writer, planner=SavePlanner(), checkpoint_id=tmp_path / name)
        found = StorageReader(tmp_path / name).read_metadata().storage_meta
        assert found is not None and found.save_id == writer.save_id
        saved.append(writer.save_id)
    assert saved[0] != saved[1]


# --- Options of torch's own storage and planners: taken, or refused with a reason


def test_options_without_effect_are_taken(tmp_path: Path) -> None:
    writer = DefaultWriter(
        tmp_path, per_thread_copy_ahead=1, cache_staged_state_dict=True,
        serialization_format=SerializationFormat.TORCH_SAVE, _extensions=[],
    )  # fmt: skip
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=DefaultPlanner(dedup_replicated_tensors=True))
    assert vescale_ckpt.load(tmp_path)["w"].tolist() == [1.0] * 3


def test_options_that_change_the_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format='safetensors'"):
        DefaultWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(ValueError, match="FileSystemWriter"):
        DefaultWriter(tmp_path, _extensions=[object()])
    with pytest.raises(ValueError, match="per_thread_copy_ahead"):
        DefaultWriter(tmp_path, per_thread_copy_ahead=-1)


def test_the_lowest_rank_has_torchs_name() -> None:
    assert DefaultPlanner(dedup_save_to_lowest_rank=True).placement == "lowest_rank"
    assert DefaultPlanner().placement == "balanced"


def test_a_registry_of_stream_extensions_is_refused(tmp_path: Path) -> None:
    DefaultReader(tmp_path, None)
    with pytest.raises(ValueError, match="FileSystemReader"):
        DefaultReader(tmp_path, ExtensionRegistry())


def test_the_future_of_a_save_is_done_after_its_callbacks(tmp_path: Path) -> None:
    handle = vescale_ckpt.save(tmp_path, {"w": torch.ones(3)}, async_checkpoint=True)
    seen: list[bool] = []
    handle.add_done_callback(lambda handle: seen.append(handle.future.done()))
    assert isinstance(handle.future, concurrent.futures.Future) and not handle.future.cancel()
    assert concurrent.futures.wait([handle.future], timeout=60).not_done == set()
    assert handle.future.result() == handle.result() and len(seen) == 1


def test_an_error_that_the_future_raised_is_not_raised_again(tmp_path: Path) -> None:
    faults.inject("sync", errno.EIO, 0, 1000)
    handle = vescale_ckpt.save(tmp_path, {"w": torch.ones(3)}, async_checkpoint=True)
    with pytest.raises(vescale_ckpt.CheckpointError, match="Input/output"):
        handle.future.result(60)
    faults.clear()
    vescale_ckpt.save(tmp_path, {"w": torch.ones(3)})

    faults.inject("sync", errno.EIO, 0, 1000)
    handle = vescale_ckpt.save(tmp_path, {"w": torch.ones(3)}, async_checkpoint=True)
    assert isinstance(handle.future.exception(60), vescale_ckpt.CheckpointError)
    faults.clear()
    with pytest.raises(vescale_ckpt.SaveFailedError):  # nobody has raised it yet
        vescale_ckpt.save(tmp_path, {"w": torch.ones(3)})
