"""`load` in one process: what fits and what does not, parts, other names, without a state, and how much is read."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.cost import calls_of
from harness.files import read_metadata, rewrite_metadata
from harness.states import MiB, assert_same, blank, mixed_state
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import Replicate, Shard

import vescale_ckpt
from vescale_ckpt import (
    CheckpointError,
    IncompatibleStateError,
    Mismatch,
    MissingKeysError,
    Safetensors,
    UntrustedCheckpointError,
)
from vescale_ckpt.safetensors import save_file


@pytest.fixture(params=["ours", "stock"])
def mixed(request: pytest.FixtureRequest, checkpoint: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, with an index or without, and what is in it."""
    state = mixed_state()
    if request.param == "ours":
        vescale_ckpt.save(checkpoint, state)
    else:
        dcp.save(state, storage_writer=FileSystemWriter(checkpoint))
    return checkpoint, state


def test_fills_a_state_in_place(mixed: tuple[Path, dict[str, Any]]) -> None:
    path, state = mixed
    target = blank(state)
    weight = target["model"]["weight"]
    report = vescale_ckpt.load(path, target)
    assert_same(target, state)
    assert target["model"]["weight"] is weight
    assert report.missing == report.unexpected == report.mismatched == []
    assert report.stats.bytes >= 3 * MiB and report.stats.verified
    assert not vescale_ckpt.load(path, target, verify=False).stats.verified


def test_one_error_tells_all_that_does_not_fit(mixed: tuple[Path, dict[str, Any]]) -> None:
    path, state = mixed
    target = {
        "model": {"weight": torch.zeros(3), "bias": torch.zeros(300), "gone": torch.zeros(2), "scalar": 3.0},
        "step": torch.zeros(()),
        "also gone": 1,
    }
    mismatched = {
        Mismatch("model.weight", "shape (3,)", "shape (300, 400)"),
        Mismatch("model.bias", "dtype torch.float32", "dtype torch.bfloat16 (allow_cast=True converts)"),
        Mismatch("model.scalar", "an object of type float", "a tensor of shape () and dtype torch.float64"),
        Mismatch("step", "a tensor", "an object that is no tensor, as a number (any object takes it)"),
    }
    with pytest.raises(MissingKeysError) as caught:
        vescale_ckpt.load(path, target)
    assert set(caught.value.missing) == {"model.gone", "also gone"} and caught.value.unexpected == []
    assert set(caught.value.mismatched) == mismatched
    assert all(key in str(caught.value) for key in ("model.gone", "also gone", "model.weight", "model.bias", "step"))
    assert target["step"] is not state["step"] and target["also gone"] == 1

    del target["also gone"], target["model"]["gone"]
    with pytest.raises(IncompatibleStateError) as other:
        vescale_ckpt.load(path, target)
    assert set(other.value.mismatched) == mismatched and other.value.key == other.value.mismatched[0].key
    assert str(pickle.loads(pickle.dumps(other.value))) == str(other.value)


def test_a_report_in_place_of_the_error(mixed: tuple[Path, dict[str, Any]]) -> None:
    path, _ = mixed
    target = {"model": {"weight": torch.zeros(3), "scalar": torch.zeros((), dtype=torch.float64)}, "gone": 1, "step": 0}
    report = vescale_ckpt.load(path, target, strict=False)
    assert report.missing == ["gone"]
    assert [mismatch.key for mismatch in report.mismatched] == ["model.weight"]
    assert "model.bias" in report.unexpected and "model.weight" not in report.unexpected
    assert target["gone"] == 1 and target["step"] == 7 and target["model"]["scalar"] == 2.5
    assert_same(target["model"]["weight"], torch.zeros(3))


def test_keys_that_nobody_asks_for_are_an_error_only_within_a_module(checkpoint: Path) -> None:
    vescale_ckpt.save(checkpoint, {"net": nn.Linear(3, 4).state_dict(), "other": {"x": torch.ones(2)}})
    report = vescale_ckpt.load(checkpoint, {"net": nn.Linear(3, 4)})
    assert report.unexpected == ["other.x"]
    without_bias = nn.Linear(3, 4, bias=False)
    with pytest.raises(MissingKeysError, match=r"1 key not in the state: 'net.bias'"):
        vescale_ckpt.load(checkpoint, {"net": without_bias})
    assert vescale_ckpt.load(checkpoint, {"net": without_bias}, strict=False).unexpected == ["net.bias", "other.x"]
    assert vescale_ckpt.load(checkpoint, {"net": without_bias}, keys="net.weight").unexpected == []
    assert vescale_ckpt.load(checkpoint, {"net": without_bias}, keys=["net.weight", "other"]).unexpected == ["other.x"]


# --- Parts and names


