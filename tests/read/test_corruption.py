"""Bad luck on disk: flipped bits, short files, exchanged files. A load gives the saved values or a named error."""

from __future__ import annotations

import os
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from harness.files import Record, data_files, drop_from_cache, flipped, records
from harness.saves import cause, load_boxes, outcome, save
from harness.states import blank, same, small_state, state
from torch.distributed.checkpoint.api import CheckpointException

from vescale_ckpt import CorruptCheckpointError, LoadPlanner, StorageReader, UntrustedCheckpointError

BLOCK = 256 << 10  # what a checksum of our table covers


def regions(directory: Path) -> dict[str, list[tuple[range, Record]]]:
    """Byte ranges of all data files by what they are."""
    found: dict[str, list[tuple[range, Record]]] = {
        name: [] for name in ("prologue", "body", "epilogue", "object", "gap", "table", "footer")
    }
    by_file: dict[Path, list[Record]] = {}
    for record in records(directory):
        by_file.setdefault(record.path, []).append(record)
    for path, inside in by_file.items():
        at = 0
        for record in sorted(inside, key=lambda record: record.begin):
            found["gap"].append((range(at, record.begin), record))
            if record.key.startswith("model"):
                found["prologue"].append((range(record.begin, record.body.start), record))
                found["body"].append((record.body, record))
                found["epilogue"].append((range(record.body.stop, record.end), record))
            else:
                found["object"].append((range(record.begin, record.end), record))
            at = record.end
        size = path.stat().st_size
        table, last = at, inside[0]
        if size != at:  # ours: stock ends with the last record
            (table,) = struct.unpack_from("<Q", path.read_bytes()[-64:], 16)
            found["table"].append((range(table, size - 64), last))
            found["footer"].append((range(size - 64, size), last))
        found["gap"].append((range(at, table), last))
    return found


@pytest.mark.parametrize("source", ["page cache", "disk"])
def test_one_flipped_bit_anywhere_gives_the_values_or_names_the_damage(saved: Path, source: str) -> None:
    rng = random.Random(1)
    found = regions(saved)
    detected = dict.fromkeys(found, 0)
    for region, ranges in found.items():
        ranges = [pair for pair in ranges if len(pair[0])]
        for _ in range((20 if region == "body" else 8) if ranges else 0):
            where, record = rng.choice(ranges)
            bit = rng.randrange(8 * where.start, 8 * where.stop)
            with flipped(record.path, bit):
                if source == "disk":
                    drop_from_cache(record.path)
                error = outcome(saved, state(1))
            if error is None:
                continue
            detected[region] += 1
            assert isinstance(error, CorruptCheckpointError), f"{region}: {error!r}"
            assert error.key == record.key
            assert error.file == str(record.path)
            assert record.begin <= error.offset < record.end
            assert record.key in str(error) and record.path.name in str(error)
            if region == "body" and found["table"] and record.key != "model.strided":
                assert 0 <= bit // 8 - error.offset < BLOCK  # names the block
    assert detected["gap"] == detected["footer"] == detected["table"] == 0  # whole tensors need none of them
    assert detected["prologue"] > 0 and detected["epilogue"] > 0 and detected["object"] > 0
    assert detected["body"] == 20


def test_the_two_ends_and_the_block_borders_of_a_large_tensor_are_checked(saved: Path) -> None:
    (record,) = (record for record in records(saved) if record.key == "model.large")
    borders = {at for at in range(0, record.path.stat().st_size, BLOCK) if at in record.body}
    wanted = borders | {at - 1 for at in borders} | {record.body.start, record.body.stop - 1}
    wanted |= {at for at in range(record.body.start, record.body.start + 4096, 1024)}
    wanted |= {at for at in range(record.body.stop - 4096, record.body.stop, 1024)}
    for at in sorted(wanted & set(record.body)):
        with flipped(record.path, 8 * at + 3):
            assert isinstance(outcome(saved, state(1)), CorruptCheckpointError), f"byte {at} is not checked"


