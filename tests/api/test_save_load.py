"""What we save, we load: every dtype, layout, size and kind of object."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.files import data_file_names
from harness.ranks import run_ranks
from harness.saves import cause, dcp_load, dcp_save, load_blank, loads
from harness.states import (
    UNPLANNABLE,
    KiB,
    MiB,
    assert_same,
    at_address,
    bits,
    cut_storage,
    layouts,
    random_tensor,
)
from torch.distributed.checkpoint.api import CheckpointException

import vescale_ckpt
from vescale_ckpt import CheckpointError

# --- Structures, dtypes, shapes


@pytest.mark.parametrize("dtype", UNPLANNABLE, ids=str)
def test_dtype_that_stock_cannot_plan_is_saved_or_named(checkpoint: Path, dtype: torch.dtype) -> None:
    state = {"odd": random_tensor((10,), dtype)}
    try:
        dcp_save(checkpoint, state)
    except CheckpointException as raised:
        error = cause(raised)
        assert isinstance(error, CheckpointError)
        assert "odd" in str(error)
        assert str(dtype) in str(error)
    else:
        assert_same(load_blank(checkpoint, state), state)


@pytest.mark.parametrize(
    "name", ["int4", "uint3", "bit"] + [name for name in ("quint4x2", "qint8") if hasattr(torch, name)]
)
def test_dtype_that_cannot_be_stored_is_named(checkpoint: Path, name: str) -> None:
    dtype = getattr(torch, name)
    if name == "qint8":
        tensor = torch.quantize_per_tensor(torch.randn(10), 0.1, 0, dtype)
    else:
        tensor = torch.empty(4, dtype=dtype)
    with pytest.raises(CheckpointException) as raised:
        dcp_save(checkpoint, {"fine": torch.ones(3), "odd": tensor})
    error = cause(raised.value)
    assert isinstance(error, CheckpointError)
    assert "odd" in str(error)
    assert str(dtype) in str(error)
    assert not checkpoint.exists() or not data_file_names(checkpoint)


# --- Where elements lie in memory


@pytest.mark.parametrize("rows", [64, 12 * KiB], ids=["small", "large"])
def test_saves_any_layout(checkpoint: Path, rows: int) -> None:
    state = layouts(rows)
    dcp_save(checkpoint, state)
    assert_same(load_blank(checkpoint, state), state)


@pytest.mark.parametrize("direct_io", ["auto", False])
@pytest.mark.parametrize("rows", [64, 12 * KiB], ids=["small", "large"])
def test_loads_into_any_layout(checkpoint: Path, rows: int, direct_io: Any) -> None:
    like = layouts(rows)
    del like["overlapping_windows"]
    values = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in like.items()}
    dcp_save(checkpoint, values)
    target = {}
    for name, tensor in like.items():
        storage = torch.UntypedStorage(tensor.untyped_storage().nbytes()).fill_(0x5A)
        target[name] = torch.empty(0, dtype=tensor.dtype).set_(
            storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    dcp_load(checkpoint, target, direct_io=direct_io)
    assert_same(target, values)
    for name, tensor in target.items():
        assert tensor.stride() == like[name].stride()
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        tensor.zero_()
        assert int((memory == 0x5A).sum()) == memory.numel() - tensor.nbytes, f"{name}: wrote beside the target"


def test_expanded_tensor_is_saved_in_full(checkpoint: Path) -> None:
    row = torch.randn(1, 300)
    state = {"rows": row.expand(500, 300), "number": torch.tensor(3.0).expand(4, 5), "large": row.expand(4000, 300)}
    dcp_save(checkpoint, state)
    assert_same(load_blank(checkpoint, state), state)


def test_views_of_one_storage_are_saved_apart(checkpoint: Path) -> None:
    base = torch.randn(1000, 1000)
    state = {"whole": base, "same": base, "view": base.view(-1), "rows": base[10:20], "transposed": base.t()}
    dcp_save(checkpoint, state)
    assert_same(load_blank(checkpoint, state), state)


@pytest.mark.parametrize("mode", ["", "tensors of inference", "saved and loaded in inference mode", "both"])
@pytest.mark.parametrize("size", [10, 200_000], ids=["small", "large"])
def test_conjugated_and_negated_views(checkpoint: Path, size: int, mode: str) -> None:
    """In inference mode torch's operators see such a view after it was conjugated or negated."""
    made, used = mode in ("tensors of inference", "both"), mode in ("saved and loaded in inference mode", "both")
    with torch.inference_mode(made):
        numbers = torch.randn(size, 3, dtype=torch.complex64)
        state = {"conj": numbers.conj(), "neg": numbers.conj().imag, "conj_t": numbers.conj().t(), "plain": numbers}
        target = {key: torch.zeros_like(value) for key, value in state.items()}
        target["conj"] = torch.zeros_like(numbers).conj()
        target["neg"] = torch.zeros_like(numbers).conj().imag
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    with torch.inference_mode(used):
        dcp_save(checkpoint, state)
        assert_same(load_blank(checkpoint, state), state)
        dcp_load(checkpoint, target)
        assert_same(target, state)
        vescale_ckpt.save(checkpoint, state)
        with torch.inference_mode(made or used):  # which may change tensors of inference
            for value in target.values():
                value.zero_()
        vescale_ckpt.load(checkpoint, target)
    assert_same(target, state)
    assert target["conj"].is_conj()
    assert target["neg"].is_neg()


