"""What the tests that damage checkpoints share: states of known values, loads that tell how they ended, children.

The rule they check: after any damage a load gives exactly the saved values or an error of this package, and nothing
else. `outcome` is that rule.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import resource
import select
import signal
import struct
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from vescale_ckpt import CheckpointError, LoadPlanner, SavePlanner, StorageReader, StorageWriter
from vescale_ckpt._checkpoint.native import metadata_file
from vescale_ckpt._engine import _C

State = dict[str, Any]

# --- States


def state(k: int) -> State:
    """A training state whose every value depends on `k`: large, small, strided and empty tensors, and objects."""
    return {
        "model": {
            "large": torch.arange(600_000, dtype=torch.float32).add_(k).view(1000, 600),  # above 2 MiB: sent alone
            "bias": torch.full((1000,), float(k), dtype=torch.bfloat16),
            "strided": torch.arange(12_000, dtype=torch.int32).add_(k).view(100, 120).t(),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(0.5 + k),
        },
        "step": k,
        "text": f"saved as {k}",
        "history": [k, {"loss": 1.0 / (1 + k)}],
    }


def small_state(k: int) -> State:
    """The same, a few KiB."""
    return {
        "model": {
            "weight": torch.arange(96, dtype=torch.float32).add_(k).view(12, 8),
            "scale": torch.arange(96, dtype=torch.float32).sub_(k).view(12, 8),
            "bias": torch.full((7,), float(k)),
        },
        "step": k,
        "text": f"saved as {k}",
    }


def same(a: Any, b: Any) -> bool:
    """Equal structure, types, dtypes and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(_bytes_of(a), _bytes_of(b))
    return bool(a == b)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


class ShardingPlanner(SavePlanner):
    """Saves matrices as two shards of rows, as two ranks would: checkpoints of several chunks from one process."""

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for item in super().create_local_plan().items:
            data = item.tensor_data
            if data is None or len(data.size) != 2 or data.size[0] < 2:
                items.append(item)
                continue
            half = data.size[0] // 2
            for start, rows in ((0, half), (half, data.size[0] - half)):
                offsets, sizes = torch.Size([start, 0]), torch.Size([rows, data.size[1]])
                chunk = TensorWriteData(ChunkStorageMetadata(offsets, sizes), data.properties, data.size)
                items.append(WriteItem(MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD, tensor_data=chunk))
        self.plan = SavePlan(items, planner_data=self.plan.planner_data)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is not WriteItemType.SHARD:
            return super().resolve_data(write_item)
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        value: torch.Tensor = self.state_dict[write_item.index.fqn]
        return value.narrow(0, chunk.offsets[0], chunk.sizes[0])


# --- Saves and loads


def save(directory: Path | str, values: State, *, sharded: bool = False, **options: Any) -> None:
    planner = ShardingPlanner() if sharded else SavePlanner()
    dcp.save(values, storage_writer=StorageWriter(directory, **options), planner=planner, no_dist=True)


def stock_save(directory: Path | str, values: State, **options: Any) -> None:
    """Saves with DCP's own writer and planner."""
    writer = FileSystemWriter(directory, **({"sync_files": False} | options))
    dcp.save(values, storage_writer=writer, no_dist=True)