def test_a_flipped_bit_is_found_under_stock_planners_too(saved: Path) -> None:
    rng = random.Random(3)
    for record in records(saved):
        if len(record.body) == 0:
            continue
        values = state(2)  # the default planner wants tensors where tensors are
        with (
            flipped(record.path, rng.randrange(8 * record.body.start, 8 * record.body.stop)),
            pytest.raises(CheckpointException) as caught,
        ):
            dcp.load(values, storage_reader=StorageReader(saved), no_dist=True)
        error = cause(caught.value)
        assert isinstance(error, CorruptCheckpointError) and record.key in str(caught.value)
        assert (error.key, error.file) == (record.key, str(record.path))


# --- Parts of tensors

LARGE_BOXES = {
    "some rows": (slice(200, 300), slice(0, 600)),
    "some columns": (slice(0, 1000), slice(100, 130)),
    "a box inside": (slice(400, 900), slice(50, 60)),
    "one element": (slice(999, 1000), slice(599, 600)),
    "the first row": (slice(0, 1), slice(0, 600)),
}


@pytest.mark.parametrize("boxes", [["some columns"], ["the first row"], ["some rows", "a box inside", "one element"]])
def test_a_flipped_bit_is_found_by_loads_of_parts(saved: Path, boxes: list[str]) -> None:
    rng = random.Random(4)
    whole = state(1)["model"]["large"]
    parts = [LARGE_BOXES[name] for name in boxes]
    (record,) = (record for record in records(saved) if record.key == "model.large")
    footer = range(record.path.stat().st_size - 2000, record.path.stat().st_size)  # the checksums, or other records
    found = 0
    for number in range(48):
        if number % 2:
            part = rng.choice(parts)
            row, column = (rng.randrange(side.start, side.stop) for side in part)
            at = record.body.start + 4 * (600 * row + column) + rng.randrange(4)
        elif number % 8 == 0:
            at = rng.choice([*range(record.begin, record.body.start), *range(record.body.stop, record.end), *footer])
        else:
            at = rng.choice(record.body)
        with flipped(record.path, 8 * at + rng.randrange(8)):
            try:
                values = load_boxes(saved, "model.large", parts)
            except CorruptCheckpointError as error:
                assert error.key == "model.large" and error.file == str(record.path)
                found += 1
                continue
        assert not number % 2, f"byte {at} is wanted and damaged"
        for value, part in zip(values, parts, strict=True):
            assert same(value, whole[part].contiguous())
    assert found >= 24


def test_damaged_checksums_of_blocks_never_let_damage_pass(saved: Path) -> None:
    found = regions(saved)
    if not found["table"]:
        pytest.skip("stock files have no table")
    (record,) = (record for record in records(saved) if record.key == "model.large")
    rng = random.Random(6)
    size = record.path.stat().st_size
    at = record.body.start + 4 * 600 * 250
    for _ in range(40):
        broken = rng.randrange(8 * (size - 300), 8 * size)
        with flipped(record.path, 8 * at), flipped(record.path, broken), pytest.raises(CorruptCheckpointError):
            load_boxes(saved, "model.large", [LARGE_BOXES["some rows"]])


# --- Files of the wrong length, missing and exchanged


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def files_with_data(copy: Path) -> list[Path]:
    """All but the file of a tensor without elements, of which nothing is read."""
    paths = {record.path for record in records(copy) if record.key != "model.empty"}
    return [path for path in data_files(copy) if path in paths]


def test_a_truncated_file_is_found_whatever_its_length(saved: Path, copy: Path) -> None:
    rng = random.Random(7)
    for path in files_with_data(copy):
        whole = path.read_bytes()
        inside = [record for record in records(saved) if record.path.name == path.name]
        needed = max(record.end for record in inside if record.key != "model.empty")
        lengths = {0, 1, 63, 64, 65, 4095, 4096, 4097, needed - 1, needed, needed + 1, len(whole) - 64, len(whole) - 1}
        for record in inside:
            lengths |= {record.begin, record.begin + 1, record.body.start, record.body.stop, record.end - 1, record.end}
        lengths |= {rng.randrange(len(whole)) for _ in range(4)}
        for length in sorted(length for length in lengths if 0 <= length < len(whole)):
            path.write_bytes(whole[:length])
            error = outcome(copy, state(1))
            assert isinstance(error, CorruptCheckpointError) or (error is None and length >= needed), length
            if error is not None:
                assert error.file == str(path) and path.name in str(error)
        path.write_bytes(whole)


