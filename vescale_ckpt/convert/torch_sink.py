"""Lays out files of torch.save for conversions."""

from __future__ import annotations

import io
import mmap
import os
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.serialization import skip_data

from .._state import objects
from .._state.flatten import flatten, nested
from .._state.structure import Path, Structure
from ..errors import CheckpointError
from .archive import ArchiveLayout, Entry, Member
from .plan import Output
from .torch_source import MappedState

_ALIGNMENT = 64


def torch_layout(
    outputs: Sequence[Output], values: Mapping[str, Any], paths: Mapping[str, Path], structure: str | None = None
) -> ArchiveLayout:
    """The archive that torch.save writes for a dict of these tensors and objects, nested according to `paths`.

    torch.save itself writes the archive, without the tensors' bytes, to a sparse file in memory. Its entries are then
    the layout. Raises `CheckpointError` for objects that torch.save cannot store.
    """
    descriptor = os.memfd_create("vescale_ckpt")
    try:
        path = f"/proc/self/fd/{descriptor}"
        tensors = _without_memory(outputs)
        state = nested({**tensors, **values}, paths, None if structure is None else Structure.unpack(structure))
        try:
            with skip_data():
                torch.save(state, path)
        except Exception as error:
            raise CheckpointError(f"torch.save does not store this: {type(error).__name__}: {error}") from error
        written = MappedState(path)
        found, kept = written.entries, flatten(written.values)[0]
        at: dict[int, Output | bytes] = {}
        for output in outputs:
            entry = written.entry_of(kept[output.name])
            assert entry is not None
            at[entry.offset] = output
        rest = [entry for entry in found if _is_storage(entry) and entry.offset not in at]
        at.update(_storages_of_objects(rest, [values[key] for key in kept if key in values]))
        with zipfile.ZipFile(path) as archive:
            return ArchiveLayout("archive/", [_member(entry, at.get(entry.offset), archive) for entry in found])
    finally:
        os.close(descriptor)


def _without_memory(outputs: Sequence[Output]) -> dict[str, torch.Tensor]:
    """Tensors in reserved address space. They take no memory as long as they are not read."""
    reserved = mmap.mmap(-1, sum(map(_room, outputs)) or 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    tensors, at = {}, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the tensors are not writable
        for output in outputs:
            if output.bytes:
                memory = torch.frombuffer(reserved, dtype=torch.uint8, count=output.bytes, offset=at)
                tensors[output.name] = memory.view(output.dtype).view(output.shape)
                at += _room(output)
            else:
                tensors[output.name] = torch.empty(output.shape, dtype=output.dtype, device="cpu")
    return tensors


def _room(output: Output) -> int:
    return -(-output.bytes // _ALIGNMENT) * _ALIGNMENT


def _member(entry: Entry, content: Output | bytes | None, archive: zipfile.ZipFile) -> Member:
    name = entry.name.partition("/")[2]
    if isinstance(content, Output):
        if content.bytes != entry.bytes:
            raise CheckpointError(f"{content.name}: torch.save wants {entry.bytes} bytes for it, not {content.bytes}")
        return Member(name, b"", content)
    return Member(name, archive.read(entry.name) if content is None else content)


def _is_storage(entry: Entry) -> bool:
    return entry.name.partition("/")[2].startswith("data/")


def _storages_of_objects(rest: Sequence[Entry], values: Sequence[Any]) -> dict[int, Output | bytes]:
    """The bytes of tensors within objects, which torch.save has left out, too; by offset of their entry."""
    if not rest:
        return {}
    contents = []
    for value in values:
        with zipfile.ZipFile(io.BytesIO(objects.dump(value, "an object", tells=False))) as archive:
            names = [name for name in archive.namelist() if name.partition("/")[2].startswith("data/")]
            contents += [archive.read(name) for name in names]
    if [len(content) for content in contents] != [entry.bytes for entry in rest]:
        raise CheckpointError("objects that share tensors with each other cannot be converted to a file of torch.save")
    return {entry.offset: content for entry, content in zip(rest, contents, strict=True)}
