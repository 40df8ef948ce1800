"""`verify`: every damage is listed, nothing else is, and nothing of the checkpoint's size is taken in memory."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import faults
from harness.children import in_child
from harness.files import data_files, drop_from_cache, flipped, ranks_alone, read_metadata, records, rewrite_metadata
from harness.saves import outcome, save, stock_save
from harness.states import state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError, Safetensors, VerifyReport, verify
from vescale_ckpt._checkpoint.check_records import check_file, file_ends
from vescale_ckpt._checkpoint.loadable import LoadableCheckpoint
from vescale_ckpt._checkpoint.open_checkpoint import open_checkpoint
from vescale_ckpt._checkpoint.recognize import committed_at


def damaged_keys(report: VerifyReport) -> set[str | None]:
    return {damage.key for damage in report.damaged}


def test_a_sound_checkpoint_is_said_to_be(saved: Path) -> None:
    for source in ("page cache", "disk"):
        if source == "disk":
            for path in data_files(saved):
                drop_from_cache(path)
        report = verify(saved)
        assert report.ok and report.damaged == []
        assert (report.keys, report.files) == (9, len(data_files(saved)))
        assert report.bytes == sum(record.end - record.begin for record in records(saved))
        assert report.unverified_bytes == 0
    quick = verify(saved, quick=True)
    assert quick.ok and (quick.keys, quick.files, quick.bytes) == (9, len(data_files(saved)), 0)
    assert quick.indexed == (saved / ".metadata.index").exists()


def test_what_a_load_finds_verify_lists(saved: Path) -> None:
    rng = random.Random(1)
    for record in records(saved):
        for _ in range(2):
            bit = rng.randrange(8 * record.begin, 8 * record.end)
            with flipped(record.path, bit):
                report, error = verify(saved), outcome(saved, state(1))
                if record.key != "model.empty":  # loads read nothing of it
                    assert report.ok == (error is None), f"{record.key}, bit {bit}: {report.damaged}, {error!r}"
                for damage in report.damaged:
                    assert (damage.key, damage.file) == (record.key, str(record.path))
                    assert record.begin <= damage.offset < record.end
                assert len(report.damaged) <= 1


def test_every_damage_is_listed(saved: Path) -> None:
    bodies = [record for record in records(saved) if len(record.body)]
    with contextlib.ExitStack() as stack:
        for record in bodies:
            stack.enter_context(flipped(record.path, 8 * record.body.start))
        report = verify(saved)
        found = {(damage.key, damage.file) for damage in report.damaged}
        assert found == {(record.key, str(record.path)) for record in bodies}
        assert len(report.damaged) == len(bodies)
        assert verify(saved, quick=True).ok  # it does not look at the data
    assert verify(saved).ok


@pytest.mark.parametrize("damage", ["missing", "truncated", "a directory", "a FIFO"])
@pytest.mark.parametrize("quick", [True, False])
def test_files_that_are_not_what_they_should_be(saved: Path, damage: str, quick: bool, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    victim = max(records(copy), key=lambda record: record.end)
    end = max(record.end for record in records(copy) if record.path == victim.path)
    of_file = {record.key for record in records(copy) if record.path == victim.path}
    if damage == "truncated":
        os.truncate(victim.path, end - 1)
    else:
        victim.path.unlink()
    if damage == "a directory":
        victim.path.mkdir()
    if damage == "a FIFO":
        os.mkfifo(victim.path)
    report = in_child(lambda: verify(copy, quick=quick)).value  # a FIFO would wait for a writer
    assert not report.ok
    assert {entry.file for entry in report.damaged} == {str(victim.path)}
    if quick:
        assert damaged_keys(report) == {None}
    elif damage == "truncated":
        assert damaged_keys(report) == {victim.key}
    else:
        assert damaged_keys(report) == {None} | of_file


def test_what_a_disk_does_not_give_is_unreadable_and_not_damaged(checkpoint: Path) -> None:
    values = {f"weight {i:03}": torch.full((3000,), float(i)) for i in range(300)}
    save(checkpoint, values)
    (checkpoint / ".metadata.index").unlink()  # its reads would be the first to fail
    for path in data_files(checkpoint):
        drop_from_cache(path)
    faults.inject("read", errno.EIO, 0, 1)
    assert verify(checkpoint).ok  # a moment's failure, as the second attempt shows
    # All lie in one transfer. Halves of halves fail, down to one record; the others are read.
    faults.inject("read", errno.EIO, 0, 9)
    report = verify(checkpoint)
    (place,) = report.unreadable
    assert place.key == "weight 000" and "Input/output error" in place.reason
    assert not report.ok and not report.damaged and report.reason == place.reason
    faults.inject("read", errno.EIO, 0, 10**9)
    assert {place.key for place in verify(checkpoint).unreadable} == set(values)
    faults.clear()
    assert verify(checkpoint).ok


def test_no_memory_of_the_checkpoints_size_is_taken(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VESCALE_CKPT_MEMORY_BYTES", str(32 << 20))
    values = {
        "large": torch.zeros(24 << 20),
        "transposed": torch.zeros(6000, 4000).t(),
        "object": {"tensor": torch.zeros(16 << 20)},
    }
    save(checkpoint / "ours", {"large": values["large"], "object": [values["object"]]})
    stock_save(checkpoint / "stock", {"transposed": values["transposed"]})
    del values
    for name in ("ours", "stock"):
        for path in data_files(checkpoint / name):
            drop_from_cache(path)
        answer = in_child(verify, checkpoint / name)
        assert answer.value.ok and answer.value.bytes > 90 << 20
        assert answer.peak_bytes < 64 << 20, f"{name}: {answer.peak_bytes >> 20} MiB"


# --- Metadata


def test_directories_without_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    for quick in (True, False):
        report = verify(checkpoint, quick=quick)
        assert not report.ok and "is no directory" in report.damaged[0].reason
        assert "has no .metadata" in verify(tmp_path, quick=quick).damaged[0].reason
    with pytest.raises(ValueError, match="no storage for hdfs"):
        verify("hdfs://host/checkpoint")


@pytest.mark.parametrize(
    ("format", "last"),
    [
        ("dcp", ".metadata"),
        ("safetensors", "model.safetensors"),
        (Safetensors(max_shard_size=16), "model.safetensors.index.json"),
    ],
    ids=["dcp", "one file", "several files"],
)
def test_a_folder_is_committed_when_its_last_file_is_there(checkpoint: Path, format: Any, last: str) -> None:
    assert committed_at(str(checkpoint)) is None
    vescale_ckpt.save(checkpoint, {"a": torch.ones(4), "b": torch.ones(4)}, format=format)
    os.utime(checkpoint / last, ns=(1, 7_000))
    assert committed_at(str(checkpoint)) == 7_000
    (checkpoint / last).unlink()
    assert committed_at(str(checkpoint)) is None


@pytest.mark.parametrize("indexed", [True, False])
def test_damaged_metadata_is_found_also_beside_a_sound_index(checkpoint: Path, indexed: bool) -> None:
    save(checkpoint, state(1))
    if not indexed:
        (checkpoint / ".metadata.index").unlink()
    rng = random.Random(2)
    path = checkpoint / ".metadata"
    for _ in range(20):
        with flipped(path, rng.randrange(8 * path.stat().st_size)):
            for quick in (True, False):
                (damage,) = verify(checkpoint, quick=quick).damaged
                assert (damage.key, damage.file) == (None, str(path))


def test_an_index_that_does_not_count_does_no_harm(checkpoint: Path) -> None:
    save(checkpoint, state(1))
    path = checkpoint / ".metadata.index"
    rng = random.Random(3)
    for _ in range(20):
        with flipped(path, rng.randrange(8 * path.stat().st_size)):
            assert verify(checkpoint, quick=True).ok and verify(checkpoint).ok
    of_another = path.read_bytes()
    save(checkpoint, state(2))
    path.write_bytes(of_another)
    report = verify(checkpoint, quick=True)
    assert report.ok and not report.indexed


def test_metadata_that_lies_is_listed_with_its_keys(checkpoint: Path) -> None:
    save(checkpoint, state(1))
    metadata = read_metadata(checkpoint)
    storage = metadata.storage_data
    by_key = {index.fqn: index for index in storage}
    storage[by_key["model.large"]].relative_path = "../outside.distcp"
    storage[by_key["model.bias"]].offset = -1
    storage[by_key["step"]].length = 1 << 61
    del storage[by_key["text"]]
    metadata.state_dict_metadata["model.scalar"].chunks.clear()
    rewrite_metadata(checkpoint, metadata)
    for quick in (True, False):
        report = verify(checkpoint, quick=quick)
        assert {"text", "model.scalar"} <= damaged_keys(report)
        assert {found.key for found in report.refused} == {"model.large", "model.bias"}
        assert not {"model.strided", "history.0"} & damaged_keys(report)
        long = [damage for damage in report.damaged if "truncated" in damage.reason]
        assert [damage.key for damage in long] == [None if quick else "step"]


def test_a_file_of_another_save_is_a_stranger(checkpoint: Path, tmp_path: Path) -> None:
    save(checkpoint, state(1))
    save(tmp_path / "other", state(2))
    shutil.copy(data_files(tmp_path / "other")[0], data_files(checkpoint)[0])
    report = verify(checkpoint, quick=True)
    assert report.ok, report.damaged
    assert "model.large" in damaged_keys(verify(checkpoint))


def test_a_stock_file_with_another_tensor_is_no_match(checkpoint: Path, tmp_path: Path) -> None:
    for directory, tensor in ((checkpoint, torch.zeros(40, 30)), (tmp_path / "other", torch.zeros(30, 40))):
        stock_save(directory, {"weight": tensor.t()})
    shutil.copy(data_files(tmp_path / "other")[0], data_files(checkpoint)[0])
    (damage,) = verify(checkpoint).damaged
    assert damage.key == "weight" and "promises torch.float32 (30, 40)" in damage.reason


def test_what_ranks_saved_without_collectives(tmp_path: Path) -> None:
    checkpoint = ranks_alone(tmp_path)
    report = verify(checkpoint)
    assert report.ok and report.indexed and report.files == 2 and report.keys == 2 * 6
    assert vescale_ckpt.inspect(checkpoint).tensors["rows"].shape == (10, 7)
    victim = data_files(checkpoint)[1]
    away = victim.rename(tmp_path / "away")
    assert {damage.file for damage in verify(checkpoint).damaged} == {str(victim)}
    away.rename(victim)
    (checkpoint / "__1.metadata").write_bytes(b"")
    assert {damage.file for damage in verify(checkpoint).damaged} == {str(checkpoint / "__1.metadata")}


# --- What loads do without


def every_bit(path: Path, at: range) -> Iterator[int]:
    for byte in at:
        for bit in range(8 * byte, 8 * byte + 8):
            with flipped(path, bit):
                yield byte


def test_damage_that_loads_do_without_is_listed_as_harmless(checkpoint: Path) -> None:
    values = {"weight": torch.arange(6.0), "step": 3}
    save(checkpoint, values)
    assert verify(checkpoint).harmless == verify(checkpoint).unchecked == []
    index, (data,) = checkpoint / ".metadata.index", data_files(checkpoint)
    (record,) = (record for record in records(checkpoint) if record.key == "weight")
    size = data.stat().st_size
    table = int.from_bytes(data.read_bytes()[-48:-40], "little")
    descriptor = range(record.body.stop, record.body.stop + 16)
    for path, where, key in (
        (index, range(0, index.stat().st_size, 41), None),
        (data, range(table, size, 7), None),
        (data, descriptor, "weight"),
    ):
        for byte in every_bit(path, where):
            report = verify(checkpoint)
            assert report.ok, report.damaged
            assert [(damage.key, damage.file) for damage in report.harmless] == [(key, str(path))], byte
            assert outcome(checkpoint, values) is None
            assert verify(checkpoint, quick=True).harmless == []


def test_descriptors_of_others_are_checked(checkpoint: Path) -> None:
    stock_save(checkpoint, state(1))
    report = verify(checkpoint)
    assert report.harmless == [] and len(report.unchecked) == 1 and "no checksum" in report.unchecked[0]
    for record in records(checkpoint):
        if not len(record.body):
            continue
        with flipped(record.path, 8 * record.body.stop + 40):  # its checksum
            report = verify(checkpoint)
            if record.key in ("model.strided", "text", "history.0", "step"):
                (damage,) = report.harmless
                assert damage.key == record.key and "data descriptor" in damage.reason
            assert report.ok


def _far_away(data: bytearray) -> None:
    at, count = struct.unpack_from("<2Q", data, 32 + 16 * 4)  # the columns
    base = at + 40 * (count - 2)  # of the offsets of the last key
    (offset,) = struct.unpack_from("<Q", data, base)
    struct.pack_into("<Q", data, base, offset + (1 << 40))


def _swapped(data: bytearray) -> None:
    keys, columns = (struct.unpack_from("<Q", data, 32 + 16 * table)[0] for table in (2, 4))
    for first, second, size in ((keys + 16, keys + 64, 8), (columns + 40, columns + 160, 40)):  # checksums and offsets
        one, other = slice(first, first + size), slice(second, second + size)
        data[one], data[other] = data[other], data[one]


def _of_many_chunks(data: bytearray) -> None:
    (keys,) = struct.unpack_from("<Q", data, 32 + 16 * 2)
    struct.pack_into("<Q", data, keys + 24, 2)  # the second one is what follows in the dims


def _of_another_dtype(data: bytearray) -> None:
    struct.pack_into("<I", data, struct.unpack_from("<Q", data, 32 + 16 * 2)[0] + 40, 1)


@pytest.mark.parametrize("change", [_far_away, _swapped, _of_many_chunks, _of_another_dtype])
def test_an_index_that_says_otherwise_is_damage(checkpoint: Path, change: Callable[[bytearray], None]) -> None:
    tensors = {"first": torch.ones(4), "second": torch.zeros(4), "long": torch.ones(4, dtype=torch.int64)}
    save(checkpoint, {**tensors, "wide": torch.ones(5), "number": 3})
    assert verify(checkpoint).ok
    index = checkpoint / ".metadata.index"
    data = bytearray(index.read_bytes())
    change(data)
    struct.pack_into("<I", data, len(data) - 4, zlib.crc32(data[:-4]))
    index.write_bytes(data)
    (damage,) = verify(checkpoint).damaged
    assert damage.file == str(index) and "contradicts the metadata" in damage.reason


def test_what_cannot_be_checked_is_said(checkpoint: Path) -> None:
    save(checkpoint, state(1), checksums=False)
    report = verify(checkpoint)
    tensors = sum(len(record.body) for record in records(checkpoint) if record.key.startswith("model."))
    assert report.ok and report.unverified_bytes >= tensors
    (told,) = report.unchecked
    assert "without checksums" in told
    (told,) = verify(checkpoint, quick=True).unchecked
    assert told.startswith("the data")


@pytest.mark.parametrize("value", [torch.arange(6.0).reshape(2, 3), torch.tensor(3.0)], ids=["matrix", "scalar"])
@pytest.mark.parametrize("by_stock", [False, True])
def test_a_tensor_that_is_placed_without_an_offset_is_damage_as_for_loads(
    checkpoint: Path, tmp_path: Path, by_stock: bool, value: torch.Tensor
) -> None:
    """Stock DCP asks for the place of each chunk by its offset, and raises KeyError."""
    values = {"w": value, "x": torch.ones(2), "object": [1]}
    (stock_save if by_stock else save)(checkpoint, values)
    metadata = read_metadata(checkpoint)
    metadata.storage_data = {
        MetadataIndex("w") if index.fqn == "w" else index: info for index, info in metadata.storage_data.items()
    }
    rewrite_metadata(checkpoint, metadata)
    with pytest.raises(CheckpointException, match="KeyError"):
        dcp.load({"w": torch.empty_like(value)}, checkpoint_id=checkpoint, no_dist=True)
    error = outcome(checkpoint, values)
    assert isinstance(error, CorruptCheckpointError) and error.key == "w"
    for quick in (True, False):
        assert damaged_keys(verify(checkpoint, quick=quick)) == {"w"}
    with pytest.raises(CorruptCheckpointError, match=r"w: the metadata in .* does not say where it is stored"):
        vescale_ckpt.convert(checkpoint, tmp_path / "made.pt", format="torch")


# --- One data file, as `verify` checks all: `check_file`


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
