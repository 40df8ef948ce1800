"""What dotted keys do not tell: kinds of keys and empty mappings come back as they were saved."""

from __future__ import annotations

import enum
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.states import assert_same
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from vescale_ckpt import (
    LoadPlanner,
    SavePlanner,
    StorageReader,
    StorageWriter,
    UntrustedCheckpointError,
    convert,
    load,
    save,
)
from vescale_ckpt._state.structure import Structure


class Color(enum.Enum):
    red = 1


class Level(enum.IntEnum):
    high = 3


STATES: dict[str, Any] = {
    "numbers": {"a": {0: torch.ones(2), 1: 5, -7: "x"}},
    "numbers at the top": {0: torch.ones(2), 3: {}},
    "numbers beside text": {"a": {0: 1, "b": 2, "00": 3}},
    "text that looks like numbers": {"a": {"0": 1, "1": torch.ones(1)}},
    "constants": {"a": {None: 1, True: torch.ones(1), 2.5: 3, float("inf"): 4}},
    "tuples": {"a": {(0, "x", None): torch.ones(2), (): 1}},
    "dtypes": {"a": {torch.float32: torch.ones(2)}},
    "empty": {"a": {}, "b": {"c": {}, "d": 1}, "e": torch.ones(1)},
    "empty in lists": {"a": [{}, {"b": torch.ones(1)}, [{}], []]},
    "empty under numbers": {"a": {0: {}, 1: {2: {}}}},
    "nothing but empty": {"a": {"b": {}}},
    "deep": {"a": {0: {1: {"x": {2: torch.ones(1)}}}}},
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("by", ["save", "dcp.save", "dcp.save with stock's writer"])
def test_kinds_of_keys_and_empty_mappings_come_back(tmp_path: Path, name: str, by: str) -> None:
    state = STATES[name]
    if by == "save":
        save(tmp_path, state)
    elif by == "dcp.save":
        dcp.save(state, storage_writer=StorageWriter(tmp_path), planner=SavePlanner(), no_dist=True)
    else:
        if "dataclasses.replace" in inspect.getsource(FileSystemWriter.finish):
            pytest.skip("this torch's writer drops what is no field of Metadata (torch 2.11): loads warn of such keys")
        dcp.save(state, checkpoint_id=tmp_path, planner=SavePlanner(), no_dist=True)
    assert_same(load(tmp_path), state)


@pytest.mark.parametrize("name", STATES)
def test_they_go_through_files_of_torch_and_back(tmp_path: Path, name: str) -> None:
    state = STATES[name]
    save(tmp_path / "dcp", state)
    convert(tmp_path / "dcp", tmp_path / "file.pt", format="torch")
    assert_same(torch.load(tmp_path / "file.pt", weights_only=True), state)
    convert(tmp_path / "file.pt", tmp_path / "again", format="dcp")
    assert_same(load(tmp_path / "again"), state)


def test_what_equals_a_number_comes_back_as_that_number(tmp_path: Path) -> None:
    save(tmp_path, {"a": {Level.high: 1}})
    assert load(tmp_path) == {"a": {3: 1}}


def test_keys_that_cannot_be_kept_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, {"of colours": {Color.red: 1}})
    assert "of colours.Color.red" in caplog.text
    assert load(tmp_path) == {"of colours": {"Color.red": 1}}
    state = {"of colours": {Color.red: 0}}
    load(tmp_path, state)
    assert state == {"of colours": {Color.red: 1}}


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("by_stock", [False, True])
def test_an_optimizer_gets_its_moments_back_from_a_load_without_a_state(tmp_path: Path, by_stock: bool) -> None:
    _, optimizer = _trained()
    state = {"optim": optimizer.state_dict()}
    if by_stock:
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    else:
        save(tmp_path, state)
    _, fresh = _trained()
    fresh.state.clear()
    fresh.load_state_dict(load(tmp_path)["optim"])
    assert_same(fresh.state_dict()["state"], optimizer.state_dict()["state"])
    save(tmp_path / "next", {"optim": fresh.state_dict()})  # no key twice
    convert(tmp_path, tmp_path / "file.pt", format="torch")
    assert_same(torch.load(tmp_path / "file.pt")["optim"], state["optim"])


def test_numbers_that_nobody_can_infer_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dcp.save({"a": {"b": {0: 1, 1: 2}}}, checkpoint_id=tmp_path, no_dist=True)
    assert load(tmp_path) == {"a": {"b": {"0": 1, "1": 2}}}
    assert "a.b" in caplog.text
    caplog.clear()
    save(tmp_path, {"a": {"b": {"0": 1, "1": 2}}})
    load(tmp_path)
    assert caplog.text == ""


def test_a_change_of_kinds_alone_is_a_new_plan(tmp_path: Path) -> None:
    for key in (0, "0", 0):
        save(tmp_path, {"a": {key: 1}, "b": {}} if key == 0 else {"a": {key: 1}})
        assert_same(load(tmp_path), {"a": {key: 1}, "b": {}} if key == 0 else {"a": {key: 1}})


def test_a_load_of_some_keys_makes_no_other_empty_mappings(tmp_path: Path) -> None:
    save(tmp_path, {"a": {"x": 1, "y": {}}, "b": {}})
    assert load(tmp_path, keys=["a"]) == {"a": {"x": 1, "y": {}}}


def test_stock_reads_what_notes_its_structure(tmp_path: Path) -> None:
    save(tmp_path / "dcp", {"a": {0: torch.ones(2), "e": {}}})
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "file.pt")
    assert_same(torch.load(tmp_path / "file.pt"), {"a": {"0": torch.ones(2)}})


@pytest.mark.parametrize("reader", ["ours", "stock's"])
def test_a_load_through_dcp_puts_values_under_numbers(tmp_path: Path, reader: str) -> None:
    save(tmp_path, {"a": {0: {"step": 1, "x": torch.ones(2)}, (1, 2): 4}})
    state = {"a": {0: {"step": 7, "x": torch.zeros(2)}, (1, 2): 8}}
    how: dict[str, Any] = (
        {"checkpoint_id": tmp_path} if reader == "stock's" else {"storage_reader": StorageReader(tmp_path)}
    )
    dcp.load(state, planner=LoadPlanner(), no_dist=True, **how)
    assert_same(state, {"a": {0: {"step": 1, "x": torch.ones(2)}, (1, 2): 4}})


@pytest.mark.parametrize("text", ["{", "[]", '{"numbered": [[{}]], "keys": [], "empty": []}',
                                  '{"numbered": [], "keys": [["a", ["code", "x"]]], "empty": []}',
                                  '{"numbered": [], "keys": [["a", ["constant", []]]], "empty": []}',
                                  '{"numbered": [], "keys": [["a", ["dtype", "os"]]], "empty": []}',
                                  "[" * 100_000])  # fmt: skip
def test_a_structure_that_nobody_writes_is_refused(text: str) -> None:
    with pytest.raises(UntrustedCheckpointError):
        Structure.unpack(text)


def test_structures_of_ranks_become_one() -> None:
    one, two = Structure(), Structure()
    one.see({0: 1}, ("a",))
    one.see({}, ("b",))
    two.see({1: 1}, ("a",))
    two.see({(1,): 1}, ("c",))
    merged = Structure.unpack(Structure.merged([one.pack(), "", two.pack(), one.pack()]))
    assert merged.key(("a",), "1") == 1
    assert merged.empty == {("b",)}
    assert merged.key(("c",), "(1,)") == (1,)
