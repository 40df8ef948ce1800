"""Loads that stack, concatenate and split tensors of safetensors files give what torch gives, or an error."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as stock_torch
import torch
import torch.distributed as dist
from harness.files import flipped
from harness.ranks import RanksFailedError, run_ranks
from harness.states import assert_same, random_tensor, same
from test_quantized import FP8, MXFP4, assert_equal_bits, by_torch, float8_model, mxfp4_model, written
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError, LoadFailedError
from vescale_ckpt._checkpoint.safetensors import header_texts

State = dict[str, torch.Tensor]
EXPERTS = 6


def model(rows: int = 20, columns: int = 12) -> State:
    state: State = {}
    for layer in range(2):
        for expert in range(EXPERTS):
            for name in ("gate", "up"):
                state[f"layers.{layer}.experts.{expert}.{name}.weight"] = random_tensor((rows, columns))
    for name, size in (("q", 24), ("k", 8), ("v", 8)):
        state[f"attention.{name}.weight"] = random_tensor((size, columns), torch.bfloat16)
        state[f"attention.{name}.bias"] = random_tensor((size,), torch.bfloat16)
    return state | {
        "packed": random_tensor((5, 7, 3), torch.float64),
        "scalars": random_tensor((4,), torch.int16),
        "only.0.w": random_tensor((3, 0)),
        "only.1.w": random_tensor((3, 0)),
        "rest": random_tensor((9,)),
    }


RULES: dict[Any, str] = {
    ("layers.*.experts.*.gate.weight", "layers.*.experts.*.up.weight"): "layers.*.experts.gate_up",
    ("attention.q.weight", "attention.k.weight", "attention.v.weight"): "attention.qkv.weight",
    ("attention.q.bias", "attention.k.bias", "attention.v.bias"): "attention.qkv.bias",
    "packed": "packed.*",
    "scalars": "scalars.*",
    "only.*.w": "only.w",
}


def by_hand(state: State) -> State:
    made = {"rest": state["rest"], "only.w": torch.stack([state["only.0.w"], state["only.1.w"]])}
    for layer in range(2):
        parts = [
            torch.cat([state[f"layers.{layer}.experts.{expert}.{name}.weight"] for name in ("gate", "up")])
            for expert in range(EXPERTS)
        ]
        made[f"layers.{layer}.experts.gate_up"] = torch.stack(parts)
    for kind in ("weight", "bias"):
        made[f"attention.qkv.{kind}"] = torch.cat([state[f"attention.{name}.{kind}"] for name in "qkv"])
    made |= {f"packed.{number}": value for number, value in enumerate(state["packed"].unbind())}
    return made | {f"scalars.{number}": value for number, value in enumerate(state["scalars"].unbind())}


def one_file(folder: Path, state: State) -> None:
    folder.mkdir()
    stock_torch.save_file(state, folder / "model.safetensors")


def many_files(folder: Path, state: State) -> None:
    folder.mkdir()
    weight_map = {key: f"model-{number % 3}.safetensors" for number, key in enumerate(state)}
    for name in set(weight_map.values()):
        stock_torch.save_file({key: state[key] for key in state if weight_map[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def with_checksums(folder: Path, state: State) -> None:
    vescale_ckpt.save(folder, state, format=vescale_ckpt.Safetensors(max_shard_size="4KB"))


def in_chunks(folder: Path, state: State) -> None:
    """As torch's writer leaves the shards of two ranks: each file has a chunk of each tensor."""
    folder.mkdir()
    for rank in (0, 1):
        parts = {key: value.chunk(2)[rank] for key, value in state.items() if value.numel() and len(value) > rank}
        whole = {key: value for key, value in state.items() if not value.numel() and rank == 0}
        places = {
            key: {header_texts.SHARDING_OFFSETS: [rank * len(state[key].chunk(2)[0])] + [0] * (value.dim() - 1)}
            for key, value in parts.items()
        }
        stock_torch.save_file(
            {key: value.contiguous() for key, value in (parts | whole).items()},
            folder / f"shard-{rank}.safetensors",
            {header_texts.SHARDING_INFO: json.dumps(places)},
        )


