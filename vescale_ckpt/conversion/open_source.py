"""Which format a checkpoint is of."""

from __future__ import annotations

from .._storage.directory import directory_at, is_folder
from ..errors import CheckpointError
from ..metadata_file import has_metadata
from ..other_formats import kind_of_file
from .dcp_source import DcpSource
from .optional_numpy import numpy_needed
from .safetensors_source import SafetensorsSource
from .source import Source
from .torch_source import TorchSource
from .zip_file import entries

_NUMPY = ".npy"


def open_source(path: str) -> Source:
    """Opens a checkpoint of any format that is known, told by what is there.

    Raises `CheckpointError` if nothing is, or it is something else, and what the formats' sources raise.
    """
    if is_folder(path):
        if has_metadata(path, None):
            return DcpSource(path)
        names = directory_at(path).names()
        if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
            return SafetensorsSource(path)
        if any(name.endswith(_NUMPY) for name in names):
            return _numpy_source(path)
        raise CheckpointError(
            f"{path} has no .metadata, no .safetensors and no .npy files: not a checkpoint, or one whose save did not "
            "finish",
            path=path,
        )
    try:
        kind = kind_of_file(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}", path=path, errno=error.errno) from error
    if kind == "pickle":
        raise CheckpointError(
            f"{path} seems to be a file of torch.save before torch 1.6: load it and save it again", path=path
        )
    if kind == "other":
        return SafetensorsSource(path)
    if any(entry.name.endswith("/data.pkl") for entry in entries(path)):
        return TorchSource(path)
    return _numpy_source(path)


def _numpy_source(path: str) -> Source:
    with numpy_needed():
        from .numpy_source import NumpySource
    return NumpySource(path)
