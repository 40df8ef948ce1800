"""Tensors on devices for which the engine has no functions: torch copies them, and what is saved and loaded is right.

The devices are fakes (tests/cpp/fakes/fake_device.cpp): a read of their memory by its address crashes, and copies that
nobody has waited for are not made.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._lazy.ts_backend
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.fake_device import KIND, fake_device
from harness.logs import logged
from harness.ranks import forked, in_fork
from harness.states import assert_same, numbers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError, StorageReader, StorageWriter, safetensors
from vescale_ckpt._engine import _C, torch_copies

BOUND = 60.0
SAVED = 11  # tensors of `_state` on devices


def _state(first: int = 0) -> dict[str, torch.Tensor]:
    """In host memory: tensors of several dtypes, contiguous, transposed, cut out, empty, lazily conjugate."""
    return {
        "large": numbers(60_000, first=first),
        "half": numbers(700, first=first).bfloat16(),
        "bytes": numbers(13, dtype=torch.uint8, first=first),
        "fp8": numbers(9, first=first).to(torch.float8_e4m3fn),
        "bool": numbers(33, first=first) % 2 == 0,
        "scalar": torch.tensor(3.5 + first),
        "empty": torch.empty(0, 3),
        "transposed": numbers(30, 40, first=first).t(),
        "window": numbers(20, 30, first=first)[3:11, 5:17],
        "complex": torch.complex(numbers(6, first=first), numbers(6, first=first + 1)),
        "on the other": numbers(501, dtype=torch.int64, first=first),
    }


def _on_devices(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {
        key: value.to(f"{KIND}:{int(key == 'on the other')}") for key, value in state.items() if key != "window"
    }
    found["window"] = torch.zeros(20, 30).to(KIND)[3:11, 5:17]
    found["window"].copy_(state["window"])
    return {**found, "host": torch.arange(7), "step": 5}


def _expect(found: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    assert {key: found[key].device for key in state} == {
        key: torch.device(KIND, int(key == "on the other")) for key in state
    }
    assert_same({key: found[key].cpu() for key in state}, state)
    assert found["host"].tolist() == list(range(7)) and found["step"] == 5


def _blank() -> dict[str, Any]:
    return {**_on_devices(_state(50)), "host": torch.zeros(7, dtype=torch.int64), "step": 0}


def _save(folder: Path, state: dict[str, Any], is_async: bool) -> None:
    vescale_ckpt.save(folder, state, async_checkpoint=is_async).result(BOUND)


# --- Saves and loads


@pytest.mark.parametrize("is_async", [False, True])
@forked
def test_what_is_saved_is_loaded_by_one_copy_a_tensor(tmp_path: Path, is_async: bool) -> None:
    fake, folder = fake_device(), tmp_path / "a"
    state = _on_devices(_state())
    fake.reset()
    with logged(logging.WARNING) as lines:
        handle = vescale_ckpt.save(folder, state, async_checkpoint=is_async)
        assert fake.queued(0) == fake.queued(1) == 0, "they were waited for"
        assert fake.count("copies to host") == fake.count("copies that were waited for") == SAVED - 1
        if is_async:
            for value in state.values():
                if isinstance(value, torch.Tensor) and not value.is_cpu:
                    value.zero_()
            handle.result(BOUND)
        assert vescale_ckpt.verify(folder).ok
        found = _blank()
        fake.reset()
        vescale_ckpt.load(folder, found)
    assert fake.queued(0) == fake.queued(1) == 0
    assert fake.count("copies to devices") == fake.count("copies that were waited for") == SAVED - 1
    _expect(found, _state())
    (line,) = [line for line in lines if "are copied by torch" in line]  # once in a process
    assert "tensors on faraway devices are copied by torch, one after the other" in line
    assert "functions of CUDA alone" in line


@forked
def test_a_copy_that_fails_is_named_and_the_next_one_succeeds(tmp_path: Path) -> None:
    fake = fake_device()
    to, copy, state = torch.Tensor.to, torch.Tensor.copy_, _on_devices(_state())
    copied = 0

    def count(is_copy: bool) -> None:
        nonlocal copied
        copied += is_copy
        if is_copy and copied == 3:
            raise torch.OutOfMemoryError("the device is full")

    def to_fails(source: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        count(arguments == ("cpu",) and not source.is_cpu)
        return to(source, *arguments, **options)

    def copy_fails(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        count(target.device.type != source.device.type)
        return copy(target, source)

    def expect_named(work: Callable[[], None]) -> None:
        nonlocal copied
        copied = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "to", to_fails)
            patch.setattr(torch.Tensor, "copy_", copy_fails)
            with pytest.raises(CheckpointError, match="the device is full") as failed:
                work()
        assert failed.value.key in state and "layout" not in str(failed.value)
        assert fake.queued(0) == fake.queued(1) == 0

    for is_async in (False, True):
        expect_named(lambda is_async=is_async: _save(tmp_path / "a", state, is_async))  # type: ignore[misc]
        assert not (tmp_path / "a" / ".metadata").exists()
    _save(tmp_path / "a", state, True)
    found = _blank()
    expect_named(lambda: vescale_ckpt.load(tmp_path / "a", found) and None)
    vescale_ckpt.load(tmp_path / "a", found)
    _expect(found, _state())


@forked
def test_functional_tensors_without_addresses(tmp_path: Path) -> None:
    torch._lazy.ts_backend.init()  # its tensors are functional, as those of XLA; they have no address
    values = {"whole": numbers(300), "turned": numbers(3, 4).t(), "half": numbers(7).bfloat16(), "none": numbers(0, 3)}
    state = {key: value.to("lazy") for key, value in values.items()}
    for is_async in (False, True):
        _save(tmp_path / str(is_async), state, is_async)
        found = {key: torch.zeros_like(value).to("lazy") for key, value in values.items()}
        vescale_ckpt.load(tmp_path / str(is_async), found)
        assert_same({key: value.cpu() for key, value in found.items()}, values)
    dcp.save(vescale_ckpt.Stager().stage(state), storage_writer=StorageWriter(tmp_path / "staged"), no_dist=True)
    staged = {key: torch.zeros_like(value) for key, value in values.items()}
    dcp.load(staged, checkpoint_id=tmp_path / "staged", no_dist=True)
    assert_same(staged, values)


@forked
def test_copies_come_behind_the_work_of_the_current_stream(tmp_path: Path) -> None:
    """Work of a stream runs when it is waited for, the default stream's first: a copy that is queued there is early."""
    fake = fake_device()
    new, target = numbers(5000, first=9).to(KIND), numbers(5000).to(KIND)
    side = torch.Stream(KIND)
    torch.accelerator.current_stream(KIND).synchronize()
    with side:
        for is_async in (False, True):
            target.zero_()
            target.copy_(new)  # queued
            assert fake.queued(0) > 0
            _save(tmp_path / str(is_async), {"x": target}, is_async)
        target.zero_()
        filled = {"x": torch.zeros(5000).to(KIND)}
        torch.accelerator.current_stream(KIND).synchronize()
        filled["x"].copy_(target)  # queued; the load's copy comes behind it
        vescale_ckpt.load(tmp_path / "False", filled)
        assert torch.equal(filled["x"].cpu(), numbers(5000, first=9))
    loaded = {"x": torch.zeros(5000)}
    for is_async in (False, True):
        vescale_ckpt.load(tmp_path / str(is_async), loaded)
        assert torch.equal(loaded["x"], numbers(5000, first=9))


