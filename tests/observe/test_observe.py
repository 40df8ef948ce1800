"""What saves and loads tell: statistics, lines of logs, listeners, traces, and steps that take long."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import steps
from harness.logs import logged
from harness.ranks import on_ranks, run_ranks

import vescale_ckpt
from vescale_ckpt import metrics
from vescale_ckpt._observe import amounts, lines
from vescale_ckpt._observe.timeline import Timeline, phase
from vescale_ckpt.reports import JobStats


def _state(elements: int = 1 << 20) -> dict[str, Any]:
    return {"weight": torch.arange(elements, dtype=torch.float32), "bias": torch.ones(7), "step": 3}


def _lines(caplog: pytest.LogCaptureFixture, text: str, level: int = logging.INFO) -> list[str]:
    records = [record for record in caplog.records if record.levelno == level and record.name == "vescale_ckpt"]
    return [record.getMessage() for record in records if text in record.getMessage()]


# --- Timelines


def test_votes_name_the_slowest_rank_and_the_most_bytes() -> None:
    votes = []
    for rank, (seconds, count) in enumerate([(1.0, 30), (2.5, 10), (0.5, 20)]):
        timeline = Timeline("save", "p", "saving to p", rank, 3)
        timeline.seconds_by_phase = {"write": seconds, "wait": 100.0}
        votes.append(timeline.votes(count))
    least = [min(of_all) for of_all in zip(*(least for least, _ in votes), strict=True)]
    sums = [sum(of_all) for of_all in zip(*(sums for _, sums in votes), strict=True)]
    job = timeline.job([*least, *sums])
    assert job == JobStats(3, 60, 30, 1, 2.5, pytest.approx(4 / 3))
    assert job.imbalance == pytest.approx(0.5)


# --- Statistics and lines


def test_a_save_and_a_load_tell_how_they_went(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vescale_ckpt")
    state = _state()
    longest = []
    for again in (False, True):
        stats = vescale_ckpt.save(checkpoint, state).stats
        assert stats is not None
        assert stats.plan_reused is again
        longest.append(max(stats.phases, key=lambda name: stats.phases[name]))  # short phases are not named in lines
    assert {"plan", "write", "sync", "commit"} <= set(stats.phases)
    assert sum(stats.phases.values()) <= stats.total_seconds
    assert stats.blocked_seconds == pytest.approx(stats.total_seconds, rel=0.5)
    assert stats.job is not None
    assert (stats.job.ranks, stats.job.bytes, stats.job.slowest_rank) == (1, stats.bytes, 0)
    loaded = vescale_ckpt.load(checkpoint, state).stats
    assert {"metadata", "plan", "read"} <= set(loaded.phases)
    assert loaded.total_seconds > 0
    saves, loads = _lines(caplog, f"saving to {checkpoint}"), _lines(caplog, f"loading {checkpoint}")
    assert [line.endswith(": begins") for line in saves] == [True, False, True, False]
    assert [line.endswith(": begins") for line in loads] == [True, False]
    assert "4.00 MiB" in saves[1] and "planned anew" in saves[1] and f" {longest[0]} " in saves[1]
    assert "plan reused" in saves[3] and f" {longest[1]} " in saves[3]
    assert f"{max(loaded.phases, key=lambda name: loaded.phases[name])} " in loads[1]


def test_an_asynchronous_save_tells_how_long_training_waited(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vescale_ckpt")
    handle = vescale_ckpt.save(checkpoint, _state(), async_checkpoint=True)
    stats = handle.result()
    assert handle.stats == stats
    assert 0 < stats.blocked_seconds < stats.total_seconds
    assert {"plan", "snapshot", "write", "sync", "commit"} <= set(stats.phases)
    assert "training waited" in _lines(caplog, "saving to")[-1]


def test_saves_and_loads_by_dcp_tell_too(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vescale_ckpt")
    writer = vescale_ckpt.StorageWriter(checkpoint)
    dcp.save(_state(), storage_writer=writer, planner=vescale_ckpt.SavePlanner())
    reader = vescale_ckpt.StorageReader(checkpoint)
    dcp.load(_state(), storage_reader=reader, planner=vescale_ckpt.LoadPlanner())
    assert writer.last_stats is not None and writer.last_stats.job is None
    assert {"write", "sync", "commit"} <= set(writer.last_stats.phases)
    assert len(_lines(caplog, "saving to")) == len(_lines(caplog, "loading")) == 2


def test_log_setting_prints_lines_with_the_rank(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VESCALE_CKPT_LOG", "info")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setattr(lines, "_handler", None)
    package = logging.getLogger("vescale_ckpt")
    level, handlers = package.level, [*package.handlers]
    try:
        vescale_ckpt.save(checkpoint, _state())
        vescale_ckpt.load(checkpoint, _state())
    finally:
        package.setLevel(level)
        package.handlers, package.propagate = handlers, True
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 4
    assert all("vescale_ckpt [rank 5] INFO " in line for line in told)


# --- Listeners


def test_listeners_hear_of_saves_loads_and_failures(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[metrics.Finished] = []

    def fails(finished: metrics.Finished) -> None:
        raise RuntimeError("no metrics today")

    removals = [metrics.on_finish(fails), metrics.on_finish(heard.append)]
    try:
        step = checkpoint / "step-12"
        vescale_ckpt.save(step, _state())
        vescale_ckpt.load(step)
        with pytest.raises(vescale_ckpt.CheckpointError):
            vescale_ckpt.load(checkpoint / "none")
    finally:
        for remove in removals:
            remove()
    vescale_ckpt.load(step)  # heard by nobody
    assert [(finished.kind, finished.step, finished.error is None) for finished in heard] == [
        ("save", 12, True), ("load", 12, True), ("load", None, False)
    ]  # fmt: skip
    assert heard[0].stats is not None and heard[2].stats is None
    assert "a listener of saves and loads failed" in caplog.text


def test_adapters_pass_the_figures_on(checkpoint: Path, tmp_path: Path) -> None:
    scalars: list[tuple[str, float, int]] = []
    logged: list[dict[str, float]] = []

    class Writer:
        def add_scalar(self, *of: Any) -> None:
            scalars.append(of)

    class Run:
        def log(self, figures: dict[str, float]) -> None:
            logged.append(figures)

    lines = tmp_path / "lines.jsonl"
    adapters = [metrics.JsonLines(lines), metrics.TensorBoard(Writer()), metrics.WeightsAndBiases(Run())]
    removals = [metrics.on_finish(adapter) for adapter in adapters]
    try:
        vescale_ckpt.save(checkpoint / "step-7", _state())
    finally:
        for remove in removals:
            remove()
    (line,) = map(json.loads, lines.read_text().splitlines())
    assert line["step"] == 7 and line["error"] is None
    name = "checkpoint/save/bytes_per_second"
    assert line[name] > 0
    assert (name, line[name], 7) in scalars
    assert logged[0][name] == line[name] and logged[0]["checkpoint/step"] == 7


# --- Several ranks


class _Lines(logging.Handler):
    def __init__(self, told: Path) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []
        self._told = told  # is made when a line says for whom a rank waits

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))
        if record.levelno == logging.WARNING and "waits for" in record.getMessage():  # by rank 0, which knows for whom
            self._told.touch()


def _late_save(directory: str, late: int) -> tuple[list[tuple[int, str]], JobStats | None]:
    """A save to which one rank comes late. Returns what this rank logs, and the job's statistics."""
    rank = dist.get_rank()
    os.environ["VESCALE_CKPT_REPORT_SECONDS"] = "1"
    told = Path(f"{directory}.told")
    lines, logger = _Lines(told), logging.getLogger("vescale_ckpt")
    logger.addHandler(lines)
    logger.setLevel(logging.DEBUG)
    try:
        state = {"all": torch.arange(4096.0), f"of {rank}": torch.ones(1 << 20 if rank == 1 else 8)}
        vescale_ckpt.save(directory, state)  # connects
        if rank == late:
            deadline = time.monotonic() + 60
            time.sleep(1.5)
            while not told.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        stats = vescale_ckpt.save(directory, state).stats
    finally:
        logger.removeHandler(lines)
        logger.setLevel(logging.NOTSET)
    return lines.lines, None if stats is None else stats.job


