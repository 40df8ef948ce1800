"""Simulated planning: its ranks hold what torch gives real ones, and what it reports adds up."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.inventories import inventory_of, items
from harness.python_forks import run_python
from harness.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale_ckpt import save
from vescale_ckpt.cli import main
from vescale_ckpt.simulate.models import MODELS, Entry, dtype_named, entries_in_checkpoint, entries_in_json, with_adam
from vescale_ckpt.simulate.parallelism import Parallelism, SimulatedState
from vescale_ckpt.simulate.simulation import gather, simulate

SMALL = [
    Entry("model.embed_tokens.weight", (50, 8), torch.bfloat16),
    Entry("model.layers.0.self_attn.q_proj.weight", (16, 8), torch.bfloat16),
    Entry("model.layers.0.self_attn.o_proj.weight", (8, 16), torch.bfloat16),
    Entry("model.norm.weight", (7,), torch.float32),
    Entry("step", (), torch.int64),
    Entry("scheduler", bytes=300),
]
SMALL_BYTES = 2 * (50 * 8 + 16 * 8 + 8 * 16) + 4 * 7 + 8 + 300


# --- Known models


@pytest.mark.parametrize(
    ("model", "tensors", "elements"),
    [
        ("llama-1b", 146, 1_235_814_400),
        ("llama-8b", 291, 8_030_261_248),
        ("llama-70b", 723, 70_553_706_496),
        ("llama-405b", 1137, 405_853_388_800),
        ("mixtral-8x7b", 323, 46_702_792_704),
    ],
)
def test_models_have_their_published_sizes(model: str, tensors: int, elements: int) -> None:
    entries = MODELS[model].entries(torch.bfloat16)
    assert len({entry.name for entry in entries}) == len(entries) == tensors
    assert sum(math.prod(entry.shape) for entry in entries) == elements


def test_adam_keeps_a_step_and_two_moments_for_each_floating_tensor() -> None:
    entries = with_adam(SMALL)
    moments = [entry for entry in entries if entry.name.endswith(("exp_avg", "exp_avg_sq"))]
    assert len(entries) == len(SMALL) + 3 * 4 + 3
    assert [entry.shape for entry in moments[::2]] == [entry.shape for entry in SMALL[:4]]
    assert {entry.dtype for entry in moments} == {torch.float32}
    assert len(with_adam(MODELS["llama-405b"].entries(torch.bfloat16))) == 4551


# --- Where tensors lie


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(24, 38, bias=False)
        self.o_proj = torch.nn.Linear(38, 24, bias=False)
        self.norm = torch.nn.Linear(24, 1, bias=False)


def held_by_a_layer(mesh_shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[list[Entry], list[Any]]:
    """On one of four ranks, laid out by torch's own means: the layer's tensors, and the items that the rank has."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = Layer().requires_grad_(False)
    if "tensor" in names:
        parallelize_module(model, mesh["tensor"], {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()})
    fully_shard(model, mesh=mesh[tuple(name for name in names if name != "tensor")])
    state = model.state_dict()
    entries = [Entry(name, tuple(tensor.shape), torch.float32) for name, tensor in state.items()]
    return entries, items(inventory_of(state))


@pytest.mark.parametrize(
    ("parallelism", "mesh_shape", "names"),
    [
        (Parallelism(4, fsdp=4), (4,), ("fsdp",)),
        (Parallelism(4, fsdp=2), (2, 2), ("replica", "fsdp")),
        (Parallelism(4, fsdp=2, tensor=2), (2, 2), ("fsdp", "tensor")),
    ],
    ids=["FSDP", "HSDP", "FSDP x TP"],
)
def test_ranks_hold_what_torch_gives_them(
    parallelism: Parallelism, mesh_shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    for rank, (entries, real) in enumerate(run_ranks(4, held_by_a_layer, mesh_shape, names)):
        assert items(SimulatedState(entries, parallelism).inventory(rank)) == real


@pytest.mark.parametrize("rank", range(8))
def test_experts_lie_on_the_innermost_ranks(rank: int) -> None:
    entry = Entry("layers.0.experts.w1", (4, 6, 5), torch.float32)
    parallelism = Parallelism(8, fsdp=8, expert=2)
    placed = parallelism.mesh_and_placements(entry)
    assert placed == ((1, 4, 2), (Replicate(), Shard(1), Shard(0)))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        tensor = distribute_tensor(torch.zeros(entry.shape), init_device_mesh("cpu", placed[0]), placed[1])
        real = inventory_of({entry.name: tensor})
    finally:
        dist.destroy_process_group()
    simulated = SimulatedState([entry], parallelism).inventory(rank)
    assert items(simulated) == items(real)


def test_a_rank_that_holds_several_pieces_or_none_names_them_all() -> None:
    entries = [Entry("q_proj.weight", (10, 3), torch.float32), Entry("bias", (3,), torch.float32)]
    state = SimulatedState(entries, Parallelism(8, fsdp=4, tensor=2))
    boxes = [
        (name, offset[0], size[0])
        for rank in range(8)
        for name, *_, offset, size in items(state.inventory(rank))
        if name == "q_proj.weight" or rank % 2 == 0
    ]
    for name, length in ("q_proj.weight", 10), ("bias", 3):
        held = sorted(row for found, offset, size in boxes if found == name for row in range(offset, offset + size))
        assert held == list(range(length))


@pytest.mark.parametrize(
    "arguments",
    [{"ranks": 6, "tensor": 4}, {"ranks": 0}, {"ranks": 6, "fsdp": 3, "expert": 2}, {"ranks": 6, "expert": 4}],
)
def test_meshes_that_cannot_be_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"ranks? "):
        Parallelism(**arguments)


