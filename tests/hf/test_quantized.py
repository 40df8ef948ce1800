"""Quantised models: loads and conversions make the values that stock readers make, and never leave scales out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch as stock_torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import run_ranks
from harness.saves import cause
from harness.states import assert_same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt import CheckpointError, IncompatibleStateError, LoadPlanner, StorageReader
from vescale_ckpt._checkpoint import quantized_tensors


class OtherPlanner(LoadPlanner):
    """Gives its items one by one."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return super().resolve_tensor(read_item)


State = dict[str, torch.Tensor]

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


def written(folder: Path, state: State, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    stock_torch.save_file(state, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": "any", "quantization_config": config}))
    return folder


# --- Scales of no known scheme


def scaled(suffix: str) -> State:
    weight = torch.arange(64, dtype=torch.float32).view(8, 8).to(torch.float8_e4m3fn)
    return {"a.weight": weight, f"a.weight{suffix}": torch.full((1, 1), 3.0), "a.bias": torch.ones(8)}


@pytest.mark.parametrize("suffix", ["_scale_of_mine", "_scale", "_scale_inv"])
def test_a_cast_never_leaves_scales_out(tmp_path: Path, suffix: str) -> None:
    state = scaled(suffix)
    folder = written(tmp_path / "model", state)
    target = {"a.weight": torch.zeros(8, 8, dtype=torch.bfloat16)}
    if suffix == "_scale_of_mine":  # fp8 without scales is a dtype as others
        vescale_ckpt.load(folder, target, allow_cast=True)
        assert_same(target["a.weight"], state["a.weight"].to(torch.bfloat16))
        return
    for load in (
        lambda: vescale_ckpt.load(folder, target, allow_cast=True),
        lambda: vescale_ckpt.convert(folder, tmp_path / "out", format="dcp", dtype="bf16"),
        lambda: dcp.load(target, storage_reader=StorageReader(folder), planner=LoadPlanner(allow_cast=True)),
        lambda: dcp.load(target, storage_reader=StorageReader(folder), planner=OtherPlanner(allow_cast=True)),
    ):
        with pytest.raises((CheckpointError, CheckpointException), match=rf"a.weight: .*a.weight{suffix}") as caught:
            load()
        error = caught.value
        assert isinstance(cause(error) if isinstance(error, CheckpointException) else error, CheckpointError)
    assert not target["a.weight"].any()
    assert not (tmp_path / "out").exists()
    with pytest.raises(IncompatibleStateError, match=f"its scales a.weight{suffix}") as refused:
        vescale_ckpt.load(folder, target)
    assert "allow_cast" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "no config.json"),
        ({"quant_method": "fp8"}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "its scales do not fit"),
        ({"quant_method": "fancy"}, "'fancy' is not known"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
    ],
)
def test_an_unknown_scheme_is_named(tmp_path: Path, config: dict[str, Any] | None, said: str) -> None:
    folder = written(tmp_path / "model", float8_model(), config)
    target = {"a.weight": torch.zeros(300, 261)}
    with pytest.raises(CheckpointError, match=rf"a.weight: .*{said}"):
        vescale_ckpt.load(folder, target, allow_cast=True)
    with pytest.raises(IncompatibleStateError, match=r"a\.weight"):
        vescale_ckpt.load(folder, target)
    with pytest.raises(CheckpointError, match=rf"a.weight: .*{said}"):
        vescale_ckpt.convert(folder, tmp_path / "out", format="dcp", dtype="fp32")


def test_a_config_that_cannot_be_read_is_of_no_known_scheme(tmp_path: Path) -> None:
    state = float8_model()
    folder = written(tmp_path / "model", state, FP8)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"a.weight: .*config.json cannot be read"):
        vescale_ckpt.load(folder, {"a.weight": torch.zeros(300, 261)}, allow_cast=True)
    assert vescale_ckpt.load(folder).keys() == {"a.weight", "a.weight_scale_inv", "a.bias"}


