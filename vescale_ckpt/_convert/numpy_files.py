"""Writes numpy files, as `_checkpoint/numpy_checkpoint.py` reads them, for conversions."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from typing import IO, Any
from urllib.parse import quote

import numpy as np
import torch

from .._checkpoint.checkpoint import Checkpoint
from .._checkpoint.numpy_checkpoint import DTYPES_NAME, SUFFIX, UNSIGNED
from .._engine.engine_errors import named_errors
from .._storage.open_storage import storage_at
from ..errors import CheckpointError
from .plan import Output
from .streamed_file import Files, OutputFile, Save, read_whole, streamed

_LONGEST_NAME = 255  # bytes, of files


def npz_file(outputs: Sequence[Output]) -> Files:
    """The archive that `numpy.savez` writes. One tensor at a time is in memory."""

    def save(stream: IO[bytes], source: Checkpoint) -> None:
        with zipfile.ZipFile(stream, "w") as archive:
            for output in outputs:
                with archive.open(zipfile.ZipInfo(output.name + SUFFIX), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, _array(read_whole(output, source)))
            if dtypes := _dtypes_to_tell(outputs):
                archive.writestr(zipfile.ZipInfo(DTYPES_NAME), dtypes)

    return Files.streamed(outputs, save)


def npy_files(outputs: Sequence[Output]) -> Files:
    """The files that `numpy.save` writes, one for each tensor."""
    files = [
        OutputFile(_file_name(output.name), output.bytes, streamed([output], _save_of(output))) for output in outputs
    ]
    dtypes = _dtypes_to_tell(outputs)

    def write_dtypes(directory: str) -> None:
        with named_errors(str, directory, len(dtypes)):
            storage_at(directory).write(DTYPES_NAME, dtypes)

    return Files(files, write_dtypes if dtypes else None)


def _save_of(output: Output) -> Save:
    return lambda stream, source: np.lib.format.write_array(stream, _array(read_whole(output, source)))


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = (
        tensor if _numpy_has(tensor.dtype) else tensor.view(UNSIGNED[tensor.itemsize])
    ).numpy()
    return found


def _numpy_has(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except (TypeError, RuntimeError):
        return False
    return True


def _dtypes_to_tell(outputs: Sequence[Output]) -> bytes:
    """The JSON text with the dtypes that numpy does not have, by tensor. Empty if there are none."""
    dtypes = {output.name: str(output.dtype) for output in outputs if not _numpy_has(output.dtype)}
    names = {name: dtype.removeprefix("torch.") for name, dtype in dtypes.items()}
    return (json.dumps(names, indent=1, ensure_ascii=False) + "\n").encode() if names else b""


def _file_name(name: str) -> str:
    """The file name of a tensor in a folder: its name, percent-encoded where a file name cannot hold a character.

    Raises `CheckpointError` if it is too long.
    """
    quoted = quote(name, safe=" !#$&'()+,;=@[]{}^~`*:<>?|\"\\")
    if quoted.startswith("."):
        quoted = "%2E" + quoted[1:]
    if len(quoted) + len(SUFFIX) > _LONGEST_NAME:
        raise CheckpointError(f"{name}: its name is too long for a file's: save an .npz, or rename it", key=name)
    return quoted + SUFFIX
