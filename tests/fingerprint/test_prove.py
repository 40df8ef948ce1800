"""Equal states have equal fingerprints however ranks share them; `prove` names each fault of a resume by its key."""

from __future__ import annotations

import cmath
import copy
import math
import random
import re
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.ranks import on_ranks, run_ranks
from harness.states import StridedShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt import Fingerprint, PerRank
from vescale_ckpt._fingerprint import object_digest
from vescale_ckpt._fingerprint.object_digest import digest_of
from vescale_ckpt.errors import CheckpointError, CorruptCheckpointError, StateDiffersError

SHAPES = [(), (16, 8), (7, 5), (1, 3), (0, 4), (11,), (3, 5, 4), (310, 601)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
WAYS: list[tuple[Placement, ...]] = [
    (Replicate(), Replicate()),
    (Replicate(), Shard(0)),
    (Shard(-1), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(-1), Shard(-1)),
    (StridedShard(0, split_factor=2), Shard(0)),
]


def _full(number: int) -> torch.Tensor:
    shape, dtype = SHAPES[number], DTYPES[number % len(DTYPES)]
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-100, 100, shape, generator=generator).to(torch.float32).to(dtype)


def _fulls() -> dict[str, Any]:
    return {f"t{number}": _full(number) for number in range(len(SHAPES))} | {"step": 7, "lr": 0.1}


@on_ranks(4)
def test_a_fingerprint_does_not_depend_on_how_ranks_share_the_state() -> None:
    meshes = {ranks: DeviceMesh("cpu", torch.tensor(ranks).reshape(shape)) for ranks, shape in MESHES.items()}
    groups = {ranks: dist.new_group(list(ranks)) for ranks in MESHES}
    alone = [dist.new_group([rank]) for rank in range(4)]
    expected = vescale_ckpt.fingerprint(_fulls(), process_group=alone[dist.get_rank()])
    assert not expected.replicas
    for ranks, mesh in meshes.items():
        if dist.get_rank() not in ranks:
            continue
        for way in WAYS:
            state = {key: _placed(value, mesh, way[: mesh.ndim]) for key, value in _fulls().items()}
            found = vescale_ckpt.fingerprint(state, process_group=groups[ranks])
            assert found == expected, (way, ranks, found - expected)
            assert str(found) == str(expected)
    dist.barrier()


MESHES = {(0,): (1,), (1, 2): (2,), (0, 1, 3): (3,), (0, 1, 2, 3): (2, 2)}


def _placed(value: Any, mesh: DeviceMesh, way: tuple[Placement, ...]) -> Any:
    """A tensor on the mesh; replicated where its dimensions do not allow the way."""
    if not isinstance(value, torch.Tensor):
        return value
    dims = [of.dim for of in way if hasattr(of, "dim")]
    fits = all(-value.dim() <= dim < value.dim() for dim in dims)
    return distribute_tensor(value, mesh, way if fits else [Replicate()] * mesh.ndim, src_data_rank=None)


def test_a_fingerprint_does_not_depend_on_strides_and_lazy_operations() -> None:
    full = torch.arange(24.0).reshape(4, 6) * (1 + 2j)
    expected = vescale_ckpt.fingerprint({"w": full})
    turned = full.t().contiguous().t()
    spread = torch.zeros(8, 12, dtype=full.dtype)[::2, ::2]
    spread.copy_(full)
    conjugated = full.conj().resolve_conj().conj()
    assert conjugated.is_conj() and not turned.is_contiguous() and not spread.is_contiguous()
    for same in (turned, spread, conjugated):
        assert vescale_ckpt.fingerprint({"w": same}) == expected


