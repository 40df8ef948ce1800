"""Objects that are not tensors: archives as torch.save writes them, read without running anything."""

from __future__ import annotations

import collections
import io
import zipfile
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from states import assert_same

from vescale_ckpt import CheckpointError, UntrustedCheckpointError, objects


class Code:
    """Needs code to be loaded."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Code)

    __hash__ = None  # type: ignore[assignment]


class Named(str):
    __slots__ = ()


PLAIN: dict[str, Any] = {
    "none": None,
    "bool": False,
    "int": -(1 << 70),
    "float": 1e-300,
    "infinity": float("inf"),
    "text": "tëxt \ud800",
    "bytes": bytes(range(256)),
    "empty bytes": b"",
    "nested": {"a": [1, (2.5, None, {"b": [b"", "x"]})], 3: (), "": [], (1, 2): {}},
    "as many as are plain": [0] * 255,
    "more than are plain": [0] * 1000,
    "deep": [[[[[[[[[[[[1]]]]]]]]]]]],
}
HARMLESS: dict[str, Any] = {
    "set": {1, "a"},
    "complex": 1 - 2j,
    "bytearray": bytearray(b"x"),
    "ordered dict": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter("aab"),
    "tensor": torch.arange(6.0).view(2, 3).t(),
    "tensors": {"a": (torch.ones(2, dtype=torch.bfloat16), [torch.zeros(0)])},
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "size": torch.Size([3]),
    "dtype": torch.complex32,
    "device": torch.device("cpu"),
}
CODE: dict[str, Any] = {
    "class": Code(),
    "function": print,
    "numpy scalar": numpy.float64(0.5),
    "text of another class": Named("x"),
    "inside a container": [1, {"a": Code()}],
    "range": range(3),
}


@pytest.mark.parametrize("name", PLAIN | HARMLESS)
@pytest.mark.parametrize("weights_only", [True, False])
def test_round_trip(name: str, weights_only: bool) -> None:
    value = (PLAIN | HARMLESS)[name]
    data = objects.dump(value)
    loaded = objects.load(data, weights_only=weights_only, key="key")
    if name == "parameter":
        assert torch.equal(loaded, value)
    else:
        assert_same(loaded, value)


@pytest.mark.parametrize("name", PLAIN | HARMLESS | CODE)
def test_torch_loads_what_we_dump(name: str) -> None:
    value = (PLAIN | HARMLESS | CODE)[name]
    loaded = torch.load(io.BytesIO(objects.dump(value)), weights_only=False)
    if isinstance(value, torch.Tensor):
        assert torch.equal(loaded, value)
    else:
        assert_same(loaded, value)


@pytest.mark.parametrize("name", PLAIN | HARMLESS)
def test_we_load_what_torch_saves(name: str) -> None:
    value = (PLAIN | HARMLESS)[name]
    for protocol in (2, 4, 5):
        buffer = io.BytesIO()
        torch.save(value, buffer, pickle_protocol=protocol)
        if protocol > 2 and name not in PLAIN:
            continue  # torch's own restricted unpickler knows protocol 2
        loaded = objects.load(buffer.getvalue(), weights_only=True, key="key")
        if isinstance(value, torch.Tensor):
            assert torch.equal(loaded, value)
        else:
            assert_same(loaded, value)


@pytest.mark.parametrize("name", CODE)
def test_what_needs_code_is_refused_by_name_unless_trusted(name: str) -> None:
    data = objects.dump(CODE[name])
    with pytest.raises(UntrustedCheckpointError, match=r"some\.key.*weights_only") as raised:
        objects.load(data, weights_only=True, key="some.key")
    assert raised.value.key == "some.key"  # type: ignore[attr-defined]
    assert objects.load(data, weights_only=False, key="some.key") == CODE[name]


def test_classes_that_the_user_declares_safe_load() -> None:
    data = objects.dump({"a": Code()})
    with torch.serialization.safe_globals([Code]):
        assert objects.load(data, weights_only=True, key="key") == {"a": Code()}


def test_plain_values_take_the_short_way_and_equal_torch_save() -> None:
    for name, value in PLAIN.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        with zipfile.ZipFile(io.BytesIO(objects.dump(value))) as ours, zipfile.ZipFile(buffer) as stock:
            assert ours.namelist() == stock.namelist(), name
            assert ours.testzip() is None, name
            for entry in stock.namelist():
                if not entry.endswith("serialization_id"):
                    assert ours.read(entry) == stock.read(entry), f"{name}: {entry}"


def test_shared_and_recursive_values() -> None:
    shared = [1]
    value: list[Any] = [shared, shared]
    loaded = objects.load(objects.dump(value), weights_only=True, key="key")
    assert loaded[0] is loaded[1]
    value.append(value)
    loaded = objects.load(objects.dump(value), weights_only=True, key="key")
    assert loaded[2] is loaded


@pytest.mark.parametrize("data", [b"", b"PK", b"x" * 1000], ids=["nothing", "two bytes", "noise"])
def test_bytes_that_are_no_archive_are_an_error_of_this_package(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="key"):
        objects.load(data, weights_only=True, key="key")


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=5)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=150)
@given(_values)
def test_any_plain_value_survives(value: Any) -> None:
    data = objects.dump(value)
    assert_same(objects.load(data, weights_only=True, key="key"), value)
    assert_same(torch.load(io.BytesIO(data), weights_only=False), value)
