"""Fingerprints of wrapper subclasses, whose inner tensors are what is saved; `prove` compares these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import on_ranks
from harness.wrapper_tensors import OneScale, Quantized, Uncut
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_ckpt.errors import StateDiffersError


def _nested(seed: int = 0) -> Any:
    return Quantized(Uncut.random(6, seed=seed), torch.ones(6, 1), torch.float32)


def test_they_are_of_class_settings_and_each_inner_bit() -> None:
    one, scaled = Quantized.random(6), Quantized.random(6)
    scaled.scale.view(torch.int32)[3] ^= 1
    states = [
        one, scaled, Quantized.random(6, seed=1), Quantized.random(6, sign=-1),
        Quantized.random(6, dtype=torch.bfloat16), OneScale.random(6), Uncut.random(6), one.values(), one.codes,
        _nested(), _nested(1),
    ]  # fmt: skip
    found = [vescale_ckpt.fingerprint({"q": value}) for value in states]
    assert len(set(map(str, found))) == len(states)
    assert vescale_ckpt.fingerprint({"q": torch.nn.Parameter(Quantized.random(6))}) == found[0]
    turned = Quantized(one.codes.t().contiguous().t(), one.scale.clone(), one.dtype)
    assert vescale_ckpt.fingerprint({"q": turned}) == found[0]
    assert list(found[0] - found[1]) == ["q"]


def test_in_objects_they_count_too() -> None:
    found = [vescale_ckpt.fingerprint({"o": {1: ({Quantized.random(2, seed=seed)},)}}) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_a_resumed_wrapper_is_proved_and_a_changed_one_is_named(tmp_path: Path) -> None:
    state = {"q": Quantized.random(6), "deep": _nested(), "w": torch.ones(3)}
    vescale_ckpt.save(tmp_path / "a", state, fingerprint=True)
    resumed = {"q": Quantized.zeros(6), "deep": _nested(5), "w": torch.zeros(3)}
    vescale_ckpt.load(tmp_path / "a", resumed)
    assert vescale_ckpt.prove(tmp_path / "a", resumed)
    resumed["q"].scale[2] += 1
    resumed["q"].codes[1, 3:5] += 1
    with pytest.raises(StateDiffersError, match=r"1 different: q \(rank 0: 3 of 54 elements\)"):
        vescale_ckpt.prove(tmp_path / "a", resumed)
    resumed["q"] = Quantized.random(6, sign=-1)
    with pytest.raises(StateDiffersError, match=r"1 different: q \(other values or settings"):
        vescale_ckpt.prove(tmp_path / "a", resumed)


@on_ranks(2)
def test_a_wrapper_that_one_rank_has_and_a_load_refuses_is_named_on_all(tmp_path: Path) -> None:
    """A stage of a pipeline: the ranks that do not have it find the same as the one that does."""
    rank = torch.distributed.get_rank()
    state = {"w": torch.ones(3), **({"q": Quantized.random(6)} if rank == 1 else {})}
    vescale_ckpt.save(tmp_path / "a", state, fingerprint=True)
    state["w"][0] = 2
    if rank == 1:
        state["q"] = Quantized.random(6, sign=-1)
    with pytest.raises(StateDiffersError) as caught:
        vescale_ckpt.prove(tmp_path / "a", state, timeout=20)
    assert [*caught.value.different] == ["q", "w"]


@on_ranks(2)
def test_replicas_have_the_fingerprint_of_one_and_shards_are_refused() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    alone = [torch.distributed.new_group([rank]) for rank in range(2)][mesh.get_rank()]
    expected = vescale_ckpt.fingerprint({"q": Quantized.random(6)}, process_group=alone)
    replica = DTensor.from_local(Quantized.random(6), mesh, [Replicate()], run_check=False)
    assert vescale_ckpt.fingerprint({"q": replica}) == expected
    shard = DTensor.from_local(Quantized.random(3), mesh, [Shard(0)], run_check=False)
    with pytest.raises(CheckpointError, match=r"model\.q: a shard of a .*Quantized has no fingerprint") as caught:
        vescale_ckpt.fingerprint({"model": {"q": shard}})
    assert caught.value.key == "model.q" or "model.q" in str(caught.value)
