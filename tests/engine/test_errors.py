"""Errors: they say what they name, carry it as attributes, and travel between ranks as pickles."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from harness import faults

from vescale_ckpt import (
    CheckpointError,
    CheckpointTimeoutError,
    CorruptCheckpointError,
    IncompatibleStateError,
    MissingKeysError,
    SaveFailedError,
    StorageFullError,
    UntrustedCheckpointError,
)
from vescale_ckpt._engine import _C
from vescale_ckpt._engine.dtype_codes import DTYPE_CODES
from vescale_ckpt._engine.engine_errors import named_errors
from vescale_ckpt._engine.options import engine_options
from vescale_ckpt._engine.rows import int_table

ERRORS: dict[str, CheckpointError] = {
    "base": CheckpointError("what happened", key="a", number=7),
    "corrupt": CorruptCheckpointError("flipped", key="a.b", file="/x/y", offset=4096),
    "incompatible": IncompatibleStateError("a.b", torch.Size([1]), torch.float32),
    "missing": MissingKeysError(["a", "b"], ["c"]),
    "untrusted": UntrustedCheckpointError("imports os.system", module="os", name="system"),
    "full": StorageFullError("/x", 12_345_678, 9),
    "timeout": CheckpointTimeoutError("plan", [3, 5]),
    "failed": SaveFailedError(3, "ValueError: no such thing"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_pickled_and_copied_errors_are_the_same(name: str) -> None:
    error = ERRORS[name]
    for twin in (*(pickle.loads(pickle.dumps(error, protocol)) for protocol in range(2, 6)), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert isinstance(twin, RuntimeError)
        assert str(twin) == str(error)
        assert twin.__dict__ == error.__dict__


def test_many_missing_keys_are_all_carried_and_some_shown() -> None:
    error = MissingKeysError([f"key {i}" for i in range(1000)])
    assert len(error.missing) == 1000
    assert "1000 keys" in str(error)
    assert "990 more" in str(error)
    assert len(str(error)) < 500


@pytest.mark.parametrize(
    ("number", "kind"),
    [*((full, StorageFullError) for full in (27, 28, 122)), *((other, CheckpointError) for other in (5, 13))],
)
def test_engine_errors_become_errors_of_this_package(tmp_path: os.PathLike[str], number: int, kind: type) -> None:
    tensor = torch.ones(3)
    table = int_table((DTYPE_CODES[tensor.dtype], tensor.data_ptr(), 1, 3, 1))
    path = os.path.join(tmp_path, "file")
    faults.inject("write", number)
    with pytest.raises(CheckpointError) as raised, named_errors(lambda row: f"key {row}", str(tmp_path), 99):
        writer = _C.FileWriter(path, 1 << 16, engine_options(None, "auto"), True)
        writer.write_tensors(table, _C.LocationTable(), range(1))
        writer.finish(False)
    assert type(raised.value) is kind
    assert path in str(raised.value)
    assert os.strerror(number) in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    if isinstance(raised.value, StorageFullError):
        assert raised.value.needed == 99
        assert raised.value.free > 0
