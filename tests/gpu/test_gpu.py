"""What needs a CUDA device; `scripts/check_gpu.py` runs these where there is one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import steps
from harness.snapshots import late_copies, snapshot_memory
from harness.states import assert_same

import vescale_ckpt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


BOUND = 120.0  # seconds after which something counts as hung


def state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    large = torch.randn(3000, 4096, generator=generator, device="cuda")
    return {
        "large": large,
        "bf16": large[:100].bfloat16(),
        "transposed": large[:64, :128].clone().t(),  # memory of its own: states are loaded into, too
        "step": torch.tensor(seed, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        "host": torch.arange(10) + seed,
    }


@pytest.mark.parametrize("arena_mib", [4, 256])
def test_device_tensors_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arena_mib: int) -> None:
    monkeypatch.setenv("VESCALE_CKPT_MEMORY_BYTES", str(arena_mib << 20))
    monkeypatch.setattr(*steps.LIMITS["bytes of a slot"], 4 << 20)
    dcp.save(state(1), storage_writer=vescale_ckpt.StorageWriter(tmp_path), planner=vescale_ckpt.SavePlanner())
    loaded = state(2)
    dcp.load(loaded, storage_reader=vescale_ckpt.StorageReader(tmp_path), planner=vescale_ckpt.LoadPlanner())
    for key, value in state(1).items():
        assert loaded[key].device == value.device
        assert torch.equal(loaded[key], value), key


def test_loads_come_after_what_the_current_stream_has_queued(tmp_path: Path) -> None:
    wanted = model_state(1)
    vescale_ckpt.save(tmp_path, wanted)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            values = model_state(2)
            torch.cuda._sleep(200_000_000)  # cycles
            change_all(values)
            vescale_ckpt.load(tmp_path, values)
            found = {key: value.clone() for key, value in values.items() if isinstance(value, torch.Tensor)}
        torch.cuda.synchronize()
        for key, value in found.items():
            assert torch.equal(value, wanted[key]), key


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_loads_cast_on_the_device(tmp_path: Path, dtype: torch.dtype) -> None:
    wanted = {key: value for key, value in state(1).items() if value.is_floating_point()}
    vescale_ckpt.save(tmp_path, wanted)
    found = {key: torch.zeros_like(value, dtype=dtype) for key, value in wanted.items()}
    vescale_ckpt.load(tmp_path, found, allow_cast=True)
    for key, value in wanted.items():
        assert torch.equal(found[key], value.to(dtype)), key


def test_a_load_while_a_graph_is_captured_is_refused(tmp_path: Path) -> None:
    values = {"a": torch.ones(1 << 20, device="cuda")}
    vescale_ckpt.save(tmp_path, values)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        with pytest.raises(vescale_ckpt.CheckpointError, match="is being captured"):
            vescale_ckpt.load(tmp_path, values)
        values["a"].add_(1)
        graph.capture_end()
    vescale_ckpt.load(tmp_path, values)
    assert values["a"].eq(1).all()


# --- Asynchronous saves


def model_state(seed: int) -> dict[str, Any]:
    """A few large, many small and strided tensors, on the device and beside it."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    small = {f"small.{i}": torch.randn(1 + 37 * i, generator=generator, device="cuda") for i in range(300)}
    return {**state(seed), **small, "number": seed}


def change_all(values: dict[str, Any]) -> None:
    for value in values.values():
        if isinstance(value, torch.Tensor):
            value.fill_(-1)


def expect_saved(path: Path, wanted: dict[str, Any]) -> None:
    loaded = model_state(99)
    dcp.load(loaded, storage_reader=vescale_ckpt.StorageReader(path), planner=vescale_ckpt.LoadPlanner())
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert loaded[key].device == value.device
            assert torch.equal(loaded[key], value), key


@pytest.mark.parametrize("snapshot_mib", [0, 8])
def test_later_changes_do_not_reach_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot_mib: int
) -> None:
    monkeypatch.setenv("VESCALE_CKPT_SNAPSHOT_BYTES", str(snapshot_mib << 20))  # 8: the rest is written in waves
    for seed in range(3):  # into memory that is not yet page-locked, and then is
        values = model_state(seed)
        handle = vescale_ckpt.save(tmp_path / str(seed), values, async_checkpoint=True)
        change_all(values)
        handle.result(BOUND)
        expect_saved(tmp_path / str(seed), model_state(seed))
    vescale_ckpt.prepare(model_state(0))  # waits until all is locked
    memory = snapshot_memory()
    assert memory["registered_bytes"] == memory["touched_bytes"] > 0


def test_saves_come_behind_what_the_current_stream_has_queued(tmp_path: Path) -> None:
    for number, stream in enumerate((torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream())):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            values = model_state(1)
            torch.cuda._sleep(200_000_000)  # cycles
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    value.add_(1)
            wanted = {key: value.clone() for key, value in values.items() if isinstance(value, torch.Tensor)}
            handle = vescale_ckpt.save(tmp_path / str(number), values, async_checkpoint=True)
            change_all(values)
        handle.result(BOUND)
        expect_saved(tmp_path / str(number), wanted)


