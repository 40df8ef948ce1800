"""Objects that are not tensors: archives as torch.save writes them, read without running anything."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import pathlib
import random
import types
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from harness.states import assert_same
from harness.steps import objects
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt import CheckpointError, UntrustedCheckpointError


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
OURS: dict[str, Any] = {  # which torch's own restricted unpickler refuses
    "array": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
    "array by columns": numpy.asfortranarray(numpy.arange(6).reshape(2, 3)),
    "arrays of one dtype": [numpy.arange(3), numpy.arange(4), {"again": numpy.arange(5)}],
    "empty array": numpy.empty((0, 3)),
    "array of text": numpy.array(["a", "bcd"]),
    "array of bytes": numpy.array([b"a", b"bcd"]),
    "array of times": numpy.array(["2024-01-01T00:00:01"], dtype="M8[s]"),
    "big-endian array": numpy.arange(3, dtype=">i4"),
    "bool array": numpy.array([True, False]),
    "numpy scalar": numpy.float64(0.5),
    "numpy bool": numpy.bool_(True),
    "numpy dtype": numpy.dtype("float32"),
    "numpy random state": numpy.random.RandomState(3).get_state(),
    "generator's state": numpy.random.default_rng(3).bit_generator.state,
    "random state": random.Random(3).getstate(),
    "date and time": datetime.datetime(2024, 1, 2, 3, 4, 5, 6, datetime.timezone(datetime.timedelta(hours=1), "X")),
    "date": datetime.date(2024, 1, 2),
    "time": datetime.time(1, 2),
    "path": Path("/a/b"),
    "pure path": pathlib.PureWindowsPath("c:/a"),
    "deque": collections.deque([1, torch.ones(2)], maxlen=5),
    "decimal": decimal.Decimal("1.50"),
    "fraction": fractions.Fraction(1, 3),
    "frozen set": frozenset({1, "a"}),
    "namespace": argparse.Namespace(lr=0.1, layers=[1, 2]),
    "simple namespace": types.SimpleNamespace(a={"b": 1}),
    "range": range(3),
    "slice": slice(1, None),
    "default dict": collections.defaultdict(list, a=[1]),
    "empty texts of numpy": [numpy.str_(""), numpy.bytes_(b"")],
    "with tensors": {"t": torch.ones(2), "d": datetime.date(2024, 1, 2), "n": numpy.arange(3)},
}
CODE: dict[str, Any] = {
    "array of objects": numpy.array([None, {}], dtype=object),
    "array of fields": numpy.zeros(2, dtype=[("a", "i4")]),
    "class": Code(),
    "function": print,
    "text of another class": Named("x"),
    "inside a container": [1, {"a": Code()}],
    "beside harmless ones": [Path("a"), Code()],
}


@pytest.mark.parametrize("name", PLAIN | HARMLESS | OURS)
@pytest.mark.parametrize("weights_only", [True, False])
def test_round_trip(name: str, weights_only: bool, caplog: pytest.LogCaptureFixture) -> None:
    value = (PLAIN | HARMLESS | OURS)[name]
    data = objects.dump(value, "key")
    assert caplog.text == ""
    loaded = objects.load(data, weights_only=weights_only, key="key")
    if name == "parameter":
        assert torch.equal(loaded, value)
    elif name == "big-endian array":  # numpy's own unpickling makes it a native one
        assert loaded.tolist() == value.tolist()
    elif name in OURS:
        assert repr(loaded) == repr(value) and type(loaded) is type(value)
    else:
        assert_same(loaded, value)


@pytest.mark.parametrize("kind", ["f8", "U3", "M8[s]", ">i4"])
def test_an_array_that_is_there_twice_is_there_twice(kind: str) -> None:
    array, other = numpy.zeros(3, kind), numpy.ones(2, kind)
    value = {"a": array, "b": [array, other], "dtype": array.dtype, "c": collections.deque([other, array])}
    loaded = objects.load(objects.dump(value, "key"), weights_only=True, key="key")
    assert loaded["a"] is loaded["b"][0] is loaded["c"][1] and loaded["b"][1] is loaded["c"][0]
    assert loaded["a"].tolist() == array.tolist() and loaded["b"][1].tolist() == other.tolist()
    assert loaded["dtype"].kind == array.dtype.kind


class Reduced:
    """Pickles as a call of its choice, and a state."""

    def __init__(self, *how: Any) -> None:
        self.how = how

    def __reduce__(self) -> tuple[Any, ...]:
        return self.how


MUCH = range(10**5)  # of which a hostile one would have a thousand million times as many


@pytest.mark.parametrize(
    "call",
    [
        *(Reduced(kind, (MUCH,)) for kind in (list, tuple, frozenset, set, collections.deque, collections.Counter)),
        *(Reduced(kind, (MUCH,)) for kind in (torch.Size, bytearray, torch.Tensor)),
        Reduced(torch.FloatTensor, ([MUCH],)),
        Reduced(int, (decimal.Decimal("1e100000"),)),
        Reduced(torch._tensor._rebuild_from_type_v2, (torch.Size, torch.Size, (MUCH,), None)),
        Reduced(torch._tensor._rebuild_from_type_v2, (list, list, (MUCH,), None)),
    ],
    ids=lambda call: f"{call.how[0].__name__} of {call.how[1][0]}",
)
def test_a_small_object_cannot_take_all_memory(call: Reduced) -> None:
    buffer = io.BytesIO()
    torch.save([pathlib.Path("a"), call], buffer)
    with pytest.raises(UntrustedCheckpointError, match="key"):
        objects.load(buffer.getvalue(), weights_only=True, key="key")


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
def test_what_needs_code_is_refused_by_name_unless_trusted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    data = objects.dump(CODE[name], f"saved as {name}")
    assert f"saved as {name}" in caplog.text and "weights_only" in caplog.text
    with pytest.raises(UntrustedCheckpointError, match=r"some\.key.*weights_only") as raised:
        objects.load(data, weights_only=True, key="some.key")
    assert raised.value.key == "some.key"  # type: ignore[attr-defined]
    loaded = objects.load(data, weights_only=False, key="some.key")  # by torch.load
    assert repr(loaded) == repr(CODE[name]) if "array" in name else loaded == CODE[name]


def test_a_key_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for key in ("one of them", "another", "one of them"):
        objects.dump(Code(), key)
    assert len(caplog.records) == 2


def test_classes_that_the_user_declares_safe_load() -> None:
    data = objects.dump({"a": Code()}, "key")
    with torch.serialization.safe_globals([Code]):
        assert objects.load(data, weights_only=True, key="key") == {"a": Code()}


def test_shared_and_recursive_values() -> None:
    shared = [1]
    value: list[Any] = [shared, shared]
    loaded = objects.load(objects.dump(value, "key"), weights_only=True, key="key")
    assert loaded[0] is loaded[1]
    value.append(value)
    loaded = objects.load(objects.dump(value, "key"), weights_only=True, key="key")
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
    data = objects.dump(value, "key")
    assert_same(objects.load(data, weights_only=True, key="key"), value)
    assert_same(torch.load(io.BytesIO(data), weights_only=False), value)


def _array(shape: tuple[int, ...], data: bytes) -> Reduced:
    function: Any = numpy.zeros(1).__reduce__()[0]
    return Reduced(function, (numpy.ndarray, (0,), b"b"), (1, shape, numpy.dtype("f8"), False, data))


HOSTILE: dict[str, Any] = {
    "a call of code": Reduced(eval, ("1",)),
    "a fraction that takes all memory": Reduced(fractions.Fraction, ("1e99999999",)),
    "bytes out of nothing": Reduced(bytes, (1 << 40,)),
    "an array without bytes": _array((1 << 40,), b""),
    "an array of fewer bytes": _array((4,), b"12345678"),
    "a dtype with fields": Reduced(numpy.dtype, ("f8", False, True), (3, "<", None, ("a",), {"a": 1}, 8, 8, 63)),
    "a dtype of objects": Reduced(numpy.dtype, ("O8", False, True)),
    "a state for a class": Reduced(getattr, (collections.deque, "append")),
    "attributes of a dict": Reduced(dict, (), {"a": 1}),
    "attributes of an array": Reduced(datetime.timedelta, (1,), {"a": 1}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_but_data_is_built(name: str) -> None:
    buffer = io.BytesIO()
    torch.save([datetime.date(2024, 1, 1), HOSTILE[name]], buffer)
    with pytest.raises(UntrustedCheckpointError):
        objects.load(buffer.getvalue(), weights_only=True, key="key")


def test_what_does_not_pickle_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"some\.key: a generator cannot be saved") as raised:
        objects.dump((x for x in ()), "some.key")
    assert raised.value.key == "some.key"  # type: ignore[attr-defined]


def test_a_buffer_comes_back_with_its_content_and_position() -> None:
    # A training loop may keep what torch.save wrote into a buffer.
    buffer = io.BytesIO(b"content \xff")
    buffer.seek(3)
    for made in (buffer, io.BytesIO()):
        loaded = objects.load(objects.dump(made, "k"), weights_only=True, key="k")
        assert type(loaded) is io.BytesIO
        assert (loaded.getvalue(), loaded.tell()) == (made.getvalue(), made.tell())


@pytest.mark.parametrize("state", [(b"1", 2, None), (b"1", -1, None), ("1", 0, None), (b"1", 0, {"a": 1}), b"1"])
def test_a_buffer_with_another_state_is_refused(state: Any) -> None:
    with pytest.raises(UntrustedCheckpointError):
        objects.load(objects.dump(Reduced(io.BytesIO, (), state), "k"), weights_only=True, key="k")
