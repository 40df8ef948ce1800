"""Fingerprints that the kernel takes on a CUDA device are those of the host's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vescale_ckpt
from vescale_ckpt._engine import _C

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GiB = 1 << 30


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device="cuda", generator=generator)


def expect_as_on_the_host(state: dict[str, Any]) -> None:
    on_device = vescale_ckpt.fingerprint(state)
    on_host = vescale_ckpt.fingerprint({key: value.cpu() for key, value in state.items()})
    assert on_device == on_host, on_device - on_host
    assert not any("wrong" in note for note in _C.device_notes())


def test_the_kernel_reads_tensors_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    if not _C.device_info()["kernel_built"]:
        pytest.skip("the engine was built without kernels")
    state = {"w": random_bytes(10_000_000), "v": torch.randn(999, 1001, device="cuda")[:, 1:1000]}
    expected = vescale_ckpt.fingerprint({key: value.cpu() for key, value in state.items()})
    monkeypatch.setattr(torch.Tensor, "to", None)  # by which torch's copies go
    assert vescale_ckpt.fingerprint(state) == expected


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_of_all_dtypes(dtype: torch.dtype) -> None:
    value = torch.randn(517, 303, device="cuda").mul(10).to(dtype)
    expect_as_on_the_host({"w": value, "rows": value[13:200], "columns": value[:, 7:290], "turned": value.t()})


def test_of_every_size_and_alignment() -> None:
    data = random_bytes(804)
    expect_as_on_the_host({f"{at} {size}": data[at : at + size] for at in range(4) for size in range(1, 801)})


def test_of_views() -> None:
    value = torch.randn(64, 50, 700, device="cuda")
    views = {
        "cut": value[1:, 3:40, 100:600],
        "every second": value[::2],
        "inner": value[..., ::3],
        "permuted": value.permute(2, 0, 1),
        "expanded": value[0, 0].expand(30, 700),
        "negated": torch._neg_view(value),
        "conjugate": torch.complex(value, value).conj(),
        "scalar": value[3, 4, 5],
        "empty": value[:0],
    }
    expect_as_on_the_host(views)


def shard(whole: torch.Tensor, offset: tuple[int, ...]) -> torch.Tensor:
    """All from an offset on, which says so as torch's `CheckpointableTensor`s do."""
    part = whole[tuple(slice(at, None) for at in offset)].clone()
    part.global_shape, part.global_offsets = whole.shape, [offset]  # type: ignore[attr-defined]
    part.local_offsets, part.local_sizes = [(0,) * whole.dim()], [tuple(part.shape)]  # type: ignore[attr-defined]
    return part


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_of_shards(dim: int) -> None:
    whole = torch.randn(31, 40, 701, device="cuda")
    for cut in (1, 13, 29):
        offset = tuple(cut if at == dim else 0 for at in range(3))
        found = [vescale_ckpt.fingerprint({"w": shard(of, offset)}) for of in (whole, whole.cpu())]
        assert found[0] == found[1]


def test_of_20_000_small_tensors() -> None:
    data = random_bytes(64 << 20)
    expect_as_on_the_host({f"{i:05}": data[i * 3000 : i * 3000 + 1 + i % 9001] for i in range(20_000)})


def test_of_a_gibibyte() -> None:
    expect_as_on_the_host(
        {"w": random_bytes(GiB + 12_345)[3:], "ones": torch.full((GiB,), 255, dtype=torch.uint8, device="cuda")}
    )


def test_after_what_the_current_stream_has_queued(tmp_path: Path) -> None:
    expected = vescale_ckpt.fingerprint({"w": torch.ones(10_000_000)})
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            value = torch.zeros(10_000_000, device="cuda")
            torch.cuda._sleep(200_000_000)  # cycles
            value.fill_(1)
            assert vescale_ckpt.fingerprint({"w": value}) == expected
    vescale_ckpt.save(tmp_path, {"w": value}, fingerprint=True)
    assert vescale_ckpt.prove(tmp_path, {"w": value})
