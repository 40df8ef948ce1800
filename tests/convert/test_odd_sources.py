"""Conversions of sources that lie, are damaged, or do not lie in their files as those of torch do."""

from __future__ import annotations

import contextlib
import json
import os
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.children import in_child
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt import CheckpointError, convert, safetensors
from vescale_ckpt._checkpoint import torch_checkpoint


def test_conversions_take_for_a_model_what_loads_do(tmp_path: Path) -> None:
    made = tmp_path / "made.safetensors"
    part = tmp_path / "part"
    part.mkdir()
    safetensors.save_file({"a": torch.ones(2)}, part / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="did not finish"):
        convert(part, made, format="safetensors")
    boxes = tmp_path / "boxes"
    boxes.mkdir()
    whole = torch.arange(12.0).view(3, 4)
    for number, box in enumerate(whole.split([1, 3], 1)):
        texts = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0, number]}})}
        name = boxes / f"shard-0000{number + 1}-model-00001-of-00001.safetensors"
        safetensors.save_file({"a": box.contiguous()}, name, texts)
    convert(boxes, made, format="safetensors")
    assert safetensors.load_file(made)["a"].equal(whole)
    os.unlink(boxes / "shard-00001-model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match="not hold all"):
        convert(boxes, made, format="safetensors", overwrite=True)
    assert safetensors.load_file(made)["a"].equal(whole)


def _zip_again(source: Path, target: Path, method: int, changed: dict[str, bytes]) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, changed.get(name.partition("/")[2], old.read(name)))


def test_files_of_torch_that_do_not_lie_as_here(tmp_path: Path) -> None:
    made = tmp_path / "made.safetensors"
    torch.save({"a": torch.arange(6.0)}, tmp_path / "a.pt")
    _zip_again(tmp_path / "a.pt", tmp_path / "big.pt", zipfile.ZIP_STORED, {"byteorder": b"big"})
    with pytest.raises(CheckpointError, match="big-endian"):
        convert(tmp_path / "big.pt", made, format="safetensors")
    _zip_again(tmp_path / "a.pt", tmp_path / "small.pt", zipfile.ZIP_DEFLATED, {})
    with pytest.raises(CheckpointError, match="compressed"):
        convert(tmp_path / "small.pt", made, format="safetensors")
    assert not made.exists()


def test_any_damage_of_an_archive_is_told_as_such(tmp_path: Path) -> None:
    rng = random.Random(5)
    torch.save({"a": torch.arange(500.0), "b": torch.ones(3, 4)}, tmp_path / "a.pt")
    sound = (tmp_path / "a.pt").read_bytes()
    convert(tmp_path / "a.pt", tmp_path / "whole.safetensors", format="safetensors")
    expected = safetensors.load_file(tmp_path / "whole.safetensors")
    for _ in range(50):
        damaged = bytearray(sound)
        for _ in range(rng.choice([1, 1, 8])):
            damaged[rng.randrange(len(sound))] = rng.randrange(256)
        (tmp_path / "b.pt").write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            convert(tmp_path / "b.pt", tmp_path / "b.safetensors", format="safetensors", overwrite=True)
            found = safetensors.load_file(tmp_path / "b.safetensors")
            assert all(value.equal(expected.get(name, value)) for name, value in found.items())


@pytest.mark.parametrize(("held", "name"), [("tensor", "narrowed"), ("object", "verify_entry")])
def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str, name: str
) -> None:
    """It was found whole and sound before. An access to its memory would end the process."""
    source, values = tmp_path / "a.pt", torch.arange(float(1 << 18))
    torch.save({"a": values if held == "tensor" else ("text", values)}, source)
    call = getattr(torch_checkpoint, name)

    def cut_short(*arguments: Any) -> Any:
        found = call(*arguments)
        os.truncate(source, 4096)
        return found

    monkeypatch.setattr(torch_checkpoint, name, cut_short)

    def converted() -> str:
        with pytest.raises(CheckpointError) as caught:
            convert(source, tmp_path / "made", format="dcp")
        return str(caught.value)

    assert str(source) in in_child(converted).value


def test_tensors_of_any_strides_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_checkpoint, "_READ_BYTES", 100)
    base = torch.arange(7.0 * 6 * 5).to(torch.complex64).view(7, 6, 5)
    base = base + 1j * base.flip(0)
    values = {
        "whole": base,
        "transposed": base.permute(2, 0, 1),
        "window": base[1:6:2, 2:, ::2],
        "expanded": base[2:3].expand(3, 6, 5),
        "conjugate": base.conj()[:, 1:],
        "negated": torch._neg_view(torch.arange(7.0))[1:],
        "one": base[3, 2, 1],
        "none": base[:0],
    }
    torch.save({**values, "object": (base[1].t(), "text")}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "made", format="dcp")
    found = {**{key: torch.zeros_like(value.resolve_conj()) for key, value in values.items()}, "object": None}
    vescale_ckpt.load(tmp_path / "made", found)
    for key, value in values.items():
        assert found[key].equal(value.resolve_conj().resolve_neg()), key
    assert found["object"][0].equal(base[1].t()) and found["object"][1] == "text"


def _shards(folder: Path) -> Iterator[dict[str, Any]]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        yield {"DTensor": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])}
        yield {"ShardedTensor": sharded_tensor.ones(ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 2)}
    finally:
        dist.destroy_process_group()


def test_files_that_torch_refuses_are_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.pt"
    for values in _shards(tmp_path):
        torch.save(values, path)
        kind = next(iter(values))
        for open_it in (lambda: convert(path, tmp_path / "out", format="dcp"), lambda: vescale_ckpt.inspect(path)):
            with pytest.raises(
                CheckpointError, match=rf"rank_0\.pt holds a {kind}.*incomplete.*vescale_ckpt\.save"
            ) as e:
                open_it()
            assert type(e.value) is CheckpointError
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    with pytest.raises(CheckpointError, match="is whole, but torch") as error:
        convert(path, tmp_path / "out", format="dcp")
    assert type(error.value) is CheckpointError
    torch.save({"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, path)
    with pytest.raises(CheckpointError, match="a: a Tensor"):
        convert(path, tmp_path / "out", format="dcp")
