"""`.metadata` as bytes: what is written comes back, in torch's own terms too; what is damaged or foreign is refused."""

from __future__ import annotations

import enum
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from vescale_ckpt import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from vescale_ckpt._checkpoint.native import metadata_pickle

ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def tensor_metadata(dtype: torch.dtype, size: tuple[int, ...], parts: int = 1) -> TensorStorageMetadata:
    rows = size[0] if size else 0
    chunks = [
        ChunkStorageMetadata(
            offsets=torch.Size([rows * part // parts, *([0] * (len(size) - 1))][: len(size)]),
            sizes=torch.Size([rows * (part + 1) // parts - rows * part // parts, *size[1:]][: len(size)]),
        )
        for part in range(parts)
    ]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)


def example() -> Metadata:
    stored: dict[str, Any] = {f"tensor {dtype}": tensor_metadata(dtype, (8, 3), 4) for dtype in ALL_DTYPES}
    stored |= {"scalar": tensor_metadata(torch.float32, ()), "object": BytesStorageMetadata()}
    data = {
        MetadataIndex(key, chunk.offsets, number): _StorageInfo(f"__{number}_0.distcp", 1 << 40, 100 + number)
        for key, value in stored.items()
        if isinstance(value, TensorStorageMetadata)
        for number, chunk in enumerate(value.chunks)
    }
    data[MetadataIndex("object")] = _StorageInfo("__0_0.distcp", 0, 7)
    return Metadata(
        stored,
        planner_data={key: ("a", 0, key) for key in stored},
        storage_data=data,
        storage_meta=StorageMeta(checkpoint_id="/some/where", save_id="x", modules=["m"]),
        version="1.0.0",
    )


def test_round_trip() -> None:
    metadata = example()
    written = metadata_pickle.dumps(metadata)
    loaded = metadata_pickle.loads(written, "path")
    assert loaded == metadata == pickle.loads(written)
    assert written == metadata_pickle.dumps(example()) and b"getattr" not in written, "the same under every Python"
    assert type(loaded.state_dict_metadata["scalar"].properties) is TensorProperties  # type: ignore[union-attr]
    assert [index.index for index in loaded.storage_data] == [index.index for index in metadata.storage_data]


@pytest.mark.parametrize("protocol", range(2, 6))
def test_we_read_what_torch_pickles(protocol: int) -> None:
    metadata = example()
    metadata.storage_data[MetadataIndex("object")] = _StorageInfo("__0_0.distcp", 0, 7, ["stream.zstd/1"])
    assert metadata_pickle.loads(pickle.dumps(metadata, protocol=protocol), "path") == metadata


class ByName(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.0 to 3.11.3 do, Debian 12's among them."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


@pytest.mark.parametrize("protocol", range(2, 6))
def test_we_read_what_early_versions_of_python_3_11_pickle(protocol: int) -> None:
    file = io.BytesIO()
    ByName(file, protocol).dump(example())
    assert b"getattr" in file.getvalue()
    assert metadata_pickle.loads(file.getvalue(), "path") == example()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last, torch.preserve_format])
def test_memory_format_of_stock_is_read_as_contiguous(memory_format: torch.memory_format) -> None:
    metadata = example()
    metadata.state_dict_metadata["scalar"].properties.memory_format = memory_format  # type: ignore[union-attr]
    loaded = metadata_pickle.loads(pickle.dumps(metadata), "path")
    assert loaded.state_dict_metadata["scalar"].properties.memory_format is torch.contiguous_format  # type: ignore[union-attr]


class _Pickler(pickle.Pickler):
    """Writes tensor properties with other fields than this torch has."""

    def __init__(self, file: io.BytesIO, fields: Any) -> None:
        super().__init__(file)
        self.fields = fields

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, TensorProperties):
            return *object.__reduce_ex__(value, 2)[:2], self.fields(value.__getstate__())
        return NotImplemented


def _with_fields(fields: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, fields).dump(example())
    return buffer.getvalue()


@pytest.mark.parametrize("more", [(False,), (None, 7), (torch.float32, "x", ())])
def test_properties_of_a_newer_torch(more: tuple[Any, ...]) -> None:
    assert metadata_pickle.loads(_with_fields(lambda fields: (*fields, *more)), "path") == example()


@pytest.mark.parametrize("fields", [lambda fields: fields[:4], lambda fields: (1,), list])
def test_properties_that_are_malformed_are_refused(fields: Any) -> None:
    with pytest.raises((UntrustedCheckpointError, CorruptCheckpointError)):
        metadata_pickle.loads(_with_fields(fields), "path")


@pytest.mark.parametrize("value", [None, 1, {}, StorageMeta(), [example()]], ids=lambda value: type(value).__name__)
def test_pickle_of_something_else_is_refused(value: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="the path"):
        metadata_pickle.loads(pickle.dumps(value), "the path")


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collector_is_left_as_it_was(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        data = metadata_pickle.dumps(example())
        assert gc.isenabled() is enabled
        metadata_pickle.loads(data, "path")
        assert gc.isenabled() is enabled
        with pytest.raises(CheckpointError):
            metadata_pickle.loads(b"noise", "path")
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