def test_parameters_and_tensors_with_gradients(checkpoint: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(100, 100))
    state = {"parameter": parameter, "result": parameter * 2, "buffer": torch.nn.Buffer(torch.randn(3))}
    dcp_save(checkpoint, state)
    target: dict[str, Any] = {
        "parameter": torch.nn.Parameter(torch.zeros(100, 100)),
        "result": torch.zeros(100, 100),
        "buffer": torch.nn.Buffer(torch.zeros(3)),
    }
    pointer = target["parameter"].data_ptr()
    dcp_load(checkpoint, target)
    assert target["parameter"].data_ptr() == pointer
    assert target["parameter"].requires_grad
    for key, value in state.items():
        assert bits(target[key]) == bits(value), key


# --- Sizes around the borders that the engine cuts on, and addresses


@pytest.mark.parametrize("within_page", [0, 1, 64, 576, 4095])
def test_memory_anywhere_in_a_page(checkpoint: Path, within_page: int) -> None:
    values = random_tensor((5 * MiB + 123,), torch.uint8)
    state = {
        "small": torch.ones(3),
        "large": at_address(values, within_page),
        "next": at_address(values[:-1], within_page),
    }
    dcp_save(checkpoint, state)
    target = {
        "small": torch.zeros(3),
        "large": at_address(torch.zeros_like(values), within_page),
        "next": at_address(torch.zeros_like(values[:-1]), (within_page + 64) % 4096),
    }
    dcp_load(checkpoint, target)
    assert_same(target, state)


def test_snapshots_are_written_without_a_copy(tmp_path: Path) -> None:
    values = {"x": random_tensor((8 * MiB,), torch.uint8), "step": torch.tensor(1)}
    stats = vescale_ckpt.save(tmp_path, values, async_checkpoint=True).result(60)
    assert stats.in_place_bytes > 7 * MiB
    assert loads(tmp_path, values)


# --- Tensors without memory that could be read or written: an error or the right values, but never a crash


def _two(values: torch.Tensor) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(values, values.clone())


def _gathered(values: torch.Tensor) -> Any:
    from torch.distributed._functional_collectives import all_gather_tensor

    return all_gather_tensor(values, 0, dist.group.WORLD)


def _fake(_: torch.Tensor) -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(1000)


#: What is made of a thousand values, what a save of it gives, and what a load into it gives.
ODD: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[str, ...], tuple[str, ...]]] = {
    "plain subclass": (
        lambda values: values.as_subclass(type("Subclass", (torch.Tensor,), {})), ("right values",), ("right values",)
    ),
    # TwoTensor is not registered: stock refuses to load it, too.
    "wrapper subclass": (_two, ("UntrustedCheckpointError",), ("right values", "CheckpointError")),
    "freed storage": (lambda values: cut_storage(values), ("CheckpointError",), ("CheckpointError",)),
    "storage cut short": (lambda values: cut_storage(values, 16), ("CheckpointError",), ("CheckpointError",)),
    "collective in flight": (_gathered, ("right values",), ()),
    "zero tensor": (lambda _: torch._efficientzerotensor(1000), ("right values", "CheckpointError"), ()),
    "fake": (_fake, ("CheckpointError",), ()),
    "meta": (lambda values: values.to("meta"), ("CheckpointError", "NotImplementedError"), ()),
}  # fmt: skip


def _of_odd(path: str, kind: str, loads: bool) -> str:
    """What a save of such a tensor and a load of it give, or a load into one."""
    values = torch.zeros(1000) if kind == "zero tensor" else torch.arange(1000.0)
    saved: Any = values if loads else ODD[kind][0](values.clone())
    target: Any = ODD[kind][0](torch.zeros(1000)) if loads else torch.zeros(1000)
    try:
        dcp_save(path, {"before": torch.full((3000,), 7.0), "odd": saved})
        dcp_load(path, {"odd": target})
    except CheckpointException as error:
        raised = cause(error)
        return f"{type(raised).__name__}: {raised}"
    parts = (target.a, target.b) if kind == "wrapper subclass" and loads else (target.as_subclass(torch.Tensor),)
    return "right values" if all(bits(part) == bits(values) for part in parts) else f"wrong values: {parts[0][:3]}"


@pytest.mark.parametrize(
    ("kind", "loads"), [(kind, loads) for kind, found in ODD.items() for loads in (False, True) if found[1 + loads]]
)
def test_a_tensor_without_plain_memory(checkpoint: Path, kind: str, loads: bool) -> None:
    (outcome,) = run_ranks(1, _of_odd, str(checkpoint), kind, loads)
    assert outcome.startswith(ODD[kind][1 + loads]), outcome
