"""Containers of a state that do not fit those of the checkpoint: filled, or refused with both named."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.states import assert_same

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager, IncompatibleStateError, MissingKeysError, PerRank


class Holder:
    """A stateful object whose state refers to its own containers."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if isinstance(value, list) and isinstance(self.state.get(name), list):
                self.state[name].clear()
                self.state[name].extend(value)
            else:
                self.state[name] = value


def history(length: int) -> list[dict[str, Any]]:
    return [{"loss": float(step), "norm": torch.tensor([step])} for step in range(length)]


SUBTREE = {"a": {"x": 1}, "b": torch.ones(2), "none": {}, "list": history(2)}
FILLED: list[tuple[Any, Any]] = [
    (history(3), history(1)), (history(3), []), (history(2), None), ([torch.ones(1), torch.ones(2)], [torch.zeros(1)]),
    (SUBTREE, {}), (SUBTREE, None), ({}, None), ({0: {"x": 1}, (1, 2): torch.ones(1), None: 3}, {}),
    ([[torch.ones(1), {"a": 1}], [torch.ones(2)]], [[torch.zeros(1)]]), ([[torch.ones(1)], [torch.ones(2)]], [[], []]),
    ([{}, {"a": 1}, {}], [{}]), ([{}, {}], []), ({"b": [{"c": history(2)}]}, {"b": [{"c": []}]}),
    (defaultdict(list, a=[torch.ones(1)]), defaultdict(list)), (OrderedDict(a=1), OrderedDict()),
    ([1, torch.ones(1), "x", None, [1, 2]], [0, torch.zeros(1)]), ([1, 2], []), ((1, 2), ()),
]  # fmt: skip


@pytest.mark.parametrize("way", ["plain", "stateful", "renamed", "keys", "manager"])
def test_what_a_container_lacks_is_filled(tmp_path: Path, way: str) -> None:
    def wrapped(values: list[Any]) -> dict[str, Any]:
        named = {f"k{number}": deepcopy(value) for number, value in enumerate(values)}
        return {"h": Holder(named)} if way == "stateful" else {"h": named}

    saved, state = wrapped([value for value, _ in FILLED]), wrapped([value for _, value in FILLED])
    if way == "manager":
        manager = CheckpointManager(tmp_path)
        manager.save(1, saved)
        manager.restore(state)
    else:
        vescale_ckpt.save(tmp_path, saved)
        given = {"other": state} if way == "renamed" else state
        report = vescale_ckpt.load(
            tmp_path, given, rename={"other": ""} if way == "renamed" else None, keys="h" if way == "keys" else None
        )
        assert report.unexpected == report.missing == report.mismatched == []
    found, expected = (of["h"].state if way == "stateful" else of["h"] for of in (state, saved))
    assert_same(found, expected)
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


REFUSED: list[tuple[Any, Any, str]] = [
    (history(2), {}, "an empty mapping.*h.0.loss"), ({"a": 1}, [], r"a list of 0.*h\.a"),
    ({}, [], "list.*empty mapping"),
    ([1, 2], {}, "an empty mapping.*one value"), (None, {}, "an empty mapping.*one value"),
    (torch.ones(1), {}, "an empty mapping.*one value"), (history(1), 3, "a int.*h.0.loss"),
    (history(1), (), "a tuple of 0.*h.0.loss"), (history(1), torch.ones(1), "a Tensor.*h.0.loss"),
    (3, {"a": 1}, r"a container with h\.a.*one value"), ([], history(2), "a list of 2.*one value"),
    (PerRank({"a": 1}), {}, "an empty mapping.*PerRank"), ([{"a": PerRank(3)}], [], "a list of 0.*PerRank"),
    ([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)], [torch.nn.Linear(1, 1)], r"a list of 1.*h\.1"),
]  # fmt: skip


@pytest.mark.parametrize(("saved", "state", "text"), REFUSED, ids=map(str, range(len(REFUSED))))
def test_what_cannot_be_filled_names_both(checkpoint: Path, saved: Any, state: Any, text: str) -> None:
    vescale_ckpt.save(checkpoint, {"h": saved, "x": 1})
    given = {"h": state, "x": 0}
    with pytest.raises(IncompatibleStateError, match=text):
        vescale_ckpt.load(checkpoint, given)
    assert given == {"h": state, "x": 0}
    report = vescale_ckpt.load(checkpoint, given, strict=False)
    assert [entry.key for entry in report.mismatched] == ["h"] and given["h"] is state and given["x"] == 1


def test_elements_that_the_checkpoint_lacks_and_keys_that_a_mapping_does_not_ask_for(checkpoint: Path) -> None:
    vescale_ckpt.save(checkpoint, {"h": history(2), "d": {"a": 1, "b": 2}})
    with pytest.raises(MissingKeysError, match=r"h\.2\.loss"):
        vescale_ckpt.load(checkpoint, {"h": history(3), "d": {}})
    with pytest.raises(IncompatibleStateError, match=r"a list of 0.*h\.1\.loss"):
        vescale_ckpt.load(checkpoint, {"h": []}, keys="h.1")
    state: dict[str, Any] = {"h": [], "d": {"a": 0}}
    assert vescale_ckpt.load(checkpoint, state).unexpected == ["d.b"] and state["d"] == {"a": 1}


def test_safetensors_fill_by_their_names(tmp_path: Path) -> None:
    tensors = {"m.0.w": torch.ones(2), "m.1.w": torch.zeros(1), "l.0": torch.ones(1), "l.1": torch.ones(3)}
    vescale_ckpt.save(tmp_path, tensors, format="safetensors")
    state: dict[str, Any] = {"m": {}, "l": [torch.zeros(1)]}
    vescale_ckpt.load(tmp_path, state)
    assert_same(state, {"m": {"0.w": torch.ones(2), "1.w": torch.zeros(1)}, "l": [torch.ones(1), torch.ones(3)]})


def test_keys_select_empty_mappings_by_their_names(tmp_path: Path) -> None:
    saved = {"k": {}, "m": {"a": {}, "b": 1}}
    vescale_ckpt.save(tmp_path, saved)
    assert vescale_ckpt.load(tmp_path, keys=["k", "m.a"]) == {"k": {}, "m": {"a": {}}}
    state: dict[str, Any] = {"k": {}, "m": {}}
    assert not vescale_ckpt.load(tmp_path, state, keys=list(saved)).missing
    assert state == saved
    with pytest.raises(MissingKeysError, match="'q'"):
        vescale_ckpt.load(tmp_path, keys=["k", "q"])


def test_a_number_and_its_text_as_keys_of_containers_are_refused(checkpoint: Path) -> None:
    saved: dict[str, Any] = {"h": {1: {"a": 1}, "1": {"b": 2}}}
    vescale_ckpt.save(checkpoint, saved)
    with pytest.raises(CheckpointError, match=r"the keys 1 and '1', whose values a load cannot tell apart"):
        vescale_ckpt.load(checkpoint, {"h": {1: {"a": 0}, "1": {"b": 0}}})