@pytest.mark.parametrize("more", [b"\0", b"x" * 64, b"\0" * 4096, b"PK\5\6" + b"\0" * 18])
def test_a_file_that_became_longer_still_loads(copy: Path, more: bytes) -> None:
    for path in data_files(copy):
        with path.open("ab") as file:
            file.write(more)
    assert outcome(copy, state(1)) is None
    (rows,) = load_boxes(copy, "model.large", [LARGE_BOXES["some rows"]])
    assert same(rows, state(1)["model"]["large"][200:300])


def test_zeroed_blocks_are_found(saved: Path, copy: Path) -> None:
    for record in records(saved):
        path = copy / record.path.name
        whole = path.read_bytes()
        if record.key == "model.empty":
            continue  # nothing is read of it
        for begin, end in (
            (record.begin, record.end),
            (record.body.start, record.body.stop),
            (record.begin, record.begin + 512),
        ):
            end = min(end, len(whole))
            if not any(whole[begin:end]):
                continue
            path.write_bytes(whole[:begin] + bytes(end - begin) + whole[end:])
            assert isinstance(outcome(copy, state(1)), CorruptCheckpointError), record
        path.write_bytes(whole)


def test_a_missing_data_file_is_named(copy: Path) -> None:
    for path in files_with_data(copy):
        kept = path.rename(path.with_suffix(".away"))
        error = outcome(copy, state(1))
        kept.rename(path)
        assert isinstance(error, CorruptCheckpointError)
        assert error.file == str(path) and "missing" in str(error) and error.key


@pytest.mark.parametrize("partial", [False, True])
def test_a_data_file_of_another_save_is_found(checkpoint: Path, tmp_path: Path, partial: bool) -> None:
    save(checkpoint, state(1))
    save(tmp_path / "other", state(2))
    (mine,), (other,) = data_files(checkpoint), data_files(tmp_path / "other")
    shutil.copyfile(other, mine)
    if partial:
        with pytest.raises(CorruptCheckpointError):
            load_boxes(checkpoint, "model.large", [LARGE_BOXES["some rows"]])
    else:
        assert isinstance(outcome(checkpoint, state(1)), CorruptCheckpointError)


# --- .metadata


def test_truncated_metadata_is_never_loaded(checkpoint: Path) -> None:
    save(checkpoint, small_state(1))
    path = checkpoint / ".metadata"
    whole = path.read_bytes()
    trailer = 16  # a file that ends right before it is whole, as stock DCP writes it
    for length in {*range(0, len(whole), 3), *range(len(whole) - trailer - 8, len(whole))}:
        path.write_bytes(whole[:length])
        error = outcome(checkpoint, small_state(1))
        if length == len(whole) - trailer:
            assert error is None
        else:
            assert isinstance(error, CorruptCheckpointError | UntrustedCheckpointError)


# --- Without verification


def test_unverified_loads_of_truncated_files_are_errors(saved: Path, copy: Path) -> None:
    for path in data_files(copy):
        needed = max(record.end for record in records(saved) if record.path.name == path.name)
        os.truncate(path, needed - 1)
    assert isinstance(outcome(copy, state(1), verify=False), CorruptCheckpointError)


# --- Checkpoints without checksums


def test_checkpoints_written_without_checksums_load_and_say_so(checkpoint: Path) -> None:
    save(checkpoint, state(1), checksums=False)
    assert outcome(checkpoint, state(1)) is None
    reader = StorageReader(checkpoint)
    dcp.load(blank(state(1)), storage_reader=reader, planner=LoadPlanner(), no_dist=True)
    assert reader.last_stats is not None and reader.last_stats.unverified_bytes > 2 << 20
