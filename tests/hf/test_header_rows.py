"""Tables that the engine makes of many headers or index rows at once. What does not fit them is left to the code that
goes through the checkpoint name by name, which says what is wrong or loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_ckpt._checkpoint.safetensors import headers
from vescale_ckpt._engine import _C
from vescale_ckpt._engine.options import engine_options
from vescale_ckpt._engine.rows import LOCATION_ROW, words
from vescale_ckpt.safetensors import save_file

_OPTIONS = engine_options(None, "auto")
_LENGTH = 2  # word of a row of locations


def _file(path: Path, tensors: dict[str, tuple[str, list[int], int]], texts: dict[str, str] | None = None) -> Path:
    """Writes a file of zeros, by dtype, shape and number of bytes of each tensor."""
    header: dict[str, Any] = {} if texts is None else {"__metadata__": texts}
    at = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    return path


def _rows(*paths: Path, keys: list[list[str]] | None = None) -> Any:
    return _C.header_rows([_C.SafetensorsFile.open(str(path), _OPTIONS, True) for path in paths], keys)


def test_header_rows(tmp_path: Path) -> None:
    plain = {"a": ("F32", [2], 8), "b": ("I64", [1, 1], 8), "none": ("F32", [0, 3], 0)}
    path = _file(tmp_path / "plain", plain, {"format": "pt"})
    other = _file(tmp_path / "other", {"c": ("U8", [3], 3)})
    assert sorted(_rows(path)[0]) == sorted(plain)
    assert _rows(path, other, keys=[["b", "a"], ["c"]])[0] == ["b", "a", "c"]
    assert _rows(path, keys=[["a", "c"]]) is None  # the file has no c
    assert _rows(path, keys=[["a", "a"]]) is None
    assert _rows(path, path) is None  # each name twice
    with pytest.raises(IndexError):
        _rows(path, other, keys=[["a"]])


@pytest.mark.parametrize(
    "tensor, texts",
    [
        (("F32", [0, 1 << 62], 0), None),  # too large, as if no dimension were empty
        (("F32", [0, 1 << 32, 1 << 32], 0), None),
        (("F32", [2], 8), {"other": "a"}),  # a second name
    ],
    ids=["size", "overflow", "alias"],
)
def test_header_that_has_no_rows(tensor: Any, texts: dict[str, str] | None, tmp_path: Path) -> None:
    assert _rows(_file(tmp_path / "model.safetensors", {"a": tensor}, texts)) is None
    if texts:
        assert vescale_ckpt.load(tmp_path)["a"].tolist() == [0, 0]
    else:
        with pytest.raises(CheckpointError, match="a"):
            vescale_ckpt.load(tmp_path)


def test_more_files_than_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {name: torch.arange(3) + number for number, name in enumerate("abc")}
    vescale_ckpt.save(tmp_path, state, format=vescale_ckpt.Safetensors(max_shard_size=24))
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    monkeypatch.setattr(headers, "_MOST_OPEN", 2)
    monkeypatch.setattr(headers._C, "header_rows", None)
    loaded = vescale_ckpt.load(tmp_path)
    assert all(torch.equal(loaded[key], value) for key, value in state.items())


def test_whole_items(tmp_path: Path) -> None:
    save_file({"a": torch.arange(4), "b": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    tables = headers.HeaderTables.read(str(tmp_path), verify=True)
    names, codes, shapes, _, _ = tables.index().whole_items([1, 0])
    assert list(zip(names, shapes, strict=True)) == [("b", (2, 3)), ("a", (4,))] and len(codes) == 2
    with pytest.raises(IndexError):
        tables.index().whole_items([2])
    locations = words(bytearray(tables.locations))  # type: ignore[arg-type]
    locations[LOCATION_ROW + _LENGTH] -= 1
    short = _C.Index.from_rows(tables.inventory, locations.tobytes(), tables.files)
    with pytest.raises(_C.EngineError, match="larger than its records") as raised:
        short.whole_items([0, 1])
    assert raised.value.item == 1