def test_each_element_bit_shape_dtype_and_key_counts() -> None:
    base = torch.zeros(3, 5)
    one, two = base.clone(), base.clone()
    one[2, 1], two[2, 2] = -0.0, -0.0
    states = [
        {"w": base}, {"w": one}, {"w": two}, {"w": base.t()}, {"w": base.reshape(15)}, {"w": base.to(torch.int32)},
        {"v": base}, {"w": base, "v": base}, {"w": base, "step": 0}, {"w": base, "step": 0.0}, {},
    ]  # fmt: skip
    assert len({str(vescale_ckpt.fingerprint(state)) for state in states}) == len(states)
    found = vescale_ckpt.fingerprint(states[1]) - vescale_ckpt.fingerprint(states[0])
    assert list(found) == ["w"] and "other values (here: [3, 5] at [0, 0])" in str(found["w"])
    assert "float32 [5, 3]" in str((vescale_ckpt.fingerprint(states[0]) - vescale_ckpt.fingerprint(states[3]))["w"])


# --- Objects


class Color(Enum):
    RED = 1
    GREEN = 2


@dataclass
class Settings:
    rate: float
    names: list[str]


def test_digests_of_objects_follow_equality() -> None:
    def distinct() -> list[Any]:
        return [
            None, True, 1, 1.0, "1", b"1", 1j, [1], (1,), {1}, frozenset({1}), {1: 2}, 0.0, -0.0, float("nan"),
            torch.tensor([1]), torch.tensor([1.0]), torch.float32, np.array([1]), np.float32(1), Color.RED, Color.GREEN,
            Settings(1.0, ["a"]), Settings(1.0, ["b"]), datetime(2026, 1, 1), Path("/x"), deque([1]), [[1], 2],
            [1, [2]], random.Random(1), random.Random(2), np.random.RandomState(1), len, int,
            torch.Generator().manual_seed(1).get_state(), torch.Generator().manual_seed(2).get_state(),
        ]  # fmt: skip

    digests = [digest_of(value) for value in distinct()]
    assert len(set(digests)) == len(digests)
    assert digests == [digest_of(copy.deepcopy(value)) for value in distinct()]
    text = "".join(["a", "b"])
    assert digest_of([text, text]) == digest_of(["ab", "".join(["a", "b"])])
    assert digest_of({"a": 1, "b": 2}) == digest_of(OrderedDict(b=2, a=1)) == digest_of(defaultdict(int, a=1, b=2))
    loops: list[list[Any]] = [[1], [1]]
    for loop in loops:
        loop.append(loop)
    assert digest_of(loops[0]) == digest_of(loops[1])


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, value: float) -> float:
        return self.by * value

    def method(self) -> None: ...


class Names(set[str]):
    pass


def test_digests_are_of_what_callables_and_subclasses_hold() -> None:
    def distinct() -> list[Any]:
        linear, other = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
        linear.weight.data.fill_(1.0)
        other.weight.data.fill_(2.0)
        return [
            Scale(1.0), Scale(2.0), Scale(1.0).method, Scale(2.0).method, partial(int, base=2), partial(int, base=8),
            itemgetter(1), itemgetter(2), math.sin, cmath.sin, np.sin, np.cos, linear, other, Names("ab"), Names("ac"),
            re.compile("a"), re.compile("b"), torch.strided, torch.eye(2).to_sparse(),
            torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(),
            torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
        ]  # fmt: skip

    digests = [digest_of(value) for value in distinct()]
    assert len(set(digests)) == len(digests)
    assert digests == [digest_of(value) for value in distinct()]
    words = [f"word {i}" for i in range(1000)]
    assert digest_of(Names(words)) == digest_of(Names(reversed(words)))
    with pytest.raises(TypeError, match="quantized"):
        digest_of(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


def test_parts_that_are_shared_are_walked_once_and_a_thicket_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    one: list[Any] = [1]
    other: list[Any] = [1]
    for _ in range(200):
        one, other = [one, one], [other, copy.copy(other)]
    assert digest_of(one) == digest_of(other)
    nodes: list[list[Any]] = [[] for _ in range(30)]
    for node in nodes:
        node.extend(nodes)
    monkeypatch.setattr(object_digest, "_MOST_LOOPS", 1000)
    with pytest.raises(TypeError, match="in too many ways"):
        digest_of(nodes)


def test_digests_do_not_depend_on_what_was_walked_before() -> None:
    def pair() -> tuple[list[Any], list[Any]]:
        a: list[Any] = ["a"]
        b: list[Any] = ["b", a, [2]]
        a.extend([b, [2]])
        return a, b

    (a, b), (c, d) = pair(), pair()
    assert digest_of({"a": a, "b": b}) == digest_of({"b": d, "a": c})


def test_a_tensor_without_a_fingerprint_is_an_error_that_names_its_key() -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.empty(3, device="meta")):
        with pytest.raises(CheckpointError, match=r"model\.w: a Tensor has no fingerprint"):
            vescale_ckpt.fingerprint({"model": {"w": tensor}})


