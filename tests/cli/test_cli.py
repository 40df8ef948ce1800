"""The command line: its help and usage, what each command prints, exit statuses, and hostile input."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.files import flip, lock
from harness.ranks import run_ranks

import vescale_ckpt
from vescale_ckpt import cli, errors
from vescale_ckpt._checkpoint.native.save_facts import unstamped
from vescale_ckpt._inspect.diff import diff
from vescale_ckpt.cli.commands import COMMANDS

FACTS = ("time", "ranks", "torch", "vescale_ckpt")
STATE = {
    "model": {"a.weight": torch.arange(12.0).view(3, 4), "a.bias": torch.zeros(3, dtype=torch.bfloat16)},
    "step": 7,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    vescale_ckpt.save(tmp_path / "checkpoint", STATE)
    return tmp_path / "checkpoint"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = cli.main(list(map(str, arguments)))
    text = capsys.readouterr()
    assert "Traceback" not in text.out + text.err
    return status, text.out, text.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    status, out, _ = run(capsys, *arguments, "--json")
    found = json.loads(out)
    assert found["schema"] == f"vescale_ckpt/{arguments[0]}/1"
    (command,) = (command for command in COMMANDS if command.name == arguments[0])
    undocumented = [name for name in found if name != "schema" and f"`{name}`" not in command.json]
    assert not undocumented
    return status, found


# --- Help and usage


def test_help_names_every_command_and_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    for argument in ("--help", "--version"):
        assert cli.main([argument]) == 0
    text = capsys.readouterr().out
    assert all(command.name in text for command in COMMANDS) and vescale_ckpt.__version__ in text


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_help_of_a_command_has_its_options_and_examples(
    command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main([command.name, "--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text or how["metavar"] in text for name, how in command.arguments)
    assert command.examples and all(example.split()[-1].strip("'") in text for example in command.examples)


@pytest.mark.parametrize(
    "arguments",
    [[], ["nonsense"], ["inspect"], ["inspect", "x", "--nonsense"], ["convert", "x"],
     ["convert", "a", "b", "--format", "zip"]],
)  # fmt: skip
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    text = capsys.readouterr()
    assert text.err + text.out and "Traceback" not in text.err


def run_without(module: str, *arguments: object) -> str:
    """The output of a command, in a process of its own that cannot import a module. Nothing goes to standard error."""
    code = f"import sys; sys.modules[{module!r}] = None; from vescale_ckpt import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and not result.stderr, result.stderr
    return result.stdout


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_needs_no_torch(argument: str) -> None:
    assert run_without("torch", argument)


def test_objects_in_one_pickle_have_no_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(3), "rest": {"a": 1, "b": 2}, "c": "x"}, tmp_path / "old.pt")
    for options in ((), ("--depth", "0"), ("--depth", "2")):
        _, out, _ = run(capsys, "inspect", tmp_path / "old.pt", *options)
        assert not re.search(r"-\d+ B", out) and "3, in the pickle of the file" in out


def test_torch_does_not_say_that_there_is_no_numpy(checkpoint: Path) -> None:
    assert "2 in 2 chunks" in run_without("numpy", "inspect", checkpoint)


def test_type_checkers_are_told_the_names_that_there_are() -> None:
    stub = Path(vescale_ckpt.__file__).with_name("__init__.pyi").read_text()
    modules = ["errors", "integrations", "reports"]
    told = [*re.findall(r"\w+ as (\w+)", stub), *(errors.__all__ if "from .errors import *" in stub else ())]
    assert sorted(told) == sorted([*vescale_ckpt.__all__, *modules])
    assert all(getattr(vescale_ckpt, name) is not None for name in [*vescale_ckpt.__all__, *modules])


# --- What commands find


def test_inspect_shows_a_tree_and_all_that_it_holds(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "inspect", checkpoint)
    assert status == 0 and "dcp, written by vescale_ckpt" in out and "2 in 2 chunks, 54 B" in out
    assert "float32 [3, 4]" in out and "step  object" in out
    status, found = run_json(capsys, "inspect", checkpoint, "--keys", "model.a.weight")
    assert status == 0 and found["schema"] == "vescale_ckpt/inspect/1" and list(found["tensors"]) == ["model.a.weight"]
    assert found["tensors"]["model.a.weight"]["shape"] == [3, 4] and not found["objects"]
    status, out, _ = run(capsys, "inspect", checkpoint, "--depth", 0)
    assert "model.a.bias" in out and ".distcp" in out


class RunsCode:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_inspect_shows_plain_values_and_runs_no_code(tmp_path: Path, capsys: Any) -> None:
    plain = {"step": 7, "lr": 0.5, "name": "run\n", "none": None, "betas": (0.5, 0.75)}
    hidden = {"dtype": torch.float32, "long": list(range(17)), "text": "x" * 9000}
    state = {"w": torch.zeros(2), "plain": plain, "hidden": hidden}
    vescale_ckpt.save(tmp_path / "ours", state)
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    for name in ("ours", "stock"):
        found = {key: value.value for key, value in vescale_ckpt.inspect(tmp_path / name).objects.items()}
        assert all(found.get(f"plain.{key}") == value for key, value in plain.items() if key != "betas")
        assert found["hidden.dtype"] is found["hidden.long"] is found["hidden.text"] is None
    assert vescale_ckpt.inspect(tmp_path / "ours").objects["plain.betas"].value == (0.5, 0.75)
    _, out, _ = run(capsys, "inspect", tmp_path / "ours")
    assert "lr  object = 0.5  " in out and "name  object = 'run\\n'" in out and "dtype  object  " in out
    dcp.save({"bad": RunsCode(tmp_path / "touched")}, checkpoint_id=tmp_path / "bad")
    assert vescale_ckpt.inspect(tmp_path / "bad").objects["bad"].value is None
    assert not (tmp_path / "touched").exists()
    next((tmp_path / "ours").glob("*.distcp")).unlink()
    assert vescale_ckpt.inspect(tmp_path / "ours").objects["plain.step"].value is None


def _save(path: str) -> None:
    vescale_ckpt.save(path, {"w": torch.zeros(3)})


def test_a_checkpoint_tells_when_and_by_what_it_was_saved(tmp_path: Path, capsys: Any) -> None:
    begin = datetime.now(timezone.utc).replace(microsecond=0)
    run_ranks(2, _save, str(tmp_path / "two"))
    by = vescale_ckpt.inspect(tmp_path / "two").saved_by
    assert by is not None and begin <= datetime.fromisoformat(by.time) <= datetime.now(timezone.utc)
    assert (by.ranks, by.torch, by.vescale_ckpt) == (2, torch.__version__, vescale_ckpt.__version__)
    assert f"{by.time}, by 2 ranks, with vescale_ckpt" in run(capsys, "inspect", tmp_path / "two")[1]
    # Stock DCP loads it, and what stock DCP saves tells nothing.
    state = {"w": torch.ones(3)}
    dcp.load(state, checkpoint_id=tmp_path / "two")
    assert not state["w"].any()
    dcp.save(state, storage_writer=vescale_ckpt.StorageWriter(tmp_path / "writer"))
    assert run_json(capsys, "inspect", tmp_path / "writer")[1]["saved_by"]["ranks"] == 1
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    status, out, _ = run(capsys, "inspect", tmp_path / "stock")
    assert status == 0 and re.search(r"saved +not recorded", out)


@pytest.mark.parametrize("facts", ["", " {", " []", ' {"time": 1}', " " + json.dumps(dict.fromkeys(FACTS, ""))])
def test_an_id_without_facts_is_an_id(facts: str) -> None:
    assert unstamped(f"0123{facts}") == (f"0123{facts}", None)


@pytest.mark.parametrize("format", ["stock", "safetensors", "torch"])
def test_inspect_reads_every_format(checkpoint: Path, tmp_path: Path, format: str) -> None:
    path = tmp_path / {"safetensors": "m.safetensors", "torch": "m.pt"}.get(format, format)
    if format == "stock":
        dcp.save({"model": dict(STATE["model"])}, checkpoint_id=path)
    else:
        vescale_ckpt.convert(checkpoint, path, format=format, on_objects="drop")  # type: ignore[arg-type]
    info = vescale_ckpt.inspect(path)
    assert info.format == ("dcp" if format == "stock" else format)
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in info.tensors.items()} == {
        "model.a.weight": ((3, 4), "float32"),
        "model.a.bias": ((3,), "bfloat16"),
    }
    assert all(tensor.whole for tensor in info.tensors.values()) and info.bytes == 54
    assert all(length > 0 for length in info.files.values())


def test_diff_tells_keys_kinds_and_values(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    other = {"model": {**STATE["model"], "new": torch.ones(2)}, "step": 8}  # type: ignore[dict-item]
    other["model"]["a.weight"] = STATE["model"]["a.weight"].clone()  # type: ignore[index]
    other["model"]["a.weight"][1, 2] += 0.5  # type: ignore[index]
    vescale_ckpt.save(tmp_path / "other", other)
    assert run(capsys, "diff", checkpoint, checkpoint, "--values")[0] == 0
    status, found = run_json(capsys, "diff", checkpoint, tmp_path / "other", "--values")
    assert status == 1 and found["only_b"] == ["model.new"] and found["objects"] == ["step"]
    (value,) = found["values"]
    assert (value["key"], value["different"], value["elements"], value["max_abs"]) == ("model.a.weight", 1, 12, 0.5)
    vescale_ckpt.convert(checkpoint, tmp_path / "m.safetensors", format="safetensors", on_objects="drop")
    status, out, _ = run(capsys, "diff", checkpoint, tmp_path / "m.safetensors", "--values", "--keys", "model")
    assert status == 0 and "values of 2 tensors compared" in out


def test_diff_compares_an_export_with_its_source(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    model = tmp_path / "model.safetensors"
    assert (
        run(capsys, "convert", checkpoint, model, "--format", "safetensors", "--keys", "model", "--rename", "model=")[0]
        == 0
    )
    compared = ("diff", checkpoint, model, "--bits", "--keys", "model", "--rename", "model=")
    status, found = run_json(capsys, *compared)
    assert status == 0 and found["equal"] and found["compared"] == 2
    assert run_json(capsys, "diff", checkpoint, model, "--keys", "model")[0] == 1  # under their own names
    vescale_ckpt.safetensors.save_file({"a.weight": torch.arange(12.0).view(3, 4) + 1, "more": torch.ones(1)}, model)
    status, found = run_json(capsys, *compared)
    assert status == 1 and found["only_a"] == ["a.bias"] and found["only_b"] == ["more"]
    assert [value["key"] for value in found["values"]] == ["a.weight"]
    assert "modell" in run(capsys, "diff", checkpoint, model, "--keys", "modell", "--rename", "model=")[2]
    assert "no =" in run(capsys, "diff", checkpoint, model, "--rename", "model")[2]
    objects = vescale_ckpt._inspect.diff.diff(checkpoint, checkpoint, with_values=True, rename=lambda key: f"new.{key}")
    assert not objects.equal and "new.step" in objects.only_a and "step" in objects.only_b


_NAN, _NEGATIVE_NAN = np.array([0x7FC00000, 0xFFC00000], dtype=np.uint32).view(np.float32)

# What is stored in both, and whether values and whether bits are equal.
_PAIRS: dict[str, tuple[Any, Any, bool, bool]] = {
    "complex": (torch.tensor([complex(1, math.nan)]), torch.tensor([complex(2, math.nan)]), False, False),
    "the same complex": (torch.tensor([complex(1, math.nan)]), torch.tensor([complex(1, math.nan)]), True, True),
    "zeros": (torch.tensor([0.0]), torch.tensor([-0.0]), True, False),
    "NaN": (torch.from_numpy(np.array([_NAN])), torch.from_numpy(np.array([_NEGATIVE_NAN])), True, False),
    "no elements": (torch.ones(0), torch.ones(0), True, True),
    "wrapped": ((torch.tensor([1.0, math.nan]),), (torch.tensor([1.0, math.nan]),), True, True),
    "shapes of arrays": (np.ones(3), np.ones(1), False, False),
    "dtypes of arrays": (np.ones(3), np.ones(3, np.float32), False, False),
    "parts in arrays": (np.array([complex(1, math.nan)]), np.array([complex(2, math.nan)]), False, False),
    "zeros in arrays": (np.zeros(2), -np.zeros(2), True, False),
    "NaN in arrays": (np.array([_NAN]), np.array([_NEGATIVE_NAN]), True, False),
    "numbers of numpy": (np.float64(1), 1.0, False, False),
    "bool": ((True,), (1,), False, False),
    "keys": (({True: 2},), ({1: 2},), False, False),
    "float": (0.0, -0.0, True, False),
    "the same float": (math.nan, math.nan, True, True),
    "complex number": (complex(1, math.nan), complex(2, math.nan), False, False),
    "tuples": ((1, "a"), (1, "a"), True, True),
}


@pytest.mark.parametrize("name", _PAIRS)
def test_diff_says_whether_values_and_bits_are_equal(tmp_path: Path, capsys: Any, name: str) -> None:
    one, other, values, bits = _PAIRS[name]
    vescale_ckpt.save(tmp_path / "a", {"x": one})
    vescale_ckpt.save(tmp_path / "b", {"x": other})
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--values")[0] == (0 if values else 1)
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--bits")[0] == (0 if bits else 1)


def test_diff_of_integers_that_other_dtypes_round(tmp_path: Path) -> None:
    for number, (a, b) in enumerate(
        [
            (torch.tensor([2**53, 2**53 + 1]), torch.tensor([2.0**53] * 2, dtype=torch.float64)),
            (torch.tensor([2**53, 2**53 + 1]), torch.tensor([2**53] * 2, dtype=torch.uint64)),
            (
                torch.tensor([2**63 + 2048, 1], dtype=torch.uint64),
                torch.tensor([2.0**63 + 2048, 2.0], dtype=torch.float64),
            ),
        ]
    ):
        vescale_ckpt.save(tmp_path / f"{number}a", {"x": a})
        vescale_ckpt.save(tmp_path / f"{number}b", {"x": b})
        (found,) = diff(tmp_path / f"{number}a", tmp_path / f"{number}b", with_values=True).values
        assert found.different == 1


def test_verify_names_the_keys_of_one_damage_in_one_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data,) = checkpoint.glob("*.distcp")
    flip(data, 8 * data.read_bytes().index(torch.tensor([11.0]).numpy().tobytes()))  # the last value of a.weight
    status, out, _ = run(capsys, "verify", checkpoint)
    assert status == 1 and "damaged: model.a.weight: checksum mismatch in " in out and "1 problem: " in out
    data.unlink()
    status, out, _ = run(capsys, "verify", checkpoint)
    assert status == 1 and len(out.splitlines()) == 3  # the file, what that means for keys, the sum
    assert "model.a.weight" in out and data.name in out


def test_verify_reads_files_of_torch(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "m.pt"
    assert run_json(capsys, "convert", checkpoint, path)[1]["tensors"] == 2
    status, found = run_json(capsys, "verify", path)
    assert (status, found["bytes"], found["unverified_bytes"]) == (0, 54, 0)
    assert run_json(capsys, "verify", path, "--quick")[1]["unchecked"]
    data = path.read_bytes()
    at = data.index(STATE["model"]["a.weight"].numpy().tobytes())  # type: ignore[index]
    path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    status, found = run_json(capsys, "verify", path)
    assert status == 1 and "a.weight" in found["damaged"][0][3]
    path.write_bytes(data[:-30])
    assert run_json(capsys, "verify", path)[0] == 1
    assert run(capsys, "verify", tmp_path / "nothing")[0] == 2
    (tmp_path / "empty").mkdir()
    assert run(capsys, "verify", tmp_path / "empty")[0] == 2


def test_prune_and_repair_remove_what_they_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with vescale_ckpt.CheckpointManager(tmp_path, async_checkpoint=False) as manager:
        for step in range(1, 6):
            manager.save(step, {"x": torch.arange(10.0)})
    status, found = run_json(capsys, "prune", tmp_path, "--keep", 2, "--keep-period", 3, "--dry-run")
    assert (status, found["removed"], found["kept"]) == (0, [1, 2], [3, 4, 5]) and manager.steps() == [1, 2, 3, 4, 5]
    status, found = run_json(capsys, "prune", tmp_path, "--keep", 2, "--keep-period", 3)
    assert found["removed"] == [1, 2] and manager.steps() == [3, 4, 5]
    assert run(capsys, "prune", tmp_path, "--keep", 0)[0] == 2 and run(capsys, "prune", tmp_path)[0] == 2
    left = tmp_path / "step-5" / "__0_0123abcd.distcp"
    left.write_bytes(b"left by a save that died")
    status, found = run_json(capsys, "repair", tmp_path, "--dry-run")
    assert (status, found["removed"]) == (0, [str(left)]) and left.exists()
    status, found = run_json(capsys, "repair", tmp_path)
    assert found["removed"] == [str(left)] and not left.exists()
    assert run(capsys, "verify", tmp_path / "step-5")[0] == 0
    assert "nothing is left over" in run(capsys, "repair", tmp_path / "step-5")[1]


def test_repair_removes_what_dead_exports_and_conversions_left(tmp_path: Path, capsys: Any) -> None:
    dead = ["model-00001-of-00002.safetensors.tmp.0123abcd", "model-00002-of-00002.safetensors.tmp.0123abcd"]
    dead += ["m.safetensors.tmp.1.0", "m.pt.tmp.77.3"]
    for name in (*dead, "notes.txt.tmp.1.0", "model.safetensors.tmp"):
        (tmp_path / name).write_bytes(b"half")
    for name, inside in (("hf.tmp.12.3", "model.safetensors"), ("c.copy.tmp.12.3", "notes.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / inside).touch()
    (tmp_path / "mine.tmp.12.3").mkdir()
    (tmp_path / "mine.tmp.12.3" / "thesis.tex").touch()
    running = lock(tmp_path / "m.pt.tmp.77.3")  # by an export that is running
    wanted = sorted(str(tmp_path / name) for name in (*dead[:3], "hf.tmp.12.3", "c.copy.tmp.12.3"))
    before = content_of(tmp_path)
    status, found = run_json(capsys, "repair", tmp_path, "--dry-run")
    assert (status, sorted(found["removed"])) == (0, wanted) and content_of(tmp_path) == before
    status, found = run_json(capsys, "repair", tmp_path)
    assert (status, sorted(found["removed"])) == (0, wanted)
    left = {"m.pt.tmp.77.3", "notes.txt.tmp.1.0", "model.safetensors.tmp", "mine.tmp.12.3"}
    assert {path.name for path in tmp_path.iterdir()} == left
    assert running is not None


def test_export_writes_a_model_under_its_own_names(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "hf"
    status, found = run_json(capsys, "export", checkpoint, out, "--dtype", "bfloat16", "--max-shard-size", "30B")
    assert status == 0 and (found["tensors"], found["bytes"], found["files"]) == (2, 30, 1)
    tensors = vescale_ckpt.safetensors.load_file(out / "model.safetensors")
    assert {key: tensor.dtype for key, tensor in tensors.items()} == dict.fromkeys(
        ["a.bias", "a.weight"], torch.bfloat16
    )
    status, _, err = run(capsys, "export", checkpoint, out)
    assert status == 2 and "exists" in err
    assert "in 2 files" in run(capsys, "export", checkpoint, out, "--overwrite", "--max-shard-size", "48B")[1]
    status, _, err = run(capsys, "export", checkpoint, tmp_path / "other", "--key", "ema")
    assert status == 2 and "--key" in err and not (tmp_path / "other").exists()
    status, _, err = run(capsys, "export", checkpoint, tmp_path / "all.safetensors", "--key", "")
    assert status == 0 and "model.a.bias" in vescale_ckpt.safetensors.load_file(tmp_path / "all.safetensors")


def test_export_copies_configuration_and_tokenizer(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    model, out = tmp_path / "pretrained", tmp_path / "hf"
    model.mkdir()
    assert run(capsys, "export", checkpoint, out, "--config", model)[0] == 2 and not out.exists()
    wanted = {"config.json": "{}", "tokenizer.model": "a", "merges.txt": "b"}
    others = {"model.safetensors": "c", "model.safetensors.index.json": "{}", "optimizer.pt": "d"}
    for name, content in (wanted | others).items():
        (model / name).write_text(content)
    status, printed, _ = run(capsys, "export", checkpoint, out, "--config", model)
    assert status == 0 and "config.json" not in printed
    assert len(vescale_ckpt.safetensors.load_file(out / "model.safetensors")) == 2
    copied = {file.name: file.read_text() for file in out.iterdir() if file.name != "model.safetensors"}
    assert {name: text for name, text in copied.items() if not name.startswith(".")} == wanted
    status, printed, _ = run(capsys, "export", checkpoint, tmp_path / "bare")
    assert status == 0 and "there is no config.json, which from_pretrained needs: --config FOLDER" in printed
    assert run(capsys, "export", checkpoint, tmp_path / "a.safetensors", "--config", model)[0] == 2


def test_the_configuration_of_plain_weights_names_no_quantisation(tmp_path: Path, capsys: Any) -> None:
    """What a quantised model's configuration says of its weights would be wrong for their values."""
    source = tmp_path / "quantised"
    weights = {
        "a.weight": torch.ones(128, 128, dtype=torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.full((1, 1), 2.0),
    }
    vescale_ckpt.save(source, weights, format="safetensors")
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = {"hidden_size": 128, "quantization_config": scheme, "text_config": {"quantization_config": scheme}}
    (source / "config.json").write_text(json.dumps(config))
    for name, options in (("plain", ("--dtype", "bfloat16")), ("as-it-is", ())):
        status, _, err = run(capsys, "export", source, tmp_path / name, "--key", "", "--config", source, *options)
        assert status == 0, err
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == {"hidden_size": 128, "text_config": {}}
    made = vescale_ckpt.safetensors.load_file(tmp_path / "plain" / "model.safetensors")
    assert made.keys() == {"a.weight"} and (made["a.weight"] == 2).all() and made["a.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "as-it-is" / "config.json").read_text()) == config


def test_quiet_commands_print_errors_only(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    for command in (("verify",), ("diff", checkpoint), ("copy", tmp_path / "copy"), ("export", tmp_path / "hf")):
        assert run(capsys, command[0], checkpoint, *command[1:], "-q") == (0, "", "")
    assert (tmp_path / "copy" / ".metadata").exists() and (tmp_path / "hf" / "model.safetensors").exists()
    next(checkpoint.glob("*.distcp")).unlink()
    assert run(capsys, "verify", checkpoint, "--quiet") == (1, "", "")
    status, out, err = run(capsys, "verify", tmp_path / "none", "-q")
    assert (status, out) == (2, "") and "none" in err


# --- Bad input: no traceback, one line, status 2 (or 1 for damage)

HOSTILE = {
    "nothing": None,
    "an empty file": b"",
    "text": b"not a checkpoint\n",
    "a cut archive": b"PK\3\4" + bytes(20),
    "a pickle that runs code": b"\x80\x04cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
    "a header that lies": (1 << 62).to_bytes(8, "little") + b"{" + bytes(100),
    "a header of nonsense": (20).to_bytes(8, "little") + b'{"a": [1, 2, "\x1b[2Jx"}' + bytes(20),
}


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
@pytest.mark.parametrize("what", [*HOSTILE, "a folder of nothing", "metadata of nonsense"])
def test_bad_input_is_one_line(tmp_path: Path, capsys: Any, command: str, what: str) -> None:
    path = tmp_path / "bad"
    if what == "a folder of nothing":
        path.mkdir()
    elif what == "metadata of nonsense":
        path.mkdir()
        (path / ".metadata").write_bytes(HOSTILE["a pickle that runs code"])  # type: ignore[arg-type]
    elif HOSTILE[what] is not None:
        path.write_bytes(HOSTILE[what])  # type: ignore[arg-type]
    more = {
        "diff": [path],
        **{name: [tmp_path / "out.safetensors"] for name in ("convert", "export", "copy")},
        "prune": ["--keep", 1],
    }.get(command, [])
    before = content_of(tmp_path)
    status, out, err = run(capsys, command, path, *more)
    if path.is_dir() and command == "repair":
        assert status == 0 and content_of(tmp_path) == before
        return
    assert status in (1, 2)
    lines = (out + err).strip().splitlines()
    assert 1 <= len(lines) <= 3 and all(len(line) < 600 and line.isprintable() for line in lines), lines
    assert content_of(tmp_path) == before


def content_of(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in directory.rglob("*")}


def test_names_that_would_drive_the_terminal_are_escaped(tmp_path: Path, capsys: Any) -> None:
    vescale_ckpt.save(tmp_path / "c", {"\x1b[2Jx\n": torch.ones(1)})
    _, out, _ = run(capsys, "inspect", tmp_path / "c", "--depth", 0)
    assert "\x1b" not in out and "\\x1b[2Jx" in out


def test_a_reader_that_goes_away_ends_a_command_quietly(checkpoint: Path) -> None:
    command = f"{sys.executable} -m vescale_ckpt inspect --json {checkpoint} | head -c 10"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, env=os.environ
    )
    assert "Traceback" not in result.stderr and "BrokenPipe" not in result.stderr


# --- Managers' directories


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    with vescale_ckpt.CheckpointManager(tmp_path / "steps", async_checkpoint=False) as manager:
        for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
            manager.save(step, STATE, metrics={"loss": loss} if step != 3 else None)
    return tmp_path / "steps"


def test_managers_steps_are_found_without_torch(steps: Path, capsys: Any) -> None:
    best = ("latest", "--best=loss", "--best-mode=min")
    commands = [("list",), ("latest",), best, ("prune", "--keep=1", "--dry-run"), ("verify", "--quick")]
    for name, *more in commands:
        where = steps / "step-2" if name == "verify" else steps
        assert run_without("torch", name, where, *more) == run(capsys, name, where, *more)[1] != ""


def test_list_shows_all_steps_of_a_manager(steps: Path, tmp_path: Path, capsys: Any) -> None:
    status, found = run_json(capsys, "list", steps)
    assert status == 0 and [step["step"] for step in found["steps"]] == [1, 2, 3]
    assert [step["metrics"] for step in found["steps"]] == [{"loss": 0.5}, {"loss": 0.25}, {}]
    assert [step["last"] for step in found["steps"]] == [False, False, True]
    assert {step["state"] for step in found["steps"]} == {"complete"}
    assert all(step["saved_by"]["ranks"] == 1 for step in found["steps"])
    assert all(step["bytes"] > 54 and step["saved"][:2] == "20" for step in found["steps"])
    next((steps / "step-2").glob("*.distcp")).unlink()
    status, out, _ = run(capsys, "list", steps)
    lines = out.splitlines()
    assert status == 1 and lines[0].split() == ["step", "saved", "ranks", "size", "loss", "state"]
    assert "0.25  damaged" in lines[2] and lines[3].endswith("complete, saved last") and "step 2: data file" in lines[4]
    (tmp_path / "none").mkdir()
    assert run(capsys, "list", tmp_path / "none")[0] == 2
    status, out, _ = run(capsys, "list", steps, tmp_path / "none")
    assert out.splitlines()[0].split()[-1] == "in" and str(steps) in out.splitlines()[1]


def test_latest_finds_the_best_one_that_is_sound(steps: Path, capsys: Any) -> None:
    best = ("latest", steps, "--best", "loss", "--best-mode")
    assert run_json(capsys, *best, "min")[1]["step"] == 2 and run_json(capsys, *best, "max")[1]["step"] == 1
    next((steps / "step-2").glob("*.distcp")).unlink()
    status, found = run_json(capsys, *best, "min")
    assert (status, found["step"], list(found["passed_over"])) == (0, 1, ["2"])
    assert run_json(capsys, "latest", steps, "--best", "acc", "--best-mode", "max")[1]["path"] is None
    assert "--best-mode is missing: for --best='loss'" in run(capsys, "latest", steps, "--best", "loss")[2]
