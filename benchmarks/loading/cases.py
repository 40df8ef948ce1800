"""What is saved and loaded: states, and how ranks hold their tensors when they save them and when they load them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks import states
from benchmarks.harness.random_states import Shapes, State, bytes_in
from benchmarks.states import LAYERS


@dataclass(frozen=True)
class Held:
    """How ranks hold the tensors of a state.

    DTensors, sharded along ``dim`` (along their last dimension, if they have fewer) or replicated where it is None; or
    ``dealt``: plain tensors, each rank those of its share of the layers.
    """

    dim: int | None = None
    dealt: bool = False

    def pieces(self, state: State, rank: int, size: int) -> State:
        """What one rank holds: views of ``state``."""
        if self.dealt:
            layers = range(LAYERS)[_share(LAYERS, rank, size)]
            return {name: tensor for name, tensor in state.items() if int(name.rpartition(".")[2]) in layers}
        if self.dim is None:
            return dict(state)
        pieces = {}
        for name, tensor in state.items():
            dim = min(self.dim, tensor.ndim - 1)
            share = _share(tensor.size(dim), rank, size)
            pieces[name] = tensor.narrow(dim, share.start, share.stop - share.start)
        return pieces

    def wrapped(self, pieces: State, shapes: Shapes, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        """What DCP sees: the pieces themselves, or DTensors over their memory."""
        if self.dealt:
            return dict(pieces)
        wrapped: dict[str, torch.Tensor] = {}
        for name, piece in pieces.items():
            shape = torch.Size(shapes[name])
            placement = Replicate() if self.dim is None else Shard(min(self.dim, len(shape) - 1))
            stride = torch.empty(shape, device="meta").stride()
            wrapped[name] = DTensor.from_local(piece, mesh, [placement], run_check=False, shape=shape, stride=stride)
        return wrapped

    def __str__(self) -> str:
        if self.dealt:
            return "layers dealt out"
        return "replicated" if self.dim is None else f"dim {self.dim}"


def _share(length: int, rank: int, size: int) -> slice:
    """As torch.chunk cuts, and DTensor: the last ranks may have less, or nothing."""
    most = -(-length // size)
    return slice(min(rank * most, length), min((rank + 1) * most, length))


@dataclass(frozen=True)
class Case:
    """One checkpoint and one way to load it. ``saved`` is None where one process without ranks saves it whole."""

    name: str
    shapes: Shapes
    saved: Held | None
    loaded: Held

    @property
    def bytes(self) -> int:
        """What is stored, and needed by some rank."""
        return bytes_in(self.shapes)


KINDS = {
    "replicated": ("llama", Held(), Held()),
    "rows-to-columns": ("llama", Held(0), Held(1)),
    "stacked": ("stacked", Held(0), Held(1)),
}
SUMMARIES = {
    "replicated": "DTensors that every rank has whole",
    "rows-to-columns": "saved in shards of rows, loaded in shards of columns",
    "stacked": "the layers stacked in 7 tensors, saved in shards of layers, loaded along the next dimension",
}


def of_table(table: str, names: Iterable[str], mib: float) -> list[Case]:
    """What a table of ``python -m benchmarks loading`` loads, each of about so many MiB."""
    if table == "stacked":
        return [case for dim in range(3) for case in stacked_and_twin(mib, dim)]
    if table == "ranks":  # what the same ranks of any number load
        shapes = states.shapes_of("llama", mib / 1024)
        return [Case("dim 0", shapes, None, Held(0)), Case("replicated", shapes, None, Held())]
    found = []
    for name in names:
        kind, saved, loaded = KINDS[name]
        found.append(Case(name, states.shapes_of(kind, mib / 1024), saved, loaded))
    return found


def stacked_and_twin(mib: float, dim: int) -> tuple[Case, Case]:
    """A stacked state loaded along ``dim``, and the same layers as tensors of their own, cut the same way."""
    shapes = states.shapes_of("stacked", mib / 1024)
    apart = {f"{name}.{layer}": shape[1:] for name, shape in shapes.items() for layer in range(shape[0])}
    twin = Held(dealt=True) if dim == 0 else Held(dim - 1)
    return Case(f"stacked, dim {dim}", shapes, None, Held(dim)), Case(f"unstacked, dim {dim}", apart, None, twin)