def test_a_cast_by_another_name_of_a_shared_tensor_leaves_no_scales_out(tmp_path: Path) -> None:
    folder = written(tmp_path, float8_model(), FP8)
    state = float8_model() | {"b.weight": torch.zeros(2)}
    stock_torch.save_file(
        {key: value for key, value in state.items() if key != "b.weight"},
        folder / "model.safetensors",
        {"b.weight": "a.weight"},
    )
    target = torch.zeros(300, 261)
    for rules in (None, {"a.bias": "bias.*"}):
        with pytest.raises(CheckpointError, match=r"a\.weight: it is quantised.*b\.weight is another name"):
            vescale_ckpt.load(folder, {"b.weight": target}, allow_cast=True, stack=rules)
    with pytest.raises(CheckpointException, match=r"a\.weight: it is quantised"):
        dcp.load({"b.weight": target}, storage_reader=StorageReader(folder), planner=OtherPlanner(allow_cast=True))
    assert not target.any()


@pytest.mark.parametrize("config", [None, FP8])
@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_quantised_tensors_load_and_convert_as_they_are(
    tmp_path: Path, suffix: str, config: dict[str, Any] | None
) -> None:
    state = scaled(suffix)
    folder = written(tmp_path / "model", state, config)
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    vescale_ckpt.load(folder, target, allow_cast=True)
    vescale_ckpt.convert(folder, tmp_path / "out", format="dcp")
    for found in (target, vescale_ckpt.load(folder), vescale_ckpt.load(tmp_path / "out")):
        assert_same(found, state)