def test_keys_select_by_name_prefix_and_pattern(checkpoint: Path) -> None:
    state = {"a": {"w": torch.ones(2), "b.c": torch.ones(3)}, "ab": torch.ones(4), "list": [torch.ones(1), 5]}
    vescale_ckpt.save(checkpoint, state)

    def loaded(keys: Any) -> dict[str, Any]:
        return vescale_ckpt.load(checkpoint, keys=keys)

    assert_same(loaded("a"), {"a": state["a"]})
    assert_same(loaded(["a*"]), {"a": state["a"], "ab": state["ab"]})
    assert_same(loaded("?.w"), {"a": {"w": torch.ones(2)}})
    assert_same(loaded(["list.1", "ab"]), {"ab": state["ab"], "list": [None, 5]})
    with pytest.raises(MissingKeysError) as caught:
        loaded(["nothing*", "a", "b"])
    assert caught.value.missing == ["nothing*", "b"]

    target = {"a": {"w": torch.zeros(2), "b.c": torch.zeros(3)}, "ab": torch.zeros(4), "not there": 1}
    report = vescale_ckpt.load(checkpoint, target, keys=["a", "ab*"])
    assert_same(target, {"a": state["a"], "ab": state["ab"], "not there": 1})
    assert report.unexpected == []
    assert report.stats.tensors == 3


def test_rename_by_mapping_and_function(checkpoint: Path) -> None:
    state = {"old": {"net": {"w": torch.ones(2), "head": {"b": torch.ones(3)}}}, "top": torch.ones(1)}
    vescale_ckpt.save(checkpoint, state)

    def loaded(target: dict[str, Any], rename: Any) -> dict[str, Any]:
        vescale_ckpt.load(checkpoint, target, rename=rename)
        return target

    model = {"w": torch.zeros(2), "out": {"b": torch.zeros(3)}}
    by_prefix = {"model": "old.net", "model.out": "old.net.head"}
    assert_same(loaded({"model": model}, by_prefix)["model"]["out"]["b"], torch.ones(3))
    assert_same(model["w"], torch.ones(2))
    assert_same(loaded({"w": torch.zeros(2)}, {"": "old.net"}), {"w": torch.ones(2)})
    assert_same(loaded({"x": {"top": torch.zeros(1)}}, {"x": ""}), {"x": {"top": torch.ones(1)}})
    assert_same(loaded({"TOP": torch.zeros(1)}, str.lower), {"TOP": torch.ones(1)})
    with pytest.raises(CheckpointError, match="gives None"):
        loaded({"top": torch.zeros(1)}, lambda key: None)
    with pytest.raises(CheckpointError, match="'a' and 'b' the same key of the checkpoint, 'top'"):
        loaded({"a": torch.zeros(1), "b": torch.zeros(1)}, {"a": "top", "b": "top"})


def test_options_that_have_no_meaning_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="into a state"):
        vescale_ckpt.load(checkpoint, rename={})  # type: ignore[call-overload]


# --- dtypes, memory


@pytest.mark.parametrize("stock", [False, True])
def test_casts_only_when_asked(checkpoint: Path, stock: bool) -> None:
    state = {"f": torch.randn(300, 7), "b": torch.randn(50).bfloat16(), "same": torch.randn(3), "i": torch.arange(5)}
    if stock:
        dcp.save(state, storage_writer=FileSystemWriter(checkpoint))
    else:
        vescale_ckpt.save(checkpoint, state)
    target = {"f": torch.zeros(300, 7).bfloat16(), "b": torch.zeros(50), "same": torch.zeros(3), "i": torch.zeros(5)}
    with pytest.raises(IncompatibleStateError) as caught:
        vescale_ckpt.load(checkpoint, target)
    assert {mismatch.key for mismatch in caught.value.mismatched} == {"f", "b", "i"}
    vescale_ckpt.load(checkpoint, target, allow_cast=True)
    assert_same(target, {"f": state["f"].bfloat16(), "b": state["b"].float(), "same": state["same"],
                         "i": state["i"].float()})  # fmt: skip
    with pytest.raises(IncompatibleStateError, match="shape"):
        vescale_ckpt.load(checkpoint, {"f": torch.zeros(7, 300)}, allow_cast=True)


def test_tensors_without_memory_get_some(checkpoint: Path) -> None:
    state = {
        "n": {"meta": torch.randn(70, 3), "list": [torch.randn(4)]},
        "parameter": torch.randn(2),
        "freed": torch.randn(9),
    }
    vescale_ckpt.save(checkpoint, state)
    freed = torch.zeros(9)
    freed.untyped_storage().resize_(0)
    inner: dict[str, Any] = {"meta": torch.empty(70, 3, device="meta"), "list": [torch.empty(4, device="meta")]}
    target = {"n": inner, "parameter": nn.Parameter(torch.empty(2, device="meta"), requires_grad=False), "freed": freed}
    vescale_ckpt.load(checkpoint, target)
    assert target["n"] is inner and target["freed"] is freed and isinstance(target["parameter"], nn.Parameter)
    target["parameter"] = target["parameter"].data
    assert_same(target, state)


