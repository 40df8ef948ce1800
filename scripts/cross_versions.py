"""Saves a state under each of several versions of torch, and loads every checkpoint under each, ours and stock's.

Usage: python scripts/cross_versions.py PYTHON [PYTHON ...]

Each PYTHON is an interpreter beside its torch; this package is the installed one, or that of PYTHONPATH. Prints a
table. A load that gives other values than were saved, and a load of ours that fails, make the exit status 1. A
failure of stock's is reported only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

READERS = ("ours, dcp.load", "ours, load", "ours, load without a state", "stock, dcp.load")
WRITERS = (
    "ours, dcp.save",
    "ours, save",
    "ours, async_save",
    "ours, safetensors",
    "stock, dcp.save",
    "stock, async_save",
)
# What DCP's own reader of safetensors knows.
_HF_DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


def state(fill: int) -> dict[str, Any]:
    """Tensors of all dtypes and layouts, DTensors, objects, nested; the same under each torch. With `fill=0` the values
    are others, to be loaded into."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def tensor(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made = torch.zeros(shape, dtype=dtype)
        if fill and made.numel():
            pattern = (torch.arange(made.nbytes) * 37 + sum(map(ord, name)) * fill) % 251
            made.untyped_storage().copy_((pattern % 2 if dtype == torch.bool else pattern).byte().untyped_storage())
        return made

    names = (
        "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex32 complex64"
    )
    names += " complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    mesh = init_device_mesh("cpu", (1,))
    moments = {
        index: {"step": torch.tensor(7.0 * fill), "exp_avg": tensor(f"m{index}", 6, 5), "exp_avg_sq": tensor("v", 6, 5)}
        for index in range(2)
    }
    return {
        "dtypes": {name: tensor(name, 3, 7, dtype=getattr(torch, name)) for name in names.split()},
        "shapes": {"scalar": tensor("s"), "empty": tensor("e", 0, 4), "one": tensor("1", 1)},
        "layouts": {"transposed": tensor("t", 8, 5).t(), "part": tensor("p", 40, 9)[3:30, 2:7]},
        "large": tensor("large", 300, 257),
        "distributed": {
            "rows": distribute_tensor(tensor("rows", 10, 6), mesh, [Shard(0)]),
            "columns": distribute_tensor(tensor("columns", 10, 6), mesh, [Shard(1)]),
            "replicated": distribute_tensor(tensor("replicated", 4), mesh, [Replicate()]),
        },
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.5 * fill, "betas": (0.9, fill), "params": [0, 1]}]},
        "objects": {
            "number": 3 * fill, "text": "ä" * fill, "list": [1, [fill, None], {"k": fill}], "true": bool(fill),
            "bytes": b"\0\xff" * fill, "ordered": OrderedDict(b=fill, a=2), "tuple": (fill, 2.5),
        },
    }  # fmt: skip


def tensors_only(of: dict[str, Any]) -> dict[str, Any]:
    """What a safetensors file holds."""
    import torch
    from torch.distributed.tensor import DTensor

    def flat(value: Any, key: str) -> dict[str, Any]:
        if isinstance(value, dict):
            return {name: leaf for k, v in value.items() for name, leaf in flat(v, f"{key}.{k}".lstrip(".")).items()}
        return {key: value} if isinstance(value, torch.Tensor | DTensor) else {}

    found = flat(of, "")
    return {key: value for key, value in found.items() if not (key.startswith("dtypes.") and key[7:] not in _HF_DTYPES)}