WRITERS = [one_file, many_files, with_checksums, in_chunks]


@pytest.mark.parametrize("writer", WRITERS)
def test_values_are_those_of_torch_and_of_a_conversion(tmp_path: Path, writer: Any) -> None:
    state = model()
    expected = by_hand(state)
    writer(tmp_path / "model", state)
    target = {key: torch.zeros_like(value) for key, value in expected.items()}
    report = vescale_ckpt.load(tmp_path / "model", target, stack=RULES)
    assert not report.missing and not report.unexpected
    assert_same(target, expected)
    assert_same(vescale_ckpt.load(tmp_path / "model", stack=RULES), expected)
    vescale_ckpt.convert(tmp_path / "model", tmp_path / "converted", format="dcp", stack=RULES)
    converted = {key: torch.zeros_like(value) for key, value in expected.items()}
    vescale_ckpt.load(tmp_path / "converted", converted)
    assert_same(converted, expected)


@pytest.mark.parametrize("writer", [one_file, with_checksums])
def test_targets_of_any_strides_names_and_dtypes(tmp_path: Path, writer: Any) -> None:
    state = {key: value for key, value in model().items() if value.dtype == torch.float32}
    state = {key: torch.randn_like(value) for key, value in state.items()}
    rules = {key: value for key, value in RULES.items() if "gate_up" in value}
    writer(tmp_path / "model", state)
    value = torch.zeros(12, EXPERTS, 40).permute(1, 2, 0)
    key = "layers.1.experts.gate_up"
    vescale_ckpt.load(tmp_path / "model", {"mine.w": value}, stack=rules, rename={"mine.w": key})
    parts = [torch.cat([state[f"layers.1.experts.{n}.{name}.weight"] for name in ("gate", "up")]) for n in range(6)]
    assert_same(value.contiguous(), torch.stack(parts))
    wide = torch.zeros(EXPERTS, 40, 12, dtype=torch.float64)
    vescale_ckpt.load(tmp_path / "model", {key: wide}, stack=rules, keys="layers.1", allow_cast=True)
    assert_same(wide, torch.stack(parts).double())


@pytest.mark.parametrize("writer", [one_file, with_checksums])
def test_each_rank_reads_its_experts_alone(tmp_path: Path, writer: Any) -> None:
    experts = {f"e.{number}.w": random_tensor((256, 1024)) for number in range(8)}  # 1 MiB each
    state = experts | {"packed": random_tensor((8, 256, 1024))}
    writer(tmp_path / "model", state)
    run_ranks(4, _load_experts, tmp_path / "model", torch.stack([*experts.values()]), state["packed"])


def _load_experts(folder: Path, stacked: torch.Tensor, packed: torch.Tensor) -> None:
    mesh, rank = init_device_mesh("cpu", (4,)), dist.get_rank()
    rules = {"e.*.w": "e.w", "packed": "p.*"}
    for dim, broadcast in ((0, False), (1, False), (0, True), (1, True), (2, True)):
        local = torch.zeros_like(stacked.chunk(4, dim)[rank])
        target = {"e.w": DTensor.from_local(local, mesh, [Shard(dim)], shape=stacked.shape, stride=stacked.stride())}
        stats = vescale_ckpt.load(folder, target, stack=rules, broadcast_checkpoint=broadcast).stats
        assert_equal_bits(target["e.w"].to_local(), stacked.chunk(4, dim)[rank].contiguous())
        assert stats.bytes == local.nbytes
        if dim == 0:  # two whole tensors, to whole blocks of the disk
            assert stats.read_bytes <= local.nbytes + 4 * 4096
    own = {f"p.{number}": torch.zeros(256, 1024) for number in (2 * rank, 2 * rank + 1)}
    stats = vescale_ckpt.load(folder, own, stack=rules, broadcast_checkpoint=False).stats
    assert stats.bytes == 2 << 20
    assert stats.read_bytes <= (2 << 20) + 2 * (256 << 10) + 4 * 4096  # an index may begin within a block of checksums
    for key, value in own.items():
        assert_equal_bits(value, packed[int(key[2:])])
    everything = {"e.w": DTensor.from_local(torch.zeros_like(stacked), mesh, [Replicate()])}
    everything |= {f"p.{number}": torch.zeros(256, 1024) for number in range(8)}
    read = vescale_ckpt.load(folder, everything, stack=rules, broadcast_checkpoint=True).stats.read_bytes
    total = torch.tensor(read)
    dist.all_reduce(total)
    assert total <= 1.1 * (16 << 20)
    assert_equal_bits(everything["e.w"].to_local(), stacked)
    for number in range(8):
        assert_equal_bits(everything[f"p.{number}"], packed[number])