# --- Values


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def float8_model(rows: int = 300, columns: int = 261, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-rows // 128), -(-columns // 128)
    powers = torch.randint(-6, 6, blocks, generator=generator).float()
    return {
        "a.weight": random_bytes(rows, columns, seed=seed).view(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.rand(blocks, generator=generator) * torch.pow(10.0, powers),
        "a.bias": torch.rand(rows, generator=generator),
    }


def mxfp4_model(experts: int = 3, rows: int = 70, groups: int = 5) -> State:
    scales = random_bytes(experts, rows, groups, seed=2)
    scales.view(-1)[:256] = torch.arange(256).to(torch.uint8)
    return {"m.up_blocks": random_bytes(experts, rows, groups, 16, seed=1), "m.up_scales": scales}


def by_torch(folder: Path, target: State, dtype: torch.dtype) -> State:
    """What torch's reader makes; it wants an index."""
    index = folder / "model.safetensors.index.json"
    keys = stock_torch.load_file(folder / "model.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(keys, "model.safetensors")}))
    dcp.load(target, storage_reader=QuantizedHuggingFaceStorageReader(str(folder), target_dtype=dtype))
    index.unlink()
    return target


def assert_equal_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, but for the bits of a NaN."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan].view(integer), expected[~nan].view(integer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300, 261), (1, 1), (128, 256), (127, 129)])
def test_float8_with_scales_of_blocks_as_torch_makes_it(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    state = float8_model(*shape)
    folder = written(tmp_path / "model", state, FP8)
    expected = by_torch(folder, {"a.weight": torch.zeros(shape, dtype=dtype)}, dtype)["a.weight"]
    target = {"a": {"weight": torch.zeros(shape, dtype=dtype), "bias": torch.zeros(shape[0])}}
    report = vescale_ckpt.load(folder, target)
    assert (report.missing, report.unexpected, report.mismatched) == ([], [], [])
    assert_equal_bits(target["a"]["weight"], expected)
    assert_same(target["a"]["bias"], state["a.bias"])
    vescale_ckpt.convert(folder, tmp_path / "out.safetensors", format="safetensors", dtype={"a.weight": dtype})
    converted = stock_torch.load_file(tmp_path / "out.safetensors")
    assert converted.keys() == {"a.weight", "a.bias"}
    assert_equal_bits(converted["a.weight"], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_as_torch_makes_it(tmp_path: Path, dtype: torch.dtype) -> None:
    state = mxfp4_model()
    folder = written(tmp_path / "model", state, MXFP4)
    # Not by a load: torch's plans it by the shape of the stored chunk, and fills 5 of 160 columns.
    reader = QuantizedHuggingFaceStorageReader(str(folder), target_dtype=dtype)
    request = SimpleNamespace(storage_offsets=(0, 0, 0), lengths=(3, 70, 160))
    expected = reader._dequantize_tensor_mxfp4(state["m.up_blocks"], state["m.up_scales"], request, 0, 0)
    target = {"m.up_blocks": torch.zeros_like(expected)}
    vescale_ckpt.load(folder, target)
    assert_equal_bits(target["m.up_blocks"], expected)
    target = {"m.up": torch.zeros(3, 160, 70, dtype=dtype)}
    vescale_ckpt.load(folder, target)
    assert_equal_bits(target["m.up"], expected.transpose(1, 2).contiguous())
    vescale_ckpt.convert(folder, tmp_path / "out", format="dcp", dtype=dtype)
    converted = vescale_ckpt.load(tmp_path / "out")
    assert converted.keys() == {"m.up"}
    assert_equal_bits(converted["m.up"], target["m.up"])


def test_mxfp4_of_all_numbers_and_scales_is_exact_as_float64(tmp_path: Path) -> None:
    """Which alone holds 2^128 and more."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    numbers = torch.cat([magnitudes, -magnitudes])
    codes = torch.arange(32) % 16
    blocks = (codes[::2] | codes[1::2] << 4).to(torch.uint8).expand(1, 256, 1, 16).contiguous()
    scales = torch.arange(256).to(torch.uint8).view(1, 256, 1)
    folder = written(tmp_path / "model", {"m.up_blocks": blocks, "m.up_scales": scales}, MXFP4)
    powers = torch.tensor([2.0 ** (exponent - 127) for exponent in range(256)], dtype=torch.float64)
    expected = (powers[:, None] * numbers[codes])[None]
    target = {"m.up_blocks": torch.zeros(1, 256, 32, dtype=torch.float64)}
    vescale_ckpt.load(folder, target)
    assert_equal_bits(target["m.up_blocks"], expected)
    target = {"m.up": torch.zeros(1, 32, 256, dtype=torch.float64)}
    vescale_ckpt.load(folder, target)
    assert_equal_bits(target["m.up"], expected.transpose(1, 2).contiguous())
    vescale_ckpt.convert(folder, tmp_path / "out", format="dcp", dtype=torch.float64)
    assert_equal_bits(vescale_ckpt.load(tmp_path / "out")["m.up"], target["m.up"])


@pytest.mark.parametrize("elements", [1000, 37])
def test_pieces_of_any_size_and_targets_of_any_strides(
    tmp_path: Path, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    float8 = written(tmp_path / "float8", float8_model(), FP8)
    packed = written(tmp_path / "mxfp4", mxfp4_model(), MXFP4)
    cases = [(float8, "a.weight", (300, 261)), (packed, "m.up", (3, 160, 70)), (packed, "m.up_blocks", (3, 70, 160))]
    for folder, key, shape in cases:
        whole = {key: torch.zeros(shape, dtype=torch.bfloat16)}
        vescale_ckpt.load(folder, whole)
        with monkeypatch.context() as patch:
            patch.setattr(quantized_tensors, "_PIECE_ELEMENTS", elements)
            target = {key: torch.zeros(shape[::-1], dtype=torch.bfloat16).permute(*range(len(shape))[::-1])}
            vescale_ckpt.load(folder, target)
        assert_equal_bits(target[key].contiguous(), whole[key])


def test_a_shard_reads_only_its_numbers_and_scales(tmp_path: Path) -> None:
    folder = written(tmp_path / "float8", float8_model(4096, 1024), FP8)
    expected = by_torch(folder, {"a.weight": torch.zeros(4096, 1024)}, torch.float32)["a.weight"]
    packed = written(tmp_path / "mxfp4", mxfp4_model(8, 64, 40), MXFP4)
    exchanged = {"m.up": torch.zeros(8, 1280, 64)}
    vescale_ckpt.load(packed, exchanged)
    run_ranks(4, _load_shards, folder, "a.weight", expected, [0, 1], 4096 * 1024 // 4, 32 * 8 * 4 // 4)
    run_ranks(4, _load_shards, packed, "m.up", exchanged["m.up"], [0, 1, 2], 8 * 64 * 40 * 16 // 4, 8 * 64 * 40 // 4)


def _load_shards(folder: Path, key: str, expected: torch.Tensor, dims: list[int], numbers: int, scales: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    for dim in dims:
        local = torch.zeros_like(expected.chunk(4, dim)[dist.get_rank()])
        target = {key: DTensor.from_local(local, mesh, [Shard(dim)], shape=expected.shape, stride=expected.stride())}
        stats = vescale_ckpt.load(folder, target).stats
        assert_equal_bits(target[key].to_local(), expected.chunk(4, dim)[dist.get_rank()].contiguous())
        assert stats.bytes == numbers + scales
        if dim == 0:  # of columns, what lies between them is read, too; so are gaps of less than 128 KiB
            assert stats.read_bytes <= numbers + scales + (128 << 10) + 4 * 4096


def test_uneven_shards_begin_inside_of_blocks(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", float8_model(), FP8)
    expected = by_torch(folder, {"a.weight": torch.zeros(300, 261)}, torch.float32)["a.weight"]
    run_ranks(4, _load_uneven, folder, expected)


def _load_uneven(folder: Path, expected: torch.Tensor) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    target = {"a.weight": distribute_tensor(torch.zeros_like(expected), mesh, [Shard(0), Shard(1)])}
    vescale_ckpt.load(folder, target)
    found = target["a.weight"]
    assert isinstance(found, DTensor)
    assert_equal_bits(found.full_tensor(), expected)


def test_scales_in_another_file_and_ranks_that_read_for_each_other(tmp_path: Path) -> None:
    state = float8_model()
    expected = by_torch(written(tmp_path / "one", state, FP8), {"a.weight": torch.zeros(300, 261)}, torch.float32)
    folder = tmp_path / "two"
    folder.mkdir()
    names = {key: f"{'second' if 'scale' in key else 'first'}.safetensors" for key in state}
    for name in set(names.values()):
        stock_torch.save_file({key: value for key, value in state.items() if names[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "config.json").write_text(json.dumps({"text_config": {"quantization_config": FP8}}))
    run_ranks(2, _load_for_each_other, folder, expected["a.weight"], state["a.bias"])


def _load_for_each_other(folder: Path, weight: torch.Tensor, bias: torch.Tensor) -> None:
    target = {"a.weight": torch.zeros_like(weight), "a.bias": torch.zeros_like(bias)}
    if dist.get_rank() == 1:
        del target["a.bias"]
    vescale_ckpt.load(folder, target, broadcast_checkpoint=True)
    assert_equal_bits(target["a.weight"], weight)
    if dist.get_rank() == 0:
        assert_same(target["a.bias"], bias)


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    """As DeepSeek's newer models may store them: bytes that are exponents."""
    state = float8_model()
    scales = torch.randint(110, 140, state["a.weight_scale_inv"].shape, dtype=torch.uint8)
    state["a.weight_scale_inv"] = scales.view(torch.float8_e8m0fnu)
    target = {"a.weight": torch.zeros(300, 261)}
    vescale_ckpt.load(written(tmp_path / "model", state, FP8), target)
    state["a.weight_scale_inv"] = torch.pow(2.0, scales.float() - 127)
    folder = written(tmp_path / "wide", state, FP8)
    assert_equal_bits(
        target["a.weight"], by_torch(folder, {"a.weight": torch.zeros(300, 261)}, torch.float32)["a.weight"]
    )


def test_zero_points_are_not_left_out(tmp_path: Path) -> None:
    state = scaled("_scale") | {"a.weight_scale": torch.ones(8, 1), "a.weight_zero_point": torch.ones(8, 1)}
    folder = written(tmp_path / "model", state, {"quant_method": "compressed-tensors", "format": "float-quantized"})
    with pytest.raises(CheckpointError, match=r"a\.weight: .*a\.weight_scale"):
        vescale_ckpt.load(folder, {"a.weight": torch.zeros(8, 8)}, allow_cast=True)


def test_modules_take_the_values(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", float8_model(), FP8)
    with torch.device("meta"):
        module = torch.nn.ModuleDict({"a": torch.nn.Linear(261, 300)})
    vescale_ckpt.load(folder, {"": module.to_empty(device="cpu")})
    expected = by_torch(folder, {"a.weight": torch.zeros(300, 261)}, torch.float32)
    assert_equal_bits(module["a"].weight.detach(), expected["a.weight"])
    state = {"a.weight": torch.empty(300, 261, device="meta")}
    vescale_ckpt.load(folder, state, keys="a.weight")
    assert_equal_bits(state["a.weight"], expected["a.weight"])


def test_values_take_new_names_and_are_stacked(tmp_path: Path) -> None:
    layers = [
        {f"layers.{number}.{key[2:]}": value for key, value in float8_model(seed=number).items()} for number in (0, 1)
    ]
    folder = written(tmp_path / "model", layers[0] | layers[1], FP8)
    vescale_ckpt.convert(
        folder, tmp_path / "out.safetensors", format="safetensors", dtype={"net*": "fp32"}, keys="*.weight",
        rename={"layers": "net"}, stack={"net.*.weight": "net.weight"},
    )  # fmt: skip
    target = {f"layers.{number}.weight": torch.zeros(300, 261) for number in (0, 1)}
    vescale_ckpt.load(folder, target)
    converted = stock_torch.load_file(tmp_path / "out.safetensors")
    assert converted.keys() == {"net.weight"}
    assert_equal_bits(converted["net.weight"], torch.stack([*target.values()]))


def test_values_of_another_shape_or_dtype_do_not_fit(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", float8_model(), FP8)
    for target in (torch.zeros(300, 260), torch.zeros(300, 261, dtype=torch.int32)):
        with pytest.raises(IncompatibleStateError, match=r"a\.weight"):
            vescale_ckpt.load(folder, {"a.weight": target})
        report = vescale_ckpt.load(folder, {"a.weight": target}, strict=False)
        assert [key for key, *_ in report.mismatched] == ["a.weight"]
        assert not target.any()


def test_targets_in_the_same_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = float8_model(128, 64) | {"plain": torch.randn(128, 64)}
    folder = written(tmp_path / "model", state, FP8)
    values = {"plain": state["plain"]} | by_torch(folder, {"a.weight": torch.zeros(128, 64)}, torch.float32)
    for first, last in (("plain", "a.weight"), ("a.weight", "plain")):
        caplog.clear()
        memory = torch.zeros(128, 64)
        vescale_ckpt.load(folder, {first: memory, last: memory})
        assert_equal_bits(memory, values[last])
        assert f"both get the value of {last}" in caplog.text
    tied = torch.zeros(128, 64)  # what is not stored replaces nothing
    vescale_ckpt.load(folder, {"a.weight": tied, "lm_head": tied})
    assert_equal_bits(tied, values["a.weight"])
    memory = torch.zeros(192, 64)
    with pytest.raises(CheckpointError, match="overlap in part"):
        vescale_ckpt.load(folder, {"a.weight": memory[:128], "plain": memory[64:]})
    assert not memory.any()


def test_damaged_scales_are_found(tmp_path: Path) -> None:
    """In files of this package, which have checksums."""
    state = float8_model()
    vescale_ckpt.save(tmp_path / "model", state, format="safetensors")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    target = {"a.weight": torch.zeros(300, 261)}
    vescale_ckpt.load(tmp_path / "model", target)
    path = tmp_path / "model" / "model.safetensors"
    data, scales = path.read_bytes(), state["a.weight_scale_inv"].numpy().tobytes()
    assert data.count(scales) == 1
    path.write_bytes(data.replace(scales, bytes([scales[0] ^ 1]) + scales[1:]))
    with pytest.raises(CheckpointError, match=r"a\.weight_scale_inv: checksum mismatch"):
        vescale_ckpt.load(tmp_path / "model", target)


@pytest.mark.parametrize("scales_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strategy", ["tensor", "channel"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compressed_tensors_of_float8(
    tmp_path: Path, dtype: torch.dtype, strategy: str, scales_dtype: torch.dtype
) -> None:
    weight = random_bytes(70, 261).view(torch.float8_e4m3fn)
    scales = (torch.rand((1,) if strategy == "tensor" else (70, 1)) / 7).to(scales_dtype)
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}
    folder = written(tmp_path / "model", {"a.weight": weight, "a.weight_scale": scales}, config)
    target = {"a.weight": torch.zeros(70, 261, dtype=dtype)}
    vescale_ckpt.load(folder, target)
    assert_equal_bits(target["a.weight"], (weight.to(scales_dtype) * scales).to(dtype))
    vescale_ckpt.convert(folder, tmp_path / "out", format="dcp", dtype=dtype)
    assert_equal_bits(vescale_ckpt.load(tmp_path / "out")["a.weight"], target["a.weight"])
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    arguments = pytest.importorskip("compressed_tensors.quantization").QuantizationArgs
    args = arguments(num_bits=8, type="float", strategy=strategy, symmetric=True)
    made = forward.dequantize(x_q=weight, scale=scales, args=args)
    assert_equal_bits(target["a.weight"], made.to(dtype))
