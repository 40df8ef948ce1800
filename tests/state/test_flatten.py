"""Our flattening against DCP's own: same keys, order, values and paths, same errors."""

from __future__ import annotations

import collections
import enum
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from cost import calls_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from vescale_ckpt._state.flatten import flatten


class Point(NamedTuple):
    x: Any
    y: Any


class Color(str, enum.Enum):
    RED = "red"


class Weird(list[Any]):
    pass


TENSOR = torch.ones(2)

tensors = [TENSOR, torch.nn.Parameter(torch.ones(1)), TENSOR.as_subclass(type("T", (torch.Tensor,), {}))]
others = [1, 2.5, "a", None, True, b"x", {1, 2}, Color.RED, object(), range(3)]
tuples = [(), (1, TENSOR), ({"a": 1},), Point(TENSOR, [TENSOR])]
leaves = st.sampled_from([*tensors, *others, *tuples])
# Few names, with dots and numbers as text: some keys clash.
names = st.sampled_from(["a", "b", "a.b", "", "0", 0, 1, 1.5, None, Color.RED, (1, 2), True])


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(names, children, max_size=4)
    lists = st.lists(children, max_size=4)
    return st.one_of(
        mappings,
        mappings.map(collections.OrderedDict),
        mappings.map(MappingProxyType),
        lists,
        lists.map(Weird),
        lists.map(tuple),
    )


states = st.dictionaries(names, st.recursive(leaves, containers, max_leaves=25), max_size=5)


def outcome(function: Any, state: Any) -> Any:
    """What a flattening gives, values by identity: or its error."""
    try:
        flat, paths = function(state)
    except ValueError as error:
        return str(error)
    # Types too: True == 1 and "1" is not 1.
    typed = [(key, [(type(part), part) for part in path]) for key, path in paths.items()]
    return [(key, id(value)) for key, value in flat.items()], typed


@settings(max_examples=200, deadline=None)
@given(states)
def test_equals_the_stock_flattening(state: dict[Any, Any]) -> None:
    assert outcome(flatten, state) == outcome(flatten_state_dict, state)


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": 1}, "a.b": 2},
        {"a.b": 2, "a": {"b": 1}},
        {"a": [TENSOR], "a.0": 2},
        {"a": {"b": {"c": 1}, "b.c": TENSOR}},
        {1: 2, "1": 3},
    ],
)
def test_clashing_keys_raise(state: dict[Any, Any]) -> None:
    with pytest.raises(ValueError, match="duplicated flatten key"):
        flatten(state)
    assert outcome(flatten, state) == outcome(flatten_state_dict, state)


def test_keys_as_before_torch_2_4(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": {"b": 1, "c": {"d": 2}}, "e": [{"f": TENSOR}, 3]}
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    assert outcome(flatten, state) == outcome(flatten_state_dict, state)
    assert list(flatten(state)[0]) == ["a", "e.0.f", "e.1"]


def test_the_state_is_left_alone() -> None:
    state = {"a": {"b": [TENSOR, {"c": 1}]}}
    flat, _ = flatten(state)
    flat.clear()
    assert list(state) == ["a"]
    assert len(state["a"]["b"]) == 2


def test_what_ten_thousand_values_cost() -> None:
    layers = {f"layers.{layer}": {name: torch.empty(1) for name in "abcdefghij"} for layer in range(500)}
    optimizer = {"state": {index: {"exp_avg": torch.empty(1), "step": 1.0} for index in range(2500)}}
    state = {"model": layers, "optimizer": optimizer}
    assert len(flatten(state)[0]) == 10_000
    # 3 for each of 3,000 containers, none for a value; stock's are 125,000.
    assert calls_of(lambda: flatten(state)) < 12_000