def test_damage_is_found_and_named_as_it_is_stored(tmp_path: Path) -> None:
    state = {f"e.{number}.w": random_tensor((64, 64)) for number in range(5)}
    state["packed"] = random_tensor((5, 64, 64))
    vescale_ckpt.save(tmp_path, state, format="safetensors")
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    rules = {"e.*.w": "e.w", "packed": "p.*"}
    for stored, data, target in (
        ("e.3.w", state["e.3.w"], {"e.w": torch.zeros(5, 64, 64)}),
        ("packed", state["packed"][2], {"p.2": torch.zeros(64, 64)}),
    ):
        at = content.index(data.numpy().tobytes())
        with flipped(path, (at + 5000) * 8):
            (made,) = target
            with pytest.raises(CorruptCheckpointError, match=f"stored as {re.escape(stored)}") as caught:
                vescale_ckpt.load(tmp_path, target, stack=rules)
            assert caught.value.key == made and caught.value.file == str(path)
            with pytest.raises(RanksFailedError) as failed:
                run_ranks(2, _load_target, tmp_path, target, rules)
            assert len(failed.value.failures) == 2
            for error in failed.value.failures.values():
                assert isinstance(error, CorruptCheckpointError) and f"stored as {stored}" in str(error)
            other = {"e.w": torch.zeros(5, 64, 64)} if made == "p.2" else {"p.1": torch.zeros(64, 64)}
            vescale_ckpt.load(tmp_path, other, stack=rules)  # what is not damaged is read
    short = content[:-100]
    path.write_bytes(short)
    with pytest.raises(CheckpointError):
        vescale_ckpt.load(tmp_path, {"e.w": torch.zeros(5, 64, 64)}, stack=rules)


def _load_target(folder: Path, target: State, rules: Any) -> None:
    vescale_ckpt.load(folder, target, stack=rules, broadcast_checkpoint=True)


WRONG: list[tuple[Any, type[Exception], str]] = [
    ({"x.*": "x"}, LoadFailedError, "no tensor is named 'x.*'"),
    ({"e.*.w": "e.*.v"}, LoadFailedError, "one of them wants one * more"),
    ({"e.*.w": "rest"}, LoadFailedError, "'rest' and 'e.0.w' would both be 'rest'"),
    ({"packed": "e.*.w"}, LoadFailedError, "would both be 'e.0.w'"),
    ({"e.*.w": "e", "e": "f.*"}, LoadFailedError, "was stacked or split by another rule"),
    ({"gap.*": "gap"}, CheckpointError, "gap: layers 1, 2 of 4 are missing"),
    ({"odd.*": "odd"}, CheckpointError, "odd: odd.1 has shape (2, 3)"),
    ({"same.*": "same"}, LoadFailedError, "have the same number"),
    ({"scalar": "s.*"}, CheckpointError, "without dimensions cannot be split"),
    ({"empty": "s.*"}, CheckpointError, "without elements cannot be split"),
    ({("e.*.w", "scalar"): "x"}, LoadFailedError, "equally many"),
    ({("rest", "scalar"): "x"}, CheckpointError, "x: scalar has shape ()"),
    ({("rest", "rest"): "x"}, LoadFailedError, "no tensor is named 'rest'"),
    ({("rest", "half"): "x"}, CheckpointError, "torch.float16"),
    ({("e.*.w", "part.*.w"): "x"}, CheckpointError, "beside e.1.w there is no 'part.*.w'"),
    ({("packed", "rest"): "x.*"}, LoadFailedError, "concatenated, and not split"),
]


