"""`load` on several ranks: resharding of modules and optimizers, failures that all ranks hear of, how much is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import on_ranks, run_ranks
from harness.states import KiB, MiB, Witness, assert_same, group_of_one, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt import (
    CheckpointError,
    IncompatibleStateError,
    LoadFailedError,
    MissingKeysError,
    PerRank,
)

FOREVER = 30.0


# --- Models


def _build(seed: int, *, meta: bool = False, ddp: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        model: nn.Module = nn.Sequential(nn.Linear(13, 30), nn.ReLU(), nn.Linear(30, 7), nn.LayerNorm(7))
    if ddp:
        model = nn.parallel.DistributedDataParallel(model)
    elif dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _train_and_save(directory: Path, ddp: bool) -> list[float]:
    model, optimizer = _build(1, ddp=ddp)
    train(model, optimizer)
    vescale_ckpt.save(directory, {"model": model, "optimizer": optimizer, "step": 2})
    return train(model, optimizer)


def _load_and_train(directory: Path, meta: bool) -> list[float]:
    model, optimizer = _build(2 + dist.get_rank(), meta=meta)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    report = vescale_ckpt.load(directory, state)
    assert report.missing == report.unexpected == report.mismatched == [] and state["step"] == 2
    if dist.get_world_size() > 1:
        weight = model[0].weight  # type: ignore[index]
        assert isinstance(weight, DTensor) and isinstance(optimizer.state[weight]["exp_avg"], DTensor)
    return train(model, optimizer)


@pytest.mark.parametrize("ddp", [False, True])
def test_training_goes_on_on_other_numbers_of_ranks(checkpoint: Path, ddp: bool) -> None:
    expected = run_ranks(2, _train_and_save, checkpoint, ddp)[0]
    for ranks, meta in ((1, True), (4, False), (4, True)):
        for losses in run_ranks(ranks, _load_and_train, checkpoint, meta):
            assert losses == pytest.approx(expected, rel=1e-5), f"{ranks} ranks, meta: {meta}"


@on_ranks(2)
def test_dtensors_on_the_meta_device_get_memory_where_they_lie(checkpoint: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(35.0).view(7, 5)
    vescale_ckpt.save(checkpoint, {"w": distribute_tensor(full, mesh, [Shard(1)])})
    for placement in (Shard(0), Replicate()):
        local = distribute_tensor(full, mesh, [placement]).to_local()
        meta = DTensor.from_local(
            torch.empty_like(local, device="meta"), mesh, [placement], run_check=False, shape=(7, 5), stride=(5, 1)
        )
        state = {"w": meta}
        vescale_ckpt.load(checkpoint, state)
        assert state["w"].placements == (placement,) and not state["w"].is_meta
        assert_same(state["w"].full_tensor(), full)


# --- Values of ranks, and all values without a state


def _save_per_rank(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "rng": PerRank(f"of {dist.get_rank()}"),
        "w": distribute_tensor(torch.arange(30.0).view(10, 3), mesh, [Shard(0)]),
        "n": {"list": [torch.ones(2), {"x": 5}]},
    }
    vescale_ckpt.save(directory, state)
    state["rng"] = PerRank("nothing")
    report = vescale_ckpt.load(directory, state, rename={"other": "w"})
    assert state["rng"].obj == f"of {dist.get_rank()}" and report.unexpected == []


def test_values_of_ranks_and_checkpoints_of_many_ranks_in_one_process(checkpoint: Path) -> None:
    run_ranks(2, _save_per_rank, checkpoint)
    loaded = vescale_ckpt.load(checkpoint)
    assert_same(loaded["w"], torch.arange(30.0).view(10, 3))
    assert_same(loaded["n"], {"list": [torch.ones(2), {"x": 5}]})
    assert_same(loaded["rng"], {f"rank_{rank}_of_2": {"state": f"of {rank}"} for rank in range(2)})
    together = PerRank(None, reshard=lambda values, rank, size: (values, rank, size))
    vescale_ckpt.load(checkpoint, {"rng": together})
    assert together.obj == (["of 0", "of 1"], 0, 1)
    with pytest.raises(IncompatibleStateError, match="state of 1 ranks"):
        vescale_ckpt.load(checkpoint, {"rng": PerRank(None)})


# --- Failures


def _state(rows: int = 64) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "w": distribute_tensor(torch.zeros(rows, 8192), mesh, [Shard(0)]),
        "witness": Witness(),
        "rng": PerRank(f"of {dist.get_rank()}"),
        "object": dist.get_world_size(),
    }


def _error(directory: Path, state: dict[str, Any], **options: Any) -> CheckpointError:
    state["rng"].obj = state["object"] = "untouched"
    with pytest.raises(CheckpointError) as caught:
        vescale_ckpt.load(directory, state, timeout=FOREVER, **options)
    if "hand over" not in str(caught.value):
        assert state["witness"].loads == 0
        assert state["rng"].obj == state["object"] == "untouched", "nothing is handed over before all have read"
    return caught.value


def _fail_in_all_ways(directory: Path) -> list[tuple[type, str]]:
    """On rank 1 only. The exchange is used on after each failure."""
    state = _state()
    vescale_ckpt.save(directory, state)
    mine = dist.get_rank() == 1
    errors = []

    errors.append(_error(directory, {**state, **({"gone": 1} if mine else {})}))
    errors.append(_error(directory, {**state, "w": torch.zeros(3 if mine else 64, 8192)}))
    errors.append(_error(directory, state, rename=(lambda key: "w") if mine else None))

    errors.append(_error(directory, {**state, "witness": Witness(fails=mine)}))
    state["witness"] = Witness()
    vescale_ckpt.load(directory, state)
    assert state["witness"].loads == 1 and state["rng"].obj == f"of {dist.get_rank()}" and state["object"] == 2
    return [(type(error), str(error)) for error in errors]


@on_ranks(3)
def test_ranks_are_counted_within_their_group(checkpoint: Path) -> None:
    """Ranks are counted within the group that saves and loads."""
    group, of_one = dist.new_group([1, 2]), group_of_one()
    rank = dist.get_rank()
    if rank == 0:
        return
    state = {"rng": PerRank(f"of {rank}")}
    vescale_ckpt.save(checkpoint, state, process_group=group)
    loaded = {"rng": PerRank(None)}
    vescale_ckpt.load(checkpoint, loaded, process_group=group, timeout=FOREVER)
    assert loaded["rng"].obj == f"of {rank}"
    alone = {"rng": PerRank(None, reshard=lambda values, rank, size: (values, rank, size))}
    vescale_ckpt.load(checkpoint, alone, process_group=of_one, timeout=FOREVER)
    assert alone["rng"].obj == (["of 1", "of 2"], 0, 1)


def test_what_goes_wrong_on_one_rank_is_raised_on_all(checkpoint: Path) -> None:
    first, second = run_ranks(2, _fail_in_all_ways, checkpoint)
    assert first == second
    kinds, texts = zip(*first, strict=True)
    assert kinds == (MissingKeysError, IncompatibleStateError, LoadFailedError, LoadFailedError)
    assert "'gone'" in texts[0] and "shape (3, 8192)" in texts[1]
    assert all("rank 1" in text for text in texts[2:]) and "rank 0" not in "".join(texts)
    assert "hand over" in texts[3] and "cannot take it" in texts[3]


@on_ranks(2)
def test_the_report_is_that_of_all_ranks_together(checkpoint: Path) -> None:
    mine = str(dist.get_rank())
    vescale_ckpt.save(checkpoint, {"a": 1, "b": {"0": torch.ones(2), "1": torch.ones(2)}, "c": 3})
    state = {"b": {mine: torch.zeros(2)}, f"gone{mine}": 5, "a": torch.zeros(()) if mine == "1" else 0}
    report = vescale_ckpt.load(checkpoint, state, strict=False)
    assert_same(state["b"][mine], torch.ones(2))
    assert (report.missing, report.unexpected) == (["gone0", "gone1"], ["c"])
    assert [mismatch.key for mismatch in report.mismatched] == ["a"]


# --- How much is read


@on_ranks(4)
def test_a_slice_reads_its_ranges_and_what_is_checked_with_them(checkpoint: Path) -> None:
    mesh = init_device_mesh("cpu", (4,))
    stacked, matrix = torch.arange(4 << 20).view(4, 1024, 1024), torch.arange(2 << 20).view(1024, 2048)
    if dist.get_rank() == 0:
        vescale_ckpt.save(checkpoint, {"stacked": stacked, "matrix": matrix}, process_group=group_of_one()).result()
    else:
        group_of_one()
    dist.barrier()
    found = []
    cases: list[tuple[str, torch.Tensor, Placement]] = [
        ("stacked", stacked, Shard(0)),
        ("stacked", stacked, Shard(1)),
        ("matrix", matrix, Shard(0)),
        ("matrix", matrix, Shard(1)),
    ]
    for verify in (True, False):
        for name, full, placement in cases:
            target = distribute_tensor(torch.zeros_like(full), mesh, [placement])
            stats = vescale_ckpt.load(checkpoint, {name: target}, verify=verify, broadcast_checkpoint=False).stats
            expected = distribute_tensor(full, mesh, [placement]).to_local()
            assert_same(target.to_local(), expected)
            assert stats.bytes == expected.nbytes
            found.append((stats.bytes, stats.read_bytes))
    # Ranges of 8 MiB, four of 2 MiB, 4 MiB, and 1024 of 4 KiB, which lie within blocks that are read whole.
    block, around = 256 * KiB, 64 * KiB
    verified, unverified = found[:4], found[4:]
    for (needed, read), ranges in zip(verified[:3], (1, 4, 1), strict=True):
        assert needed <= read <= needed + ranges * 2 * block + around
    needed, read = verified[3]
    assert needed < read <= 4 * needed + around, "each block once"
    for (needed, read), ranges in zip(unverified[:3], (1, 4, 1), strict=True):
        assert needed <= read <= needed + ranges * 8 * KiB + around
    assert unverified[3][1] <= 16 * MiB + around, "gaps of 12 KiB are cheaper to read than to skip"