# --- Without a state


def test_without_a_state_all_comes_back_as_it_was(mixed: tuple[Path, dict[str, Any]]) -> None:
    path, state = mixed
    numbered = state["optimizer"]["state"]
    loaded = vescale_ckpt.load(path)
    assert loaded["optimizer"]["state"].keys() == numbered.keys()
    assert_same(dict(sorted(loaded["model"].items())), dict(sorted(state["model"].items())))
    loaded["model"], loaded["optimizer"]["state"] = state["model"], numbered
    assert_same(loaded, state)


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("x",), "b": ("x",)},
        {"a": ("x",), "b": ("x", "y")},
        {"a": ("x", 0), "b": ("x", "y")},
        {"a": ("x", 1 << 40), "b": ("y",)},
        {"a": (0,), "b": ("y",)},
        {"a": ("x", -1), "b": ("y",)},
        {"a": (), "b": ("y",)},
        {"a": "xy", "b": ("y",)},
    ],
)
def test_places_that_no_state_has_are_refused(checkpoint: Path, paths: dict[str, Any]) -> None:
    vescale_ckpt.save(checkpoint, {"a": (), "b": 1})
    metadata = read_metadata(checkpoint)
    metadata.planner_data = paths
    rewrite_metadata(checkpoint, metadata)
    (checkpoint / ".metadata.index").unlink()
    with pytest.raises(UntrustedCheckpointError):
        vescale_ckpt.load(checkpoint)


def test_no_checkpoint_is_a_named_error(checkpoint: Path) -> None:
    checkpoint.mkdir()
    for state in (None, {"x": 1}):
        with pytest.raises(CheckpointError, match=r"no \.metadata: not a checkpoint"):
            vescale_ckpt.load(checkpoint, state)  # type: ignore[call-overload]


# --- Very many tensors


@pytest.mark.parametrize(
    ("save", "most"),
    [
        (lambda path, state: save_file(state, path), 8),
        (lambda path, state: vescale_ckpt.save(path, state, format=Safetensors(max_shard_size=2048)), 36),
        (vescale_ckpt.save, 6),
        (lambda path, state: dcp.save(state, checkpoint_id=path, no_dist=True), 140),
    ],
    ids=["file", "index", "native", "stock"],
)
def test_calls_for_each_tensor(save: Callable[..., Any], most: float, tmp_path: Path) -> None:
    """Next to no Python code runs for each: models of very many small tensors load fast."""
    counts, numbers, dtypes = [], (100, 600), (torch.float32, torch.int64, torch.uint8, torch.bool)
    for count in numbers:
        state = {f"layers.{i // 4}.w{i % 4}": torch.arange(2).to(dtypes[i % 4]) + (i % 2) for i in range(count)}
        path = tmp_path / f"of {count}"
        save(path, state)
        vescale_ckpt.load(path)  # what is made once
        loaded: dict[str, Any] = {}
        counts.append(calls_of(lambda path=path, loaded=loaded: loaded.update(vescale_ckpt.load(path))))
        assert list(loaded) == list(state) if save is vescale_ckpt.save else loaded.keys() == state.keys()
        for key, value in state.items():
            assert loaded[key].dtype == value.dtype and torch.equal(loaded[key], value), key
    assert (counts[1] - counts[0]) / (numbers[1] - numbers[0]) <= most


@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_plain_tensors_are_saved_and_loaded_without_an_import_of_dcp_or_of_sharded_tensors(
    tmp_path: Path, form: str
) -> None:
    code = """
import sys, torch
before = set(sys.modules)
import vescale_ckpt
assert len(sys.modules.keys() - before) <= 5
path, form = sys.argv[1:]
state = {"model": {"a": torch.arange(6.0), "b": torch.nn.Parameter(torch.ones(2))}}
vescale_ckpt.save(path, state, format=form)
assert vescale_ckpt.load(path, {"model": dict(state["model"], a=torch.zeros(6))}).missing == []
loaded = vescale_ckpt.load(path)
assert torch.equal((loaded.get("model") or loaded)["a" if form == "dcp" else "model.a"], torch.arange(6.0))
print(*sys.modules.keys() - before)
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "checkpoint"), form]
    new = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    heavy = ("sympy", "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.fsdp")
    assert 0 < len(new) <= 180 and not [name for name in new if name.startswith(heavy)]


def test_placements_among_objects_load_in_a_process_that_has_no_dtensor(tmp_path: Path) -> None:
    # DTensor's module registers them as safe to unpickle, and stock DCP always imports it.
    placements = (Shard(1), Replicate())
    vescale_ckpt.save(tmp_path / "c", {"w": torch.ones(2), "placements": {"w": placements}})
    code = """
import sys, vescale_ckpt
assert "torch.distributed.tensor" not in sys.modules
print(vescale_ckpt.load(sys.argv[1])["placements"]["w"])
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "c")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == str(placements)
