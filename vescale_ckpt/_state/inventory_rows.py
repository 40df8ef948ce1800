"""Makes the inventory of a `State` (csrc/state/inventory.h), and the memory source of each of its rows."""

from __future__ import annotations

import struct
from operator import le
from typing import Any

import torch

from .._engine import _C, torch_private
from .._engine.dtype_codes import dtype_code
from .._engine.rows import OBJECT, SHARD
from .._engine.torch_private import DTensorLayout
from .._engine.wrapper_tensors import is_wrapper_type
from ..errors import CheckpointError
from .chunk_rows import ShardChunk, packed_row
from .state import State


def add_inventory(state: State) -> None:
    """Adds the inventory to a state, with the names and sources of its items, and the keys of values without items.

    Raises `CheckpointError` with the key for a dtype or placement that no checkpoint can hold."""
    groups = state.groups
    if len(groups.plain) + len(groups.objects) == len(groups.keys):  # without Python code for each
        packed = _C.inventory_of_tensors(groups.keys, state.table, state.requires_grad, groups.objects, state.node)
        if packed is not None:
            state.inventory, state.sources = packed
            state.names = groups.keys
            return
    _Making(state).finish()


class _Making:
    def __init__(self, state: State) -> None:
        self.state, self.groups = state, state.groups
        self.other = list(self.groups.other)
        self.meshes: dict[int, tuple[tuple[int, ...], tuple[int, ...] | None]] = {}
        self.rows: dict[Any, list[tuple[bytes, bytes]]] = {}  # {traits: rows}, because layers repeat
        # By index in the order of the keys: rows of the inventory, each with its row of the table of sources.
        self.items: list[list[tuple[bytes, bytes]]] = [[] for _ in self.groups.keys]
        self._add_plain()
        self._add_dtensors()
        self._add_chunked()
        item = packed_row(OBJECT, 0, False, 0, ShardChunk((), (), ()), ()), _source(-1, _offsets(()))
        for position in self.groups.objects:
            self.items[position] = [item]

    def finish(self) -> None:
        state, keys, items = self.state, self.groups.keys, self.items
        state.names = [key for key, of_key in zip(keys, items, strict=True) for _ in of_key]
        rows = [row for of_key in items for row, _ in of_key]
        state.inventory = _C.pack_inventory(state.names, rows, state.node)
        state.sources = b"".join([source for of_key in items for _, source in of_key])
        state.other = dict.fromkeys(keys[position] for position in sorted(self.other))

    def _add_plain(self) -> None:
        state, plain = self.state, self.groups.plain
        rows = _C.rows_of_tensors(state.table, state.requires_grad[: len(plain)])
        for number, (position, row) in enumerate(zip(plain, rows, strict=True)):
            tensor = state.tensors[number]
            if row:
                self.items[position] = [(row, _source(number, _offsets((0,) * tensor.dim())))]
                continue
            if not tensor.is_nested:  # nested tensors have no shape
                dtype_code(tensor.dtype, self.groups.keys[position])  # raises
            self.other.append(position)

    def _add_dtensors(self) -> None:
        if not self.groups.dtensors:
            return
        state = self.state
        first = len(self.groups.plain)
        wrapper_types = set(filter(is_wrapper_type, set(state.local_types)))
        for index, (position, layout) in enumerate(zip(self.groups.dtensors, state.layouts, strict=True)):
            number = first + index
            tensor = state.tensors[number]
            requires_grad = bool(state.requires_grad[number])
            mesh_shape, coordinate = self._mesh(layout)
            if coordinate is None:
                continue  # this rank holds nothing of the tensor
            placing = layout.placements, layout.shape, layout.shard_order, mesh_shape, coordinate
            uncut = state.local_types[index] in wrapper_types
            traits = (*placing, tensor.dtype, tensor.shape, requires_grad, uncut)
            chunks = self.rows.get(traits)
            if chunks is None:
                chunks = self.rows[traits] = self._chunks(
                    self.groups.keys[position], layout, mesh_shape, coordinate, tensor, requires_grad, uncut
                )
            self.items[position] = [(row, _source(number, offsets)) for row, offsets in chunks]

    def _mesh(self, layout: DTensorLayout) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        mesh = self.meshes.get(id(layout.mesh))
        if mesh is None:
            coordinate = layout.mesh.get_coordinate()
            mesh = tuple(layout.mesh.shape), None if coordinate is None else tuple(coordinate)
            self.meshes[id(layout.mesh)] = mesh
        return mesh

    def _chunks(
        self,
        key: str,
        layout: DTensorLayout,
        mesh_shape: tuple[int, ...],
        coordinate: tuple[int, ...],
        tensor: torch.Tensor,
        requires_grad: bool,
        uncut: bool,
    ) -> list[tuple[bytes, bytes]]:
        from .shard_chunks import are_known, chunks_at, local_shape  # it imports DTensor's placements

        code = dtype_code(tensor.dtype, key)
        try:
            if are_known(layout.placements):
                found = chunks_at(layout, mesh_shape, coordinate)
            else:
                offset, size = torch_private.chunk_of_layout(layout)
                found = (ShardChunk(offset, size, (0,) * len(size)),)
        except CheckpointError as error:
            raise CheckpointError(f"{key}: {error}", key=key) from error
        held, shape = tuple(tensor.shape), local_shape(found)
        # What FSDP2 leaves of a shard without elements has sizes of 0 in its own dimension too: (0, 0) for (3, 0).
        if 0 in held and 0 in shape and len(held) == len(shape) and all(map(le, held, shape)):
            found = (found[0]._replace(size=held),)
        elif held != shape:
            raise CheckpointError(
                f"{key}: its placements {layout.placements} on a mesh of {mesh_shape} give this rank a shard of shape "
                f"{shape}, but it holds {held}",
                key=key,
            )
        flagged = code, requires_grad, tensor.itemsize
        return [
            (packed_row(SHARD, *flagged, chunk, layout.shape, uncut=uncut), _offsets(chunk.local_offset))
            for chunk in found
        ]

    def _add_chunked(self) -> None:
        state = self.state
        number = len(self.groups.plain) + len(self.groups.dtensors)
        for position, told in zip(self.groups.chunked, state.chunks, strict=True):
            if told is None:
                self.other.append(position)
                continue
            key, (shape, chunks) = self.groups.keys[position], told
            for kind, requires_grad, offset, size, uncut in chunks:
                tensor = state.tensors[number]
                if tuple(tensor.shape) != size:
                    raise CheckpointError(
                        f"{key}: its shard at {offset} is of shape {size}, but this rank holds {tuple(tensor.shape)}",
                        key=key,
                    )
                origin = (0,) * len(shape)
                code = dtype_code(tensor.dtype, key)
                chunk = ShardChunk(offset, size, origin)
                row = packed_row(kind, code, requires_grad, tensor.itemsize, chunk, shape, uncut=uncut)
                self.items[position].append((row, _source(number, _offsets(origin))))
                number += 1


def _offsets(offset: tuple[int, ...]) -> bytes:
    return struct.pack(f"{1 + len(offset)}q", len(offset), *offset)


def _source(tensor: int, offsets: bytes) -> bytes:
    return struct.pack("q", tensor) + offsets