def test_what_a_gate_guards_is_copied_while_the_device_works(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, device="cuda") for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.randn(64, 1024, device="cuda")

    def train() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    for step in range(4):
        values = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        wanted = {key: value.clone() for key, value in model.state_dict().items()}
        moments = [entry["exp_avg"].clone() for entry in optimizer.state.values()]
        handle = vescale_ckpt.save(tmp_path / str(step), values, async_checkpoint=True, gate=optimizer)
        for _ in range(3):
            train()
        handle.result(BOUND)
        loaded = {"model": {key: torch.zeros_like(value) for key, value in wanted.items()}}
        vescale_ckpt.load(tmp_path / str(step), loaded)
        assert all(torch.equal(loaded["model"][key], value) for key, value in wanted.items())
        found = {"optimizer": {"state": {i: {"exp_avg": torch.zeros_like(m)} for i, m in enumerate(moments)}}}
        vescale_ckpt.load(tmp_path / str(step), found)
        for number, moment in enumerate(moments):
            assert torch.equal(found["optimizer"]["state"][number]["exp_avg"], moment)


def test_a_change_that_passes_the_gate_is_refused(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    torch.cuda._sleep(500_000_000)
    handle = vescale_ckpt.save(tmp_path, {"weight": parameter}, async_checkpoint=True, gate=optimizer)
    with torch.no_grad():
        parameter.add_(1)
    with pytest.raises(vescale_ckpt.CheckpointError, match="weight was changed"):
        handle.result(BOUND)


def test_every_device_is_copied_from(tmp_path: Path) -> None:
    devices = range(torch.cuda.device_count())
    values = {f"on.{i}": torch.full((100_000,), float(i), device=f"cuda:{i}") for i in devices}
    handle = vescale_ckpt.save(tmp_path, values, async_checkpoint=True)
    change_all(values)
    handle.result(BOUND)
    vescale_ckpt.load(tmp_path, values)
    assert all(values[f"on.{i}"].eq(i).all() for i in devices)


# --- Copies


def shapes_of_all_kinds() -> list[torch.Tensor]:
    large = torch.randn(2048, 4096, device="cuda")
    small = [
        torch.randn(1 + i % 700, device="cuda").to(dtype) for i in range(500) for dtype in (torch.half, torch.float)
    ]
    odd = [torch.randint(0, 255, (1 + i,), device="cuda", dtype=torch.uint8) for i in range(40)]
    return [
        *small,
        *odd,
        *(value[1:] for value in odd[8:]),
        large,
        large[:, :2048],
        large[5:900, 3:77],
        large.t(),
        large.bfloat16().view(64, 32, 64, 64).permute(2, 0, 3, 1),
        torch.randn(7, device="cuda").expand(5, 7),
        torch.zeros(0, 3, device="cuda"),
        torch.tensor(3.5, device="cuda"),
    ]


def test_snapshots_hold_tensors_of_all_kinds(tmp_path: Path) -> None:
    values = {str(number): tensor for number, tensor in enumerate(shapes_of_all_kinds())}
    vescale_ckpt.save(tmp_path, values, async_checkpoint=True).result(BOUND)
    loaded = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in values.items()}
    vescale_ckpt.load(tmp_path, loaded)
    for key, value in values.items():
        assert torch.equal(loaded[key], value.cpu()), (value.shape, value.stride(), value.dtype)


# --- Gates with compiled models and optimizers


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_waits(tmp_path: Path, backend: str) -> None:
    if backend == "inductor":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    module = torch.nn.Linear(2048, 2048, device="cuda")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    model, step = torch.compile(module, backend=backend), torch.compile(optimizer.step, backend=backend)
    for _ in range(2):
        model(torch.ones(2048, device="cuda")).sum().backward()
        step()
    gate = vescale_ckpt.Gate(optimizer, allow_capturable=True)  # the compiler has set it
    for number in (1, 2):
        state = {"w": module.weight, "average": optimizer.state[module.weight]["exp_avg"]}
        before = {name: tensor.detach().cpu() for name, tensor in state.items()}
        with late_copies() as ready:
            handle = vescale_ckpt.save(tmp_path / str(number), state, async_checkpoint=True, gate=gate)
            model(torch.ones(2048, device="cuda")).sum().backward()
            threading.Timer(0.3, ready.set).start()
            step()
            assert handle.staged.done()
            handle.result(BOUND)
        assert not torch.equal(module.weight.cpu(), before["w"])
        loaded = {name: torch.zeros(2048, 2048) for name in state}
        vescale_ckpt.load(tmp_path / str(number), loaded)
        assert_same(loaded, before)


# --- Loads into many allocations of torch's, which are often neighbours, as tensors are in files and in the memory that
# they are read into. No copy may span two allocations: CUDA refuses it.


def large(count: int = 16, nbytes: int = 32 << 20) -> dict[str, torch.Tensor]:
    """Each fills an allocation of its own."""
    return {f"t{number:02}": torch.randn(nbytes // 4) for number in range(count)}


def small(count: int = 20_000) -> dict[str, torch.Tensor]:
    """Each fills a part of an allocation: sizes are multiples of 512 bytes."""
    values = torch.randn(count, 640)
    return {f"s{number:05}": values[number, : 128 * (1 + number % 5)].clone() for number in range(count)}


def expect_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(tensor.device.type == "cuda" for tensor in found.values())
    joined = torch.cat([found[name] for name in wanted]).cpu()
    assert torch.equal(joined, torch.cat(list(wanted.values())))


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
@pytest.mark.parametrize("make", [large, small])
def test_tensors_of_many_allocations(tmp_path: Path, format: str, make: object) -> None:
    wanted = large() if make is large else small()
    vescale_ckpt.save(tmp_path / "checkpoint", wanted, format=format)
    found = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in wanted.items()}
    for _ in range(2):  # into memory that is not yet page-locked, and then is
        vescale_ckpt.load(tmp_path / "checkpoint", found)
        expect_equal(found, wanted)
        for tensor in found.values():
            tensor.zero_()