def test_a_rank_that_waits_says_for_whom(checkpoint: Path) -> None:
    answers = run_ranks(3, _late_save, str(checkpoint), 2)
    jobs = [job for _, job in answers]
    assert jobs[0].last_rank == 2 and jobs[0].late_seconds > 1
    assert jobs[0] is not None and jobs.count(jobs[0]) == 3
    assert jobs[0].ranks == 3
    assert jobs[0].most_bytes >= 4 << 20 and jobs[0].imbalance > 1
    told = [text for level, text in answers[0][0] if level == logging.WARNING]
    assert any("last to come: rank 2" in text for _, text in answers[0][0])
    assert any("is in 'wait'" in text and "waits for rank 2 of 3" in text for text in told), told
    assert not any("waits for" in text for lines, _ in answers[1:] for level, text in lines if level >= logging.WARNING)
    ends = [text for level, text in answers[0][0] if level == logging.INFO and "slowest: rank" in text]
    assert len(ends) == 2


@on_ranks(3)
def test_a_rank_that_was_late_because_it_connected_is_told_so(checkpoint: Path) -> None:
    """A first save of a group, in which one rank takes long to connect to the store."""
    group = dist.new_group(range(dist.get_world_size()), backend="gloo")
    slow = steps.before("connect to the store", lambda *_: time.sleep(3))
    with slow if dist.get_rank() == 1 else contextlib.nullcontext(), logged() as texts:
        stats = vescale_ckpt.save(checkpoint, {"w": torch.ones(8)}, process_group=group).stats
    assert stats is not None and stats.job is not None
    assert dist.get_rank() != 1 or stats.phases["connect"] >= 3
    if dist.get_rank() == 0:
        told = "\n".join(texts)
        assert (stats.job.last_rank, stats.job.last_phase) == (1, "connect")
        assert stats.job.last_phase_seconds >= 3 and stats.job.late_seconds > 1.5
        assert "last to come: rank 1" in told and f"after {stats.job.last_phase_seconds:.2f} s of 'connect'" in told
        assert stats.phases["wait"] > 1.5