def differing(found: Any, wanted: Any, path: str = "") -> list[str]:
    import torch
    from torch.distributed.tensor import DTensor

    if isinstance(wanted, dict):
        if not isinstance(found, dict) or {str(key) for key in found} != {str(key) for key in wanted}:
            return [path]
        by_text = {str(key): value for key, value in found.items()}
        return [at for key, value in wanted.items() for at in differing(by_text[str(key)], value, f"{path}.{key}")]
    if isinstance(wanted, list | tuple) and any(isinstance(value, dict | torch.Tensor) for value in wanted):
        if type(found) is not type(wanted) or len(found) != len(wanted):
            return [path]
        return [at for i, value in enumerate(wanted) for at in differing(found[i], value, f"{path}.{i}")]
    if isinstance(wanted, torch.Tensor):
        if isinstance(wanted, DTensor):
            wanted = wanted.to_local()
        if isinstance(found, DTensor):
            found = found.to_local()
        same = isinstance(found, torch.Tensor) and found.dtype == wanted.dtype and found.shape == wanted.shape
        if same and wanted.numel():
            same = torch.equal(*(of.detach().contiguous().view(-1).view(torch.uint8) for of in (found, wanted)))
        return [] if same else [path]
    return [] if found == wanted and type(found) is type(wanted) else [path]


def write(to: Path) -> None:
    import torch.distributed.checkpoint as dcp

    import vescale_ckpt

    def ours(path: Path) -> dict[str, Any]:
        return {"storage_writer": vescale_ckpt.StorageWriter(path), "planner": vescale_ckpt.SavePlanner()}

    made = state(1)
    dcp.save(made, **ours(to / WRITERS[0]))
    vescale_ckpt.save(to / WRITERS[1], made)
    vescale_ckpt.save(to / WRITERS[2], made, async_checkpoint=True).result()
    vescale_ckpt.save(to / WRITERS[3], tensors_only(made), format="safetensors")
    dcp.save(made, checkpoint_id=to / WRITERS[4])
    dcp.async_save(made, checkpoint_id=to / WRITERS[5]).result()


def read(of: Path, reader: str) -> list[str]:
    import torch.distributed.checkpoint as dcp

    import vescale_ckpt

    safetensors = of.name == WRITERS[3]
    wanted, target = state(1), state(0)
    if safetensors:
        wanted, target = tensors_only(wanted), tensors_only(target)
    if reader == READERS[0]:
        dcp.load(target, storage_reader=vescale_ckpt.StorageReader(of), planner=vescale_ckpt.LoadPlanner())
    elif reader == READERS[1]:
        vescale_ckpt.load(of, target)
    elif reader == READERS[2]:
        target = vescale_ckpt.load(of)
    elif safetensors:
        dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(of)))
    else:
        dcp.load(target, checkpoint_id=of)
    return differing(target, wanted)


def in_one_version(task: str, folder: Path) -> None:
    """Writes all checkpoints into the folder, or reads those in each of its folders and prints what came out."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if task == "write":
        version = torch.__version__.split("+")[0]
        write(folder / version)
        print(version)
    else:
        outcomes = {}
        for checkpoint in sorted(folder.glob("*/*")):
            for reader in READERS:
                try:
                    found = read(checkpoint, reader)
                    said = f"other values: {', '.join(found)}" if found else ""
                except BaseException as error:
                    said = str(error).strip().splitlines()[-1][:300]
                outcomes[f"{checkpoint.parent.name}/{checkpoint.name}/{reader}"] = said
        print(json.dumps(outcomes))
    dist.destroy_process_group()


def run(python: str, task: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [python, __file__, task, str(folder)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip().splitlines()[-1]


def main(pythons: list[str]) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        versions = {python: run(python, "write", folder) for python in pythons}
        outcomes = {version: json.loads(run(python, "read", folder)) for python, version in versions.items()}
    failed, notes = 0, []
    print("| written under | by | " + " | ".join(f"read under {version}" for version in outcomes) + " |")
    print("|---|---|" + "---|" * len(outcomes))
    for written in versions.values():
        for writer in WRITERS:
            cells = []
            for reading, said in outcomes.items():
                bad = {reader: said[f"{written}/{writer}/{reader}"] for reader in READERS}
                bad = {reader: why for reader, why in bad.items() if why}
                cells.append("all read it" if not bad else f"not by: {'; '.join(bad)}")
                for reader, why in bad.items():
                    failed += reader.startswith("ours") or why.startswith("other values")
                    notes.append(f"- {writer} of {written}, read by {reader} under {reading}: {why}")
            print(f"| {written} | {writer} | " + " | ".join(cells) + " |")
    print("", *notes, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("write", "read"):
        in_one_version(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