def test_an_object_without_a_digest_is_an_error_that_names_its_key() -> None:
    with pytest.raises(CheckpointError, match=r"extra\.lock"):
        vescale_ckpt.fingerprint({"extra": {"lock": (i for i in range(2))}})


# --- Saved, and proved


def test_a_checkpoint_without_a_fingerprint_or_with_a_damaged_one_is_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    vescale_ckpt.save(tmp_path / "a", state)
    with pytest.raises(CheckpointError, match="fingerprint=True"):
        vescale_ckpt.prove(tmp_path / "a", state)
    vescale_ckpt.save(tmp_path / "b", state, extra_files={"fingerprint.json": b'{"fingerprint":99,"tensors":{}}'})
    with pytest.raises(CorruptCheckpointError, match="version 99"):
        vescale_ckpt.prove(tmp_path / "b", state)
    for of_w in (
        '["float32",[1e999],"0"]',
        '["float32",[3],"-5"]',
        '["float32",[3],"0_0"]',
        '["float32",[3],""]',
        '"w"',
        "{}",
    ):
        content = f'{{"fingerprint":1,"tensors":{{"w":{of_w}}},"objects":{{}}}}'.encode()
        with pytest.raises(CorruptCheckpointError, match="not readable"):
            Fingerprint.from_bytes(content, "b")
    with pytest.raises(ValueError, match="fingerprint"):
        vescale_ckpt.save(tmp_path / "c", state, format="safetensors", fingerprint=True)


def _replicas(directory: Path) -> None:
    rank = dist.get_rank()
    state = {"same": torch.arange(6.0), "drifted": torch.arange(6.0), "rng": PerRank(rank), "step": 3}
    vescale_ckpt.save(directory / "a", state, fingerprint=True)
    assert vescale_ckpt.prove(directory / "a", state)
    if rank == 1:
        state["drifted"].view(torch.int32)[4] ^= 1  # far from what a save samples
    proof = vescale_ckpt.prove(directory / "a", state, strict=False)
    assert proof.replicas == {"drifted": (0, 1)} and not proof
    state["step"] = 3 + rank
    with pytest.raises(StateDiffersError, match=r"drifted \(ranks 0 and 1\), step \(ranks 0 and 1\)"):
        vescale_ckpt.prove(directory / "a", state)
    state["step"] = 3
    state["drifted"] = torch.arange(6.0)
    sharded = {"w": _sharded(torch.arange(40.0).reshape(10, 4))}
    vescale_ckpt.save(directory / "b", sharded, fingerprint=True)
    if rank == 1:
        sharded["w"].to_local()[3, 1] += 1
    with pytest.raises(StateDiffersError, match=r"w \(rank 1: 1 of 20 elements\)"):
        vescale_ckpt.prove(directory / "b", sharded)


def _sharded(full: torch.Tensor) -> DTensor:
    return distribute_tensor(full, DeviceMesh("cpu", [0, 1]), [Shard(0)], src_data_rank=None)


def test_replicas_and_shards_that_differ_are_named_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, _replicas, tmp_path)
