"""Saves a state as FOLDER/NAME, and loads what other processors saved there, for scripts/test_arm.sh."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import vescale_ckpt
from vescale_ckpt import safetensors


def tensors() -> dict[str, torch.Tensor]:
    """The same on every processor: whole numbers, which each dtype holds."""
    whole = torch.arange(3 * 2**20)
    return {
        "float32": (whole % 2**20).float().view(3, -1),
        "bfloat16": (whole % 127).bfloat16(),
        "int64": whole * 2**33,
        "bool": whole % 3 == 0,
        "scalar": torch.tensor(-1.5, dtype=torch.float64),
        "transposed": (whole[:6000] % 100).to(torch.int16).view(60, 100).t(),
        "empty": torch.empty(0, 4),
    }


def check(found: dict[str, torch.Tensor], what: str) -> None:
    for name, value in tensors().items():
        assert torch.equal(found[name], value), f"{what}: {name} differs"


def main(folder: Path, own_name: str) -> None:
    others = sorted(folder.iterdir())
    own = folder / own_name
    state = {"model": tensors(), "step": 12}
    vescale_ckpt.save(own / "ours", state)
    dcp.save(state, checkpoint_id=own / "dcp", no_dist=True)
    safetensors.save_file({name: value.contiguous() for name, value in tensors().items()}, own / "model.safetensors")
    for one in [*others, own]:
        for kind in ("ours", "dcp"):
            for load in (vescale_ckpt.load, lambda path, into: dcp.load(into, checkpoint_id=path, no_dist=True)):
                into = {"model": {name: torch.zeros_like(value) for name, value in tensors().items()}, "step": 0}
                load(one / kind, into)
                check(into["model"], f"{one.name}/{kind}")
                assert into["step"] == 12, into["step"]
        check(safetensors.load_file(one / "model.safetensors"), f"{one.name}/model.safetensors")
        assert (one / "model.safetensors").read_bytes() == (own / "model.safetensors").read_bytes()
        assert vescale_ckpt.verify(one / "ours").ok
    loaded = ", ".join(one.name for one in [*others, own])
    print(f"{platform.machine()}, torch {torch.__version__}: saved {own_name}, loaded {loaded}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
