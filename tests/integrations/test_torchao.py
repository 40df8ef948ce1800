"""Checkpoints of torchao's tensors: optimizers of 8 and 4 bits, float8 with FSDP2, quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

pytest.importorskip("torchao")

from harness.ranks import run_ranks
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_

import vescale_ckpt

pytestmark = pytest.mark.slow
OPTIMIZERS = {"8bit": AdamW8bit, "4bit": AdamW4bit, "fp8": partial(AdamWFp8, block_size=256)}


def bits(value: Any) -> Any:
    """A tensor's class and bytes, of a wrapper those of its inner tensors."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if not hasattr(value, "__tensor_flatten__"):
        plain = value.detach().contiguous()
        return type(plain).__name__, plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    names, _ = value.__tensor_flatten__()
    return type(value).__name__, {name: bits(getattr(value, name)) for name in names}


def bits_of(state: dict[str, Any]) -> dict[str, Any]:
    """The same of all tensors of a nested state."""
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found[key] = bits_of(value)
        elif isinstance(value, torch.Tensor):
            found[key] = bits(value)
    return found


def weights(configuration: Any, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    layer = nn.Linear(128, 256, bias=False, dtype=torch.bfloat16)
    quantize_(layer, configuration)
    return layer.weight.detach()


def made(seed: int, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return make(torch.randn(256, 128, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(seed)))


WEIGHTS: dict[str, Callable[[int], torch.Tensor]] = {
    "int8": partial(weights, Int8WeightOnlyConfig()),
    "int4": partial(weights, IntxWeightOnlyConfig(torch.int4)),
    "float8": partial(weights, Float8WeightOnlyConfig()),
    "mxfp8": lambda seed: made(seed, lambda values: MXTensor.to_mx(values, torch.float8_e4m3fn, 32)),
    "nvfp4": lambda seed: made(seed, NVFP4Tensor.to_nvfp4),
}


def save(writer: str, path: Path, state: dict[str, Any], **options: Any) -> None:
    vescale_ckpt.save(path, state) if writer == "ours" else dcp.save(state, checkpoint_id=path, **options)


def load(reader: str, path: Path, state: dict[str, Any], **options: Any) -> None:
    vescale_ckpt.load(path, state) if reader == "ours" else dcp.load(state, checkpoint_id=path, **options)


@pytest.mark.parametrize(("writer", "reader"), [("ours", "ours"), ("ours", "stock"), ("stock", "ours")])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_quantized_weights(tmp_path: Path, kind: str, writer: str, reader: str) -> None:
    given, target = WEIGHTS[kind](0), WEIGHTS[kind](1)
    assert bits(target) != bits(given)
    if kind == "int4" and writer == "stock":
        pytest.skip("stock DCP asks it is_pinned, which it does not have")
    save(writer, tmp_path / "1", {"w": given}, no_dist=True)
    load(reader, tmp_path / "1", {"w": target}, no_dist=True)
    assert bits(target) == bits(given)
    assert vescale_ckpt.verify(tmp_path / "1").ok
    assert torch.equal(vescale_ckpt.load(tmp_path / "1")["w"], given.dequantize())  # type: ignore[no-untyped-call]
    vescale_ckpt.convert(tmp_path / "1", tmp_path / "out", format="safetensors")
    assert torch.equal(vescale_ckpt.load(tmp_path / "out")["w"], given.dequantize())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", WEIGHTS)
def test_quantized_weights_are_proved(tmp_path: Path, kind: str) -> None:
    target = WEIGHTS[kind](1)
    vescale_ckpt.save(tmp_path / "1", {"w": WEIGHTS[kind](0)}, fingerprint=True)
    assert vescale_ckpt.prove(tmp_path / "1", {"w": target}, strict=False).different.keys() == {"w"}
    vescale_ckpt.load(tmp_path / "1", {"w": target})
    assert vescale_ckpt.prove(tmp_path / "1", {"w": target})


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, dtype=dtype), nn.Tanh(), nn.Linear(128, 64, dtype=dtype))


def trained(kind: str, dtype: torch.dtype, steps: int) -> tuple[nn.Module, Any]:
    model = model_of(dtype)
    if dist.get_world_size() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer: Any = OPTIMIZERS[kind](model.parameters(), lr=0.01)
    step(model, optimizer, steps)
    return model, optimizer


def step(model: nn.Module, optimizer: Any, steps: int) -> None:
    torch.compiler.set_stance("force_eager")  # compiling takes minutes, and a compiler
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 256, generator=generator).to(dtype)).square().mean().backward()
        optimizer.step()


