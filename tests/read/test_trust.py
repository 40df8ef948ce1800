"""Hostile checkpoints: nothing in them runs, leaves the directory, takes memory it has no bytes for, hangs, crashes."""

from __future__ import annotations

import codecs
import dataclasses
import io
import os
import pickle
import resource
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.children import in_child
from harness.files import data_files, read_metadata, rewrite_metadata
from harness.saves import cause, load, load_boxes, outcome, save
from harness.states import State, blank, same, small_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import LoadPlanner as DcpLoadPlanner

import vescale_ckpt
from vescale_ckpt import (
    CheckpointError,
    CorruptCheckpointError,
    LoadPlanner,
    StorageReader,
    UntrustedCheckpointError,
)
from vescale_ckpt._checkpoint.native import metadata_pickle
from vescale_ckpt._checkpoint.native.metadata_unpickler import Places, load_places
from vescale_ckpt._engine.torch_private import MemoryFormatEncoding, StorageInfo

MiB = 1 << 20
ENOUGH = 150 * MiB  # of memory for any small checkpoint, whatever it says of itself


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


class OfOurOwn:
    """A class that no checkpoint should need."""

    def __init__(self) -> None:
        self.value = 7


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that exists if hostile code ran."""
    return tmp_path / "code_ran"


def hostile(mark: Path) -> dict[str, Any]:
    touch = f"open({str(mark)!r}, 'w')"
    return {
        "os.system": Call(os.system, f"touch {mark}"),
        "eval": Call(eval, touch),
        "exec": Call(exec, touch),
        "open": Call(open, str(mark), "w"),
        "a chain of getattr": Call(getattr, Call(getattr, Metadata, "__init__"), "__globals__"),
        "torch.load": Call(torch.load, str(mark)),
        "torch.save": Call(torch.save, 1, str(mark)),
        "torch.jit.load": Call(torch.jit.load, str(mark)),
        "codecs": Call(codecs.encode, "x", "rot13"),
        "sys.exit": Call(sys.exit, 3),
        "a class of ours": OfOurOwn(),
    }


HOSTILE = sorted(hostile(Path("/")))


def pickled_globals(name: str) -> bytes:
    module, _, attribute = name.rpartition("|")
    return (
        b"\x80\x04" + b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, attribute)) + b"\x93."
    )


# --- Pickles in .metadata


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_in_metadata_runs(checkpoint: Path, mark: Path, name: str, protocol: int) -> None:
    checkpoint.mkdir()
    metadata = Metadata({}, planner_data=hostile(mark)[name], storage_data={})
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata, protocol=protocol))
    error = outcome(checkpoint, small_state(1))
    assert isinstance(error, UntrustedCheckpointError) and "refused" in str(error)
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    [
        "builtins|setattr",
        "torch|load",
        "torch.serialization|load",
        "torch.distributed.checkpoint.metadata|pickle",
        "torch.distributed.checkpoint.metadata|os.system",
        "torch.distributed.checkpoint.metadata|Metadata.__init__.__globals__",
        "torch.distributed.checkpoint.metadata|Metadata.__init__",
        "torch.distributed.checkpoint.state_dict_saver|save",
        "torch|Size.__init__",
        "torch|Tensor",
        "collections|namedtuple",
        "collections|OrderedDict.fromkeys",
        "pathlib|Path.cwd",
        "copyreg|_reconstructor",
        "vescale_ckpt._checkpoint.native.metadata_file|_MetadataUnpickler",
    ],
)
def test_only_the_names_that_metadata_is_made_of_may_be_imported(name: str) -> None:
    with pytest.raises(UntrustedCheckpointError):
        metadata_pickle.loads(pickled_globals(name), ".metadata")


# BUILD with a state of two parts sets attributes, on classes too. What may stand between a class and its BUILD:
DETOURS = {
    "at once": b"",
    "remembered": b"q\x000h\x00",
    "twice": b"2",
    "after adding nothing to it": b"(e",
    "after setting nothing in it": b"(u",
    "after adding no members to it": b"(\x90",
    "after a mark": b"(1",
}


@pytest.mark.parametrize("detour", DETOURS)
def test_a_refused_load_leaves_no_trace_in_classes(detour: str) -> None:
    kinds: list[type] = [Metadata, MetadataIndex, StorageMeta, TensorProperties, ChunkStorageMetadata, StorageInfo]
    for kind in [*kinds, MemoryFormatEncoding, metadata_pickle._LenientProperties]:
        before, places = dict(vars(kind)), dict(vars(Places))
        module, name = kind.__module__.encode(), kind.__name__.encode()
        poison = b"\x80\x04c%s\n%s\n%sN}X\x06\x00\x00\x00__eq__ctorch\nSize\ns\x86b." % (module, name, DETOURS[detour])
        try:
            with pytest.raises(CheckpointError):
                metadata_pickle.loads(poison, ".metadata")
            assert dict(vars(kind)) == before, f"{name!r} was changed"
            with pytest.raises(CheckpointError):
                load_places(poison, ".metadata")
            assert dict(vars(Places)) == places, f"what stands for {name!r} was changed"
        finally:
            if vars(kind).get("__eq__") is not before.get("__eq__"):
                setattr(kind, "__eq__", before["__eq__"]) if "__eq__" in before else delattr(kind, "__eq__")


def test_a_refused_load_leaves_no_trace_in_constants() -> None:
    constants = {
        "a memory format": (MemoryFormatEncoding(0), b"c%s\n%s\nK\x00\x85R"),
        "a memory format made anew": (MemoryFormatEncoding(0), b"c%s\n%s\nK\x00\x85\x81"),
    }
    module, name = MemoryFormatEncoding.__module__.encode(), MemoryFormatEncoding.__name__.encode()
    for what, (constant, made) in constants.items():
        before = dict(vars(constant))
        for state in (b"}X\x07\x00\x00\x00_value_K\x07s", b"N}X\x07\x00\x00\x00_value_K\x07s\x86"):
            try:
                with pytest.raises(CheckpointError):
                    metadata_pickle.loads(b"\x80\x04" + made % (module, name) + state + b"b.", ".metadata")
                assert vars(constant) == before, what
            finally:
                vars(constant).update(before)


def long_memo(index: int) -> bytes:
    """A memo entry of a high number: the unpickler makes room for all below it."""
    return b"\x80\x02Nr" + struct.pack("<I", index) + b"."


def doubled_path() -> bytes:
    """A path joined of itself and itself, and again."""
    start = b"\x80\x02cpathlib\nPosixPath\nq\x00X\x40\x00\x00\x00" + b"a" * 64 + b"q\x01"
    return start + b"h\x00h\x01h\x01\x86Rq\x01" * 24 + b"."


def deep_key() -> bytes:
    """A tuple in a tuple in a tuple ... as a key: hashing it takes a frame of the stack for each."""
    return b"\x80\x02}()" + b"\x85" * 1_000_000 + b"Nu."


def copies(kind: bytes, value: bytes, arguments: bytes, count: int) -> bytes:
    """A list of `count` objects of `kind`, each with a copy of one remembered value: a few bytes for many."""
    start = b"\x80\x02c" + kind + b"\nq\x00" + value + b"q\x010]("
    return start + (b"h\x00" + arguments + b"R") * count + b"e."


LONG_TUPLE = b"(" + b"K\x01" * 200_000 + b"t"
LONG_TEXT = b"X" + struct.pack("<I", 1 * MiB) + b"a" * MiB
MANY_PAIRS = b"](" + b"".join(b"J" + struct.pack("<i", i) + b"N\x86" for i in range(50_000)) + b"e"
INDEX = b"torch.distributed.checkpoint.metadata\nMetadataIndex"

BOMBS = {
    "many sizes of one tuple": copies(b"torch\nSize", LONG_TUPLE, b"h\x01\x85", 400),
    "many indices of one tuple": copies(INDEX, LONG_TUPLE, b"Nh\x01\x86", 400),
    "many dicts of one list": copies(b"collections\nOrderedDict", MANY_PAIRS, b"h\x01\x85", 100),
    "many texts encoded": copies(b"_codecs\nencode", LONG_TEXT, b"h\x01X\x06\x00\x00\x00latin1\x86", 400),
    "a path of one text many times": copies(b"pathlib\nPosixPath", LONG_TEXT, b"(" + b"h\x01" * 400 + b"t", 1),
    "a high memo number": long_memo(1 << 26),
    "a path of paths": doubled_path(),
    "a deep key": deep_key(),
    "bytes that are not there": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"abc.",
    "a bytearray that is not there": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"abc.",
    "text that is not there": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"abc.",
    "a frame that is not there": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "a number that is not there": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"abc.",
    "many digits": b"\x80\x02I" + b"9" * 100_000 + b"\n.",
    "deep lists": b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
}


@pytest.mark.parametrize("name", BOMBS)
def test_metadata_takes_no_memory_that_it_has_no_bytes_for(name: str) -> None:
    answer = in_child(refused_metadata, BOMBS[name])
    assert answer.value and answer.peak_bytes < ENOUGH


def refused_metadata(data: bytes) -> bool:
    try:
        metadata_pickle.loads(data, ".metadata")
    except CheckpointError:
        return True
    return False


HOLES: dict[str, Callable[[bytes], bytes]] = {
    "nothing but a hole": lambda data: b"",
    "behind sound metadata": lambda data: data,
    "behind a megabyte": lambda data: b"\x80\x04" + b"N0" * (1 << 20),
    "a long name": lambda data: b"\x80\x04\x8d" + struct.pack("<Q", 3 << 30) + b"abc",
}


@pytest.mark.parametrize("name", HOLES)
def test_metadata_that_only_claims_to_be_large_is_refused_before_it_is_read(checkpoint: Path, name: str) -> None:
    save(checkpoint, small_state(1))
    path = checkpoint / ".metadata"
    path.write_bytes(HOLES[name](path.read_bytes()))
    os.truncate(path, (3 << 30) + 16)
    for refused in (describe_outcome, describe_load, describe_verify):
        answer = in_child(refused, checkpoint)
        assert str(path) in answer.value and answer.peak_bytes < ENOUGH, refused


def describe_load(directory: Path) -> str:
    try:
        return f"loaded: {vescale_ckpt.load(directory)}"
    except CheckpointError as error:
        return repr(error)


def describe_verify(directory: Path) -> str:
    report = vescale_ckpt.verify(directory)
    (found,) = report.damaged + report.refused
    return str(found)


@pytest.mark.parametrize("shape", [(2**40, 2**40), (2**31, 2**33), (2**32,) * 3, (2**61,)])
def test_a_shape_that_overflows_is_refused_by_key(checkpoint: Path, shape: tuple[int, ...]) -> None:
    save(checkpoint, small_state(1))
    origin = torch.Size([0] * len(shape))

    def change(metadata: Metadata) -> None:
        stored = metadata.state_dict_metadata["model.weight"]
        stored.size = torch.Size(shape)
        stored.chunks[:] = [ChunkStorageMetadata(origin, torch.Size(shape))]
        index = next(index for index in metadata.storage_data if index.fqn == "model.weight")
        metadata.storage_data[MetadataIndex("model.weight", origin, 0)] = metadata.storage_data.pop(index)

    lie(checkpoint, change)
    for load_it in (
        lambda: vescale_ckpt.load(checkpoint),
        lambda: vescale_ckpt.load(checkpoint, blank(small_state(1))),
        lambda: load(checkpoint, small_state(1)),
    ):
        with pytest.raises(UntrustedCheckpointError, match=r"model\.weight: no tensor .*\.metadata") as caught:
            load_it()
        assert caught.value.key == "model.weight"
    report = vescale_ckpt.verify(checkpoint)
    assert [found.key for found in report.refused] == ["model.weight"] and not report.damaged


# --- Metadata that lies


def lie(directory: Path, change: Callable[[Metadata], None]) -> None:
    metadata = read_metadata(directory)
    change(metadata)
    rewrite_metadata(directory, metadata)


def set_in_storage(key: str, **values: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == key)
        metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], **values)

    return change


def set_in_tensor(**values: Any) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.state_dict_metadata["model.weight"].__dict__.update(values)


def set_in_chunk(**values: Any) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.state_dict_metadata["model.weight"].chunks[0].__dict__.update(values)


def set_dtype(dtype: Any) -> Callable[[Metadata], None]:
    return lambda metadata: setattr(metadata.state_dict_metadata["model.weight"].properties, "dtype", dtype)


def set_everywhere(name: str, value: Any) -> Callable[[Metadata], None]:
    return lambda metadata: setattr(metadata, name, value)


NO_NUMBERS: list[Any] = [-1, -(2**63), 2**62, 2**63 - 1, 2**63, 2**70, 1.5, "0", None, True, (), [0]]
NO_SHAPES: list[Any] = [
    (2**31, 2**31),
    (2**62, 2**62),
    (12, 2**70),
    (-12, -8),
    (12,),
    (12, 8, 1),
    (1,) * 10_000,
    (12.0, 8.0),
    ("12", "8"),
    (None, None),
    "12",
    12,
    None,
    [[12], [8]],
]

LIES: dict[str, Callable[[Metadata], None]] = {
    **{
        f"{field} of {key} {value!r}": set_in_storage(key, **{field: value})
        for field in ("offset", "length")
        for key in ("model.weight", "text")
        for value in (NO_NUMBERS if key == "model.weight" else NO_NUMBERS[::4])
    },
    **{f"length of {key} 0": set_in_storage(key, length=0) for key in ("model.weight", "text")},
    **{f"chunk of {str(value)[:30]}": set_in_chunk(sizes=value) for value in NO_SHAPES},
    **{
        f"tensor and chunk of {str(value)[:30]}": lambda metadata, value=value: (  # type: ignore[misc]
            set_in_tensor(size=value)(metadata),
            set_in_chunk(sizes=value)(metadata),
        )
        for value in NO_SHAPES
    },
    **{
        f"chunk at {str(value)[:30]}": set_in_chunk(offsets=value)
        for value in [*NO_SHAPES[:-4], (1, 0), (0, 1), (-1, 0), (2**62, 0), None, 7]
    },
    **{f"chunks {value!r}": set_in_tensor(chunks=value) for value in ([], None, 7, [None], [7], "chunk", {})},
    **{f"size {value!r}": set_in_tensor(size=value) for value in (None, 7, (), "12", (8, 12))},
    **{f"dtype {value!r}": set_dtype(value) for value in ("float32", None, 7, [], torch.float64, torch.int32)},
    "no properties": set_in_tensor(properties=None),
    "a tensor that is an object": lambda metadata: metadata.state_dict_metadata.update(
        {"model.weight": BytesStorageMetadata()}
    ),
    "an object that is a tensor": lambda metadata: metadata.state_dict_metadata.update(
        text=metadata.state_dict_metadata["model.weight"]
    ),
    "a tensor that is nothing": lambda metadata: metadata.state_dict_metadata.update({"model.weight": None}),
    "a tensor that is a number": lambda metadata: metadata.state_dict_metadata.update({"model.weight": 7}),
    "no state_dict_metadata": set_everywhere("state_dict_metadata", {}),
    "state_dict_metadata a list": set_everywhere("state_dict_metadata", []),
    "no storage_data": set_everywhere("storage_data", None),
    "storage_data empty": set_everywhere("storage_data", {}),
    "storage_data a list": set_everywhere("storage_data", [1]),
    "storage_data of numbers": lambda metadata: metadata.storage_data.update(dict.fromkeys(metadata.storage_data, 7)),
    "storage_data of nothing": lambda metadata: metadata.storage_data.update(dict.fromkeys(metadata.storage_data)),
    "storage_data without one key": lambda metadata: metadata.storage_data.pop(MetadataIndex("text")),
    "unknown transform": set_in_storage("model.weight", transform_descriptors=["stream.unknown/1"]),
    "transforms of no kind": set_in_storage("text", transform_descriptors=7),
}


@pytest.mark.parametrize("name", LIES)
def test_metadata_that_lies_is_a_named_error_at_once(checkpoint: Path, name: str) -> None:
    save(checkpoint, small_state(1))
    lie(checkpoint, LIES[name])
    answer = in_child(describe_outcome, checkpoint)
    assert answer.value, "a lie was believed"
    assert answer.peak_bytes < ENOUGH


def describe_outcome(directory: Path, **options: Any) -> str:
    """Empty if the values are right."""
    error = outcome(directory, small_state(1), **options)
    return "" if error is None else repr(error)


@pytest.mark.parametrize("dtype", ["float32", None, 7, torch.float64, torch.int32])
def test_a_dtype_that_lies_gives_the_values_or_an_error_when_casts_are_allowed(checkpoint: Path, dtype: Any) -> None:
    save(checkpoint, small_state(1))
    lie(checkpoint, set_dtype(dtype))
    outcome(checkpoint, small_state(1), planner=LoadPlanner(allow_cast=True))


@pytest.mark.parametrize("name", ["storage_meta", "planner_data", "version"])
@pytest.mark.parametrize("value", [None, 7, "text", [], {"a": 1}, (1, 2)])
def test_fields_that_nobody_needs_do_no_harm(checkpoint: Path, name: str, value: Any) -> None:
    save(checkpoint, small_state(1))
    lie(checkpoint, set_everywhere(name, value))
    assert not outcome(checkpoint, small_state(1))


# --- Chunks with holes, overlapping, outside


def drop_a_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.weight"].chunks.pop()


def move_a_chunk(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata["model.weight"].chunks
    moved = torch.Size([2, 0])
    old = next(i for i in metadata.storage_data if i.fqn == "model.weight" and i.offset == chunks[1].offsets)
    metadata.storage_data[MetadataIndex("model.weight", moved)] = metadata.storage_data.pop(old)
    chunks[1] = ChunkStorageMetadata(moved, chunks[1].sizes)


def repeat_a_chunk(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata["model.weight"].chunks
    chunks[1] = chunks[0]


def shrink_a_chunk(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata["model.weight"].chunks
    chunks[1] = ChunkStorageMetadata(chunks[1].offsets, torch.Size([5, 8]))


@pytest.mark.parametrize("change", [drop_a_chunk, move_a_chunk, repeat_a_chunk, shrink_a_chunk])
@pytest.mark.parametrize("planner", [LoadPlanner, None])
def test_chunks_that_do_not_tile_their_tensor_are_an_error(
    checkpoint: Path, change: Callable[[Metadata], None], planner: type[LoadPlanner] | None
) -> None:
    save(checkpoint, small_state(1), sharded=True)
    lie(checkpoint, change)
    values = blank(small_state(1))
    with pytest.raises(CheckpointException) as caught:
        dcp.load(values, storage_reader=StorageReader(checkpoint), planner=planner and planner(), no_dist=True)
    assert isinstance(cause(caught.value), CheckpointError)


# --- Names of data files


def outside(directory: Path) -> str:
    away = directory.parent / "outside.distcp"
    away.write_bytes(data_files(directory)[0].read_bytes())
    return "../outside.distcp"


def in_a_folder_beside(directory: Path) -> str:
    other = directory.parent / "other"
    other.mkdir()
    (other / "file.distcp").write_bytes(data_files(directory)[0].read_bytes())
    return "../other/file.distcp"


def absolute(directory: Path) -> str:
    outside(directory)
    return str(directory.parent / "outside.distcp")


def fifo(directory: Path) -> str:
    os.mkfifo(directory / "fifo")
    return "fifo"


def link_to(target: str) -> Callable[[Path], str]:
    def make(directory: Path) -> str:
        (directory / "link").symlink_to(target)
        return "link"

    return make


def folder(directory: Path) -> str:
    (directory / "folder").mkdir()
    return "folder"


NAMES: dict[str, Callable[[Path], Any]] = {
    "outside": outside,
    "in a folder beside": in_a_folder_beside,
    "outside in a roundabout way": lambda directory: "a/b/../../" + outside(directory),
    "absolute": absolute,
    "a device": lambda _: "/dev/zero",
    "empty": lambda _: "",
    "with NUL": lambda directory: data_files(directory)[0].name + "\0",
    "the directory itself": lambda _: ".",
    "the parent": lambda _: "..",
    "a directory": folder,
    "a FIFO": fifo,
    "a link to a device that has no end": link_to("/dev/zero"),
    "a link to a device that waits": link_to("/dev/tty"),
    "a link to itself": link_to("link"),
    "a link to a FIFO": lambda directory: link_to(fifo(directory))(directory),
    "of 5,000 letters": lambda _: "a" * 5000,
    "of no characters": lambda _: "\udcff\ud800",
    "a number": lambda _: 7,
    "nothing": lambda _: None,
    "bytes": lambda _: b"name",
    "a list": lambda _: ["name"],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["model.weight", "text"])
def test_names_that_are_not_files_in_the_directory_are_refused(checkpoint: Path, name: str, key: str) -> None:
    save(checkpoint, small_state(1))
    lie(checkpoint, set_in_storage(key, relative_path=NAMES[name](checkpoint)))
    answer = in_child(describe_outcome, checkpoint)
    assert answer.value, "read from where nothing of the checkpoint is"
    assert answer.peak_bytes < ENOUGH


def test_a_link_in_the_directory_is_followed(checkpoint: Path) -> None:
    save(checkpoint, small_state(1))
    (data,) = data_files(checkpoint)
    data.rename(checkpoint.parent / "elsewhere")
    data.symlink_to(checkpoint.parent / "elsewhere")
    assert describe_outcome(checkpoint) == ""
    assert same(load(checkpoint, small_state(0)), small_state(1))


@pytest.mark.parametrize("kind", ["a FIFO", "a link to a device that has no end", "a link to itself", "a directory"])
def test_metadata_that_is_no_file_is_an_error(checkpoint: Path, kind: str) -> None:
    save(checkpoint, small_state(1))
    (checkpoint / ".metadata").unlink()
    (checkpoint / NAMES[kind](checkpoint)).rename(checkpoint / ".metadata")
    answer = in_child(describe_outcome_bounded, checkpoint)
    assert answer.value and answer.peak_bytes < ENOUGH


def describe_outcome_bounded(directory: Path) -> str:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 512 * MiB, used + 512 * MiB))
    return describe_outcome(directory)


# --- Objects


def archive(*entries: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression, compresslevel=1) as file:
        for name, content in entries:
            file.writestr(name, content)
    return buffer.getvalue()


REST = (("archive/version", b"3\n"), ("archive/byteorder", b"little"))
PLAIN = pickle.dumps(7, protocol=2)


def with_prefix(prefix: bytes, content: bytes) -> bytes:
    """An archive behind other bytes, with offsets that count them."""
    buffer = io.BytesIO(prefix)
    with zipfile.ZipFile(buffer, "a") as file:
        file.writestr("archive/data.pkl", content)
    return buffer.getvalue()


# Where two readers of an archive may see two things: which entry is the pickle, and whether it is an archive at all.
DISGUISES: dict[str, Callable[[bytes], bytes]] = {
    "openly": lambda evil: archive(("archive/data.pkl", evil), *REST),
    "behind a longer name": lambda evil: archive(("archive/xdata.pkl", PLAIN), ("archive/data.pkl", evil), *REST),
    "behind a folder": lambda evil: archive(("archive/a/data.pkl", PLAIN), ("archive/data.pkl", evil), *REST),
    "behind other letters": lambda evil: archive(("archive/a/data.pkl", PLAIN), ("archive/DATA.PKL", evil), *REST),
    "before an equal name": lambda evil: archive(("archive/data.pkl", PLAIN), ("archive/data.pkl", evil), *REST),
    "behind an equal name": lambda evil: archive(("archive/data.pkl", evil), ("archive/data.pkl", PLAIN), *REST),
    "in front of an archive": lambda evil: with_prefix(evil, PLAIN),
    "without an archive": lambda evil: evil,
    "in another folder": lambda evil: archive(("b/data.pkl", evil), ("archive/data.pkl", PLAIN), *REST),
}


def store_object(directory: Path, data: bytes, **info: Any) -> None:
    """A checkpoint of one object `value`, stored as `data`."""
    directory.mkdir()
    (directory / "__0_0.distcp").write_bytes(data)
    index = MetadataIndex("value")
    metadata = Metadata(
        {"value": BytesStorageMetadata()},
        planner_data={"value": ("value",)},
        storage_data={index: StorageInfo("__0_0.distcp", 0, len(data), **info)},
        storage_meta=StorageMeta(),
    )
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def load_object(directory: Path, planner: DcpLoadPlanner | None, **options: Any) -> Any:
    values: State = {"value": None}
    dcp.load(values, storage_reader=StorageReader(directory, **options), planner=planner, no_dist=True)
    return values["value"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("disguise", "name"),
    [*((disguise, "os.system") for disguise in DISGUISES), *(("openly", name) for name in ("exec", "torch.save"))],
)
@pytest.mark.parametrize("planner", [LoadPlanner, None])
@pytest.mark.parametrize("verify", [True, False])
def test_nothing_in_an_object_runs(
    checkpoint: Path, mark: Path, disguise: str, name: str, planner: type[LoadPlanner] | None, verify: bool
) -> None:
    store_object(checkpoint, DISGUISES[disguise](pickle.dumps(hostile(mark)[name], protocol=2)))
    try:
        value = load_object(checkpoint, planner and planner(), verify=verify)
    except CheckpointException as error:
        assert isinstance(cause(error), CheckpointError), repr(cause(error))
        if disguise == "openly":
            assert isinstance(cause(error), UntrustedCheckpointError) and "'value'" in str(cause(error))
    else:
        assert value == 7  # the harmless half of it
    assert not mark.exists()


def test_the_user_may_trust_a_checkpoint(checkpoint: Path) -> None:
    store_object(checkpoint, DISGUISES["openly"](pickle.dumps(OfOurOwn(), protocol=2)))
    for planner in (LoadPlanner(), None):
        with pytest.raises(CheckpointException, match="weights_only=False"):
            load_object(checkpoint, planner)
        value = load_object(checkpoint, planner, weights_only=False)
        assert type(value) is OfOurOwn and value.value == 7


# --- Hostile archives


def patched(data: bytes, signature: bytes, at: int, value: bytes) -> bytes:
    """The last record of that kind with other bytes in it."""
    start = data.rindex(signature) + at
    return data[:start] + value + data[start + len(value) :]


def overlapping(count: int, size: int) -> bytes:
    """One body under many names' entries: to check each is `count` times the work of the archive's size."""
    data = archive(("archive/data.pkl", PLAIN + bytes(size)))  # what follows a pickle is not looked at
    directory = data.index(b"PK\1\2")
    end = data.index(b"PK\5\6")
    entry = data[directory:end]
    tail = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, count * len(entry), directory, 0)
    return data[:directory] + entry * count + tail


def good() -> bytes:
    return archive(("archive/data.pkl", PLAIN), *REST)


HOSTILE_ARCHIVES: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "one byte": lambda: b"P",
    "an end alone": lambda: b"PK\5\6" + bytes(18),
    "65,535 entries claimed": lambda: patched(good(), b"PK\5\6", 8, b"\xff\xff\xff\xff"),
    "no entries claimed": lambda: patched(good(), b"PK\5\6", 8, bytes(4)),
    "directory at the end of the world": lambda: patched(good(), b"PK\5\6", 12, b"\xff" * 8),
    "directory in itself": lambda: patched(good(), b"PK\5\6", 16, struct.pack("<I", 3)),
    "a size of 4 GiB": lambda: patched(good(), b"PK\1\2", 20, b"\xfe\xff\xff\xff" * 2),
    "a header that is elsewhere": lambda: patched(good(), b"PK\1\2", 42, b"\xfe\xff\xff\xff"),
    "a name of 64 KiB": lambda: patched(good(), b"PK\1\2", 28, b"\xff\xff"),
    "a name that is no text": lambda: patched(good(), b"PK\1\2", 46, b"\xff\xfe\xe4"),
    "a comment": lambda: patched(good(), b"PK\5\6", 20, b"\5\0") + b"hello",
    "zip64 sizes without a field": lambda: patched(good(), b"PK\1\2", 20, b"\xff" * 8),
    "zip64 end that lies": lambda: (
        good()[:-22]
        + struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 1 << 60, 1 << 60, 1 << 62, 1 << 62)
        + struct.pack("<4sIQI", b"PK\6\7", 0, len(good()) - 22, 1)
        + good()[-22:]
    ),
    "overlapping entries": lambda: overlapping(2000, 1 * MiB),
    "a compressed pickle": lambda: archive(("archive/data.pkl", PLAIN), *REST, compression=zipfile.ZIP_DEFLATED),
    "a bomb": lambda: archive(
        ("archive/data.pkl", b"\x80\x02X" + struct.pack("<I", 180 * MiB) + bytes(180 * MiB) + b"."),
        *REST,
        compression=zipfile.ZIP_DEFLATED,
    ),
    **{
        f"a pickle: {name}": (lambda bomb=bomb: archive(("archive/data.pkl", bomb), *REST))
        for name, bomb in BOMBS.items()
    },  # type: ignore[misc]
}


HARMLESS = {"a pickle: deep lists"}
HARMLESS_UNVERIFIED = {"a compressed pickle", "a comment", "no entries claimed"}


@pytest.mark.parametrize("name", HOSTILE_ARCHIVES)
@pytest.mark.parametrize("verify", [True, False])
def test_hostile_archives_of_objects_are_named_errors(checkpoint: Path, name: str, verify: bool) -> None:
    store_object(checkpoint, HOSTILE_ARCHIVES[name]())
    answer = in_child(object_error, checkpoint, verify)
    assert answer.value != "loaded" or name in HARMLESS or (not verify and name in HARMLESS_UNVERIFIED)
    assert answer.peak_bytes < ENOUGH


def object_error(directory: Path, verify: bool) -> str:
    try:
        load(directory, {"value": 0}, verify=verify)
    except CheckpointError as error:
        assert "value" in str(error)
        return str(error)
    return "loaded"


@pytest.mark.parametrize("name", [name for name in HOSTILE_ARCHIVES if not name.startswith("a pickle: ")])
def test_hostile_archives_of_tensors_are_named_errors(checkpoint: Path, name: str) -> None:
    save(checkpoint, small_state(1))
    data = HOSTILE_ARCHIVES[name]()
    (checkpoint / "hostile.distcp").write_bytes(data)
    lie(checkpoint, set_in_storage("model.weight", relative_path="hostile.distcp", offset=0, length=len(data)))
    for verify in (True, False):
        answer = in_child(lambda verify=verify: describe_outcome(checkpoint, verify=verify))
        assert "model.weight" in answer.value
        assert answer.peak_bytes < ENOUGH


# --- Tables of checksums; what their numbers may be is tested in tests/cpp/format/checksum_table_test.cpp

FOOTER = struct.Struct("<8sQQQQI16x")


def widen_table(path: Path, hole: int) -> None:
    """The table of a data file seems to have so many bytes more; all its checksums are right."""
    data = path.read_bytes()
    magic, _, offset, size, block, crc = FOOTER.unpack_from(data, len(data) - 64)
    footer = FOOTER.pack(magic, offset + size + hole + 64, offset, size + hole, block, crc)
    with path.open("r+b") as file:
        file.seek(offset + size + hole)
        file.write(footer + struct.pack("<I", zlib.crc32(footer)))


def test_a_table_of_checksums_takes_no_memory_that_it_has_no_bytes_for(checkpoint: Path) -> None:
    save(checkpoint, small_state(1))
    widen_table(data_files(checkpoint)[0], 256 * MiB)
    answer = in_child(load_a_part, checkpoint)
    assert answer.value and answer.peak_bytes < ENOUGH


def load_a_part(directory: Path) -> bool:
    """Whether it gave the values or a named error."""
    try:
        (part,) = load_boxes(directory, "model.weight", [(slice(3, 7), slice(2, 5))])
    except CheckpointError as error:
        return "model.weight" in str(error)
    return same(part, small_state(1)["model"]["weight"][3:7, 2:5].contiguous())


def test_a_record_of_another_tensor_is_refused(checkpoint: Path) -> None:
    other = {"model": {"weight": torch.arange(96, dtype=torch.float32).view(8, 12)}}  # as many bytes, another shape
    save(checkpoint, small_state(1))
    save(checkpoint.parent / "other", other)
    (name,) = data_files(checkpoint.parent / "other")
    info = next(iter(read_metadata(checkpoint.parent / "other").storage_data.values()))
    (checkpoint / name.name).write_bytes(name.read_bytes())
    lie(
        checkpoint,
        set_in_storage("model.weight", relative_path=name.name, offset=info.offset, length=info.length),
    )
    assert isinstance(outcome(checkpoint, small_state(1)), CorruptCheckpointError)


def test_the_good_checkpoint_that_all_lies_start_from_loads(checkpoint: Path) -> None:
    save(checkpoint, small_state(1))
    lie(checkpoint, lambda _: None)
    assert describe_outcome(checkpoint) == ""
    assert same(load(checkpoint, small_state(1)), small_state(1))
