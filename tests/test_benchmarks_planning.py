"""The planning benchmarks, tiny: they time what they say, and their stock is DCP."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import in_fork
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from benchmarks.planning import __main__ as command
from benchmarks.planning import balance, coordinator, local, reading, steady, stock
from benchmarks.planning.simulated_rank import in_new_process, simulated_rank, state_of
from benchmarks.timing import STOCK, Sample, alternate, first_call, summarize, table
from vescale_ckpt import _C
from vescale_ckpt.describe import Describer
from vescale_ckpt.rows import OBJECT
from vescale_ckpt.simulate.models import Entry, with_adam
from vescale_ckpt.simulate.parallelism import Parallelism, SimulatedState
from vescale_ckpt.simulate.simulation import planned

ENTRIES = with_adam(
    [
        Entry("embed_tokens.weight", (30, 8), torch.bfloat16),
        Entry("layers.0.q_proj.weight", (16, 8), torch.bfloat16),
        Entry("layers.0.o_proj.weight", (8, 16), torch.bfloat16),
        Entry("layers.0.norm.weight", (8,), torch.bfloat16),
    ]
)


# --- Timing


def test_candidates_run_as_often_as_asked_and_in_every_round() -> None:
    runs: list[str] = []

    def candidate(name: str, seconds: float) -> dict[str, float]:
        runs.append(name)
        return {"step": seconds}

    candidates = {"fast": lambda: candidate("fast", 0.5), STOCK: lambda: candidate(STOCK, 2.0)}
    samples = alternate("case", candidates, {"fast": 5, STOCK: 3}, seed=1)
    assert sorted((sample.round, sample.candidate) for sample in samples) == [
        (0, "fast"), (0, STOCK), (1, "fast"), (1, STOCK), (2, "fast"), (2, STOCK), (3, "fast"), (4, "fast"),
    ]  # fmt: skip
    assert runs == [sample.candidate for sample in samples]
    assert {sample.case for sample in samples} == {"case"}


def test_rows_hold_medians_and_ratios_within_rounds() -> None:
    samples = [
        Sample("case", "ours", 0, {"plan": 1.0, "write": 9.0}, 5),
        Sample("case", "ours", 1, {"plan": 3.0, "write": 9.0}, 7),
        Sample("case", "ours", 2, {"plan": 2.0, "write": 9.0}, 6),
        Sample("case", STOCK, 0, {"plan": 10.0}, None),
        Sample("case", STOCK, 1, {"plan": 60.0}, 4),
    ]
    plan, stock_plan, write = summarize(samples)
    assert (plan.step, plan.rounds, plan.median, plan.least, plan.most) == ("plan", 3, 2.0, 1.0, 3.0)
    assert (plan.of_stock, plan.peak_extra_bytes) == (15.0, 7)
    assert (stock_plan.candidate, stock_plan.of_stock, stock_plan.peak_extra_bytes) == (STOCK, 1.0, None)
    assert (write.step, write.of_stock) == ("write", None)
    text = table([plan, stock_plan, write])
    assert text.splitlines()[0] == "case"
    assert "2 s" in text and "15" in text


def test_the_first_call_is_the_one_that_counts() -> None:
    watched = SimpleNamespace(write=len)
    with first_call(watched, "write") as written:
        start = time.perf_counter()
        assert watched.write("abc") == 3
        first = written.since(start)
        assert watched.write("") == 0
    assert 0 <= first == written.since(start)
    assert watched.write is len
    with first_call(watched, "write") as written:
        pass
    with pytest.raises(RuntimeError, match="never called"):
        written.since(start)


# --- Stock


def plans_of_rank(rank: int) -> tuple[bytes, bytes]:
    """Of one rank, what stock plans of its state and what we make of its inventory; in a process of its own."""
    parallelism = Parallelism(8, fsdp=2, tensor=2)
    with simulated_rank(8, rank):
        state = state_of(ENTRIES, parallelism)
        inventory = Describer().describe(state)[0].inventory
        simulated = SimulatedState(ENTRIES, parallelism).inventory(rank)
        assert _C.inventory_kinds(inventory) == _C.inventory_kinds(simulated)
        assert [item for item in _C.inventory_items(inventory) if item[1] != OBJECT] == [
            item for item in _C.inventory_items(simulated) if item[1] != OBJECT
        ]
        return pickle.dumps(create_default_local_save_plan(state, False).items), pickle.dumps(
            stock.save_plan(inventory)
        )


def test_stock_gets_the_items_that_it_makes_itself() -> None:
    real, ours = map(pickle.loads, in_fork(plans_of_rank, 5))
    assert len(real) == len(ENTRIES)
    assert [item.index for item in ours.items] == [item.index for item in real]
    assert [item.type for item in ours.items] == [item.type for item in real]
    assert [item.tensor_data for item in ours.items] == [item.tensor_data for item in real]
    assert ours.planner_data == {entry.name: (entry.name,) for entry in ENTRIES}


def test_stock_writes_all_bytes_once() -> None:
    state = SimulatedState(ENTRIES, Parallelism(4, fsdp=2))
    inventories = [state.inventory(rank) for rank in range(4)]
    plan, _ = planned(inventories, "balanced")
    objects = 3 * 1024  # nothing, to stock
    assert sum(stock.bytes_by_rank(inventories)) == sum(plan.bytes_by_rank()) - objects


# --- The cases


def test_coordinators_are_timed_on_the_same_items(tmp_path: Path) -> None:
    samples = coordinator.run(ranks=4, items=100, rounds=2, stock_rounds=1, directory=tmp_path, seed=0)
    assert len(samples) == 2 + 1 + 1
    for sample in samples:
        assert sample.case.startswith("coordinator, 4 ranks x 100 items")
        assert sample.seconds["plan"] > 0
        assert sample.seconds["metadata"] > 0
    stocks = [sample.seconds for sample in samples if sample.candidate.startswith(STOCK)]
    for seconds in stocks:
        parts = ("unpickle plans", "assign and validate", "pickle plans")
        assert seconds["plan"] == pytest.approx(sum(seconds[part] for part in parts))
    assert list(tmp_path.iterdir()) == []


def _small(case: balance.Case) -> bool:
    return case.parallelism.ranks == 8 or case.name.startswith("2 layers")


@pytest.mark.parametrize("case", filter(_small, balance.cases()), ids=lambda case: case.name)
def test_small_cases_are_balanced(case: balance.Case) -> None:
    found = balance.balance(case)
    assert 1 <= found.ours <= 1.02
    assert found.stock >= found.ours - 0.01


def test_the_balance_of_stock_is_the_known_one() -> None:
    found = {case.name: balance.balance(case) for case in balance.cases()[:1]}
    assert found["Llama 8B replicated on 8"].stock == pytest.approx(1.43, abs=0.005)
    assert "1.43" in balance.table(list(found.values()))


@pytest.mark.parametrize("kind", ["plain tensors", "DTensors"])
def test_saves_are_timed_to_their_first_byte(kind: str, tmp_path: Path) -> None:
    samples = in_fork(local.before_first_byte, kind, 20, 1, tmp_path, 0)
    assert {sample.candidate for sample in samples} == {"dcp.save, our planner and writer", "vescale_ckpt.save", STOCK}
    for sample in samples:
        assert set(sample.seconds) == {"cold", "warm"}
        assert 0 < min(sample.seconds.values()) < 100
    assert kind in samples[0].case


def test_local_plans_are_timed() -> None:
    samples = in_new_process(local.local_plans, "DTensors", 30, 2, 0)
    assert [sample.candidate for sample in samples].count(STOCK) == 2
    assert {row.step: row.case for row in summarize(samples)} == dict.fromkeys(
        ("cold", "warm"), "local plan, 30 DTensors"
    )


def test_local_plans_of_a_big_job_are_timed() -> None:
    samples = in_fork(local.local_plans_of_model, "llama-1b", Parallelism(32, fsdp=8, tensor=4), 2, 1, 0)
    assert [sample.candidate for sample in samples].count("vescale") == 2
    ours = next(row for row in summarize(samples) if row.candidate == "vescale" and row.step == "cold")
    assert ours.case.endswith("587 items")
    assert ours.of_stock is not None and ours.of_stock > 1


def test_steady_saves_and_loads_are_timed(tmp_path: Path) -> None:
    samples = steady.run(ranks=2, tensors=10, rounds=1, directory=tmp_path, seed=0)
    steps = {sample.candidate: set(sample.seconds) for sample in samples}
    assert steps == {
        "dcp.save / dcp.load, ours": {"save", "load"},
        "vescale_ckpt.save": {"save"},
        STOCK: {"save", "load"},
    }
    assert all(0 < seconds < 60 for sample in samples for seconds in sample.seconds.values())
    assert list(tmp_path.iterdir()) == []


def test_metadata_is_read_for_one_rank(tmp_path: Path) -> None:
    samples = reading.one_rank_of_many(8, 50, 2, 1, tmp_path, 0)
    assert len(samples) == 4
    ours = next(sample for sample in samples if sample.candidate == "vescale")
    assert ours.seconds["read metadata"] == pytest.approx(ours.seconds["open"] + ours.seconds["find what is wanted"])


def test_load_plans_of_another_world_are_timed(tmp_path: Path) -> None:
    samples = in_fork(reading.changed_world, 20, 4, 3, 1, tmp_path, 0)
    assert {sample.candidate for sample in samples} == {"vescale", STOCK}
    assert {"both", "read metadata", "plan"} == set(samples[0].seconds)


def test_the_command_writes_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "in_new_process", in_fork)
    output = tmp_path / "found.json"
    arguments = ["--cases=coordinator,large", "--rounds=1", "--stock-rounds=1", "--ranks=4", "--large-ranks=6"]
    assert command.main([*arguments, "--items=10", f"--dir={tmp_path}", f"--json={output}"]) == 0
    printed = capsys.readouterr().out
    assert "coordinator, 4 ranks x 10 items" in printed
    assert "coordinator, 6 ranks x 10 items" in printed
    content = json.loads(output.read_text())
    assert content["settings"]["ranks"] == 4
    assert {row["candidate"] for row in content["rows"]} == {"vescale", STOCK, f"{STOCK}, collector on"}
    assert len(content["samples"]) == 3 + 1
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("arguments", [["--rounds=0"], ["--cases=nothing"], ["--dir=/no/such/directory"]])
def test_the_command_refuses_what_it_cannot_do(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert "error" in capsys.readouterr().err
