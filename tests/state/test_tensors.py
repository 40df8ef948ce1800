"""Tables of tensors: what DLPack says in one call is what torch's Python interface says, whatever the tensor."""

from __future__ import annotations

import functools
import warnings
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.states import cut_storage, layouts
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from vescale_ckpt._engine import _C, torch_private
from vescale_ckpt._engine.dtype_codes import DTYPE_CODES
from vescale_ckpt._engine.rows import TENSOR
from vescale_ckpt._engine.tensor_checks import is_host_memory
from vescale_ckpt._state.chunk_rows import ShardChunk, packed_row
from vescale_ckpt._state.tensor_table import read_tensors, tensor_row

UNQUANTIZED = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype) and "torch.q" not in str(value)}, key=str
)


class Subclass(torch.Tensor):
    pass


class Hostile(torch.Tensor):
    @property
    def shape(self) -> Any:
        raise RuntimeError("no shape")


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3, 4)


def quantized() -> torch.Tensor:
    tensor: torch.Tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    return tensor


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 4),
    "expanded": lambda: torch.ones(1, 4).expand(3, 4),
    "view": lambda: torch.arange(20)[3:9],
    "parameter": lambda: torch.nn.Parameter(torch.ones(3, 2)),
    "requires_grad": lambda: torch.ones(3, requires_grad=True),
    "not_a_leaf": lambda: torch.ones(3, requires_grad=True) * 2,
    "conjugated": lambda: torch.ones(3, dtype=torch.cfloat).conj(),
    "negated": lambda: torch.ones(3, dtype=torch.cfloat).conj().imag,
    "imaginary": lambda: torch.ones(3, dtype=torch.cfloat).imag,
    "meta": lambda: torch.empty(3, 5, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse_rows": lambda: torch.eye(3).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(3, 4).to_mkldnn(),
    "quantized": quantized,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "zero": lambda: torch._efficientzerotensor(3),
    "empty_zero": lambda: torch._efficientzerotensor(0),
    "part_of_zero": lambda: torch._efficientzerotensor(5)[2:],
    "freed": lambda: cut_storage(torch.ones(8)),
    "part_of_freed": lambda: cut_storage(torch.ones(8)[3:]),
    "fake": fake,
    "subclass": lambda: torch.ones(3).as_subclass(Subclass),
    "hostile": lambda: torch.ones(3).as_subclass(Hostile),
    "collective": lambda: AsyncCollectiveTensor(torch.ones(3)),
    "buffer": lambda: torch.nn.Buffer(torch.ones(3)),
    "many_dimensions": lambda: torch.ones([1] * 63 + [2]),
    **{f"dtype_{dtype}": functools.partial(torch.empty, 3, 2, dtype=dtype) for dtype in UNQUANTIZED},
    **{f"layout_{name}": functools.partial(layouts(48).__getitem__, name) for name in layouts(48)},
}


def make(kind: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes
        return KINDS[kind]()


def said_by_torch(tensor: torch.Tensor, name: str, otherwise: Any) -> Any:
    try:
        return getattr(tensor, name)
    except RuntimeError:
        return otherwise


def rows(table: bytes) -> list[list[int]]:
    """The rows of a table of tensors: address, dtype, device, sizes and strides."""
    words = array("q", table)
    found = []
    at = 0
    while at < len(words):
        length = 4 + 2 * words[at + 3]
        found.append(list(words[at : at + length]))
        at += length
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_contiguous_and_what_an_inventory_says_of_it(kind: str) -> None:
    tensor = make(kind)
    table = read_tensors([tensor, torch.ones(2), tensor]).table
    if tensor_row(tensor)[2] >= 0:
        assert _C.not_contiguous(table) == ([] if tensor.is_contiguous() else [0, 2])
    else:
        assert _C.not_contiguous(table) == [0, 2]
    first, other, second = _C.rows_of_tensors(table, bytes([0, 0, 1]))
    assert other == packed_row(TENSOR, DTYPE_CODES[torch.float32], False, 4, ShardChunk((0,), (2,), ()), (2,))
    if tensor_row(tensor)[1] < 0:
        assert first == second == b""
        return
    shape = tuple(tensor_row(tensor)[4:][: tensor_row(tensor)[3]])
    chunk, code = ShardChunk((0,) * len(shape), shape, ()), DTYPE_CODES[tensor.dtype]
    assert first == packed_row(TENSOR, code, False, tensor.itemsize, chunk, shape)
    assert second == packed_row(TENSOR, code, True, tensor.itemsize, chunk, shape)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_of_a_tensor_is_what_torch_says(kind: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        tensors = [make(kind), torch.ones(3), make(kind)]
        if kind in ("view", "parameter", "requires_grad", "negated", "dtype_torch.bfloat16"):
            tensors[2].data.zero_()
        reads = read_tensors(tensors)
        assert rows(reads.table) == list(map(tensor_row, tensors))
        assert reads.ready == bytes(map(is_host_memory, tensors))
        allocate_targets = [tensor for tensor in tensors if tensor_row(tensor)[2] >= 0]
        storages = [tensor.untyped_storage() for tensor in allocate_targets]
        identities = [list(map(torch_private.storage_identity, of)) for of in (reads.storages, storages)]
        assert identities[0] == identities[1]
        assert reads.storage_bytes.tolist() == [storage.nbytes() for storage in storages]
        for tensor, version, flag in zip(tensors, reads.versions, reads.requires_grad, strict=True):
            assert (version, flag) == (
                said_by_torch(tensor, "_version", -1),
                said_by_torch(tensor, "requires_grad", False),
            )


def test_counters_and_flags_of_inference_and_training() -> None:
    with torch.inference_mode():
        without = torch.ones(2)
    trained = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        trained.add_(1).mul_(2)
    versions, requires_grad = torch_private.tensor_facts([without, trained, trained.detach()])
    assert (versions.tolist(), list(requires_grad)) == ([-1, 2, 2], [0, 1, 0])
