"""Every optimizer of some packages: what `torch.save` and `load_state_dict` resume bit for bit, a load resumes, too."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.states import assert_same
from torch import nn

import vescale_ckpt

flashoptim: Any = pytest.importorskip("flashoptim")
prodigyopt: Any = pytest.importorskip("prodigyopt")
pytorch_optimizer: Any = pytest.importorskip("pytorch_optimizer")
schedulefree: Any = pytest.importorskip("schedulefree")
OPTIMIZERS: dict[str, Any] = pytorch_optimizer.optimizer.OPTIMIZERS

Make = Callable[[nn.Module], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 32)
        self.unused = nn.Linear(2, 2)
        self.table = nn.Embedding(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).relu())  # type: ignore[no-any-return]


def _around(kind: Any) -> Make:
    return lambda model: kind(torch.optim.AdamW(model.parameters(), lr=0.01))


def _of_matrices(kind: Any) -> Make:
    return lambda model: kind([p for p in model.parameters() if p.ndim == 2])


def _with_muon(kind: Any) -> Make:
    """Muon for the matrices, AdamW for everything else."""

    def make(model: nn.Module) -> Any:
        parameters = list(model.parameters())
        return kind(
            [{"params": [p for p in parameters if (p.ndim == 2) is muon], "use_muon": muon} for muon in (True, False)]
        )

    return make


def _zoo() -> dict[str, Make]:
    """{package.class: how it is made for a model} of all classes that the packages name."""
    special: dict[Any, Make] = {
        OPTIMIZERS["bsam"]: lambda model: OPTIMIZERS["bsam"](model.parameters(), num_data=7),
        OPTIMIZERS["magma"]: _around(OPTIMIZERS["magma"]),
        OPTIMIZERS["ranger21"]: lambda model: OPTIMIZERS["ranger21"](model.parameters(), num_iterations=10),
        torch.optim.Muon: _of_matrices(torch.optim.Muon),
        OPTIMIZERS["spectralsphere"]: _of_matrices(OPTIMIZERS["spectralsphere"]),
        torch.optim.SparseAdam: lambda model: torch.optim.SparseAdam(model.table.parameters()),
    }
    special |= {kind: _with_muon(kind) for name, kind in OPTIMIZERS.items() if "muon" in name or name == "adago"}
    special |= {
        kind: partial(
            lambda kind, model: kind(model.parameters(), quantize=False, master_weight_bits=None, fused=False), kind
        )
        for name, kind in vars(flashoptim).items()
        if name.startswith("Flash")
    }
    special |= {OPTIMIZERS[name]: OPTIMIZERS[name] for name in ("adalomo", "adammini", "lomo")}
    special |= {getattr(schedulefree, f"ScheduleFreeWrapper{end}"): None for end in ("", "Reference")}
    wrappers = ("Lookahead", "OrthoGrad", "PCGrad", "ScheduleFreeWrapper", "TRAC")
    special |= {getattr(pytorch_optimizer, name): None for name in wrappers}
    special |= {kind: _around(kind) for kind, make in special.items() if make is None}
    for name in ("SAM", "FriendlySAM", "LookSAM"):
        kind = getattr(pytorch_optimizer, name)
        special[kind] = partial(lambda kind, model: kind(model.parameters(), torch.optim.AdamW), kind)
    special[pytorch_optimizer.WSAM] = lambda model: pytorch_optimizer.WSAM(model, model.parameters(), torch.optim.AdamW)
    packages = {
        "pytorch_optimizer": [*OPTIMIZERS.values(), *special],
        "torch.optim": vars(torch.optim).values(),
        "schedulefree": vars(schedulefree).values(),
        "prodigyopt": vars(prodigyopt).values(),
        "flashoptim": vars(flashoptim).values(),
    }
    return {
        f"{package}.{kind.__name__}": special.get(kind) or partial(lambda kind, model: kind(model.parameters()), kind)
        for package, kinds in packages.items()
        for kind in kinds
        if isinstance(kind, type)
        and kind.__module__.startswith(package)
        and hasattr(kind, "load_state_dict")
        and kind not in (torch.optim.Optimizer, flashoptim.FlashOptimizer)
    }


ZOO = _zoo()


def train(model: Any, optimizer: Any, steps: int) -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    name = type(optimizer).__name__
    for _ in range(steps):
        x = torch.randn(7, 6, dtype=model.first.weight.dtype)
        sparse = isinstance(optimizer, torch.optim.SparseAdam)

        def losses(x: torch.Tensor = x, sparse: bool = sparse) -> list[torch.Tensor]:
            y = nn.functional.embedding(torch.tensor([1, 3]), model.table.weight, sparse=True) if sparse else model(x)
            return [y.square().mean(), y.abs().mean()]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = losses()[0]
            loss.backward(create_graph=name in ("AdaHessian", "SophiaH"))
            return loss

        if hasattr(optimizer, "fused_backward"):
            optimizer.fused_backward(losses()[0], lr=0.01)
        elif hasattr(optimizer, "pc_backward"):
            optimizer.zero_grad()
            optimizer.pc_backward(losses())
            optimizer.step()
        else:
            closure()
            optimizer.step(closure)


def made(make: Make, dtype: torch.dtype, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = Net().to(dtype)
    optimizer = make(model)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return model, optimizer


def outcome(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})


def dense(value: Any) -> Any:
    """The state with tensors in row-major order: checkpoints of DCP keep no strides."""
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    if isinstance(value, dict):
        return {name: dense(each) for name, each in value.items()}
    return [dense(each) for each in value] if type(value) is list else value


def difference(resume: Callable[..., tuple[nn.Module, Any]], *how: Any, expected: Any) -> str:
    """How model and optimizer differ from the expected ones right after the load, and two steps later."""
    try:
        model, optimizer = resume(*how)
        loaded = outcome(model, optimizer)
        train(model, optimizer, 2)
        assert_same((loaded, outcome(model, optimizer)), expected)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_what_torch_resumes_is_resumed(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """With its model and alone, into an optimizer that is fresh and one that has stepped."""
    try:
        model, optimizer = made(ZOO[name], dtype, 1)
        train(model, optimizer, 3)
    except Exception as error:
        pytest.skip(f"does not train here: {type(error).__name__}: {error}")
    saved = outcome(model, optimizer)
    torch.save(dense(saved), tmp_path / "saved.pt")
    vescale_ckpt.save(tmp_path / "named", {"model": model, "optimizer": optimizer})
    vescale_ckpt.save(tmp_path / "alone", {"optimizer": optimizer})
    train(model, optimizer, 2)
    expected = saved, outcome(model, optimizer)

    def resumed(steps: int, form: str) -> tuple[nn.Module, Any]:
        model, optimizer = made(ZOO[name], dtype, 2)
        train(model, optimizer, steps)
        if form == "named":
            state = {"model": model, "optimizer": optimizer}
            vescale_ckpt.load(tmp_path / form, state, weights_only=False)
            return model, optimizer
        model.load_state_dict(saved["model"])
        if form == "alone":
            vescale_ckpt.load(tmp_path / form, {"optimizer": optimizer}, weights_only=False)
        else:
            optimizer.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=False)["optimizer"])
        return model, optimizer

    differences = {
        (steps, form): difference(resumed, steps, form, expected=expected)
        for steps in (0, 1)
        for form in ("torch", "named", "alone")
    }
    worse = {how: text for how, text in differences.items() if text and not differences[how[0], "torch"]}
    assert not worse
