"""The benchmark of loads on several ranks, tiny: it loads what it says, and its tables say what was measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks import states
from benchmarks.loading import __main__ as command
from benchmarks.loading import cases, results
from benchmarks.loading.cases import Held
from benchmarks.loading.ranks import LOOPBACK, ONE_NODE, Rank, RankFailedError, ranks_on
from benchmarks.loading.storage import UnavailableError, storage_limit
from benchmarks.loading.trial import Place, Sample
from benchmarks.timing import STOCK
from vescale_ckpt.node import node_of_this_process

# --- What ranks hold


@pytest.mark.parametrize("held", [Held(0), Held(1), Held(2)], ids=str)
def test_shards_of_all_ranks_are_the_whole(held: Held) -> None:
    state = {"cube": torch.arange(5 * 7 * 3).view(5, 7, 3), "row": torch.arange(5)}
    pieces = [held.pieces(state, rank, 4) for rank in range(4)]
    assert held.dim is not None
    for name, tensor in state.items():
        dim = min(held.dim, tensor.ndim - 1)
        assert torch.equal(torch.cat([piece[name] for piece in pieces], dim), tensor)


def test_a_state_and_its_twin_give_ranks_the_same_bytes() -> None:
    for dim in range(3):
        stacked, twin = cases.stacked_and_twin(1, dim)
        whole, apart = states.build(stacked.shapes, 0), states.build(twin.shapes, 0)
        assert stacked.bytes == twin.bytes
        for rank in range(4):
            ours = stacked.loaded.pieces(whole, rank, 4).values()
            theirs = twin.loaded.pieces(apart, rank, 4).values()
            assert sum(piece.nbytes for piece in ours) == sum(piece.nbytes for piece in theirs)


# --- Tables


def _sample(case: str, place: Place, candidate: str, number: int, seconds: float) -> Sample:
    return Sample(case, place, candidate, number, seconds, 100, 200, 300, 1.0, 2**20 * (number + 2), 0.5, 0.0)


def test_rows_hold_medians_and_ratios_within_rounds() -> None:
    place = Place(4, None, ONE_NODE)
    samples = [_sample("case", place, "auto", number, seconds) for number, seconds in ((-1, 9.0), (0, 1.0), (1, 3.0))]
    samples += [_sample("case", place, STOCK, number, seconds) for number, seconds in ((0, 2.0), (1, 12.0))]
    ours, stock = results.summarize(samples)
    assert (ours.candidate, ours.rounds, ours.seconds, ours.of_stock) == ("auto", 2, 2.0, 3.0)
    assert (ours.disk_reads, ours.call_reads, ours.first_seconds, ours.peak_extra_bytes) == (2.0, 3.0, 9.0, 3 * 2**20)
    assert (stock.candidate, stock.of_stock, stock.first_seconds) == (STOCK, 1.0, None)
    assert "case: 4 ranks, storage as it is, one node, median of 2" in results.details([ours, stock])


def test_the_crossover_names_the_faster_way_and_what_finding_out_costs() -> None:
    slow, fast = Place(4, 150, LOOPBACK), Place(4, None, "100")
    samples = [
        _sample("case", place, name, 0, seconds)
        for place, times in ((slow, (4.0, 1.0, 1.5)), (fast, (1.0, 2.0, 1.0)))
        for name, seconds in zip(("false", "true", "auto"), times, strict=True)
    ]
    _, first, second = results.crossover(results.summarize(samples)).splitlines()
    assert first.split() == ["case", "4", "150", "loopback", "4.000", "1.000", "1.500", "true", "1.50", "50%"]
    assert second.split()[-6:] == ["1.000", "2.000", "1.000", "false", "1.00", "50%"]


def test_numbers_of_ranks_are_compared_with_the_fastest() -> None:
    samples = [_sample("dim 0", Place(ranks, None, ONE_NODE), "true", 0, 4.0 / ranks) for ranks in (1, 2, 4)]
    lines = results.by_ranks(results.summarize(samples)).splitlines()
    assert [line.split()[-3] for line in lines[1:]] == ["4.00", "2.00", "1.00"]


# --- Ranks, and what slows them down


def _node(rank: Rank, others: int) -> tuple[int, int]:
    rank.barrier.wait()
    return rank.rank + others, node_of_this_process()


def _fail(rank: Rank) -> None:
    if rank.rank == 1:
        raise ValueError("on purpose")
    rank.barrier.wait()


def test_ranks_answer_and_fail_together() -> None:
    with ranks_on(2, LOOPBACK) as ranks:
        assert ranks.call(_node, 10) == [(10, 0), (11, 1)]
        with pytest.raises(RankFailedError, match=r"(?s)rank 1.*on purpose"):
            ranks.call(_fail)


@pytest.mark.root
def test_storage_is_limited_for_as_long_as_asked(tmp_path: Path) -> None:
    try:
        with storage_limit(tmp_path) as limit:
            limit.set(10**6)
            (group,) = Path("/sys/fs/cgroup").rglob("vescale-ckpt-benchmark-*")
            found = (
                "".join(path.read_text() for path in group.glob("*read_bps_device")) or (group / "io.max").read_text()
            )
            assert "1000000" in found
            limit.set(None)
    except UnavailableError as error:
        pytest.skip(str(error))
    assert not group.exists()


def test_memory_is_no_disk_to_limit() -> None:
    with pytest.raises(UnavailableError, match="cannot be limited"), storage_limit(Path("/dev/shm")):
        pass


# --- The command


def test_the_command_writes_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "found.json"
    arguments = ["--ranks=2", "--mib=8", "--rounds=1", "--warmup=0", f"--dir={tmp_path}", f"--json={output}"]
    assert command.main([*arguments, "--modes=true,false,reader,stock"]) == 0
    printed = capsys.readouterr().out
    for name in ("replicated", "rows-to-columns", "stacked"):
        assert f"{name}: 2 ranks, storage as it is, one node, median of 1" in printed
    content = json.loads(output.read_text())
    assert len(content["samples"]) == 3 * 4
    assert {row["candidate"] for row in content["rows"]} == {"true", "false", "reader", STOCK}
    for row in content["rows"]:
        assert row["call_reads"] >= 1 and row["peak_extra_bytes"] is not None and 0 < row["seconds"] < 100
    shared = {(row["case"], row["candidate"]): row["shared"] for row in content["rows"]}
    assert (shared["replicated", "true"], shared["replicated", "false"], shared["replicated", STOCK]) == (1, 0, None)
    assert list(tmp_path.iterdir()) == [output]


def test_the_command_compares_a_stack_with_its_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--table=stacked", "--ranks=1", "--mib=2", "--rounds=1", "--warmup=0", f"--dir={tmp_path}"]
    assert command.main([*arguments, "--modes=false,stock", "--written-by=stock"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stacked")]
    assert len(lines) == 3 * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["--rounds=0"], ["--cases=nothing"], ["--modes=stock,fast"], ["--network=0"], ["--dir=/no/such"]]
)
def test_the_command_refuses_what_it_cannot_do(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert "error" in capsys.readouterr().err


def test_samples_can_be_written() -> None:
    sample = _sample("case", Place(2, 150, ONE_NODE), "auto", 0, 1.0)
    assert json.loads(json.dumps(dataclasses.asdict(sample)))["place"]["storage"] == 150