@forked
def test_what_snapshots_have_no_room_for_is_written_at_once(tmp_path: Path) -> None:
    fake = fake_device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_CKPT_SNAPSHOT_BYTES", "100000")
        state = _on_devices(_state())
        fake.reset()
        handle = vescale_ckpt.save(tmp_path, state, async_checkpoint=True)
        for value in state.values():
            if isinstance(value, torch.Tensor) and not value.is_cpu:
                value.zero_()
        assert handle.result(BOUND).tensors == SAVED + 1
        assert fake.count("copies to host") >= SAVED - 1
    found = _blank()
    vescale_ckpt.load(tmp_path, found)
    _expect(found, _state())


@forked
def test_behind_a_gate_they_are_copied_before_save_returns(tmp_path: Path) -> None:
    fake = fake_device()
    weight = torch.nn.Parameter(numbers(300).to(KIND))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, foreach=False)
    weight.grad = torch.ones(300).to(KIND)
    optimizer.step()
    want = weight.detach().cpu()
    handle = vescale_ckpt.save(
        tmp_path, {"weight": weight, "optimizer": optimizer.state_dict()}, async_checkpoint=True, gate=optimizer
    )
    assert fake.queued(0) == 0
    optimizer.step()
    handle.result(BOUND)
    loaded = {"weight": torch.zeros(300).to(KIND)}
    vescale_ckpt.load(tmp_path, loaded)
    assert torch.equal(loaded["weight"].cpu(), want) and not torch.equal(weight.detach().cpu(), want)


# --- Other ways in


@forked
def test_prepared_saves_and_saves_through_dcp_and_its_stagers(tmp_path: Path) -> None:
    fake_device()

    def expect_saved(name: str) -> None:
        found, by_dcp = _blank(), _blank()
        vescale_ckpt.load(tmp_path / name, found)
        dcp.load(by_dcp, storage_reader=StorageReader(tmp_path / name))
        for loaded in (found, by_dcp):
            _expect(loaded, _state())

    state = _on_devices(_state())
    vescale_ckpt.prepare(state)
    for name in ("first", "second"):
        _save(tmp_path / name, state, True)
        expect_saved(name)
    staged = vescale_ckpt.Stager().stage(state)
    assert_same({key: staged[key] for key in _state()}, {k: v.contiguous() for k, v in _state().items()})
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "ours"))
    dcp.save(staged, checkpoint_id=tmp_path / "stock")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    for name, stager in (("stock stager", None), ("own stager", vescale_ckpt.Stager())):
        dcp.async_save(state, storage_writer=StorageWriter(tmp_path / name), async_stager=stager).result(BOUND)
    for name in ("ours", "stock", "stock stager", "own stager"):
        expect_saved(name)
    dist.destroy_process_group()


