"""Unpickles objects for loads with `weights_only=True`: types of torch's list, and types that are listed here.

The list here has types of the standard library and of numpy. torch's list can only be extended for the whole process.
So a pickle that torch refuses is read a second time by an unpickler that knows torch's list, the user's additions to
it, and the list here. No entry of the list runs code from the pickle or opens a file. numpy's arrays are made from
their bytes, because numpy's own `__setstate__` does not check its input.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import math
import pathlib
import pickle
import re
import sys
import types
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from typing import Any

import torch

from .._engine import _C, torch_private

_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")
_KINDS_OF_ARRAYS = "biufcSUMm"  # objects and fields are refused, because they may contain anything


def _fraction(*arguments: Any) -> fractions.Fraction:
    if not all(type(value) is int or (type(value) is str and "e" not in value.lower()) for value in arguments):
        raise pickle.UnpicklingError("a fraction of something else than numbers")  # 1e999999999 would take all memory
    return fractions.Fraction(*arguments)


def no_bytes(*arguments: Any) -> bytes:
    if arguments:  # bytes(n) would take n of memory
        raise pickle.UnpicklingError("bytes with arguments")
    return b""


_CLASSES: dict[type, Callable[..., Any]] = {
    datetime.date: datetime.date,
    datetime.datetime: datetime.datetime,
    datetime.time: datetime.time,
    datetime.timedelta: datetime.timedelta,
    datetime.timezone: datetime.timezone,
    decimal.Decimal: decimal.Decimal,
    fractions.Fraction: _fraction,
    collections.deque: collections.deque,
    collections.defaultdict: collections.defaultdict,
    argparse.Namespace: argparse.Namespace,
    types.SimpleNamespace: types.SimpleNamespace,
    pathlib.PurePosixPath: pathlib.PurePosixPath,
    pathlib.PureWindowsPath: pathlib.PureWindowsPath,
    pathlib.PosixPath: pathlib.Path,
    pathlib.WindowsPath: pathlib.PureWindowsPath,
    frozenset: frozenset,
    range: range,
    slice: slice,
    bytes: no_bytes,
    io.BytesIO: io.BytesIO,
    **{kind: kind for kind in (int, float, bool, str, list, dict, tuple)},
}
#: These may be the factory of a defaultdict, but a pickle may not call them: `list(range(n))` would take memory for n
#: values, and so would `int(Decimal("1e999999999"))`.
_NEVER_CALLED = (int, float, bool, str, list, dict, tuple, torch.Tensor)
_BY_NAME = {(kind.__module__, kind.__qualname__): make for kind, make in _CLASSES.items()}
_WITH_ATTRIBUTES = (argparse.Namespace, types.SimpleNamespace)
_LISTS = (list, collections.deque)


# --- On saving


class Recorder:
    """Pickles for torch.save, and records the used classes and functions that loads would refuse."""

    __name__ = "pickle"  # torch.save reads this attribute of the pickle module

    def __init__(self) -> None:
        self.refused: dict[str, None] = {}
        recorder = self

        class Pickler(pickle.Pickler):
            def reducer_override(self, value: Any) -> Any:
                recorder._see(value)
                return NotImplemented

        self.Pickler = Pickler

    def _see(self, value: Any) -> None:
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            name = (getattr(value, "__module__", None), value.__qualname__)
            if not (name in _BY_NAME or name in _NUMPY or _is_torch_s(value, *name)):
                self.refused[f"{name[0]}.{name[1]}"] = None
        elif _is_numpy_dtype(value) and value.kind not in _KINDS_OF_ARRAYS:
            self.refused[f"numpy.dtype {value.str}"] = None


def _is_torch_s(value: Any, module: str | None, name: str) -> bool:
    if module in ("torch", "torch.storage") and name.endswith("Storage"):
        return True
    return any(value is known for known in (*torch_private.weights_only_globals().values(), *_of_the_user().values()))


def _is_numpy_dtype(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.dtype)


def _of_the_user() -> dict[str, Any]:
    """Returns {name: global} that the user gave to `torch.serialization.add_safe_globals`."""
    found = {}
    for entry in torch.serialization.get_safe_globals():
        value, name = entry if isinstance(entry, tuple) else (entry, f"{entry.__module__}.{entry.__qualname__}")
        found[name] = value
    return found


# --- On loading


def load(data: bytes) -> Any:
    """Returns the object in an archive that torch.load refuses with weights_only=True. Raises `UnpicklingError`."""
    module = types.SimpleNamespace(__name__="pickle", Unpickler=_Unpickler, load=_refuse)
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=module)


def _refuse(*_: Any, **__: Any) -> Any:
    raise pickle.UnpicklingError("a file of torch before 1.6")


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise pickle.UnpicklingError("it takes numpy, which is not installed") from None
    return numpy


class _Unfinished:
    """A numpy value whose state has not come yet in the pickle."""

    def __init__(self) -> None:
        self.memos: list[int] = []  #: the memo numbers of the value in the pickle


class _Dtype(_Unfinished):
    """A numpy dtype: `numpy.dtype(name, align, copy)`, then its state."""

    def __init__(self, name: Any, *_: Any) -> None:
        super().__init__()
        if type(name) is not str or not re.fullmatch(r"[?biufcSUMm]\d*", name):
            raise pickle.UnpicklingError(f"an array of {name!r}")
        self.name = name

    def built(self, state: Any) -> Any:
        version, order, subdtype, names, fields, size, *others = state
        if type(version) is not int or order not in ("<", ">", "|", "=") or (subdtype, names, fields) != (None,) * 3:
            raise pickle.UnpicklingError("an array with fields")
        name = self.name
        if name[0] in "Mm":
            unit, number, denominator, event = others[2][1]
            unit = unit.decode("ascii") if isinstance(unit, bytes) else unit
            if not (re.fullmatch(r"[A-Za-z]{1,7}", unit) and type(number) is int and (denominator, event) == (1, 1)):
                raise pickle.UnpicklingError("times of an unknown unit")
            name = name[0] + "8" + ("" if unit == "generic" else f"[{number}{unit}]")
        elif name[0] in "SU" and type(size) is int and size >= 0:
            name = f"{name[0]}{size // (4 if name[0] == 'U' else 1)}"
        dtype = _numpy().dtype(name)
        return dtype.newbyteorder(order) if order == ">" else dtype


class _Array(_Unfinished):
    """A numpy array: `_reconstruct(numpy.ndarray, (0,), b"b")`, then its state."""

    def __init__(self, kind: Any, *_: Any) -> None:
        super().__init__()
        if kind is not _NDARRAY:
            raise pickle.UnpicklingError("an array of a class of its own")

    def built(self, state: Any) -> Any:
        _, shape, dtype, in_columns, data = state
        return _array(dtype, data, shape, bool(in_columns))


def _array(dtype: Any, data: Any, shape: Any, in_columns: bool) -> Any:
    numpy = _numpy()
    if not isinstance(dtype, numpy.dtype) or type(data) is not bytes or type(shape) is not tuple:
        raise pickle.UnpicklingError("an array of something else than bytes")
    if any(type(length) is not int or length < 0 for length in shape):
        raise pickle.UnpicklingError("an array without a shape")
    if not data:
        if math.prod(shape):
            raise pickle.UnpicklingError("an array without its bytes")
        return numpy.empty(shape, dtype)
    return numpy.frombuffer(data, dtype).reshape(shape, order="F" if in_columns else "C").copy(order="K")


def _scalar(dtype: Any, data: Any) -> Any:
    if isinstance(dtype, _numpy().dtype) and dtype.itemsize == 0:  # an empty text: numpy has no array of that
        return dtype.type()
    return _array(dtype, data, (), False)[()]


class _NDARRAY:
    """Replaces numpy.ndarray, which pickles name but do not call."""


_NUMPY: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _NDARRAY,
    **{(module, "_reconstruct"): _Array for module in _ARRAYS},
    **{(module, "scalar"): _scalar for module in _ARRAYS},
}


class _Memo(dict[int, Any]):
    """The values of a pickle by their memo numbers. None may be used before it has its state: what used it would never
    get the finished value."""

    def __setitem__(self, number: int, value: Any) -> None:
        super().__setitem__(number, value)
        if isinstance(value, _Unfinished):
            value.memos.append(number)

    def __getitem__(self, number: int) -> Any:
        value = super().__getitem__(number)
        if isinstance(value, _Unfinished):
            raise pickle.UnpicklingError("an array of numpy that is used before it has its state")
        return value


class _Unpickler(pickle._Unpickler):  # the operations of this pure Python class can be overridden
    proto: int
    stack: list[Any]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: Any, **options: Any) -> None:
        data = file.read()
        wrong, _ = _C.check_pickle(data, storages=True)
        if wrong:
            raise pickle.UnpicklingError(wrong)
        super().__init__(io.BytesIO(data), **options)
        self.memo = _Memo()
        self._torch_s = {**torch_private.weights_only_globals(), **_of_the_user()}
        known = (*_CLASSES.values(), *_NUMPY.values(), *self._torch_s.values())
        self._known = {id(function) for function in known if function is not _NDARRAY}
        self._known -= {id(kind) for kind in _NEVER_CALLED}
        self._of_torch = {id(function) for function in self._torch_s.values()}
        self._rebuild = self._torch_s.get("torch._tensor._rebuild_from_type_v2")
        self._unfinished = 0  # the number of values that have no state yet

    def load(self) -> Any:
        value = super().load()
        if self._unfinished:
            raise pickle.UnpicklingError("an array of numpy without its state")
        return value

    def find_class(self, module: str, name: str) -> Any:
        if self.proto < 3:  # the pickle has Python 2's names
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        known = _BY_NAME.get((module, name)) or _NUMPY.get((module, name)) or self._torch_s.get(f"{module}.{name}")
        if known is None and module.startswith("pathlib"):  # Python 3.13 has these classes in another module
            known = _BY_NAME.get((pathlib.PosixPath.__module__, name)) or _BY_NAME.get(("pathlib", name))
        if known is None:
            raise pickle.UnpicklingError(f"{module}.{name} is not known to be harmless")
        return known

    def _make(self, kind: Any, arguments: Any, make: Callable[..., Any]) -> None:
        self._check_call(kind, arguments)
        if kind is self._rebuild:  # this function calls its first argument
            if id(arguments[0]) not in self._of_torch or arguments[0] is kind:
                raise pickle.UnpicklingError(f"it has torch call {arguments[0]!r}")
            self._check_call(arguments[0], arguments[2])
        made = make(*arguments)
        self._unfinished += isinstance(made, _Unfinished)
        self.append(made)

    def _check_call(self, kind: Any, arguments: Any) -> None:
        if id(kind) not in self._known or type(arguments) is not tuple or isinstance(kind, type(torch.FloatTensor)):
            raise pickle.UnpicklingError(f"it calls {kind!r}")
        from_range = any(type(argument) is range for argument in arguments)  # a few bytes may give any number of values
        if from_range and not any(kind is known for known in (slice, *_of_the_user().values())):
            raise pickle.UnpicklingError(f"it fills a {kind!r} from a range")

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self._make(function, arguments, function)

    def load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, type):
            raise pickle.UnpicklingError(f"it makes a new {kind!r}")
        if kind in (_Dtype, _Array):
            raise pickle.UnpicklingError("no array of numpy is made so")
        self._make(kind, arguments, lambda *given: kind.__new__(kind, *given))

    def load_build(self) -> None:
        state, value = self.stack.pop(), self.stack[-1]
        if type(value) in (_Dtype, _Array):
            self._replace(value, value.built(state))
            self._unfinished -= 1
        elif type(value) in _WITH_ATTRIBUTES or type(value) is collections.OrderedDict:
            if type(state) is not dict or not all(type(name) is str for name in state):
                raise pickle.UnpicklingError("attributes that are none")
            value.__dict__.update(state)
        elif type(value) is io.BytesIO:
            self._fill(value, state)
        elif any(type(value) is known for known in _of_the_user().values()):
            self.stack.append(state)
            super().load_build()  # type: ignore[misc]
        else:
            raise pickle.UnpicklingError(f"it gives a {type(value).__name__} a state")

    def _fill(self, buffer: io.BytesIO, state: Any) -> None:
        whole = type(state) is tuple and len(state) == 3 and type(state[0]) is bytes and type(state[1]) is int
        if not whole or not 0 <= state[1] <= len(state[0]) or state[2]:  # attributes are refused
            raise pickle.UnpicklingError("a buffer of something else than bytes")
        buffer.__setstate__((state[0], state[1], None))  # type: ignore[attr-defined]  # typeshed lacks it

    def _replace(self, value: _Unfinished, built: Any) -> None:
        self.stack[-1] = built
        for number in value.memos:
            if self.memo.get(number) is value:
                self.memo[number] = built

    def load_append(self) -> None:
        value = self.stack.pop()
        self._checked(_LISTS).append(value)

    def load_appends(self) -> None:
        values = self.pop_mark()
        self._checked(_LISTS).extend(values)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._checked((dict,), derived=True)[key] = value

    def load_setitems(self) -> None:
        values = self.pop_mark()
        mapping = self._checked((dict,), derived=True)
        for key, value in zip(values[::2], values[1::2], strict=True):
            mapping[key] = value  # `update` of a derived class may do something else

    def load_additems(self) -> None:
        values = self.pop_mark()
        self._checked((set,)).update(values)

    def _checked(self, kinds: tuple[type, ...], derived: bool = False) -> Any:
        value = self.stack[-1]
        fits = isinstance(value, kinds) if derived else type(value) in kinds
        if not fits:
            raise pickle.UnpicklingError(f"it fills a {type(value).__name__}")
        return value

    def refuse(self) -> None:
        raise pickle.UnpicklingError("an operation that data do not need")


def _dispatch() -> dict[int, Callable[..., None]]:
    refused = (
        pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER,
        pickle.READONLY_BUFFER, pickle.FRAME, pickle.DUP,
    )  # fmt: skip
    # The table of the base class has its own functions, not those of a subclass.
    functions = {code: getattr(_Unpickler, load.__name__) for code, load in pickle._Unpickler.dispatch.items()}
    return {**functions, **dict.fromkeys((opcode[0] for opcode in refused), _Unpickler.refuse)}


_Unpickler.dispatch = _dispatch()
