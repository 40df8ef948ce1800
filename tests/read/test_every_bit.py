"""Every single bit of a small checkpoint turned around, none left out: right values, or an error that names the file.

All bits go through what each part of a file passes before it is used: on the rank that reads it, and on those that it
is sent to (those of `.metadata` in test_foreign_metadata.py). Loads of one and two ranks see a bit of every third byte;
with EVERY_BIT=1 in the environment, all of them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.files import data_files, flip, flipped, read_metadata, records
from harness.ranks import run_ranks
from harness.saves import load_boxes
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import vescale_ckpt
from vescale_ckpt import CheckpointError, LoadPlanner, StorageReader
from vescale_ckpt._engine import _C
from vescale_ckpt._engine.dtype_codes import DTYPE_CODES
from vescale_ckpt._engine.options import engine_options
from vescale_ckpt._engine.rows import int_table

NAMES = ("layer0", "layer1")
FLOAT32 = DTYPE_CODES[torch.float32]
STEP = 24 if not os.environ.get("EVERY_BIT") else 1


def state() -> dict[str, Any]:
    return {"layer0": torch.arange(6.0).reshape(2, 3), "layer1": torch.arange(6.0).reshape(2, 3) + 10, "step": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tests leave it as they found it."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoint"
    vescale_ckpt.save(directory, state())
    return directory


def bits_of(data: bytes, ranges: list[range] | None = None) -> Iterator[tuple[int, bytes]]:
    """Each bit of the ranges, and `data` with that bit turned around."""
    changed = bytearray(data)
    for at in range(len(data)) if ranges is None else (at for of in ranges for at in of):
        for bit in range(8):
            changed[at] ^= 1 << bit
            yield 8 * at + bit, bytes(changed)
            changed[at] ^= 1 << bit


# --- What each part of a checkpoint passes


def test_the_records_of_tensors(saved: Path, tmp_path: Path) -> None:
    (path,) = data_files(saved)
    copies = tmp_path / "copies"
    options = engine_options(None, False)
    metadata = read_metadata(saved)
    for record in (record for record in records(saved) if record.key in NAMES):
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == record.key)
        data = path.read_bytes()[record.begin : record.end]
        length = -(-len(data) // 64) * 64
        checks, reads, bits = int_table(), int_table(), []
        with copies.open("wb") as file:  # one after the other, each with another bit turned around
            for bit, damaged in bits_of(data):
                file.write(damaged.ljust(length, b"\0"))
                checks.extend((0, length * len(bits), len(data), info.crc, FLOAT32, 2, 2, 3))
                bits.append(bit)
        targets = torch.full((len(bits), 2, 3), -1.0)
        damaged_rows, unread, unverified = _C.check_tensors([str(copies)], checks, options)
        assert not unverified
        for row, offset, reason, number in damaged_rows:
            assert not number and str(copies) in reason and length * row <= offset < length * (row + 1)
        found = {row for row, *_ in damaged_rows}
        body = {bit for bit in range(8 * len(data)) if record.begin + bit // 8 in record.body}
        assert {row for row, bit in enumerate(bits) if bit in body} <= found
        assert not set(unread) & {row for row, bit in enumerate(bits) if bit in body}
        for row in set(range(len(bits))) - found:
            reads.extend((0, length * row, len(data), info.crc, FLOAT32, 2, 2, 3))
            reads.extend((0, 0, 2, 3, targets[row].data_ptr(), 3, 1))
        report = _C.read_tensors([str(copies)], reads, True, options)
        sound = [row for row in range(len(bits)) if row not in found]
        of_table = {sound[number] for number in report["unread"]}
        assert of_table <= set(unread)
        for row in set(sound) - of_table:
            assert torch.equal(targets[row], state()[record.key]), f"{record.key}, bit {bits[row]}"
        for row in of_table:  # they look like what others write: torch reads them whole, if their checksums are right
            changed = bytearray(data)
            changed[bits[row] // 8] ^= 1 << bits[row] % 8
            if not _C.check_archive(bytes(changed), True):
                try:
                    value = torch.load(io.BytesIO(changed), weights_only=True)
                except Exception:  # which the reader tells as damage
                    continue
                assert torch.equal(value, state()[record.key]), f"{record.key}, bit {bits[row]}"


def test_the_record_of_an_object(saved: Path) -> None:
    (record,) = (record for record in records(saved) if record.key == "step")
    metadata = read_metadata(saved)
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "step")
    data = record.path.read_bytes()[record.begin : record.end]
    for bit, damaged in bits_of(data):
        assert _C.check_archive(damaged, True) or _C.crc32(damaged) != info.crc, f"bit {bit}"


def test_the_table_of_checksums_and_its_footer(saved: Path) -> None:
    (path,) = data_files(saved)
    data = path.read_bytes()
    table = int.from_bytes(data[-48:-40], "little")
    (record,) = (record for record in records(saved) if record.key == "layer1")
    part = (slice(1, 2), slice(0, 3))

    def load() -> torch.Tensor:
        (rows,) = load_boxes(saved, "layer1", [part])
        return rows

    for bit in [*range(8 * table, 8 * len(data), STEP), *(8 * at + 1 for at in record.body)]:
        with flipped(path, bit):
            try:
                assert torch.equal(load(), state()["layer1"][part]), f"bit {bit}"
                assert bit // 8 not in record.body[12:], f"bit {bit} is wanted and damaged"
            except CheckpointError as error:
                assert str(path) in str(error)


# --- Loads


def targets() -> dict[str, Any]:
    return {name: torch.full((2, 3), -1.0) for name in NAMES} | {"step": -1}


def by_load(directory: Path, **options: Any) -> dict[str, Any]:
    values = targets()
    vescale_ckpt.load(directory, values, **options)
    return values


def by_dcp(directory: Path, planner: Any) -> dict[str, Any]:
    values = targets()
    try:
        dcp.load(values, storage_reader=StorageReader(directory), planner=planner, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
    return values


WAYS: list[Callable[[Path], dict[str, Any]]] = [
    by_load,
    lambda directory: by_load(directory, strict=False),
    lambda directory: by_load(directory, broadcast_checkpoint=False),
    lambda directory: vescale_ckpt.load(directory),
    lambda directory: by_dcp(directory, LoadPlanner()),
    lambda directory: by_dcp(directory, LoadPlanner(allow_partial_load=True)),
    lambda directory: by_dcp(directory, DefaultLoadPlanner()),
]


def wrong(way: Callable[[Path], dict[str, Any]], directory: Path) -> tuple[bool, str]:
    """Whether a load gave values, and what is wrong with them or with its error."""
    try:
        values = way(directory)
    except CheckpointError as error:
        return False, "" if str(directory) in str(error) else f"an error that names no file: {error}"
    except Exception as error:
        return False, f"an error of another kind: {error!r}"
    expected = state()
    right = set(values) == set(expected) and values["step"] == 3
    right = right and all(torch.equal(values[name], expected[name]) for name in NAMES)
    return True, "" if right else f"wrong values: {values}"


def failures(directory: Path, names: dict[str, int]) -> list[str]:
    """What goes against the rule on this rank, where files have a bit turned around; all ranks call it together.

    `names`: files, each with how many of its bits to pass over for one that is taken.
    """
    found, number = [], 0
    first = not dist.is_initialized() or dist.get_rank() == 0

    def barrier() -> None:
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))

    for name, step in names.items():
        path = directory / name
        data = path.read_bytes()
        used = [at for at in range(len(data)) if data[at] or at < 144 or name == ".metadata"]
        bits = [8 * at + bit for at in used for bit in range(8)]
        for at in range(0, len(bits), step):
            bit = bits[at + number % min(step, 8)]
            way = WAYS[number % len(WAYS)]
            number += 1
            if first:
                flip(path, bit)
            barrier()
            _, text = wrong(way, directory)
            if text:
                found.append(f"{name}, bit {bit}, way {WAYS.index(way)}: {text}")
            barrier()
            if first:
                flip(path, bit)
    return found


@pytest.mark.parametrize("indexed", [True, False])
def test_loads(checkpoint: Path, indexed: bool) -> None:
    vescale_ckpt.save(checkpoint, state())
    if not indexed:
        (checkpoint / ".metadata.index").unlink()
    names = {".metadata.index": STEP, ".metadata": STEP} if indexed else {".metadata": STEP}
    found = failures(checkpoint, names)
    assert not found, "\n".join(found[:5])


@pytest.mark.parametrize("indexed", [True, False])
def test_loads_of_two_ranks(checkpoint: Path, indexed: bool) -> None:
    vescale_ckpt.save(checkpoint, state())
    if not indexed:
        (checkpoint / ".metadata.index").unlink()
    few = 8 * STEP if STEP > 1 else 1  # a load of two takes long; what each byte passes is the same for both
    names = {".metadata.index": min(few, 2 * STEP), ".metadata": 4 * few} if indexed else {".metadata": few}
    found = run_ranks(2, failures, checkpoint, names, timeout=3600)
    assert not any(found), "\n".join(text for of_rank in found for text in of_rank[:5])
