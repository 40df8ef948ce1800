"""Megatron-FSDP's uneven DTensors, whose local tensors tell DCP which rows they are: placements say other rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.ranks import on_ranks
from harness.saves import load_by, save_by
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

pytest.importorskip("megatron_fsdp", reason="megatron-fsdp")
pytestmark = pytest.mark.slow  # its import takes longer than the test

WHOLE = torch.arange(65.0).view(13, 5)
ROWS = {"strided": [4, 3, 2, 4], "shard order": [5, 1, 0, 7], "hybrid": [3, 4, 1, 5]}


def _sharded(mesh: DeviceMesh, zeros: bool = False) -> dict[str, DTensor]:
    """Cut first by the last dimension of the mesh, as tensor parallelism comes before FSDP."""
    made = {}
    (i, j) = mesh.get_coordinate()  # type: ignore[misc]
    for name, rows in ROWS.items():
        position = 2 * j + i
        start = sum(rows[:position])
        local = WHOLE[start : start + rows[position]].clone()
        first = _StridedShard(0, split_factor=2) if name == "strided" else Shard(0)
        made[name] = DTensor.from_local(
            local.zero_() if zeros else local,
            mesh,
            [first, Shard(0)],
            run_check=False,
            shape=WHOLE.shape,
            stride=(5, 1),
        )
    return made


@on_ranks(4)
def test_uneven_dtensors_are_stored_as_they_tell(tmp_path: Path) -> None:
    from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor as preprocess

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh._shard_order = [1, 0]  # type: ignore[attr-defined]  # the package's own attribute
    full = {name: WHOLE for name in ROWS}
    for saved_by in ("ours", "dcp.save", "safetensors", "stock"):
        target = tmp_path / saved_by
        save_by(saved_by, target, preprocess(_sharded(mesh)))
        for loaded_by in ("ours", "dcp.load", "stock"):
            if (saved_by, loaded_by) == ("safetensors", "stock"):
                continue
            resharded = {
                name: distribute_tensor(torch.zeros_like(value), mesh, [Replicate(), Shard(1)], src_data_rank=None)
                for name, value in full.items()
            }
            load_by(loaded_by, target, resharded)
            load_by(loaded_by, target, again := preprocess(_sharded(mesh, zeros=True)))
            for name, value in _sharded(mesh).items():
                assert torch.equal(resharded[name].full_tensor(), WHOLE), (saved_by, loaded_by, name)
                assert torch.equal(again[name]._local_tensor, value._local_tensor), (saved_by, loaded_by, name)
