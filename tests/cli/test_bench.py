"""The command `bench`, and the pictures of `--plot`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vescale_ckpt
from vescale_ckpt import cli
from vescale_ckpt._bench import measure_disk, saves_and_loads
from vescale_ckpt._bench.by_turns import CEILING, STOCK, Sample, Steps, alternate, summarize, table
from vescale_ckpt._bench.page_cache import StillResidentError, drop, resident_fraction
from vescale_ckpt._bench.usage import Usage


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "mine").write_text("of the user")
    (tmp_path / "vescale-ckpt-bench-of-the-user").mkdir()
    return tmp_path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_it_measures_all_candidates_and_leaves_nothing(directory: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(measure_disk, "_trials", lambda: [("threads", 1)])
    before = names(directory), dict(os.environ)
    dead = directory / "vescale-ckpt-bench-0123abcd"
    dead.mkdir()
    (dead / ".vescale-ckpt-bench").touch()  # what one that was killed has left
    seen: list[tuple[int, int]] = []
    found = measure_disk.bench(directory, 3 << 20, 2, progress=lambda done, total: seen.append((done, total)))
    assert (names(directory), dict(os.environ)) == before and seen[-1][0] == seen[-1][1]
    assert [(row.step, row.candidate) for row in found.rows] == [
        (step, name) for step in ("save", "load") for name in ("disk", "vescale_ckpt", "stock DCP")
    ]
    assert all(len(row.rounds) == 2 and min(row.rounds) > 0 for row in found.rows)
    assert [trial.variable for trial in found.trials] == ["VESCALE_CKPT_THREADS"]
    monkeypatch.setattr("vescale_ckpt.cli.show_bench.bench", lambda *arguments, **options: found)
    status = cli.main(["bench", str(directory), "--json"])
    content = json.loads(capsys.readouterr().out)
    assert status == 0 and content["schema"] == "vescale_ckpt/bench/1" and content["bytes"] == 3 << 20
    assert set(content["broadcast"]) == {"one_node", "several_nodes"} and names(directory) == before[0]


def samples(candidate: str, seconds: list[float]) -> list[Sample]:
    steps = ("save", "load", "together")
    return [
        Sample("", step, candidate, number, Usage(taken, state_bytes=1 << 20))
        for step in steps
        for number, taken in enumerate(seconds)
    ]


def test_it_recommends_what_is_steadily_faster() -> None:
    def judged(seconds: list[float]) -> measure_disk.Trial:
        timed = samples("vescale_ckpt", [1.0] * 5) + samples("VESCALE_CKPT_THREADS=8", seconds)
        return measure_disk._judged(timed, "threads", 8)

    for seconds, wanted in (([0.8] * 5, 1), ([0.98] * 5, 0), ([0.5, 0.5, 0.5, 1.1, 1.2], 0), ([1.2] * 5, 0)):
        assert len(measure_disk._recommended([judged(seconds)])) == wanted


@pytest.mark.parametrize("ends", ["error", "interrupt", "SIGTERM"])
def test_nothing_is_left_however_it_ends(directory: Path, capsys: Any, monkeypatch: Any, ends: str) -> None:
    def fail(*arguments: object) -> None:
        if ends == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        raise KeyboardInterrupt if ends == "interrupt" else OSError(5, "Input/output error")

    before, handler = names(directory), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(saves_and_loads.api, "load", fail)
    status = cli.main(["bench", str(directory), "--bytes", "1MiB", "--repeats", "1", "--no-trials"])
    assert status == (2 if ends == "error" else 130) and "Traceback" not in capsys.readouterr().err
    assert names(directory) == before and signal.getsignal(signal.SIGTERM) is handler


def test_a_wrong_load_is_an_error(directory: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(saves_and_loads.api, "load", lambda *arguments: SimpleNamespace(stats=None))
    assert cli.main(["bench", str(directory), "--bytes", "1MiB", "--repeats", "1", "--no-trials"]) == 2
    assert "something else than was saved" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--bytes", "4EB"], ["--bytes", "many"], ["--bytes", "900TB"], ["--repeats", "0"], ["--plot", "a.gif"]],
)
def test_wrong_arguments_are_one_line(directory: Path, capsys: Any, arguments: list[str]) -> None:
    assert cli.main(["bench", str(directory), *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and len(names(directory)) == 2


def test_files_that_are_dropped_are_not_resident(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    assert resident_fraction(tmp_path) > 0.9
    if drop(tmp_path) == 0:
        assert resident_fraction(tmp_path) == 0


# --- Rounds, medians, ratios, tables: what the command and the benchmarks share


def test_every_candidate_runs_in_every_round_unless_it_is_to_run_fewer_times() -> None:
    runs: list[str] = []

    def candidate(name: str) -> Steps:
        runs.append(name)
        return {"step": 0.5}

    turns = {"ours": lambda: candidate("ours"), STOCK: lambda: candidate(STOCK)}
    samples = list(alternate("case", turns, 3, warmup=1, seed=1, fewer={STOCK: 1}))
    assert [(sample.round, sample.candidate) for sample in samples] == [
        (-1, "ours"), (-1, STOCK), (0, "ours"), (0, STOCK), (1, "ours"), (2, "ours")
    ]  # fmt: skip
    assert sorted(runs[:2]) == sorted(["ours", STOCK]) and len(runs) == 6


def test_a_round_with_files_that_stayed_in_memory_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [0]

    def candidate() -> Steps:
        turns[0] += 1
        if turns[0] == 2:
            raise StillResidentError("half of them")
        return {"step": 0.5}

    assert [sample.round for sample in alternate("case", {"ours": candidate}, 3)] == [0, 2]
    assert "round 1 is dropped: half of them" in capsys.readouterr().err


def test_rows_hold_medians_and_ratios_within_rounds() -> None:
    def samples(candidate: str, *seconds: float, first: int = 0) -> list[Sample]:
        rounds = enumerate(seconds, first)
        return [Sample("case", "save", candidate, number, Usage(taken, 1.0, number)) for number, taken in rounds]

    found = samples("ours", 9.0, 1.0, 3.0, 2.0, first=-1) + samples(STOCK, 10.0, 60.0) + samples(CEILING, 0.5, 0.3)
    ours, stock, ceiling = summarize([*found, Sample("case", "load", "ours", -1, Usage(1.0))])
    assert (ours.rounds, ours.seconds, ours.first_seconds) == ([1.0, 3.0, 2.0], 2.0, 9.0)
    assert (ours.of_baseline, ours.of_ceiling, ours.peak_extra_bytes) == (15.0, pytest.approx(0.3), 2)
    assert (stock.of_baseline, stock.first_seconds, ceiling.of_ceiling, ceiling.rate) == (1.0, None, 1.0, None)
    text = table([ours, stock, ceiling]).splitlines()
    assert text[0] == "case, median of 3" and "x stock" in text[1] and "GB/s" not in text[1]
    assert text[2].startswith("save  ours") and "2 s" in text[2] and "1 s-3 s" in text[2]


# --- Pictures


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    values = torch.tensor([1e-9, -4.0, 0.0, float("nan"), 1e9])
    vescale_ckpt.save(tmp_path / "c", {"$x_^$": values, "y": torch.ones(4), "e": torch.empty(0), "\x1b[2J": values})
    return tmp_path / "c"


def test_without_matplotlib_one_line_says_what_to_install(
    checkpoint: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    for command in (["stats", str(checkpoint)], ["bench", str(tmp_path)]):
        assert cli.main([*command, "--plot", str(tmp_path / "a.png")]) == 2
        err = capsys.readouterr().err
        assert 'pip install "vescale_ckpt[plot]"' in err and len(err.splitlines()) == 1
    assert not (tmp_path / "a.png").exists()


def test_pictures_are_drawn(checkpoint: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["stats", str(checkpoint), "--plot", str(tmp_path / "a.png")]) == 1
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    timed = [sample for name in ("disk", "vescale_ckpt", "stock DCP") for sample in samples(name, [1.0, 2.0])]
    rows = [row for row in summarize(timed, "stock DCP", "disk") if row.step != "together"]
    found = measure_disk.BenchReport("/$x^$", "ext4", 1 << 20, 2, True, rows, [], [])
    monkeypatch.setattr("vescale_ckpt.cli.show_bench.bench", lambda *arguments, **options: found)
    assert cli.main(["bench", str(tmp_path), "--plot", str(tmp_path / "b.svg")]) == 0
    assert b"<svg" in (tmp_path / "b.svg").read_bytes()
