"""Loads to CUDA devices, for which a library of threads stands (tests/fake_cuda.py): all but the device itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import steps
from harness.fake_cuda import ASSERT, device_notes, fake_cuda, needs_fake_cuda, neighbours
from harness.files import flip
from harness.ranks import forked, on_ranks
from harness.states import KiB, MiB, assert_same, numbers, sharded_by

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError, LoadPlanner, StorageReader

pytestmark = needs_fake_cuda

BOUND = 60.0


def _state() -> dict[str, torch.Tensor]:
    """Large, small, strided and empty tensors, on two devices and on the host."""
    return {
        "large": numbers(1500, 999),  # of several slots
        "half": numbers(700, 1001, dtype=torch.bfloat16),
        **{f"small.{i}": numbers(101 + 37 * i, first=i) for i in range(60)},
        "host": numbers(7),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "transposed": numbers(300, 200).t(),
        "columns": numbers(400, 5000)[:, 100:2100],  # runs of 8 KiB
        "few columns": numbers(400, 500)[:, 100:140],
    }


def _blank(state: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Tensors to load into, of the same strides."""
    return {
        key: torch.empty_strided(value.shape, value.stride(), dtype=dtype or value.dtype).fill_(77)
        for key, value in state.items()
    }


def _small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*steps.LIMITS["bytes of a slot"], 4 * MiB)
    monkeypatch.setenv("VESCALE_CKPT_MEMORY_BYTES", str(8 * MiB))


# --- One process


@forked
def test_tensors_of_all_kinds_come_to_their_devices(tmp_path: Path) -> None:
    state = _state()
    vescale_ckpt.save(tmp_path / "native", state)
    vescale_ckpt.save(tmp_path / "hf", state, format="safetensors")
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    with pytest.MonkeyPatch.context() as patch, fake_cuda() as fake:
        _small_memory(patch)
        fake.delay_copies(100)
        for kind in ("native", "hf", "stock"):
            before = fake.count("bytes to device")
            found = _blank(state)
            stats = vescale_ckpt.load(tmp_path / kind, found).stats
            assert_same(found, state)
            assert stats is not None and stats.verified
            wanted = sum(value.nbytes for value in state.values() if value.numel() > 100)
            if kind != "stock":  # which keeps strides: torch reads such records
                assert fake.count("bytes to device") - before == wanted, kind
        found = _blank(state)
        dcp.load(found, storage_reader=StorageReader(tmp_path / "native"), planner=LoadPlanner())
        assert_same(found, state)
        found = _blank(state)
        dcp.load(found, storage_reader=StorageReader(tmp_path / "stock"))  # by DCP's own planner, item by item
        assert_same(found, state)
        wide = _blank(state, torch.float64)
        vescale_ckpt.load(tmp_path / "native", wide, allow_cast=True)
        assert_same(wide, {key: value.double() for key, value in state.items()})
        names = ("cudaMemcpyAsync", "cudaMemcpyBatchAsync", "copies of memory that is not locked", "locked bytes")
        counts = {name: fake.count(name) for name in names}
    assert counts["copies of memory that is not locked"] == 0
    assert 0 < counts["locked bytes"] <= 8 * MiB + 64 * MiB, "the engine's slots, and those of small parts"
    assert counts["cudaMemcpyBatchAsync"] > 0, "small tensors travel together"


@forked
def test_stacks_and_parts_come_to_their_devices(tmp_path: Path) -> None:
    experts = [numbers(300, 1001, first=number) for number in range(6)]
    packed = numbers(5, 700, 999)
    state = {f"e.{number}.w": value for number, value in enumerate(experts)} | {"packed": packed}
    vescale_ckpt.save(tmp_path, state, format="safetensors")
    wanted = {"e.w": torch.stack(experts)}
    wanted |= {f"p.{number}": value for number, value in enumerate(packed.unbind())}
    with pytest.MonkeyPatch.context() as patch, fake_cuda() as fake:
        _small_memory(patch)
        fake.delay_copies(100)
        for rules, expected in (
            ({"e.*.w": "e.w", "packed": "p.*"}, wanted),
            ({("e.1.w", "e.0.w"): "two"}, {"two": torch.cat(experts[1::-1])}),
        ):
            before = fake.count("bytes to device")
            found = _blank(expected)
            vescale_ckpt.load(tmp_path, found, stack=rules)
            assert_same(found, expected)
            assert fake.count("bytes to device") - before == sum(value.nbytes for value in expected.values())


