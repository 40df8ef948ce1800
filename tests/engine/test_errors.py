"""Errors: they say what they name, carry it as attributes, and travel between ranks as pickles."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import faults
from harness.ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException

from vescale_ckpt import (
    CheckpointError,
    CheckpointTimeoutError,
    CorruptCheckpointError,
    IncompatibleStateError,
    LoadPlanner,
    MissingKeysError,
    SaveFailedError,
    StorageFullError,
    StorageReader,
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


def test_attributes() -> None:
    corrupt, incompatible, missing, full = (ERRORS[name] for name in ("corrupt", "incompatible", "missing", "full"))
    assert (corrupt.key, corrupt.file, corrupt.offset) == ("a.b", "/x/y", 4096)  # type: ignore[attr-defined]
    assert (incompatible.expected, incompatible.found) == ("torch.Size([1])", "torch.float32")  # type: ignore[attr-defined]
    assert (missing.missing, missing.unexpected) == (["a", "b"], ["c"])  # type: ignore[attr-defined]
    timeout, failed = ERRORS["timeout"], ERRORS["failed"]
    assert (timeout.phase, timeout.late_ranks) == ("plan", [3, 5])  # type: ignore[attr-defined]
    assert (failed.rank, failed.cause) == (3, "ValueError: no such thing")  # type: ignore[attr-defined]
    assert failed.failures == {3: "ValueError: no such thing"}  # type: ignore[attr-defined]
    assert (full.path, full.needed, full.free) == ("/x", 12_345_678, 9)  # type: ignore[attr-defined]


def test_messages_name_what_they_are_about() -> None:
    for name, words in {
        "incompatible": ["a.b", "torch.Size([1])", "torch.float32"],
        "missing": ["2 keys missing", "'a'", "'b'", "1 key not in the state", "'c'"],
        "full": ["/x", "12,345,678", "nothing was committed"],
        "timeout": ["plan", "[3, 5]"],
        "failed": ["rank 3", "no such thing"],
    }.items():
        for word in words:
            assert word in str(ERRORS[name])


def test_many_missing_keys_are_all_carried_and_some_shown() -> None:
    error = MissingKeysError([f"key {i}" for i in range(1000)])
    assert len(error.missing) == 1000
    assert "1000 keys" in str(error)
    assert "990 more" in str(error)
    assert len(str(error)) < 500


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (28, StorageFullError),
        (122, StorageFullError),
        (27, StorageFullError),
        (5, CheckpointError),
        (13, CheckpointError),
    ],
)
def test_engine_errors_become_errors_of_this_package(tmp_path: os.PathLike[str], number: int, kind: type) -> None:
    tensor = torch.ones(3)
    table = int_table((DTYPE_CODES[tensor.dtype], tensor.data_ptr(), 1, 3, 1))
    path = os.path.join(tmp_path, "file")
    faults.inject("write", number)
    with pytest.raises(CheckpointError) as raised, named_errors(lambda row: f"key {row}", str(tmp_path), 99):
        writer = _C.FileWriter(path, 1 << 16, engine_options(None, "auto"), True)
        writer.write_tensors(table)
        writer.finish(False)
    assert type(raised.value) is kind
    assert path in str(raised.value)
    assert os.strerror(number) in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    if isinstance(raised.value, StorageFullError):
        assert raised.value.needed == 99
        assert raised.value.free > 0


def _load_what_does_not_fit(path: str) -> list[str]:
    target = {"a": torch.zeros(3), f"new {dist.get_rank()}": 1}
    try:
        dcp.load(target, storage_reader=StorageReader(path), planner=LoadPlanner())
    except CheckpointException as error:
        return [
            f"{rank} {type(raised).__name__} {raised.missing}"  # type: ignore[attr-defined]
            for rank, (raised, _) in sorted(error.failures.items())
        ]
    return ["no error"]


def test_errors_of_all_ranks_arrive_on_all_ranks(tmp_path: os.PathLike[str]) -> None:
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    expected = ["0 MissingKeysError ['new 0']", "1 MissingKeysError ['new 1']"]
    assert run_ranks(2, _load_what_does_not_fit, str(tmp_path)) == [expected, expected]
