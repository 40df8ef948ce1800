"""Every benchmark's command, tiny: it runs, compares what was written with the state, and prints a row for each way."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import steps as harness_steps
from harness.machines import why_not
from harness.object_server import ObjectServer
from harness.ranks import in_fork
from harness.steps import CEILING, STOCK

from benchmarks import __main__ as command
from benchmarks import background, export, gpu, loading, quick
from benchmarks.candidates import FILES
from benchmarks.planning import cases as planning
from benchmarks.planning.simulated_job import Parallelism

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_waiting_for_what_others_write() -> None:
    harness_steps.instead("wait for what others write", lambda directory: None).start()


@pytest.fixture(autouse=True)
def little_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "TRIES", 1)
    monkeypatch.setattr(background, "TRAINING_STEPS", 2)


Rows = dict[tuple[str, str], dict[str, Any]]  # by step and candidate, of the last case


def run(name: str, folder: Path, *arguments: str) -> Rows:
    """The rows of a benchmark that leaves nothing behind but its report."""
    report = folder / "report.json"
    assert command.main([name, *arguments, "--rounds=1", "--warmup=0", f"--dir={folder}", f"--json={report}"]) == 0
    assert list(folder.iterdir()) == [report]
    rows = json.loads(report.read_text())["rows"]
    assert all(0 < row["seconds"] < 100 for row in rows)
    return {(row["step"], row["candidate"]): row for row in rows}


def steps(rows: Rows) -> dict[str, set[str]]:
    return {name: {step for step, candidate in rows if candidate == name} for _, name in rows}


def test_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(quick, "_PROBE", 2**21)
    monkeypatch.setattr(quick, "MOST_GIB", 0.002)
    monkeypatch.setattr(quick, "SECONDS", 0.0)
    assert command.main(["quick", str(tmp_path)]) == 0
    assert not list(tmp_path.iterdir())
    shown = capsys.readouterr().out
    assert all(shown.count(name) == 2 for name in quick.NAMES.values()), "saves and loads"
    assert command.main(["quick"]) == command.main(["quick", str(tmp_path / "none")]) == 2


def test_first_loads(tmp_path: Path) -> None:
    rows = run("first_loads", tmp_path, "--gib=0.002", "--state=small", "--idle=0", "--touch=0.01")
    assert {"vescale", "not verified", STOCK} <= {candidate for _, candidate in rows}
    assert steps(rows)["vescale"] == {"load", "load and copy"}


def test_quantized(tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.mxfp4")
    rows = run("quantized", tmp_path, "--gib=0.001")
    assert {candidate for _, candidate in rows} == {CEILING, "as stored", "plain", "values", "stacked", STOCK}
    assert rows["load", "values"]["of_ceiling"] > 0 and rows["load", "stacked"]["of_ceiling"] > 0


def test_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run("saves", tmp_path, "--gib=0.001", "--candidates=ceiling,vescale,vescale-functions,dcp-4")
    assert steps(rows) == {name: {"save", "load"} for name in (CEILING, "vescale", "vescale-functions", "dcp-4")}
    assert rows["load", "vescale"]["of_ceiling"] > 0 and rows["save", "vescale"]["of_baseline"] > 0
    assert rows["save", "vescale"]["calls"] > 0.9 and "direct" in rows["save", "vescale"]["path"]
    assert "x dcp-4" in capsys.readouterr().out


def test_safetensors(tmp_path: Path) -> None:
    options = ("--state=one", "--baseline=safetensors", "--files")
    rows = run("saves", tmp_path, "--gib=0.001", "--ops=save", "--places=as-it-is,durable,memory", *options)
    assert steps(rows) == {name: {"save"} for name in FILES}
    assert rows["save", "vescale-safetensors"]["of_baseline"] > 0
    assert steps(run("saves", tmp_path, "--gib=0.001", "--ops=load", *options)) == {name: {"load"} for name in FILES}


def test_loading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--ranks=2", "--mib=4", "--modes=ceiling,true,false,stock", "--cases=rows-to-columns,replicated")
    rows = run("loading", tmp_path, *more, "--network=node,loopback")
    shared = {name: row["shared"] for (_, name), row in rows.items()}
    assert shared == {CEILING: None, "true": 1, "false": 0, STOCK: None}
    assert rows["load", "true"]["of_ceiling"] > 0 and rows["load", "true"]["peak_extra_bytes"] is not None
    assert "replicated: 2 ranks, storage as it is, node, median of 1" in capsys.readouterr().out


def test_background(tmp_path: Path) -> None:
    rows = run("background", tmp_path, "--gib=0.001", "--candidates=ours,our stager,stock")
    wanted = {"stall", "durable", "training lost", "synchronous save"}
    assert steps(rows) == dict.fromkeys(("ours", "our stager", STOCK), wanted) | {CEILING: {"stall", "durable"}}


def test_export(tmp_path: Path) -> None:
    rows = run("export", tmp_path, "--gib=0.001", "--ranks=2", "--held", "columns")
    assert {name for step, name in rows if step == "save"} == set(export.CANDIDATES)
    assert ("sync behind it", STOCK) in rows


def test_convert(tmp_path: Path) -> None:
    rows = run("convert", tmp_path, "--gib=0.004")
    assert steps(rows) == {name: {"convert"} for name in (CEILING, "convert", STOCK)}


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_nodes(tmp_path: Path) -> None:
    rows = run("nodes", tmp_path, "--nodes=3", "--mib=1", "--links=1000")
    assert steps(rows) == {
        CEILING: {"restore"},
        "local": {"stall", "durable"},
        "copies": {"stall", "copied", "restore"},
        "copies, sending": {"stall", "durable"},
    }
    assert rows["restore", "copies"]["of_ceiling"] > 0 and rows["stall", "copies"]["of_baseline"] > 0
    received, sent = (float(part.split()[0]) for part in rows["copied", "copies"]["path"].split(", "))
    assert 1 <= received < 1.5 and 1 <= sent < 1.5, "each file once, and messages"


def test_many_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run("many_ranks", tmp_path, "--connect=3,20", "--save=2", "--items=3")
    saved = {"first save", "first load", "save", "load"}
    assert steps(rows) == {"vescale": {*saved, "connect", "agree", "gather"}, STOCK: saved}
    costs = re.findall(r"(\d+) descriptors .*, (\d+) requests to the store", capsys.readouterr().out)
    assert len(costs) == 2, "of 3 and 20 ranks"
    assert all(int(descriptors) > 0 and int(requests) >= 15 for descriptors, requests in costs)


def test_object_store(tmp_path: Path, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in object_server.environment(object_server.endpoint).items():
        monkeypatch.setenv(name, value)
    options = (f"--url=s3://{object_server.bucket}/benchmark", "--candidates=ceiling,vescale")
    rows = run("object_store", tmp_path, "--gib=0.001", *options)
    assert steps(rows) == {name: {"save", "load"} for name in (CEILING, "vescale")}


def test_planning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "in_new_process", in_fork)
    monkeypatch.setattr(planning, "BIG_JOB", ("llama-1b", Parallelism(32, fsdp=8, tensor=4)))
    sizes = ("--ranks=4", "--items=10", "--tensors=20", "--world=2")
    rows = run("planning", tmp_path, "--cases=coordinator,local,steady,metadata,load", *sizes)
    assert steps(rows)["vescale"] >= {"plan", "metadata", "read metadata"}
    assert steps(rows)[STOCK] >= {"plan", "metadata", "cold", "warm", "read metadata", "save", "load"}
    assert steps(rows)["vescale_ckpt.save"] == {"cold", "warm"} and rows["save", "vescale_ckpt"]["of_baseline"] > 0


@pytest.mark.parametrize("arguments", [["--rounds=0"], ["--modes=stock,fast"], ["--network=0"], ["--dir=/no/such"]])
def test_what_cannot_be_done_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        loading.main(arguments)
    assert "error" in capsys.readouterr().err


def test_figures_of_the_gpu_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device=cpu", f"--dir={tmp_path}", "--sections=stock", "--gib=0.001", "--rounds=1"]
    monkeypatch.setattr(sys, "argv", [gpu.__name__, *options])
    gpu.main()
    found: dict[str, Any] = {}
    for line in capsys.readouterr().out.splitlines():
        found |= json.loads(line) if line.startswith("{") else {}  # tables are printed, too
    assert isinstance(found["save_vescale_cold_gb_s"], float)
    assert not list(tmp_path.iterdir())