def _wrong_state() -> State:
    names = ["gap.0", "gap.3", "odd.0", "same.1", "same.01", "e.0.w", "e.1.w", "part.0.w", "rest"]
    state = {name: torch.zeros(2) for name in names}
    state |= {"odd.1": torch.zeros(2, 3), "scalar": torch.zeros(()), "packed": torch.zeros(2, 2)}
    return state | {"empty": torch.zeros(9, 0), "half": torch.zeros(2, dtype=torch.float16)}


def test_rules_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    one_file(tmp_path / "model", _wrong_state())
    for rules, kind, text in WRONG:
        target = {"rest": torch.ones(2)}
        with pytest.raises(kind, match=re.escape(text)):
            vescale_ckpt.load(tmp_path / "model", target, stack=rules, strict=False)
        assert_same(target["rest"], torch.ones(2))
    for rules in ("x", {1: "x"}, {(): "x"}, {("a", 1): "x"}, {"x": ("a", "b")}):
        with pytest.raises(ValueError, match="expected a mapping of names"):
            vescale_ckpt.load(tmp_path / "model", {}, stack=rules)  # type: ignore[call-overload]


def test_all_ranks_raise_the_same(tmp_path: Path) -> None:
    one_file(tmp_path / "model", _wrong_state())
    run_ranks(2, _raises_on_each, tmp_path / "model")


def _raises_on_each(folder: Path) -> None:
    for rules, kind, text in (WRONG[0], WRONG[5]):
        with pytest.raises(kind, match=re.escape(text)):
            vescale_ckpt.load(folder, stack=rules)
    rules = {"e.*.w": "e"} if dist.get_rank() else {"e.*.w": "f"}
    with pytest.raises(CheckpointError, match=r"different .*stack"):
        vescale_ckpt.load(folder, stack=rules)


