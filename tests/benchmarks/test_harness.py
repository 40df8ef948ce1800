"""The benchmarks' harness: candidates by turns, cold files, medians and ratios, a folder that is always removed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness import saves_and_loads
from benchmarks.harness.by_turns import CEILING, STOCK, Sample, Steps, alternate, summarize, table
from benchmarks.harness.page_cache import StillResidentError, drop, resident_fraction
from benchmarks.harness.room import WrongContentsError, working_folder
from benchmarks.harness.saves_and_loads import Disk, SavesAndLoads
from benchmarks.harness.usage import Usage
from benchmarks.storage import UnavailableError, storage_limit


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("ends", [None, OSError, KeyboardInterrupt, "SIGTERM"])
def test_nothing_is_left_however_it_ends(tmp_path: Path, ends: Any) -> None:
    (tmp_path / "mine").write_text("of the user")
    before, handler = names(tmp_path), signal.getsignal(signal.SIGTERM)
    try:
        with working_folder(tmp_path) as folder:
            (folder / "file").touch()
            if ends == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            elif ends is not None:
                raise ends()
    except (OSError, KeyboardInterrupt):
        assert ends is not None
    assert names(tmp_path) == before and signal.getsignal(signal.SIGTERM) is handler


def test_a_wrong_load_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    both = SavesAndLoads({"w": (512,)}, Disk(tmp_path, lambda folder: 0.0))
    both.turn("ours", saves_and_loads.ours())
    monkeypatch.setattr(saves_and_loads.api, "load", lambda *arguments: SimpleNamespace(stats=None))
    with pytest.raises(WrongContentsError, match="something else than was saved"):
        both.turn("ours", saves_and_loads.ours())


def test_files_that_are_dropped_are_not_resident(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    assert resident_fraction(tmp_path) > 0.9
    if drop(tmp_path) == 0:
        assert resident_fraction(tmp_path) == 0


def test_every_candidate_runs_in_every_round() -> None:
    runs: list[str] = []

    def candidate(name: str) -> Steps:
        runs.append(name)
        return {"step": 0.5}

    turns = {"ours": lambda: candidate("ours"), STOCK: lambda: candidate(STOCK)}
    samples = list(alternate("case", turns, 2, warmup=1))
    assert [(sample.round, sample.candidate) for sample in samples] == [
        (-1, "ours"), (-1, STOCK), (0, "ours"), (0, STOCK), (1, "ours"), (1, STOCK)
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


# --- The limit of storage under which benchmarks run


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
