"""`check_file`: one data file against the records that a checkpoint names in it, as `verify` checks all."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path

import pytest
from harness import faults
from harness.files import data_files, drop_from_cache, flipped, records
from harness.states import state

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError, verify
from vescale_ckpt._checkpoint.check_records import check_file, file_ends
from vescale_ckpt._checkpoint.loadable import LoadableCheckpoint
from vescale_ckpt._checkpoint.open_checkpoint import open_checkpoint


def opened(path: Path) -> LoadableCheckpoint:
    checkpoint = open_checkpoint(str(path))
    assert isinstance(checkpoint, LoadableCheckpoint)
    return checkpoint


def taken_away(path: Path, tmp_path: Path) -> Path:
    """A copy of a file under another name in another folder, as of a file that is being received."""
    return Path(shutil.copyfile(path, tmp_path / f"{path.name}.tmp.1.2"))


def test_sound_files_pass_under_any_name(saved: Path, tmp_path: Path) -> None:
    checkpoint = opened(saved)
    assert set(file_ends(checkpoint)) == {path.name for path in data_files(saved)}
    for path in data_files(saved):
        check_file(checkpoint, path.name, str(path))
        away = taken_away(path, tmp_path)
        drop_from_cache(away)
        check_file(checkpoint, path.name, str(away))


def test_what_verify_finds_is_raised(saved: Path, tmp_path: Path) -> None:
    rng = random.Random(2)
    checkpoint = opened(saved)
    for record in records(saved):
        away = taken_away(record.path, tmp_path)
        for place in (record.body, range(record.begin, record.end)):
            if not len(place):
                continue
            bit = rng.randrange(8 * place.start, 8 * place.stop)
            with flipped(record.path, bit):
                damaged = verify(saved).damaged
            assert damaged or place is not record.body
            with flipped(away, bit):
                if not damaged:
                    check_file(checkpoint, record.path.name, str(away))
                    continue
                with pytest.raises(CorruptCheckpointError) as raised:
                    check_file(checkpoint, record.path.name, str(away))
            assert (raised.value.key, raised.value.file) == (record.key, str(away))
            assert raised.value.offset == damaged[0].offset and record.key in str(raised.value)
            assert str(away) in str(raised.value)


def test_files_of_safetensors(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "model", state(1)["model"], format="safetensors")
    (path,) = (tmp_path / "model").glob("*.safetensors")
    away = taken_away(path, tmp_path)
    check_file(opened(tmp_path / "model"), path.name, str(away))
    with flipped(away, 8 * (away.stat().st_size - 1)), pytest.raises(CorruptCheckpointError) as raised:
        check_file(opened(tmp_path / "model"), path.name, str(away))
    assert raised.value.file == str(away) and raised.value.key in state(1)["model"]


def test_what_is_no_file_of_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    checkpoint, path = opened(saved), data_files(saved)[0]
    with pytest.raises(CheckpointError, match="names no data file other"):
        check_file(checkpoint, "other", str(path))
    with pytest.raises(CheckpointError) as missing:
        check_file(checkpoint, path.name, str(tmp_path / "missing"))
    assert missing.value.errno == errno.ENOENT
    os.mkfifo(tmp_path / "fifo")
    for place in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(CorruptCheckpointError, match="is not a regular file"):
            check_file(checkpoint, path.name, str(place))


def test_a_file_that_cannot_be_read_is_not_called_damaged(saved: Path, tmp_path: Path) -> None:
    checkpoint = opened(saved)
    path = max(records(saved), key=lambda record: len(record.body)).path
    away = taken_away(path, tmp_path)
    drop_from_cache(away)
    with (
        faults.fault("read", errno.EIO, 0, 10**9),
        pytest.raises(CheckpointError, match="Input/output error") as raised,
    ):
        check_file(checkpoint, path.name, str(away))
    assert not isinstance(raised.value, CorruptCheckpointError) and raised.value.path == str(away)
