"""Safetensors files loaded to CUDA devices, for which a library of threads stands (tests/fake_cuda.py)."""

from __future__ import annotations

import gc
import json
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import steps
from harness.fake_cuda import FakeCuda, device_of, fake_cuda, needs_fake_cuda, no_copies_from_cuda
from harness.files import flip, safetensors_dtypes
from harness.ranks import forked
from harness.states import MiB, numbers, random_tensor, same

from vescale_ckpt import CheckpointError, CorruptCheckpointError, safetensors
from vescale_ckpt._engine import _C

pytestmark = needs_fake_cuda

ALIGNMENT = 512  # bytes


class Memory:
    """Memory of the fake devices, given to `torch.empty`: allocations that begin where the one before ends, as torch's
    may. The trainer's work writes into each until after it was given away."""

    def __init__(self, fake: FakeCuda, most: int) -> None:
        self.fake = fake
        self.all = torch.full((most,), 0x55, dtype=torch.uint8, device="cpu")
        self.taken = 0
        self.room = most
        self.given: list[tuple[torch.device, int]] = []  #: devices and bytes of the allocations
        self.blocks: list[weakref.ref[torch.Tensor]] = []

    def empty(self, shape: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        begin, end = self.taken, self.taken + -(-nbytes // ALIGNMENT) * ALIGNMENT
        if end > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.taken = end
        own = (
            torch.frombuffer(memoryview(self.all.numpy())[begin:], dtype=torch.uint8, count=nbytes) if nbytes else None
        )
        if own is None:
            return torch.empty(shape, dtype=dtype)
        self.fake.allocate(own)
        self.fake.queue_fill(self.fake.streams[device.index or 0], own, 0x66, 5)
        block = own.view(dtype).view(shape)
        self.given.append((device, nbytes))
        self.blocks.append(weakref.ref(block))
        return block


@contextmanager
def devices(most: int = 64 * MiB) -> Iterator[tuple[FakeCuda, Memory]]:
    """Two devices of which the first is current."""
    with pytest.MonkeyPatch.context() as patch, fake_cuda() as fake:
        memory, empty = Memory(fake, most), torch.empty

        def placed(*shape: Any, device: Any = None, **more: Any) -> torch.Tensor:
            if device is not None and torch.device(device).type == "cuda":
                return memory.empty(*shape, device=torch.device(device), **more)
            return empty(*shape, device=device, **more)

        patch.setattr(torch, "empty", placed)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(*steps.LIMITS["bytes of a slot"], 4 * MiB)
        patch.setenv("VESCALE_CKPT_MEMORY_BYTES", str(8 * MiB))
        fake.delay_copies(50)
        yield fake, memory
        assert fake.count("copies across allocations") == 0
        assert fake.count("copies of memory that is not locked") == 0


def all_kinds() -> dict[str, torch.Tensor]:
    """All dtypes; large and small tensors, of no elements and of no dimension."""
    shapes: list[tuple[int, ...]] = [(), (1,), (0,), (3, 5), (2, 0, 3), (700, 3)]
    return {
        "large": numbers(5, 600_000),
        "large too": numbers(9 * MiB, dtype=torch.uint8),
        "half": numbers(700, 1001, dtype=torch.bfloat16),
        **{f"{i}": numbers(1 + 997 * i, first=i) for i in range(60)},
        **{
            f"{name} {shape}": random_tensor(shape, dtype)
            for name, dtype in safetensors_dtypes().items()
            for shape in shapes
            if shape or name != "float4_e2m1fn_x2"
        },
    }


# --- Whole files


@forked
def test_all_kinds_of_tensors_come_to_the_device(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = all_kinds()
    safetensors.save_file(values, path)
    order = list(safetensors.load_file(path))
    for device, number, verify in (("cuda", 0, True), (torch.device("cuda", 1), 1, False)):
        with devices() as (_, memory):
            found = safetensors.load_file(path, device, verify=verify)
            assert same(found, values) and list(found) == order
            assert {place.index or 0 for place, _ in memory.given} == {number}
            assert all(value.untyped_storage().nbytes() == value.nbytes for value in found.values())


@forked
def test_tensors_at_odd_offsets_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = {"flag": torch.tensor([True]), "w": numbers(5000), "z": numbers(3, dtype=torch.float64)}
    header, at, data = {}, 0, b""
    for name, dtype in (("flag", "BOOL"), ("w", "F32"), ("z", "F64")):
        data += values[name].numpy().tobytes()
        header[name] = {"dtype": dtype, "shape": list(values[name].shape), "data_offsets": [at, len(data)]}
        at = len(data)
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)  # the data begin at an odd offset
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    with devices():
        found = safetensors.load_file(path, "cuda")
        assert same(found, values)
        with safetensors.safe_open(path, device="cuda") as file:
            assert torch.equal(file.get_tensor("w"), values["w"])
            assert torch.equal(file.get_slice("w")[17:3000], values["w"][17:3000])


# --- Tensors and parts of them


@forked
def test_tensors_and_slices_come_to_the_device(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = all_kinds() | {"cube": numbers(40, 50, 60), "wide": numbers(300, 5000)}
    safetensors.save_file(values, path)
    with devices() as (fake, memory), safetensors.safe_open(path, device="cuda:1") as file:
        for name in ("large", "half", "12", "float32 ()", "float32 (0,)", "uint8 (700, 3)"):
            found = file.get_tensor(name)
            assert same(found, values[name])
            assert found.untyped_storage().nbytes() == found.nbytes, "it shares no memory"
        for name, index in (
            ("cube", (slice(3, 30), slice(None, None, 7), 4)),
            ("cube", (..., slice(10, 20))),
            ("cube", 7),
            ("cube", (slice(5, 5),)),
            ("cube", torch.tensor([1, 3])),
            ("wide", (slice(10, 200), slice(100, 2200))),
            ("wide", (-1, -1)),
        ):
            assert torch.equal(file.get_slice(name)[index], values[name][index]), (name, index)
        before = fake.count("bytes to device")
        file.get_slice("wide")[10:20]
        assert fake.count("bytes to device") - before == 10 * 5000 * 4, "only what is wanted"
        assert same(file.get_tensors(), values)
        assert {place.index for place, _ in memory.given} == {1}


# --- What goes wrong


@forked
def test_failures_are_told_and_hold_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = {f"{i}": numbers(300_000, first=i) for i in range(20)}
    safetensors.save_file(values, path)
    texts = {}
    with devices(most=256 * MiB) as (fake, memory):

        def failed(case: str, kind: type[Exception] = CheckpointError) -> None:
            with pytest.raises(kind) as caught:
                safetensors.load_file(path, "cuda")
            texts[case] = str(caught.value)

        fake.fail("captured")
        failed("captured")
        fake.fail("cudaMemcpyBatchAsync")  # then copies are made one by one
        fake.fail("cudaMemcpyAsync", 1)
        failed("copy")
        flip(path)
        failed("damage", CorruptCheckpointError)
        with pytest.raises(CorruptCheckpointError), safetensors.safe_open(path, device="cuda") as file:
            for name in values:
                file.get_slice(name)[1:]
        flip(path)
        memory.room = memory.taken + 20 * MiB
        failed("memory", torch.OutOfMemoryError)
        memory.room = 256 * MiB
        gc.collect()
        assert not any(block() is not None for block in memory.blocks), "what failed holds no memory"
        assert same(safetensors.load_file(path, "cuda"), values)
    assert "is being captured" in texts["captured"]
    assert "bytes from the host to device 0" in texts["copy"]
    assert "checksum mismatch" in texts["damage"]
    assert "out of memory" in texts["memory"]


# --- Saving


@forked
def test_tensors_on_devices_are_saved_in_parts(tmp_path: Path) -> None:
    values = all_kinds() | {"large as can be": numbers(5 * MiB)}
    values["large"] = torch.full((12_000_000,), 3, dtype=torch.uint8).view(torch.float32)
    safetensors.save_file(values, tmp_path / "from host memory")
    values["large"].zero_()
    with pytest.MonkeyPatch.context() as patch, fake_cuda() as fake:
        patch.setattr(*steps.LIMITS["bytes of a slot"], 4 * MiB)
        patch.setenv("VESCALE_CKPT_MEMORY_BYTES", str(8 * MiB))
        fake.delay_copies(50)
        fake.queue_fill(fake.streams[device_of(values["large"])], values["large"], 3, 20)  # by the trainer
        safetensors.save_file(values, tmp_path / "from devices")
        assert fake.count("copies of memory that is not locked") == 0
        assert _C.snapshot_memory()["touched_bytes"] <= 12 * MiB, _C.snapshot_memory()
    assert (tmp_path / "from devices").read_bytes() == (tmp_path / "from host memory").read_bytes()


@forked
def test_a_copy_that_fails_in_a_save_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    with fake_cuda() as fake:
        fake.fail("on the device", 3)
        with pytest.raises(CheckpointError, match="device"):
            safetensors.save_file(all_kinds(), tmp_path / "file")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"before")]
    safetensors.save_file(all_kinds(), tmp_path / "file")


def test_without_cudas_runtime_torch_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"a": numbers(1000), "b": numbers(3, 4)}
    safetensors.save_file(values, tmp_path / "file")
    copied: list[Any] = []
    no_copies_from_cuda().start()  # so torch copies
    monkeypatch.setattr(safetensors, "to_device", lambda host, device: copied.append(device) or host)
    assert same(safetensors.load_file(tmp_path / "file", "cuda:1"), values)
    with safetensors.safe_open(tmp_path / "file", device="cuda:1") as file:
        assert torch.equal(file.get_slice("a")[3:5], values["a"][3:5])
    assert copied == [torch.device("cuda:1")] * 3