@forked
def test_copies_come_after_what_the_users_streams_have_queued(tmp_path: Path) -> None:
    state = _state()
    vescale_ckpt.save(tmp_path, state)
    with fake_cuda() as fake:
        fake.delay_copies(500)
        found = _blank(state)
        fake.queue_fill(fake.streams[0], found["large"], 5, 300)
        fake.queue_fill(fake.streams[1], found["half"], 5, 300)
        vescale_ckpt.load(tmp_path, found)
        assert_same(found, state)  # and nothing of it is under way any more
        for stream in fake.streams:
            fake.drain(stream)
        assert_same(found, state)


@forked
def test_failures_are_told_and_leave_nothing_under_way(tmp_path: Path) -> None:
    state = _state()
    vescale_ckpt.save(tmp_path, state)
    texts = {}
    with pytest.MonkeyPatch.context() as patch, fake_cuda() as fake:
        _small_memory(patch)

        def failed(case: str, kind: type[CheckpointError] = CheckpointError) -> None:
            with pytest.raises(kind) as caught:
                vescale_ckpt.load(tmp_path, _blank(state))
            texts[case] = str(caught.value)

        fake.fail("cudaMemcpyAsync", 1)
        failed("copy")
        fake.fail("captured")
        failed("captured")
        fake.fail("cudaMemcpyBatchAsync")  # is no failure
        found = _blank(state)
        vescale_ckpt.load(tmp_path, found)
        assert_same(found, state)
        texts["notes"] = " / ".join(device_notes())
        file = max(tmp_path.glob("*.distcp"), key=lambda path: path.stat().st_size)
        flip(file, file.stat().st_size // 3 * 8)
        failed("damage", CorruptCheckpointError)
        flip(file, file.stat().st_size // 3 * 8)
        fake.fail("on the device", 3)
        failed("on the device")
    assert "bytes from the host to device" in texts["copy"] and "cudaErrorFakeCall" in texts["copy"]
    assert any(f"{key}: " in texts["copy"] for key in _state()), "it names a tensor"
    assert "the current stream is being captured" in texts["captured"]
    assert "refused a batch" in texts["notes"]
    assert "checksum mismatch" in texts["damage"]
    assert "cudaErrorFakeDevice" in texts["on the device"]


@forked
def test_no_copy_crosses_the_border_of_an_allocation(tmp_path: Path) -> None:
    """Tensors that follow one another in a file often do so on the device, each in a block of its own."""
    large = {f"large.{i}": numbers(5 * MiB // 4, first=i) for i in range(8)}  # of several slots
    small = {f"small.{i:05}": numbers(640, first=i) for i in range(5000)}
    vescale_ckpt.save(tmp_path / "large", large, format="safetensors")
    vescale_ckpt.save(tmp_path / "small", small, format="safetensors")
    vescale_ckpt.save(tmp_path / "native", small)
    with pytest.MonkeyPatch.context() as patch, fake_cuda() as fake:
        _small_memory(patch)
        for kind, state in (("large", large), ("small", small), ("native", small)):
            found = neighbours(state)
            vescale_ckpt.load(tmp_path / kind, found)
            assert_same(found, state)
        assert 100 < fake.count("most copies in a batch") <= 512
        across, alone = fake.count("copies across allocations"), fake.count("cudaMemcpyAsync")
    assert across == 0
    assert alone < 100, "small tensors travel in batches"


@forked
def test_batches_end_where_they_are_not_wanted_or_memory_is_not_locked(tmp_path: Path) -> None:
    state = {**_state(), "a": numbers(3 * MiB), "b": numbers(3 * MiB)}
    vescale_ckpt.save(tmp_path, state)
    counts = []
    with pytest.MonkeyPatch.context() as patch, fake_cuda() as fake:

        def batches() -> None:
            before = fake.count("cudaMemcpyBatchAsync")
            found = _blank(state)
            vescale_ckpt.load(tmp_path, found)
            assert_same(found, state)
            counts.append(fake.count("cudaMemcpyBatchAsync") - before)

        batches()
        patch.setenv("VESCALE_CKPT_COPY_BATCHES", "0")
        batches()
        assert any("VESCALE_CKPT_COPY_BATCHES=0" in note for note in device_notes())
        patch.delenv("VESCALE_CKPT_COPY_BATCHES")
        batches()
        fake.fail("cudaHostRegister")
        patch.setattr(*steps.LIMITS["bytes of a slot"], 5 * MiB)  # in slots of other memory, one of which is not locked
        batches()
        assert fake.count("copies of memory that is not locked") > 0
        notes = device_notes()
        batches()
        assert device_notes() == notes and sum("a page lock was refused" in note for note in notes) == 1
    wanted, unwanted, again, unlocked, after = counts
    assert wanted > 0 and again > 0
    assert (unwanted, unlocked, after) == (0, 0, 0)


@forked
def test_casts_go_by_the_host_where_the_device_is_full(tmp_path: Path) -> None:
    state = {"large": numbers(1500, 999), **{f"small.{i}": numbers(200 + i) for i in range(30)}}
    vescale_ckpt.save(tmp_path, state)
    empty = torch.empty

    def full(*shape: Any, device: Any = None, **options: Any) -> torch.Tensor:
        if isinstance(device, torch.device):  # that of a target
            raise torch.OutOfMemoryError("the device is full")
        return empty(*shape, device=device, **options)

    with pytest.MonkeyPatch.context() as patch, fake_cuda() as fake:
        patch.setattr(torch, "empty", full)
        wide = {key: torch.zeros(value.shape, dtype=torch.float64) for key, value in state.items()}
        vescale_ckpt.load(tmp_path, wide, allow_cast=True)
        assert_same(wide, {key: value.double() for key, value in state.items()})
        assert fake.count("bytes to device") == 0


@forked
def test_an_error_that_the_trainer_left_is_named_as_theirs(tmp_path: Path) -> None:
    state = _state()
    vescale_ckpt.save(tmp_path, state)
    with fake_cuda() as fake:
        vescale_ckpt.load(tmp_path, _blank(state))  # with streams and events that the next one finds
        fake.stick(ASSERT)
        for _ in range(2):
            with pytest.raises(CheckpointError) as caught:
                vescale_ckpt.load(tmp_path, _blank(state))
            text = str(caught.value)
            assert "device 0 had failed before, by work of this process" in text and "(710)" in text


# --- Several ranks, which read for each other


def _full() -> dict[str, torch.Tensor]:
    return {
        "w": numbers(1024, 999),
        "v": numbers(300, 500, dtype=torch.int16),
        "s": numbers(3, 4),
        **{f"bias.{i}": numbers(200 + i) for i in range(20)},
    }


@on_ranks(3)
def test_ranks_that_read_for_each_other_copy_to_their_devices(checkpoint: Path) -> None:
    full, counts = _full(), []
    vescale_ckpt.save(checkpoint, {name: sharded_by(tensor, 0) for name, tensor in full.items()})
    with pytest.MonkeyPatch.context() as patch, fake_cuda() as fake:
        patch.setenv("VESCALE_CKPT_MEMORY_BYTES", str(8 * MiB))
        fake.delay_copies(100)
        for broadcast in (True, False):
            converted = () if broadcast else ((None, torch.float64),)  # torch's own copies know no fake streams
            for dim, dtype in ((None, None), (1, None), *converted):
                before = fake.count("bytes to device")
                dims = {name: dim if tensor.dim() > 1 else None for name, tensor in full.items()}
                targets = {
                    name: sharded_by(torch.full_like(tensor, 77, dtype=dtype), dims[name])
                    for name, tensor in full.items()
                }
                for target in targets.values():
                    local = target.to_local()
                    fake.queue_fill(fake.streams[int(local.itemsize == 2)], local, 9, 5)
                stats = vescale_ckpt.load(
                    checkpoint, targets, broadcast_checkpoint=broadcast, timeout=BOUND, allow_cast=dtype is not None
                ).stats
                for name, tensor in full.items():
                    wanted = tensor if dtype is None else tensor.to(dtype)
                    assert_same(targets[name].to_local(), sharded_by(wanted, dims[name]).to_local())
                assert stats is not None
                counts.append((stats.shared_bytes, fake.count("bytes to device") - before))
    assert counts[0][0] > 0 and all(copied > 400 * KiB for _, copied in counts), counts


@on_ranks(2)
def test_a_device_that_fails_is_told_to_all_ranks(checkpoint: Path) -> None:
    full = _full()
    vescale_ckpt.save(checkpoint, full)
    with fake_cuda() as fake:
        if dist.get_rank() == 1:
            fake.fail("cudaMemcpyAsync")
            fake.fail("cudaMemcpyBatchAsync")
        found = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
        with pytest.raises(CheckpointError) as caught:
            vescale_ckpt.load(checkpoint, found, broadcast_checkpoint=True, timeout=BOUND)
    text = str(caught.value)
    assert "to device" in text, text
