"""What a review looked for in safetensors files of several ranks: small tensors in one block, ties, odd ranks."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import faults
from harness.ranks import run_ranks
from harness.states import same
from test_safetensors_save import files, nothing_left, read, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt import CheckpointError, SavePlanner, StorageFullError, StorageWriter, convert, safetensors
from vescale_ckpt._convert.formats import Format
from vescale_ckpt._engine import _C

SIZES = [1, "100KB", "5GB", 4096]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]


def _values(seed: int) -> dict[str, torch.Tensor]:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    state = {}
    for number in range(24):
        dtype = chance.choice(DTYPES)
        dims = chance.choice([0, 1, 1, 2, 2, 3])
        small = chance.random() < 0.7
        shape = [chance.choice([0, 1, 2, 3, 5, 7, 16] if small else [1, 3, 31, 64, 129, 181]) for _ in range(dims)]
        if chance.random() < 0.15:
            shape = [chance.choice([4096, 262144, 524288, 262143, 262145 + 4032, 700001])]
        count = torch.Size(shape).numel()
        raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
        state[f"t{number}"] = (raw % 2).bool().view(shape) if dtype == torch.bool else raw.view(dtype).view(shape)
    return state


def _rank_state(seed: int, values: dict[str, torch.Tensor]) -> dict[str, Any]:
    chance = random.Random(seed + 1000)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for name, value in values.items():
        way = chance.choice(["shard", "shard", "replica", "alone", "plain"])
        owner = chance.randrange(dist.get_world_size())
        if way == "shard" and value.ndim:
            placement = Shard(chance.randrange(value.ndim))
            spread = distribute_tensor(value, mesh, [placement], src_data_rank=None)
            if chance.random() < 0.5 and value.ndim > 1:  # strided local
                local = spread.to_local()
                local = local.transpose(0, 1).contiguous().transpose(0, 1)
                spread = DTensor.from_local(local, mesh, [placement], shape=value.shape, stride=value.stride())
            state[name] = spread
        elif way == "replica":
            state[name] = distribute_tensor(value, mesh, [Replicate()], src_data_rank=None)
        elif way == "alone":
            if owner == dist.get_rank():
                state[name] = value
        else:
            state[name] = value.clone()
    return state


def _random(directory: str, seeds: list[int]) -> None:
    planner = SavePlanner()
    for seed in seeds:
        state = _rank_state(seed, _values(seed))
        for number, size in enumerate(SIZES):
            handle = save(
                f"{directory}/{seed}.{number}",
                state,
                max_shard_size=size,
                planner=planner,
                async_checkpoint=number % 2 == 1,
            )
            if number % 2:
                handle.staged.result(60)
                for value in state.values():  # what is saved is what was staged
                    _flip(value)
            handle.result(60)
            if number % 2:
                for value in state.values():
                    _flip(value)
        writer = StorageWriter(f"{directory}/{seed}.{len(SIZES)}", format="safetensors", max_shard_size="50KB")
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner())


def _flip(value: torch.Tensor) -> None:
    local = value.to_local() if isinstance(value, DTensor) else value
    storage = torch.empty(0, dtype=torch.uint8).set_(local.untyped_storage())  # type: ignore[call-overload]
    storage.bitwise_xor_(1)


@pytest.mark.parametrize(("ranks", "seeds"), [(2, [1]), (3, [3])])
def test_random_states(tmp_path: Path, ranks: int, seeds: list[int]) -> None:
    seeds = [int(seed) for seed in os.environ["SEEDS"].split(",")] if "SEEDS" in os.environ else seeds
    run_ranks(ranks, _random, str(tmp_path), seeds)
    for seed in seeds:
        expected = _values(seed)
        for number in range(len(SIZES) + 1):
            directory = tmp_path / f"{seed}.{number}"
            assert same(read(directory), expected), (seed, number)
            assert nothing_left(directory)


def _tied(directory: str) -> list[int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    planner = SavePlanner()
    made = []
    plan_of_all = SavePlanner.global_plan_of

    def counted(self: SavePlanner, plans: Any) -> Any:
        made.append(len(plans))
        return plan_of_all(self, plans)

    with mock.patch.object(SavePlanner, "global_plan_of", counted):
        for k in range(3):
            tensor = distribute_tensor(torch.arange(10.0).view(5, 2) + k, mesh, [Shard(0)], src_data_rank=None)
            other = distribute_tensor(torch.ones(5, 2) * k, mesh, [Shard(0)], src_data_rank=None)
            save(directory, {"other": other, "embed": tensor, "head": tensor}, planner=planner)
    return made


def test_ties_of_uneven_shards_are_known_and_planned_once(tmp_path: Path) -> None:
    """The last rank has nothing of them, and cannot see that they are tied."""
    made = run_ranks(4, _tied, str(tmp_path / "x"))
    found = read(tmp_path / "x")
    assert found.keys() == {"other", "embed"}
    assert found["embed"].equal(torch.arange(10.0).view(5, 2) + 2) and found["other"].equal(torch.ones(5, 2) * 2)
    with safetensors.safe_open(tmp_path / "x" / "model.safetensors") as file:
        assert file.metadata() == {"format": "pt", "head": "embed"}
    assert made == [[4], [], [], []]


def test_a_conjugate_is_not_the_tensor_whose_memory_it_has(tmp_path: Path) -> None:
    tensor = torch.randn(4, dtype=torch.complex64)
    with pytest.raises(CheckpointError, match="share memory"):
        save(tmp_path, {"a": tensor, "b": tensor.conj()})
    save(tmp_path, {"a": tensor, "b": tensor.clone().conj(), "c": tensor})
    found = read(tmp_path)
    assert found.keys() == {"a", "b"} and found["b"].equal(tensor.conj().resolve_conj())


def test_ties_that_change_while_a_save_fails(tmp_path: Path) -> None:
    """The layout of a save that failed is no layout that ranks have."""
    planner, tensor = SavePlanner(), torch.arange(5000.0)
    one = {"a": tensor}
    tied = {"a": tensor, **{f"{'b' * 1000}{number}": tensor for number in range(20)}}
    for first, second in ((one, tied), (tied, one)):
        save(tmp_path, first, planner=planner)
        with mock.patch.object(_C, "free_bytes", return_value=0), pytest.raises(StorageFullError):
            save(tmp_path, second, planner=planner)
        save(tmp_path, first, planner=planner)
        assert read(tmp_path)["a"].equal(tensor)


def test_a_stock_planner_that_keeps_its_plans_is_refused(tmp_path: Path) -> None:
    def of_stock(directory: Path) -> None:
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"a": torch.ones(3)}, storage_writer=StorageWriter(directory, format="safetensors"), planner=planner)

    of_stock(tmp_path / "first")
    with pytest.raises(dcp.api.CheckpointException, match="enable_plan_caching"):
        of_stock(tmp_path / "second")
    assert read(tmp_path / "first")["a"].equal(torch.ones(3))
    assert not files(tmp_path / "second")


def test_an_export_over_a_single_file_that_was_killed_before_its_index(tmp_path: Path) -> None:
    """Its first file has its name already: the older model is whole, and nothing of the new one is mixed into it."""
    save(tmp_path, {"old": torch.zeros(2)})
    safetensors.save_file({"new": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    assert vescale_ckpt.load(tmp_path).keys() == {"old"}
    convert(tmp_path, tmp_path / "a.safetensors", format="safetensors")
    assert safetensors.load_file(tmp_path / "a.safetensors").keys() == {"old"}


# --- Conversions


def test_conversions_take_for_a_model_what_loads_do(tmp_path: Path) -> None:
    made = tmp_path / "made.safetensors"
    part = tmp_path / "part"
    part.mkdir()
    safetensors.save_file({"a": torch.ones(2)}, part / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="did not finish"):
        convert(part, made, format="safetensors")
    boxes = tmp_path / "boxes"
    boxes.mkdir()
    whole = torch.arange(12.0).view(3, 4)
    for number, box in enumerate(whole.split([1, 3], 1)):
        texts = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0, number]}})}
        name = boxes / f"shard-0000{number + 1}-model-00001-of-00001.safetensors"
        safetensors.save_file({"a": box.contiguous()}, name, texts)
    convert(boxes, made, format="safetensors")
    assert safetensors.load_file(made)["a"].equal(whole)
    os.unlink(boxes / "shard-00001-model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match="not hold all"):
        convert(boxes, made, format="safetensors", overwrite=True)
    assert safetensors.load_file(made)["a"].equal(whole)


def _zip_again(source: Path, target: Path, method: int, changed: dict[str, bytes]) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, changed.get(name.partition("/")[2], old.read(name)))


def test_files_of_torch_that_do_not_lie_as_here(tmp_path: Path) -> None:
    made = tmp_path / "made.safetensors"
    torch.save({"a": torch.arange(6.0)}, tmp_path / "a.pt")
    _zip_again(tmp_path / "a.pt", tmp_path / "big.pt", zipfile.ZIP_STORED, {"byteorder": b"big"})
    with pytest.raises(CheckpointError, match="big-endian"):
        convert(tmp_path / "big.pt", made, format="safetensors")
    _zip_again(tmp_path / "a.pt", tmp_path / "small.pt", zipfile.ZIP_DEFLATED, {})
    with pytest.raises(CheckpointError, match="compressed"):
        convert(tmp_path / "small.pt", made, format="safetensors")
    assert not made.exists()


def _npy(shape: tuple[int, ...], data: bytes, dtype: str = "<f4") -> bytes:
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, {"descr": dtype, "fortran_order": False, "shape": shape})
    return text.getvalue() + data


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.npy": _npy((-2, -3), bytes(24))}, "no array has shape"),
        ({"a.npy": _npy((1 << 70, 0), b"")}, "no array has shape"),
        ({"a.npy": _npy((1 << 40, 1 << 40, 0), b"")}, "no array has shape"),
        ({"a.npy": _npy((2,), bytes(4), ">u2"), "torch_dtypes.json": b'{"a": "bfloat16"}'}, "which >u2 cannot be"),
        ({"a.npy": _npy((2,), bytes(8), "<i4"), "torch_dtypes.json": b'{"a": "float32"}'}, "which int32 cannot be"),
        ({"a%2Fb.npy": _npy((1,), bytes(4)), "a%2fb.npy": _npy((1,), b"1234")}, "two arrays"),
    ],
)
def test_folders_of_arrays_that_lie(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    (tmp_path / "npy").mkdir()
    for name, content in files.items():
        (tmp_path / "npy" / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "npy", tmp_path / "made", format="safetensors")
    assert not (tmp_path / "made").exists()


def test_any_damage_of_an_archive_is_told_as_such(tmp_path: Path) -> None:
    rng = random.Random(5)
    np.savez_compressed(tmp_path / "a.npz", a=np.arange(500, dtype=np.float32), b=np.ones((3, 4)))
    sound = (tmp_path / "a.npz").read_bytes()
    convert(tmp_path / "a.npz", tmp_path / "whole.safetensors", format="safetensors")
    expected = safetensors.load_file(tmp_path / "whole.safetensors")
    for _ in range(50):
        damaged = bytearray(sound)
        for _ in range(rng.choice([1, 1, 8])):
            damaged[rng.randrange(len(sound))] = rng.randrange(256)
        (tmp_path / "b.npz").write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            convert(tmp_path / "b.npz", tmp_path / "b.safetensors", format="safetensors", overwrite=True)
            found = safetensors.load_file(tmp_path / "b.safetensors")
            assert all(value.equal(expected.get(name, value)) for name, value in found.items())


def test_layers_with_a_huge_number(tmp_path: Path) -> None:
    torch.save({"l.0.w": torch.ones(1), f"l.{10**15}.w": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="8, 9, 10 and 999999999999989 more of 1000000000000001 are missing"):
        convert(tmp_path / "a.pt", tmp_path / "made", format="dcp", stack={"l.*.w": "l.w"})


@pytest.mark.parametrize("dtype", ["float4_e2m1fn_x2", {"a": "bits8"}, {"a": "quint8"}])
def test_dtypes_that_nothing_converts_to(tmp_path: Path, dtype: Any) -> None:
    torch.save({"a": torch.ones(4)}, tmp_path / "a.pt")
    with pytest.raises(TypeError, match="no conversion"):
        convert(tmp_path / "a.pt", tmp_path / "made", format="npy", dtype=dtype)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, exchanges: bool) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    torch.save({"b": torch.ones(1)}, tmp_path / "b.pt")
    made = tmp_path / "made"
    convert(tmp_path / "a.pt", made, format="npy")
    for error in (errno.EIO, errno.ENOSPC):
        faults.inject("exchange", error if exchanges else errno.EINVAL)
        faults.inject("rename", error, 1)
        with pytest.raises(StorageFullError if error == errno.ENOSPC else CheckpointError, match="made"):
            convert(tmp_path / "b.pt", made, format="npy", overwrite=True)
        faults.clear()
        assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt", "made"] and os.listdir(made) == ["a.npy"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("format", ["npy", "safetensors"])
def test_a_kill_while_a_folder_is_replaced_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: Format, exchanges: bool
) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    torch.save({"b": torch.ones(3)}, tmp_path / "b.pt")
    made = tmp_path / "made"
    calls = 0

    def replace(kill_at: int) -> None:
        nonlocal calls
        calls = 0

        def killed(call: Any) -> Any:
            def stand_in(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > kill_at:
                    raise Killed
                return call(*arguments, **options)

            return stand_in

        with monkeypatch.context() as patched:
            if not exchanges:
                patched.setattr(_C, "exchange_names", lambda first, second: False)
            for name in ("rename_file", "exchange_names", "sync_directory", "remove_file"):
                patched.setattr(_C, name, killed(getattr(_C, name)))
            patched.setattr(shutil, "rmtree", killed(shutil.rmtree))
            convert(tmp_path / "b.pt", made, format=format, max_shard_size=4, overwrite=True)

    def keys(path: Path) -> list[str]:
        convert(path, tmp_path / "again.pt", format="torch", overwrite=True)
        return list(torch.load(tmp_path / "again.pt"))

    gaps = 0
    for kill_at in range(100):
        convert(tmp_path / "a.pt", made, format=format, overwrite=True)
        try:
            replace(kill_at)
            break
        except Killed:
            pass
        if made.exists():
            assert keys(made) in (["a"], ["b"])
        else:
            gaps += 1
        with pytest.raises(CheckpointError, match="overwrite"):  # what was there is there again
            convert(tmp_path / "b.pt", made, format=format)
        assert keys(made) in (["a"], ["b"])
        convert(tmp_path / "b.pt", made, format=format, overwrite=True)
        assert keys(made) == ["b"] and not [name for name in os.listdir(tmp_path) if ".tmp." in name]
    assert kill_at > 2 and keys(made) == ["b"]
    assert gaps == 0 if exchanges else gaps > 0


def test_a_link_to_a_folder_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "old", format="npy")
    (tmp_path / "link").symlink_to("old")
    convert(tmp_path / "a.pt", tmp_path / "link", format="npy", rename={"a": "b"}, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "link", "old"]
    assert os.listdir(tmp_path / "old") == ["a.npy"] and os.listdir(tmp_path / "link") == ["b.npy"]
