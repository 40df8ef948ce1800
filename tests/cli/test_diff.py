"""`vescale-ckpt diff` without `--values`: never "equal" for values that were not compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import run_ranks
from harness.wrapper_tensors import Quantized
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt import cli
from vescale_ckpt._inspect.diff import Diff, diff

EQUAL, DIFFERENT, UNKNOWN = 0, 1, 3
State = dict[str, Any]


def _state() -> State:
    return {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(3, dtype=torch.bfloat16), "scalar": torch.tensor(2.0)}


def _changed(state: State, key: str = "w") -> State:
    return {**state, key: state[key] + 1}


def _stock(path: Path, state: State) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


def _converted(name: str) -> Callable[[Path, State], None]:
    def write(path: Path, state: State) -> None:
        vescale_ckpt.save(path.with_name(f"{path.name}.dcp"), state)
        vescale_ckpt.convert(path.with_name(f"{path.name}.dcp"), path, format=name)  # type: ignore[arg-type]

    return write


#: How a checkpoint is written, and whether it has checksums of the values.
FORMATS: dict[str, tuple[Callable[[Path, State], None], bool]] = {
    "ours": (lambda path, state: vescale_ckpt.save(path, state) and None, True),
    "stock": (_stock, False),
    "pt": (lambda path, state: torch.save(state, path), False),
    "safetensors": (_converted("safetensors"), False),
}


def _difference(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, Diff]:
    """The exit status and what was found, which fit."""
    status, found = cli.main(["diff", str(a), str(b)]), diff(a, b)
    out = capsys.readouterr().out
    assert status == (DIFFERENT if found.different else UNKNOWN if found.not_compared else EQUAL)
    assert (status == EQUAL) == found.equal == ("\nequal;" in f"\n{out}")
    assert all(f"values not compared: {key}\n" in out for key in found.not_compared) and "--values" in (
        out if found.not_compared else "--values"
    )
    return status, found


@pytest.mark.parametrize("kinds", list(itertools.combinations_with_replacement(FORMATS, 2)), ids="-".join)
def test_formats(tmp_path: Path, kinds: tuple[str, str], capsys: Any) -> None:
    (write_a, sums_a), (write_b, sums_b) = (FORMATS[kind] for kind in kinds)
    suffix = {"pt": ".pt"}
    a, b, c = (tmp_path / f"{name}{suffix.get(kind, '')}" for name, kind in zip("abc", (*kinds, kinds[1]), strict=True))
    write_a(a, _state())
    write_b(b, _state())
    write_b(c, _changed(_state()))
    known = sums_a and sums_b
    status, found = _difference(a, b, capsys)
    assert (status, len(found.not_compared)) == ((EQUAL, 0) if known else (UNKNOWN, 3))
    status, found = _difference(a, c, capsys)
    assert (status, found.checksums) == ((DIFFERENT, ["w"]) if known else (UNKNOWN, []))


_TABLE = torch.arange(24.0).view(6, 4)
#: Tensors whose memory does not hold their values in order.
ODD = {
    "transposed": _TABLE.t(),
    "part": _TABLE[1:3],
    "conjugate": torch.ones(3, dtype=torch.complex64).mul(1j).conj(),
    "empty": torch.empty(0, 4),
}


@pytest.mark.parametrize("name", ODD)
def test_tensors_that_hold_values_otherwise(tmp_path: Path, name: str, capsys: Any) -> None:
    state = {"w": ODD[name]}
    a, b, c = (_saved(tmp_path / name, of) for name, of in zip("abc", (state, state, _changed(state)), strict=True))
    assert _difference(a, b, capsys)[0] == EQUAL
    assert _difference(a, c, capsys)[0] == (DIFFERENT if state["w"].numel() else EQUAL)


def _sharded(directory: Path, name: str, dim: int, plus: float) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = distribute_tensor(torch.arange(64.0).view(8, 8) + plus, mesh, [Shard(dim)])
    vescale_ckpt.save(directory / name, {"w": tensor})


def test_other_shards(tmp_path: Path, capsys: Any) -> None:
    run_ranks(2, _sharded, tmp_path, "two", 0, 0.0)
    run_ranks(2, _sharded, tmp_path, "same", 0, 0.0)
    run_ranks(2, _sharded, tmp_path, "more", 0, 1.0)
    run_ranks(4, _sharded, tmp_path, "four", 0, 0.0)
    run_ranks(2, _sharded, tmp_path, "columns", 1, 0.0)
    for name, expected in {"same": EQUAL, "more": DIFFERENT, "four": UNKNOWN, "columns": UNKNOWN}.items():
        assert _difference(tmp_path / "two", tmp_path / name, capsys)[0] == expected


def _saved(path: Path, state: State, **options: Any) -> Path:
    vescale_ckpt.save(path, state, **options)
    return path


def test_objects_and_extra_files(tmp_path: Path, capsys: Any) -> None:
    rank = vescale_ckpt.PerRank
    state = {**_state(), "rng": rank({"seed": 1}), "history": [1.0, {"a": np.ones(2)}]}
    one = _saved(tmp_path / "1", state, extra_files={"c.json": b"1"})
    assert _difference(one, _saved(tmp_path / "2", state, extra_files={"c.json": b"1"}), capsys)[0] == EQUAL
    others = [
        {**state, "rng": rank({"seed": 2})},
        {**state, "history": [1.0, {"a": np.zeros(2)}]},
        state,
    ]
    for number, other in enumerate(others):
        path = _saved(tmp_path / f"other {number}", other, extra_files={"c.json": b"1" if other is not state else b"2"})
        status, found = _difference(one, path, capsys)
        assert status == DIFFERENT and len(found.objects) == 1
    other = _saved(tmp_path / "3", _changed(state, "b"), extra_files={"c.json": b"1"})
    assert _difference(one, other, capsys)[1].checksums == ["b"]
    renamed = diff(one, other, keys="w", rename={"w": "w"})
    assert not renamed.checksums and renamed.compared == 1


def test_wrapper_subclasses(tmp_path: Path, capsys: Any) -> None:
    one, same, other = (
        _saved(tmp_path / str(number), {"w": Quantized.random(4, seed=seed)}) for number, seed in enumerate((0, 0, 1))
    )
    assert _difference(one, same, capsys)[0] == EQUAL and _difference(one, other, capsys)[0] == DIFFERENT
