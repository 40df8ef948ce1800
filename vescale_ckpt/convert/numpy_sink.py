"""Lays out numpy files for conversions: an archive `.npz`, or a folder of `.npy`."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import torch

from ..errors import CheckpointError
from .archive import ArchiveLayout, Member
from .numpy_source import DTYPES_NAME, SUFFIX, UNSIGNED
from .pipeline import Piece
from .plan import Output
from .streamed_file import Body

_LONGEST_NAME = 255  # bytes, of files


def npz_layout(outputs: Sequence[Output]) -> ArchiveLayout:
    """The archive that `numpy.savez` writes, with each array's bytes at a multiple of 64."""
    members = [Member(output.name + SUFFIX, npy_header(output), output) for output in outputs]
    dtypes = dtypes_to_tell(outputs)
    return ArchiveLayout("", [*members, Member(DTYPES_NAME, dtypes)] if dtypes else members)


class NpyLayout:
    """The file that `numpy.save` writes."""

    def __init__(self, output: Output) -> None:
        self._header = npy_header(output)
        self.bodies = [Body(output, len(self._header))]
        self.length = len(self._header) + output.bytes

    def add_checksum(self, piece: Piece, address: int) -> None: ...

    def format_bytes(self, number: int) -> bytes:
        return self._header

    def head(self) -> bytes:
        return b""


def npy_header(output: Output) -> bytes:
    dtype, _ = _numpy_dtype(output.dtype, output.name)
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": output.shape}
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, fields)
    return text.getvalue()


def dtypes_to_tell(outputs: Sequence[Output]) -> bytes:
    """The JSON text with the dtypes that numpy does not have, by tensor. Empty if there are none."""
    dtypes = {output.name: output.dtype for output in outputs if not _numpy_dtype(output.dtype, output.name)[1]}
    names = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
    return (json.dumps(names, indent=1, ensure_ascii=False) + "\n").encode() if names else b""


def _numpy_dtype(dtype: torch.dtype, name: str) -> tuple[np.dtype[Any], bool]:
    """The numpy dtype that stores a torch dtype, and whether it is the same dtype. Raises `CheckpointError` if numpy
    has no dtype of that size."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype, True
    except (TypeError, RuntimeError):
        pass
    if dtype.itemsize not in UNSIGNED:
        raise CheckpointError(f"{name}: numpy has no place for {dtype}", key=name)
    return np.dtype(UNSIGNED[dtype.itemsize]), False


def file_name(name: str) -> str:
    """The file name of a tensor in a folder: its name, percent-encoded where a file name cannot hold a character.

    Raises `CheckpointError` if it is too long.
    """
    quoted = quote(name, safe=" !#$&'()+,;=@[]{}^~`*:<>?|\"\\")
    if quoted.startswith("."):
        quoted = "%2E" + quoted[1:]
    if len(quoted) + len(SUFFIX) > _LONGEST_NAME:
        raise CheckpointError(f"{name}: its name is too long for a file's: save an .npz, or rename it", key=name)
    return quoted + SUFFIX
