"""What is no argument, and no setting, is refused by name, and the text says what was expected."""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import on_ranks
from harness.saves import cause
from torch.distributed.checkpoint.api import CheckpointException

from vescale_ckpt import (
    CheckpointError,
    LoadFailedError,
    LoadPlanner,
    Safetensors,
    SaveFailedError,
    SavePlanner,
    StorageReader,
    StorageWriter,
    convert,
    load,
    prepare,
    save,
    settings,
    verify,
)

STATE = {"weight": torch.arange(6.0), "step": 3}
FLAG = "expected True or False, got "
SECONDS = "expected seconds, more than 0, or None, got "
PATH = "expected a path, got "
GROUP = "expected a group or None, got "


def refused(call: Callable[..., Any], name: str, value: Any, wanted: str) -> Any:
    label = f"{call.__name__}({name}={type(value).__name__} {value})"[:60]
    return pytest.param(call, name, value, wanted, id=label)


CASES = [
    *(
        refused(call, name, value, FLAG)
        for call, names in {
            save: ("async_checkpoint", "overwrite"),
            prepare: ("async_checkpoint",),
            load: ("strict", "verify", "allow_cast", "weights_only"),
            convert: ("overwrite",),
            verify: ("quick",),
            StorageWriter: ("single_file_per_rank", "sync_files", "overwrite", "checksums"),
            StorageReader: ("verify", "weights_only"),
            SavePlanner: ("flatten_state_dict", "flatten_sharded_tensors", "enable_plan_caching"),
            LoadPlanner: ("flatten_state_dict", "flatten_sharded_tensors", "allow_partial_load", "allow_cast"),
        }.items()
        for name in names
        for value in ("no", None)
    ),
    *(
        refused(call, "timeout", value, SECONDS)
        for call in (save, prepare, load, convert)
        for value in ("5", 0, -1, float("nan"), float("inf"), True, datetime.timedelta(seconds=3))
    ),
    *(
        refused(call, "thread_count", value, "thread_count: expected a whole number from 1 to 256, or None, got ")
        for call in (StorageWriter, StorageReader)
        for value in ("4", 4.0, True, 0, -1, 257)
    ),
    *(
        refused(call, "direct_io", value, "direct_io: expected 'auto', True or False, got ")
        for call in (StorageWriter, StorageReader)
        for value in ("on", "off", 1, None, [])
    ),
    *(
        refused(call, "broadcast_checkpoint", value, "expected 'auto', True or False, got ")
        for call in (load, StorageReader)
        for value in ("yes", 1, None, [])
    ),
    *(
        refused(call, "path", value, PATH + type(value).__name__)
        for call in (save, load, verify, StorageWriter, StorageReader)
        for value in (None, 3, b"x", STATE)
    ),
    *(refused(convert, name, None, f"{name}: {PATH}NoneType") for name in ("src", "dst")),
    *(refused(call, "path", "", "got an empty text") for call in (save, load, verify, StorageWriter, StorageReader)),
    *(refused(call, "process_group", value, GROUP) for call in (save, prepare, load, convert) for value in ("x", 0)),
    *(
        refused(Safetensors, "max_shard_size", value, "bytes, or text like '5GB'")
        for value in (True, 5e9, "5 bananas", 0, None)
    ),
    refused(Safetensors, "metadata", ["a"], "expected a mapping of texts or None"),
    refused(save, "gate", 3, "expected a torch.optim.Optimizer or several, got int"),
    refused(save, "gate", [1], "expected a torch.optim.Optimizer, got int"),
    refused(save, "on_busy", "perhaps", "on_busy"),
    refused(load, "keys", 3, "expected names or patterns"),
    *(refused(load, "rename", value, "rename: ") for value in (3, "x", {1: 2})),
    *(refused(convert, "rename", value, "rename: ") for value in (3, "x", {1: 2})),
    *(refused(convert, "stack", value, "stack: expected a mapping of names") for value in ("x", {1: 2})),
    *(refused(SavePlanner, "placement", value, "one of balanced, lowest_rank") for value in ("x", [], "local")),
]