def _train_and_save(path: str, kind: str, dtype: torch.dtype, writer: str) -> Any:
    model, optimizer = trained(kind, dtype, 3)
    if writer == "ours":
        vescale_ckpt.save(path, {"model": model, "optimizer": optimizer})
    else:
        dcp.save(
            {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path
        )
    return bits_of(get_optimizer_state_dict(model, optimizer)["state"])  # type: ignore[arg-type]


def _load_and_look(path: str, kind: str, dtype: torch.dtype, reader: str, steps: int) -> Any:
    model, optimizer = trained(kind, dtype, steps)
    if reader == "ours":
        vescale_ckpt.load(path, {"model": model, "optimizer": optimizer})
    else:
        loading: Any = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(loading, checkpoint_id=path)
        set_optimizer_state_dict(model, optimizer, loading["optimizer"])
    return bits_of(get_optimizer_state_dict(model, optimizer)["state"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("writer", "reader", "steps"),
    [("ours", "ours", 0), ("ours", "ours", 1), ("ours", "stock", 1), ("stock", "ours", 1)],
)
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (1, torch.bfloat16)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers(
    tmp_path: Path, kind: str, ranks: int, dtype: torch.dtype, writer: str, reader: str, steps: int
) -> None:
    """Under FSDP2 with two ranks. Without compilation torch fails there with bfloat16."""
    expected = run_ranks(ranks, _train_and_save, str(tmp_path), kind, dtype, writer)
    assert "OptimState" in str(expected)[:10_000]
    assert run_ranks(ranks, _load_and_look, str(tmp_path), kind, dtype, reader, steps) == expected
    assert vescale_ckpt.verify(tmp_path).ok


def _resume_and_prove(path: str, kind: str) -> Any:
    def state(steps: int) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), trained(kind, torch.float32, steps), strict=True))

    with vescale_ckpt.CheckpointManager(path, prove=True) as manager:
        manager.save(3, state(3))
    resumed = state(1)
    with vescale_ckpt.CheckpointManager(path, prove=True) as manager:
        assert manager.restore(resumed) == 3
    step(resumed["model"], resumed["optimizer"], 1)
    return list(vescale_ckpt.prove(f"{path}/step-3", resumed, strict=False).different)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_optimizer_is_proved(tmp_path: Path, kind: str) -> None:
    different = run_ranks(1, _resume_and_prove, str(tmp_path), kind)[0]
    assert {"model.0.weight", "optimizer.state.0.weight.exp_avg"} <= set(different)


def _gather_state(path: str, kind: str) -> Any:
    """The bits of the values of the optimizer's state, after a load on another number of ranks."""
    model, optimizer = trained(kind, torch.float32, 1)
    vescale_ckpt.load(path, {"model": model, "optimizer": optimizer})
    found = {}
    for name, values in get_optimizer_state_dict(model, optimizer)["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            local = values[key].to_local() if isinstance(values[key], DTensor) else values[key]
            found[f"{name}.{key}"] = (local.dequantize() if hasattr(local, "dequantize") else local).numpy()
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_on_other_numbers_of_ranks(tmp_path: Path, kind: str) -> None:
    """Rows of all ranks put together are those that were saved."""
    run_ranks(2, _train_and_save, str(tmp_path), kind, torch.float32, "ours")
    (expected,) = run_ranks(1, _gather_state, str(tmp_path), kind)
    for ranks in (2, 4):
        parts = run_ranks(ranks, _gather_state, str(tmp_path), kind)
        for key, value in expected.items():
            assert numpy.array_equal(numpy.concatenate([part[key] for part in parts]), value), key


def _float8_model() -> nn.Module:
    """All-gathers in float8: the shards are wrappers."""
    model = convert_to_float8_training(model_of(), config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _save_float8(path: str, writer: str) -> None:
    model = _float8_model()
    local = model[0].weight.to_local()  # type: ignore[index]
    assert type(local).__name__ == "WeightWithDynamicFloat8CastTensor"
    save(writer, Path(path), {"model": model.state_dict()})


def _load_float8(path: str, reader: str) -> bool:
    model, expected = _float8_model(), _float8_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict()}
    assert bits_of(state) != bits_of({"model": expected.state_dict()})
    load(reader, Path(path), state)
    return bits_of(state) == bits_of({"model": expected.state_dict()})


@pytest.mark.parametrize(("writer", "reader"), [("ours", "ours"), ("ours", "stock"), ("stock", "ours")])
def test_float8_all_gathers_of_fsdp2(tmp_path: Path, writer: str, reader: str) -> None:
    run_ranks(2, _save_float8, str(tmp_path), writer)
    for ranks in (2, 4):
        assert run_ranks(ranks, _load_float8, str(tmp_path), reader) == [True] * ranks
    plain = model_of()
    vescale_ckpt.load(tmp_path, {"model": plain})
    assert all(map(torch.equal, plain.parameters(), model_of().parameters()))
