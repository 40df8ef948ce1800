"""Loads of quantised models, and of experts as stacks: ``python -m benchmarks quantized --gib 1 --rounds 5``.

FP8 with scales of blocks (DeepSeek) and MXFP4 (GPT-OSS), one safetensors file in the page cache. The ceiling copies as
many bytes as the values have, within memory and on one thread. ``as stored`` loads numbers and scales as they are;
``plain`` loads a plain model with the values; ``values`` makes them while loading. The rival for FP8 is torch's
``QuantizedHuggingFaceStorageReader``, for MXFP4 a load of numbers and scales and transformers' arithmetic. Values are
compared bit for bit. Rates are of bytes of values.

Experts: two weights of each, in bfloat16. ``plain`` loads a file that holds them as one stack, ``stacked`` a file of
single weights by a rule of ``load(stack=)``. The rival reads the weights with the safetensors library, concatenates and
stacks them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import safetensors.torch as library
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

import vescale_ckpt
from benchmarks import command
from benchmarks.command import Alternate
from benchmarks.harness import page_cache
from benchmarks.harness.by_turns import CEILING, STOCK, Sample, Steps, Turn
from benchmarks.harness.room import WrongContentsError
from benchmarks.harness.usage import measure, settle

State = dict[str, torch.Tensor]
_ROWS, _COLUMNS = 4096, 2048  # of a weight
_CASES = ["fp8", "mxfp4", "experts"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its plain twin, with ``values``, and what loads the model: by name, tensors like it, and the load."""

    name: str
    directory: Path
    values: State
    ways: dict[str, tuple[State, Callable[[State], object]]]

    def turns(self) -> dict[str, Turn]:
        def copy(target: State) -> None:
            for name, tensor in target.items():
                ctypes.memmove(tensor.data_ptr(), self.values[name].data_ptr(), tensor.nbytes)

        plain = partial(vescale_ckpt.load, self.directory / "plain")
        ways = {CEILING: (self.values, copy), "plain": (self.values, plain), **self.ways}
        return {name: partial(_turn, self.directory, like, self.values, way) for name, (like, way) in ways.items()}


def _save(directory: Path, **states: State) -> None:
    for name, state in states.items():
        (directory / name).mkdir(parents=True)
        library.save_file(state, directory / name / "model.safetensors")


def quantized(directory: Path, gib: float, scheme: str) -> Case:
    rows = min(_ROWS, max(128, int(gib * 2**30 / 2 / _COLUMNS) // 128 * 128))
    generator = torch.Generator().manual_seed(0)
    stored: State = {}
    for number in range(max(1, round(gib * 2**30 / (2 * rows * _COLUMNS)))):
        stored |= _weight(scheme, number, rows, generator)
    by_arithmetic = _values_of_mxfp4 if scheme == "mxfp4" else _values_of_fp8
    model, values = directory / "model", by_arithmetic(stored)
    _save(directory, model=stored, plain=values)
    config = {"quant_method": scheme, "weight_block_size": [128, 128]}
    (model / "config.json").write_text(json.dumps({"quantization_config": config}))
    index = {"weight_map": dict.fromkeys(stored, "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))

    def by_stock(target: State) -> None:
        if scheme == "fp8":
            reader = QuantizedHuggingFaceStorageReader(str(model), target_dtype=torch.bfloat16)
            dcp.load(target, storage_reader=reader)
            return
        loaded = {key: torch.empty_like(value) for key, value in stored.items()}
        vescale_ckpt.load(model, loaded)
        for key, value in _values_of_mxfp4(loaded).items():
            target[key].copy_(value)

    load = partial(vescale_ckpt.load, model)
    ways = {"as stored": (stored, load), "values": (values, load), STOCK: (values, by_stock)}
    return Case(f"{scheme} to bfloat16", directory, values, ways)


def _values_of_mxfp4(stored: State) -> State:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stems = [key.removesuffix("_blocks") for key in stored if key.endswith("_blocks")]
    return {stem: convert_moe_packed_tensors(stored[f"{stem}_blocks"], stored[f"{stem}_scales"]) for stem in stems}


def _values_of_fp8(stored: State) -> State:
    found = {}
    for key in filter(lambda key: key.endswith(".weight"), stored):
        scales = stored[f"{key}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        found[key] = (stored[key].float() * scales).bfloat16()
    return found


def experts(directory: Path, gib: float) -> Case:
    rows = 512
    generator = torch.Generator().manual_seed(0)
    count = max(2, round(gib * 2**30 / (4 * rows * _COLUMNS)))
    names = [[f"e.{number}.{name}.weight" for name in ("gate", "up")] for number in range(count)]
    stored = {name: torch.randn(rows, _COLUMNS, generator=generator).bfloat16() for pair in names for name in pair}

    def stacked(state: State) -> torch.Tensor:
        return torch.stack([torch.cat([state[name] for name in pair]) for pair in names])

    def by_stock(target: State) -> None:
        target["e.gate_up"].copy_(stacked(library.load_file(directory / "model" / "model.safetensors")))

    values = {"e.gate_up": stacked(stored)}
    _save(directory, model=stored, plain=values)
    rules = {("e.*.gate.weight", "e.*.up.weight"): "e.gate_up"}
    by_rule = partial(vescale_ckpt.load, directory / "model", stack=rules)
    return Case("experts, stacked", directory, values, {"stacked": (values, by_rule), STOCK: (values, by_stock)})


def _turn(directory: Path, like: State, values: State, way: Callable[[State], object]) -> Steps:
    """Loads tensors like `like`, and compares them with it. Rates are of the bytes of `values`."""
    settle(directory)
    resident = page_cache.prepare(directory, warm=True)
    target = {key: torch.zeros_like(value) for key, value in like.items()}
    usage = measure(lambda: way(target))
    for key, value in target.items():
        if not torch.equal(value.view(torch.uint8), like[key].view(torch.uint8)):
            raise WrongContentsError(f"{directory}: {key} has other values")
    moved = sum(value.nbytes for value in values.values())
    return {"load": dataclasses.replace(usage, state_bytes=moved, resident=resident)}


def _weight(scheme: str, number: int, rows: int, generator: torch.Generator) -> State:
    def random_bytes(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, dtype=torch.uint8, generator=generator)

    if scheme == "mxfp4":
        blocks = random_bytes(256, 2, rows // 2, _COLUMNS // 32, 16)
        return {f"{number}.up_blocks": blocks, f"{number}.up_scales": 100 + random_bytes(50, *blocks.shape[:-1])}
    numbers = random_bytes(127, rows, _COLUMNS) | random_bytes(2, rows, _COLUMNS) << 7  # without NaN
    return {
        f"{number}.weight": numbers.view(torch.float8_e4m3fn),
        f"{number}.weight_scale_inv": torch.rand(rows // 128, _COLUMNS // 128, generator=generator),
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs what ``arguments`` ask for and returns the exit status."""
    parser = command.parser("benchmarks quantized", __doc__)
    parser.add_argument("--gib", type=command.size, default=1.0, help="of the values (default %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=_CASES, default=_CASES, help="(default: all)")
    options = parser.parse_args(arguments)

    def measured(directory: Path, alternate: Alternate) -> Iterator[Sample]:
        for name in options.cases:
            make = experts if name == "experts" else partial(quantized, scheme=name)
            case = make(directory / name, options.gib)
            yield from alternate(case.name, case.turns())

    return command.run(options, measured)