def load(directory: Path | str, like: State, *, planner: LoadPlanner | None = None, **options: Any) -> State:
    """What `dcp.load` does on one rank, without its wrapping of errors (which costs more than the load)."""
    values = blank(like)
    reader, planner = StorageReader(directory, **options), planner or LoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(values, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return values


def blank(like: Any) -> Any:
    """The structure of `like` with values that no test saves."""
    if isinstance(like, dict):
        return {key: blank(value) for key, value in like.items()}
    if isinstance(like, list):
        return [blank(value) for value in like]
    if isinstance(like, torch.Tensor):
        return torch.full(like.shape, 77).to(like.dtype)
    return None


def outcome(directory: Path | str, *expected: State, **options: Any) -> CheckpointError | None:
    """None if a load gives one of the expected states bit for bit, the error if it gives one of this package.

    Anything else, wrong values above all, is an AssertionError.
    """
    try:
        found = load(directory, expected[0], **options)
    except CheckpointError as error:
        return error
    except Exception as error:
        raise AssertionError(f"an error without a name: {type(error).__name__}: {error}") from error
    assert any(same(found, values) for values in expected), "a load gave wrong values and no error"
    return None


def cause(error: CheckpointException) -> BaseException:
    """The error of one rank inside DCP's own."""
    failure: BaseException = next(iter(error.failures.values()))[0]
    return failure


def no_snapshot_is_left(seconds: float = 60.0) -> bool:
    """Whether all memory for snapshots is free, perhaps after garbage and other threads have let go of it."""
    deadline = time.monotonic() + seconds
    while _C.snapshot_memory()["in_use_bytes"]:
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(0.001)
    return True


@contextlib.contextmanager
def fault(call: str, error: int, skip: int = 0, times: int = 1) -> Iterator[None]:
    """System calls of a kind fail, but the first `skip`."""
    _C.clear_faults()
    _C.inject_fault(call, error, skip, times)
    try:
        yield
    finally:
        _C.clear_faults()


# --- What lies where in a checkpoint


@dataclass(frozen=True)
class Record:
    """One stored tensor or object, bytes of its file."""

    key: str
    path: Path
    begin: int
    end: int
    body: range  #: the tensor's bytes or the object's pickle


def read_metadata(directory: Path) -> Metadata:
    return metadata_file.read_metadata(str(directory))


def rewrite_metadata(directory: Path, metadata: Metadata) -> None:
    """As it is, without what our writer would put right."""
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def records(directory: Path) -> list[Record]:
    found = []
    for index, info in read_metadata(directory).storage_data.items():
        path = directory / info.relative_path
        data = path.read_bytes()[info.offset : info.offset + info.length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            entry = archive.getinfo(next((n for n in names if n.endswith("/data/0")), names[0]))
            header = entry.header_offset
        name, extra = struct.unpack_from("<HH", data, header + 26)
        start = info.offset + header + 30 + name + extra
        found.append(
            Record(index.fqn, path, info.offset, info.offset + info.length, range(start, start + entry.file_size))
        )
    return found


def data_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.distcp"))


def only_named_files(directory: Path) -> bool:
    """Whether the directory holds `.metadata`, perhaps its index, and exactly what it names."""
    named = {info.relative_path for info in read_metadata(directory).storage_data.values()}
    return set(os.listdir(directory)) - {".metadata.index"} == named | {".metadata"}


# --- Damage


@contextlib.contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """One bit of a file turned around; turned back at the end."""
    flip(path, bit)
    try:
        yield
    finally:
        flip(path, bit)


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


# --- Boxes: reads of parts of stored chunks


class BoxPlanner(LoadPlanner):
    """Reads boxes of stored chunks into tensors of their own: what resharding does, without ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.items: list[ReadItem] = []
        self.targets: list[torch.Tensor] = []

    def want(self, index: MetadataIndex, box: tuple[slice, ...]) -> None:
        offsets = torch.Size([part.start for part in box])
        lengths = torch.Size([part.stop - part.start for part in box])
        number = MetadataIndex(str(len(self.items)))
        self.items.append(ReadItem(LoadItemType.TENSOR, number, offsets, index, offsets, lengths))
        self.targets.append(torch.full(lengths, 77).to(self.dtype))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.targets[int(read_item.dest_index.fqn)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        assert tensor.data_ptr() == self.resolve_tensor(read_item).data_ptr()


def load_boxes(directory: Path, key: str, boxes: list[tuple[slice, ...]], **options: Any) -> list[torch.Tensor]:
    """Boxes of the only chunk of a tensor."""
    reader = StorageReader(directory, **options)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    (index,) = (index for index in metadata.storage_data if index.fqn == key)
    planner = BoxPlanner(metadata.state_dict_metadata[key].properties.dtype)
    for box in boxes:
        planner.want(index, box)
    reader.read_data(LoadPlan(planner.items), planner).wait()
    return planner.targets


# --- Children: for what may hang, crash, take all memory or is to be killed


class ChildError(AssertionError):
    """The child hung, died or raised."""


@dataclass(frozen=True)
class Answer:
    value: Any
    peak_bytes: int  #: of memory, above what the child began with


def in_child(function: Callable[..., Any], *args: Any, seconds: float = 120.0) -> Answer:
    """Calls a function in a fork of this process. Raises `ChildError` if it raises, dies or takes longer."""
    reading, writing = os.pipe()
    pid = fork(lambda: _report(function, args, writing))
    os.close(writing)
    data, deadline = b"", time.monotonic() + seconds
    try:
        while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(reading, 1 << 16)
            data += piece
            if not piece:
                break
        else:
            raise ChildError(f"{function.__name__} gave no answer within {seconds:.0f} s")
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if not data:
        raise ChildError(f"{function.__name__} died by signal {os.WTERMSIG(status)}")
    ok, value, peak = pickle.loads(data)
    if not ok:
        raise ChildError(value)
    return Answer(value, peak)


def fork(body: Callable[[], object]) -> int:
    """Runs `body` in a fork of this process, which then ends without a trace; returns its id."""
    pid = os.fork()
    if pid == 0:
        _run_and_end(body)
    return pid


def _run_and_end(body: Callable[[], object]) -> NoReturn:
    try:
        torch.set_num_threads(1)  # the parent's pool of threads did not come along
        body()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _report(function: Callable[..., Any], args: tuple[Any, ...], writing: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(pickle.dumps((*answer, peak)))