# --- What is reported


def test_what_ranks_send_grows_with_layers_once_and_not_for_each_rank() -> None:
    def sent(layers: int, ranks: int) -> int:
        entries = [Entry(f"layers.{layer:02}.weight", (64, 8), torch.float32) for layer in range(layers)]
        return gather(SimulatedState(entries, Parallelism(ranks, fsdp=ranks))).sent_bytes

    assert sent(40, 2) - sent(20, 2) == sent(40, 16) - sent(20, 16) == 20 * (len("layers.00.weight") + 2 * 4)


def test_an_empty_state_is_planned() -> None:
    found = simulate([], Parallelism(3))
    assert (found.items, found.bytes_most, found.imbalance) == (0, 0, 1.0)


# --- States found elsewhere


def test_shapes_come_from_json(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"a": [4, 2], "b": {"shape": [3], "dtype": "int8"}, "c": {"bytes": 9}, "d": []}))
    assert entries_in_json(path, torch.float16) == [
        Entry("a", (4, 2), torch.float16),
        Entry("b", (3,), torch.int8),
        Entry("c", bytes=9),
        Entry("d", (), torch.float16),
    ]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"a": [4, -2]}, "a"),
        ({"a": [True]}, "a"),
        ({"bad": {"shape": 3}}, "bad"),
        ({"bad": {"dtype": "int8"}}, "bad"),
        ({"bad": {"shape": [1], "kind": "x"}}, "bad"),
        ({"bad": {"bytes": 1.5}}, "bad"),
        ({"bad": [0] * 65}, "bad"),
        ({"bad": [2**40, 2**30]}, "bad"),
        ({"a": {"shape": [1], "dtype": "Tensor"}}, "Tensor"),
        ([1, 2], "shapes.json"),
    ],
)
def test_json_of_another_form_is_refused(tmp_path: Path, content: Any, named: str) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=named):
        entries_in_json(path, torch.float16)


def test_shapes_come_from_a_checkpoint(checkpoint: Path) -> None:
    state = {"weight": torch.zeros(6, 4, dtype=torch.bfloat16), "step": torch.tensor(3), "note": "x" * 1000}
    save(checkpoint, state)
    weight, step, note = sorted(entries_in_checkpoint(checkpoint), key=lambda entry: list(state).index(entry.name))
    assert weight == Entry("weight", (6, 4), torch.bfloat16)
    assert step == Entry("step", (), torch.int64)
    assert (note.name, note.dtype) == ("note", None)
    assert 1000 < note.bytes < 4000


def test_dtypes_are_those_that_can_be_saved() -> None:
    assert dtype_named("float8_e4m3fn") is torch.float8_e4m3fn
    for name in ("nothing", "nn", "Tensor"):
        with pytest.raises(ValueError, match=name):
            dtype_named(name)


# --- The command


def test_the_command_prints_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-8b", "--ranks", "64", "--ddp"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["ranks"] == "64"
    assert lines["bytes"].endswith("mean 239.32 MiB")
    assert float(lines["max"].split()[-1]) < 1.02
    assert lines["planning"].endswith("s on the coordinator")
    assert {"items", "peak", "metadata", "index"} <= lines.keys()


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-1b", "--ranks=8", "--fsdp=2", "--tp=2", "--optimizer=adam", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    objects = 3 * 1024
    assert found["ranks"] == 8
    assert found["bytes_mean"] * 8 == pytest.approx(10 * 1_235_814_400 + 4 * 146 + objects)
    assert found["items"] == 146 * 4 + 3
    assert found["imbalance"] < 1.02


@pytest.mark.parametrize(
    ("arguments", "ranks", "imbalance"),
    [
        (["--fsdp=6", "--tp=2", "--replicas=3"], 36, None),
        (["--fsdp=8"], 8, None),
        (["--ddp", "--replicas=5"], 5, None),
        (["--ranks=6", "--placement=lowest_rank", "--ddp"], 6, 6.0),
    ],
)
def test_the_command_counts_ranks(
    arguments: list[str], ranks: int, imbalance: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "llama-1b", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == ranks
    assert found["bytes_mean"] * ranks == pytest.approx(2 * 1_235_814_400)
    assert imbalance is None or found["imbalance"] == imbalance


def test_the_command_takes_a_checkpoint_and_a_file(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(checkpoint, {"a": torch.zeros(1000)})
    (tmp_path / "shapes.json").write_text('{"a": [1000]}')
    for source in (str(checkpoint), str(tmp_path / "shapes.json")):
        assert main(["plan", source, "--ranks=4", "--dtype=float32", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["bytes_mean"] * 4 == 4000


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["no-such-model", "--ranks=2"], "llama-405b"),
        (["llama-1b", "--ranks=6", "--tp=4"], "6 ranks"),
        (["llama-1b", "--ranks=8", "--ddp", "--fsdp=2"], "--ddp"),
        (["llama-1b", "--ranks=8", "--fsdp=2", "--replicas=2"], "2 (replicas) x 2 (fsdp)"),
        (["llama-1b", "--ranks=8", "--dtype=complex"], "complex"),
        (["EMPTY", "--ranks=8"], "has no .metadata"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", *(argument.replace("EMPTY", str(tmp_path)) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("vescale-ckpt plan: ")
    assert reason in captured.err


def test_the_package_runs_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text('{"a": [1000]}')
    command = [sys.executable, "-m", "vescale_ckpt", "plan", str(tmp_path / "shapes.json"), "--ranks=4"]
    run = run_python(command)
    assert run.returncode == 0, run.stderr
    assert "max / mean" in run.stdout