def test_other_formats_are_refused_with_what_to_do(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path, {"e.0": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"of format 'dcp'.*convert"):
        vescale_ckpt.load(tmp_path, stack={"e.*": "e"})
    with pytest.raises(CheckpointError, match=r"of format 'dcp'.*convert"):
        vescale_ckpt.load(tmp_path, {"e": torch.zeros(1, 3)}, stack={"e.*": "e"})


def test_shared_tensors_are_taken_under_all_of_their_names_or_none(tmp_path: Path) -> None:
    shared, other = random_tensor((4, 3)), random_tensor((4, 3))
    vescale_ckpt.save(tmp_path, {"e.0": shared, "e.1": shared, "e.2": other, "head": other}, format="safetensors")
    with pytest.raises(CheckpointError, match=r"stored as one tensor \(shared weights\)"):
        vescale_ckpt.load(tmp_path, stack={"e.*": "e"})
    vescale_ckpt.save(tmp_path, {"e.0": shared, "e.1": shared, "e.2": other}, format="safetensors")
    assert_same(vescale_ckpt.load(tmp_path, stack={"e.*": "e"})["e"], torch.stack([shared, shared, other]))
    target = {"e": torch.zeros(3, 4, 3)}
    run_ranks(2, _load_shared, tmp_path, target, torch.stack([shared, shared, other]))


def _load_shared(folder: Path, target: State, expected: torch.Tensor) -> None:
    vescale_ckpt.load(folder, target, stack={"e.*": "e"}, broadcast_checkpoint=True)
    assert_same(target["e"], expected)


# --- Random rules


def random_model(seed: int) -> tuple[State, dict[Any, str], State]:
    """Returns tensors, rules and what they make."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    state: State = {}
    rules: dict[Any, str] = {}
    made: State = {}
    for number in range(chance.randint(2, 4)):
        dtype = chance.choice([torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
        rest = tuple(chance.choice([1, 2, 3, 33, 257]) for _ in range(chance.randint(0, 2)))
        experts, name = chance.randint(1, 5), f"t{number}"
        if (kind := chance.choice(["stack", "concatenate", "both", "split"])) == "split":
            state[name] = random_tensor((experts, *rest), dtype)
            rules[name] = f"{name}.*.w"
            made |= {f"{name}.{index}.w": value for index, value in enumerate(state[name].unbind())}
            continue
        rows = [chance.choice([1, 2, 70]) for _ in range(1 if kind == "stack" else chance.randint(2, 3))]
        layers = [
            [random_tensor((length, *rest), dtype) for length in rows]
            for _ in range(1 if kind == "concatenate" else experts)
        ]
        for layer, part in [(layer, part) for layer in range(len(layers)) for part in range(len(rows))]:
            state[f"{name}.{layer}.p{part}"] = layers[layer][part]
        star = "0" if kind == "concatenate" else "*"
        left = tuple(f"{name}.{star}.p{part}" for part in range(len(rows)))
        rules[left if len(left) > 1 else left[0]] = name
        whole = [torch.cat(parts) for parts in layers]
        made[name] = whole[0] if kind == "concatenate" else torch.stack(whole)
    keys = chance.sample(list(state), len(state))
    return {key: state[key] for key in keys}, rules, made


def test_random_rules_on_shards(tmp_path: Path) -> None:
    for seed in range(20, 32):
        WRITERS[seed % 3](tmp_path / f"{seed}", random_model(seed)[0])
    run_ranks(3, _load_random, tmp_path)


def _load_random(folder: Path) -> None:
    mesh, rank = init_device_mesh("cpu", (3,)), dist.get_rank()
    for seed in range(20, 32):
        _, rules, made = random_model(seed)
        chance = random.Random(seed)
        target: dict[str, Any] = {}
        for key, value in made.items():
            placement = chance.choice([Replicate(), *(Shard(dim) for dim in range(value.dim()))])
            target[key] = distribute_tensor(torch.zeros_like(value), mesh, [placement], src_data_rank=None)
            if chance.random() < 0.3 and rank == 1:
                del target[key]
        vescale_ckpt.load(folder / f"{seed}", target, stack=rules, broadcast_checkpoint=seed % 2 == 0)
        for key, value in target.items():
            wanted = distribute_tensor(made[key], mesh, value.placements, src_data_rank=None).to_local()
            assert same(value.to_local(), wanted), (seed, key)


# --- Quantised


def float8_experts(count: int = 3, rows: int = 256, columns: int = 261) -> State:
    return {
        f"e.{number}.{key[2:]}": value
        for number in range(count)
        for key, value in float8_model(rows, columns, seed=number).items()
        if "bias" not in key
    }


def values_of(folder: Path, keys: list[str], rows: int = 256, columns: int = 261) -> list[torch.Tensor]:
    return [*by_torch(folder, {key: torch.zeros(rows, columns) for key in keys}, torch.float32).values()]


@pytest.mark.parametrize("rules", [
    {"e.*.weight": "e.weight"},
    {"e.*.weight": "e.weight", "e.*.weight_scale_inv": "e.weight_scale_inv"},
    {"e.*.weight_scale_inv": "e.weight_scale_inv", "e.*.weight": "e.weight"},
])  # fmt: skip
def test_scales_are_stacked_with_their_numbers(tmp_path: Path, rules: dict[str, str]) -> None:
    state = float8_experts()
    folder = written(tmp_path / "model", state, FP8)
    expected = torch.stack(values_of(folder, [f"e.{number}.weight" for number in range(3)]))
    target = {"e.weight": torch.zeros_like(expected)}
    vescale_ckpt.load(folder, target, stack=rules)
    assert_equal_bits(target["e.weight"], expected)
    stored = vescale_ckpt.load(folder, stack=rules)
    assert_same(stored, {
        "e.weight": torch.stack([state[f"e.{number}.weight"] for number in range(3)]),
        "e.weight_scale_inv": torch.stack([state[f"e.{number}.weight_scale_inv"] for number in range(3)]),
    })  # fmt: skip
    run_ranks(3, _load_values, folder, expected, rules)
    vescale_ckpt.convert(folder, tmp_path / "out.safetensors", format="safetensors", stack=rules)
    assert_same(stock_torch.load_file(tmp_path / "out.safetensors"), stored)


def _load_values(folder: Path, expected: torch.Tensor, rules: Any) -> None:
    mesh, rank = init_device_mesh("cpu", (3,)), dist.get_rank()
    for dim in (0, 1, 2):
        own = expected.chunk(3, dim)[rank]
        local = torch.zeros(own.shape)
        target = {
            "e.weight": DTensor.from_local(local, mesh, [Shard(dim)], shape=expected.shape, stride=expected.stride())
        }
        stats = vescale_ckpt.load(folder, target, stack=rules).stats
        assert_equal_bits(target["e.weight"].to_local(), own.contiguous())
        if dim == 0:
            assert stats.bytes == own.numel() + 2 * 3 * 4


def test_quantised_tensors_are_concatenated_between_blocks(tmp_path: Path) -> None:
    state = {f"q.{key[2:]}": value for key, value in float8_model(256, 261).items()}
    state |= {f"k.{key[2:]}": value for key, value in float8_model(140, 261, seed=1).items()}
    folder = written(tmp_path / "model", state, FP8)
    (q,), (k,) = values_of(folder, ["q.weight"]), values_of(folder, ["k.weight"], 140)
    for names, expected in ((("q", "k"), torch.cat([q, k])), (("k", "q"), None)):
        rules = {tuple(f"{name}.weight" for name in names): "qk.weight"}
        target = {"qk.weight": torch.zeros(396, 261)}
        if expected is None:  # the second would begin within a block
            with pytest.raises(CheckpointError, match=r"qk\.weight: the scales k\.weight_scale_inv .* cuts"):
                vescale_ckpt.load(folder, target, stack=rules)
        else:
            vescale_ckpt.load(folder, target, stack=rules)
            assert_equal_bits(target["qk.weight"], expected)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="not known"):
        vescale_ckpt.load(folder, target, stack={("q.weight", "k.weight"): "qk.weight"})


def test_rows_of_one_block_each_are_not_taken_for_blocks_of_one_row(tmp_path: Path) -> None:
    """One row and 128: as many scales as 129 rows in blocks of 128 have."""
    state = {f"q.{key[2:]}": value for key, value in float8_model(1, 64).items()}
    state |= {f"k.{key[2:]}": value for key, value in float8_model(128, 64, seed=1).items()}
    folder = written(tmp_path / "model", state, FP8)
    target = {"qk.weight": torch.zeros(129, 64)}
    with pytest.raises(CheckpointError, match="cuts"):
        vescale_ckpt.load(folder, target, stack={("q.weight", "k.weight"): "qk.weight"}, allow_cast=True)


def test_numbers_and_scales_are_not_taken_apart(tmp_path: Path) -> None:
    state = float8_experts()
    folder = written(tmp_path / "model", state, FP8)
    target = {"e.weight": torch.zeros(3, 256, 261)}
    for rules, text in (
        ({"e.*.weight_scale_inv": "scales"}, "and not the numbers"),
        ({"e.*.weight": "e.weight", "e.*.weight_scale_inv": "scales"}, "does not make e.weight_scale_inv"),
        ({"e.*.weight": "e.weight", "e.1.weight_scale_inv": "s.*"}, "does not make e.weight_scale_inv"),
    ):
        for load in (
            lambda rules=rules: vescale_ckpt.load(folder, target, stack=rules, allow_cast=True, strict=False),
            lambda rules=rules: vescale_ckpt.convert(folder, tmp_path / "out", format="dcp", stack=rules),
        ):
            with pytest.raises(CheckpointError, match=re.escape(text)):
                load()
    del state["e.1.weight_scale_inv"]
    some = written(tmp_path / "some", state, FP8)
    with pytest.raises(CheckpointError, match="have scales"):
        vescale_ckpt.load(some, target, stack={"e.*.weight": "e.weight"}, allow_cast=True)
    assert not target["e.weight"].any()
    with pytest.raises(CheckpointError, match="have scales"):
        vescale_ckpt.convert(folder, tmp_path / "out", format="dcp", stack={"e.*.weight": "e.weight"}, keys="*.weight")


def test_mxfp4_and_float8_are_split_with_their_scales(tmp_path: Path) -> None:
    folder = written(tmp_path / "mxfp4", mxfp4_model(), MXFP4)
    whole = {"m.up": torch.zeros(3, 160, 70)}
    vescale_ckpt.load(folder, whole)
    target = {f"m.{number}.up": torch.zeros(160, 70) for number in range(3)}
    rules = {"m.up_blocks": "m.*.up_blocks"}
    assert vescale_ckpt.load(folder, stack=rules).keys() == {
        f"m.{n}.up_{kind}" for n in range(3) for kind in ("blocks", "scales")
    }
    vescale_ckpt.load(folder, target, stack=rules)
    for number in range(3):
        assert_equal_bits(target[f"m.{number}.up"], whole["m.up"][number])
    state = float8_experts()
    keys = [f"e.{number}.weight" for number in range(3)]
    expected = values_of(written(tmp_path / "experts", state, FP8), keys)
    stacked = {
        f"e.{end}": torch.stack([state[f"e.{number}.{end}"] for number in range(3)])
        for end in ("weight", "weight_scale_inv")
    }
    folder = written(tmp_path / "stacked", stacked, FP8)
    target = {key: torch.zeros(256, 261) for key in keys}
    vescale_ckpt.load(folder, target, stack={"e.weight": "e.*.weight"})
    for value, of_torch in zip(target.values(), expected, strict=True):
        assert_equal_bits(value, of_torch)
    flat_rows = {"w": stacked["e.weight"][0], "w_scale_inv": stacked["e.weight_scale_inv"][0]}
    with pytest.raises(CheckpointError, match="cuts"):
        vescale_ckpt.load(written(tmp_path / "rows", flat_rows, FP8), stack={"w": "w.*"})


@pytest.mark.parametrize("scales_dtype", [torch.bfloat16, torch.float32])
def test_compressed_tensors_of_rows_are_stacked_and_those_of_tensors_are_not_known(
    tmp_path: Path, scales_dtype: torch.dtype
) -> None:
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}
    state = float8_experts(columns=200)
    rules = {"e.*.weight": "e.weight"}
    for scales in ([torch.rand(256, 1).to(scales_dtype) for _ in range(3)], [torch.rand(1) for _ in range(3)]):
        stored = {f"e.{number}.weight": state[f"e.{number}.weight"] for number in range(3)}
        stored |= {f"e.{number}.weight_scale": scales[number] for number in range(3)}
        folder = written(tmp_path / "model", stored, config)
        target = {"e.weight": torch.zeros(3, 256, 200)}
        if scales[0].dim() == 1:
            with pytest.raises(CheckpointError, match=r"e\.weight: it is quantised.*e\.weight_scale"):
                vescale_ckpt.load(folder, target, stack=rules, allow_cast=True)
            continue
        vescale_ckpt.load(folder, target, stack=rules)
        expected = [(stored[f"e.{n}.weight"].to(scales_dtype) * scales[n]).float() for n in range(3)]
        assert_equal_bits(target["e.weight"], torch.stack(expected))
