"""Our flattening against DCP's own: same keys, order, values and paths, same errors."""

from __future__ import annotations

import collections
import copy
import enum
from collections.abc import Callable
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from harness.cost import calls_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from vescale_ckpt._state import flatten as flatten_module
from vescale_ckpt._state.flatten import Flattener, flatten, flatten_with_structure


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


def test_what_ten_thousand_values_cost() -> None:
    layers = {f"layers.{layer}": {name: torch.empty(1) for name in "abcdefghij"} for layer in range(500)}
    optimizer = {"state": {index: {"exp_avg": torch.empty(1), "step": 1.0} for index in range(2500)}}
    state = {"model": layers, "optimizer": optimizer}
    assert len(flatten(state)[0]) == 10_000
    # 3 for each of 3,000 containers, none for a value; stock's are 125,000.
    assert calls_of(lambda: flatten(state)) < 12_000


# --- A state after another one


def _outcome(function: Any, state: Any) -> Any:
    try:
        return function(state)
    except ValueError as error:
        return str(error)


def _same(found: Any, wanted: Any) -> bool:
    """Whether both are the same values, not only equal ones, under the same keys, in the same order."""
    if isinstance(found, str) or isinstance(wanted, str):
        return bool(found == wanted)
    (flat, paths, structure), (flat_2, paths_2, structure_2) = found, wanted
    return (
        list(flat) == list(flat_2)
        and all(map(is_, flat.values(), flat_2.values()))
        and list(paths.items()) == list(paths_2.items())
        and structure == structure_2
    )


@given(st.lists(states, min_size=2, max_size=4))
def test_each_state_is_flattened_as_if_it_were_the_first(several: list[dict[Any, Any]]) -> None:
    flattener = Flattener()
    for state in [*several, several[-1]]:
        assert _same(_outcome(flattener.flatten, state), _outcome(flatten_with_structure, state))


FORM = {
    "model": {"a": TENSOR, "b": torch.ones(3)},
    "optimizer": {"state": {0: {"step": 1.0, "empty": {}}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "p": [0, 1]}]},
    "step": 3,
}


def _turned(mapping: dict[str, Any]) -> collections.OrderedDict[str, Any]:
    turned = collections.OrderedDict(mapping)
    turned.move_to_end("a")
    return turned


def _changed(change: Callable[[dict[Any, Any]], object]) -> dict[Any, Any]:
    state = copy.deepcopy(FORM)
    change(state)
    return state


CHANGES: dict[str, Callable[[dict[Any, Any]], object]] = {
    "a new key": lambda state: state["model"].update(c=TENSOR),
    "a key less": lambda state: state["model"].pop("a"),
    "another key": lambda state: state.update(model={"a": TENSOR, "c": TENSOR}),
    "another order": lambda state: state.update(model=dict(reversed(state["model"].items()))),
    "text for a number": lambda state: state["optimizer"].update(state={"0": state["optimizer"]["state"][0]}),
    "a truth for a number": lambda state: state["optimizer"].update(state={False: state["optimizer"]["state"][0]}),
    "a list that is walked": lambda state: state["optimizer"]["groups"][0].update(p=[TENSOR, 1]),
    "a list that is not": lambda state: state["optimizer"].update(groups=[1, 2]),
    "a shorter list": lambda state: state["optimizer"]["groups"].clear(),
    "a longer list": lambda state: state["optimizer"]["groups"].append({}),
    "a value for a mapping": lambda state: state.update(model=3),
    "a mapping for a value": lambda state: state.update(step={"x": 1}),
    "something in what was empty": lambda state: state["optimizer"]["state"][0].update(empty={"x": 1}),
    "another kind of mapping": lambda state: state.update(model=MappingProxyType(state["model"])),
    "an order of its own": lambda state: state.update(model=_turned(state["model"])),
    "another kind of list": lambda state: state["optimizer"].update(groups=Weird(state["optimizer"]["groups"])),
    "two equal keys": lambda state: state.update({"model.a": 1}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_form_is_noticed(change: str) -> None:
    flattener = Flattener()
    first, second = copy.deepcopy(FORM), _changed(CHANGES[change])
    assert _same(flattener.flatten(first), flatten_with_structure(first))
    assert _same(_outcome(flattener.flatten, second), _outcome(flatten_with_structure, second))
    assert _same(flattener.flatten(first), flatten_with_structure(first))


def test_new_values_of_the_same_form_are_read_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    flattener = Flattener()
    flattener.flatten(FORM)
    second = copy.deepcopy(FORM)
    wanted = flatten_with_structure(second)
    monkeypatch.setattr(flatten_module, "flatten_with_structure", None)
    flat, paths, structure = flattener.flatten(second)
    assert _same((flat, paths, structure), wanted)
    paths.clear()  # by whoever got them
    flat.clear()
    assert _same(flattener.flatten(second), wanted)