@pytest.mark.parametrize(("call", "name", "value", "wanted"), CASES)
def test_what_is_expected_is_said(call: Any, name: str, value: Any, wanted: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        save: {"path": tmp_path / "new", "state": STATE},
        prepare: {"state": STATE},
        load: {"path": tmp_path / "old", "state": {"weight": torch.zeros(6)}},
        convert: {"src": tmp_path / "old", "dst": tmp_path / "new", "format": "torch"},
        verify: {"path": tmp_path / "old"},
        StorageWriter: {"path": tmp_path / "new"},
        StorageReader: {"path": tmp_path / "old"},
    }.get(call, {})
    if call in (load, convert):
        save(tmp_path / "old", STATE)
    if name == "gate":
        arguments["async_checkpoint"] = True
    with pytest.raises((ValueError, TypeError), match=wanted):
        call(**{**arguments, name: value})
    assert not (tmp_path / "new").exists()


def test_only_an_asynchronous_save_has_a_gate() -> None:
    with pytest.raises(ValueError, match="only an asynchronous save"):
        save("x", {}, gate=torch.optim.SGD([torch.zeros(1)]))


def test_texts_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"NODE": "5", "NO_NVCC": "1", "TEST_KILLS": "3", "THREADS": "2"}.items():
        monkeypatch.setenv(f"VESCALE_CKPT_{name}", text)
    settings.check()
    for text in ("x", "", "-1", "1.5", str(1 << 63), "²"):
        monkeypatch.setenv("VESCALE_CKPT_NODE", text)
        with pytest.raises(ValueError, match="VESCALE_CKPT_NODE"):
            settings.check()


def test_a_name_that_is_no_setting_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setenv("VESCALE_CKPT_THREAD", "4")
    monkeypatch.setenv("VESCALE_CKPT_XYZ", "4")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            save(tmp_path, STATE)
            load(tmp_path, dict(STATE))
    said = [record.getMessage() for record in caplog.records if "is no setting" in record.getMessage()]
    assert len(said) == 2
    assert any("VESCALE_CKPT_THREAD " in text and "Did you mean VESCALE_CKPT_THREADS?" in text for text in said)


# Any text is a directory for traces.
@pytest.mark.parametrize("name", [*(name for name in settings.SETTINGS if name != "trace"), "node"])
def test_every_setting_is_checked_when_something_begins(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"VESCALE_CKPT_{name.upper()}"
    save(tmp_path / "old", STATE)
    monkeypatch.setenv(variable, "nonsense")
    writer, reader = StorageWriter(tmp_path / "new"), StorageReader(tmp_path / "old")
    for begins in (
        lambda: save(tmp_path / "new", STATE),
        lambda: save(tmp_path / "new", {"weight": STATE["weight"]}, format="safetensors"),
        lambda: prepare(STATE),
        lambda: load(tmp_path / "old", dict(STATE)),
        lambda: load(tmp_path / "old"),
        lambda: convert(tmp_path / "old", tmp_path / "new", format="torch"),
        lambda: verify(tmp_path / "old"),
        lambda: dcp.save(dict(STATE), storage_writer=writer),
        lambda: dcp.load({"weight": torch.zeros(6)}, storage_reader=reader),
    ):
        with pytest.raises((ValueError, CheckpointError, CheckpointException)) as caught:
            begins()
        error: BaseException = caught.value
        text = str(cause(error)) if isinstance(error, CheckpointException) else str(error)
        assert variable in text and text.endswith("got 'nonsense'")
    assert not (tmp_path / "new" / ".metadata").exists()


@pytest.mark.parametrize("name", ["DIRECT_IO", "TIMEOUT", "MEMORY_BYTES"])
@on_ranks(2)
def test_a_setting_that_is_wrong_on_one_rank_stops_all(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    save(path, STATE, timeout=60)
    if dist.get_rank() == 1:
        os.environ[f"VESCALE_CKPT_{name}"] = "nonsense"
    calls: list[tuple[Any, type, dict[str, Any]]] = [
        (save, SaveFailedError, {"path": path, "state": STATE}),
        (load, LoadFailedError, {"path": path, "state": {"weight": torch.zeros(6)}}),
        (convert, CheckpointError, {"src": path, "dst": path + ".pt", "format": "torch"}),
    ]
    for call, kind, arguments in calls:
        with pytest.raises(kind, match=f"rank 1: .*VESCALE_CKPT_{name}: .*got 'nonsense'"):
            call(**arguments, timeout=None if name == "TIMEOUT" else 60)
    os.environ.pop(f"VESCALE_CKPT_{name}", None)
    target = {"weight": torch.zeros(6)}
    load(path, target, timeout=60)
    assert torch.equal(target["weight"], STATE["weight"])  # type: ignore[arg-type]
    dist.barrier()