@forked
def test_as_safetensors(tmp_path: Path) -> None:
    fake_device()
    values = {key: value.contiguous() for key, value in _state().items() if not value.is_complex()}
    safetensors.save_file({key: value.to(KIND) for key, value in values.items()}, tmp_path / "file")
    found = safetensors.load_file(tmp_path / "file", f"{KIND}:1")
    assert {value.device for value in found.values()} == {torch.device(KIND, 1)}
    assert_same({key: value.cpu() for key, value in found.items()}, values)
    with safetensors.safe_open(tmp_path / "file", device=KIND) as file:
        assert torch.equal(file.get_slice("large")[7:99].cpu(), values["large"][7:99])
    vescale_ckpt.save(tmp_path / "export", {key: value.to(KIND) for key, value in values.items()}, format="safetensors")
    loaded = {key: torch.zeros_like(value).to(KIND) for key, value in values.items()}
    vescale_ckpt.load(tmp_path / "export", loaded)
    assert_same({key: value.cpu() for key, value in loaded.items()}, values)


# --- Ranks


def _rank(folder: Path, rank: int) -> list[Any]:
    fake_device()
    dist.init_process_group(f"cpu:gloo,{KIND}:fake", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh(KIND, (2,))
    whole = numbers(400, 60)
    rows, columns = whole.chunk(2)[rank], whole.chunk(2, dim=1)[rank]

    def on_device(local: torch.Tensor, dim: int) -> DTensor:
        return DTensor.from_local(local.to(KIND), mesh, [Shard(dim)], run_check=False)

    state = {"sharded": on_device(rows, 0), "replicated": numbers(900).to(KIND)}
    vescale_ckpt.save(folder / "a", state, async_checkpoint=True).result(BOUND)
    found = []
    for broadcast in (False, True):
        target = {"sharded": on_device(torch.zeros_like(columns), 1), "replicated": torch.zeros(900).to(KIND)}
        vescale_ckpt.load(folder / "a", target, broadcast_checkpoint=broadcast)
        found.append(torch.equal(target["sharded"].to_local().cpu(), columns))
        found.append(torch.equal(target["replicated"].cpu(), numbers(900)))
        cast = {"replicated": torch.zeros(900, dtype=torch.float64).to(KIND)}
        vescale_ckpt.load(folder / "a", cast, broadcast_checkpoint=broadcast, allow_cast=True)
        found.append(torch.equal(cast["replicated"].cpu(), numbers(900).double()))
        with torch.Stream(KIND):  # threads of the load do not know of it
            behind = {"replicated": torch.zeros(900, dtype=torch.float64).to(KIND)}
            behind["replicated"].copy_(torch.ones(900, dtype=torch.float64).to(KIND))  # queued
            vescale_ckpt.load(folder / "a", behind, broadcast_checkpoint=broadcast, allow_cast=True)
            found.append(torch.equal(behind["replicated"].cpu(), numbers(900).double()))
    dist.destroy_process_group()
    return found


def test_dtensors_on_such_devices_are_loaded_with_another_sharding(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(in_fork, _rank, tmp_path, rank) for rank in range(2)]
        assert [rank.result() for rank in ranks] == [[True] * 8] * 2


def test_a_load_to_the_meta_device_is_noted_as_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_copies, "_notes", [])
    monkeypatch.setattr(torch_copies, "_noted_kinds", set())
    safetensors.save_file({"a": torch.ones(3)}, tmp_path / "file")
    assert safetensors.load_file(tmp_path / "file", "meta")["a"].is_meta
    assert not torch_copies._notes


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("no CUDA driver", "tensors on cuda devices are copied by torch, one after the other, while the training "
         "waits, also with a gate (no CUDA driver)"),
        ("", "some tensors on cuda devices are copied by torch, one after the other, while the training waits, also "
         "with a gate (the engine copies none that are lazily conjugate, or converted on the way)"),
    ],
)  # fmt: skip
def test_the_note_of_cuda_says_why_the_engine_does_not_copy(
    monkeypatch: pytest.MonkeyPatch, reason: str, said: str
) -> None:
    for name, empty in (("_notes", []), ("_noted_kinds", set()), ("_logged", set())):
        monkeypatch.setattr(torch_copies, name, empty)
    asked = []
    monkeypatch.setattr(_C, "device_info", lambda: asked.append(1) or {"reason": reason})
    for _ in range(3):
        torch_copies.note_device("cuda")
    assert [note for note in torch_copies.device_notes() if "cuda devices" in note] == [said]
    assert len(asked) == 1, "each answer takes memory of a device"