def test_a_step_in_which_nothing_moves_is_a_warning(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "vescale_ckpt")
    monkeypatch.setenv("VESCALE_CKPT_REPORT_SECONDS", "1")
    release = threading.Timer(2.5, lambda: None)
    release.start()
    timeline = Timeline("save", "p", "saving to p")
    timeline.progress = lambda: (5 << 20, 10 << 20)
    with timeline.here(), phase("write", "the file"):
        release.join()
    told = _lines(caplog, "is in 'write' (the file)", logging.WARNING)
    assert told
    assert "5.00 MiB of 10.00 MiB, and nothing moves" in told[0]


# --- Traces


def _traced(directory: str, trace: str) -> None:
    os.environ["VESCALE_CKPT_TRACE"] = trace
    os.environ["RANK"] = str(dist.get_rank())
    state = {f"of {dist.get_rank()}": torch.ones(1 << 20)}
    vescale_ckpt.save(f"{directory}/step-1", state)
    vescale_ckpt.save(f"{directory}/step-2", state, async_checkpoint=True).result()
    vescale_ckpt.load(f"{directory}/step-2", state)


def test_traces_of_all_ranks_are_one_trace(checkpoint: Path, tmp_path: Path) -> None:
    run_ranks(2, _traced, str(checkpoint), str(tmp_path / "traces"))
    for file in (tmp_path / "traces").iterdir():  # a process that is killed tears the last line
        assert len(json.loads(f"{file.read_text().rstrip(chr(10) + ',')}]")) > 10
        file.write_text(file.read_text() + '{"ph": "X", "na')
    page = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "slow-save.md").read_text()
    (command,) = re.findall(r"^\(echo .*$", page, re.MULTILINE)
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    events = json.loads(f"{(tmp_path / 'all-ranks.json').read_text().rstrip(chr(10) + ',')}]")
    spans = [event for event in events if event["ph"] == "X"]
    whole = [
        (event["pid"], event["cat"]) for event in sorted(spans, key=lambda event: event["ts"]) if event["tid"] == 0
    ]
    for rank in (0, 1):
        assert [kind for of_rank, kind in whole if of_rank == rank] == ["save", "save", "load"]
        names = {event["name"] for event in spans if event["pid"] == rank}
        assert {"plan", "snapshot", "write", "sync", "wait", "read"} <= names


def test_profiles_of_torch_show_the_phases(checkpoint: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        vescale_ckpt.save(checkpoint, _state())
    assert {"vescale_ckpt save: plan", "vescale_ckpt save: write"} <= {event.key for event in profile.key_averages()}


def test_a_trace_that_cannot_be_written_fails_no_save(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VESCALE_CKPT_TRACE", str(tmp_path / "file" / "below"))
    vescale_ckpt.save(checkpoint, _state())
    assert "no trace is written" in caplog.text


# --- Bars and texts


def test_progress_setting_prints_lines_where_there_is_no_terminal(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VESCALE_CKPT_PROGRESS", "1")
    monkeypatch.setattr(amounts, "_QUIET_SECONDS", 0.1)
    with steps.slow_background_writes(12 << 20):
        vescale_ckpt.save(checkpoint, _state(6 << 20), async_checkpoint=True).result()
    told = capsys.readouterr().err
    assert f"saving to {checkpoint}: " in told and "of 24.00 MiB" in told, told
