"""Lists names, dtypes and shapes of a state for simulations: of a published model, a JSON file, or a checkpoint."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from .._checkpoint.open_checkpoint import open_to_load
from .._engine.dtype_codes import DTYPE_CODES
from .._engine.rows import MOST_BYTES
from .._storage.open_storage import readable_path

_OBJECT_BYTES = 1024  # about what torch.save needs for a number
_MOST_DIMS = 64  # torch's own limit


class Entry(NamedTuple):
    """A tensor or an object of a state."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None  #: None: an object
    bytes: int = 0  #: size of an object
    everywhere: bool = False  #: whole on every rank, whatever the parallelism


@dataclass(frozen=True)
class Transformer:
    """A decoder with grouped-query attention and a gated feed-forward, optionally with experts."""

    layers: int
    hidden: int
    keys: int  #: width of the key and value projections
    feed_forward: int
    vocabulary: int
    experts: int = 0
    tied: bool = False  #: whether the embedding is the output layer, too

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, wide = self.hidden, self.feed_forward
        yield "model.embed_tokens.weight", (self.vocabulary, hidden)
        for number in range(self.layers):
            prefix = f"model.layers.{number}"
            for name, width in ("q", hidden), ("k", self.keys), ("v", self.keys):
                yield f"{prefix}.self_attn.{name}_proj.weight", (width, hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
            if self.experts:
                yield f"{prefix}.mlp.router.weight", (self.experts, hidden)
                for name, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
                    yield f"{prefix}.mlp.experts.{name}_proj", (self.experts, *shape)
            else:
                for name, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
                    yield f"{prefix}.mlp.{name}_proj.weight", shape
            yield f"{prefix}.input_layernorm.weight", (hidden,)
            yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, hidden)

    def entries(self, dtype: torch.dtype) -> list[Entry]:
        return [Entry(name, shape, dtype) for name, shape in self.shapes()]


MODELS = {
    "llama-1b": Transformer(16, 2048, 512, 8192, 128256, tied=True),
    "llama-8b": Transformer(32, 4096, 1024, 14336, 128256),
    "llama-70b": Transformer(80, 8192, 1024, 28672, 128256),
    "llama-405b": Transformer(126, 16384, 1024, 53248, 128256),
    "mixtral-8x7b": Transformer(32, 4096, 1024, 14336, 32000, experts=8),
}


def with_adam(entries: Sequence[Entry]) -> list[Entry]:
    """The entries and Adam's state for each of their tensors: a step and two moments in float32."""
    state: list[Entry] = []
    for name, shape, dtype, *_ in entries:
        if dtype is not None and dtype.is_floating_point:
            prefix = f"optim.state.{name}"
            state.append(Entry(f"{prefix}.step", (), torch.float32, everywhere=True))
            state += (Entry(f"{prefix}.{moment}", shape, torch.float32) for moment in ("exp_avg", "exp_avg_sq"))
    groups = (Entry(f"optim.param_groups.0.{name}", bytes=_OBJECT_BYTES) for name in ("lr", "betas", "weight_decay"))
    return [*entries, *state, *groups]


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name. Raises `ValueError` for a dtype that checkpoints cannot hold."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_CODES:
        raise ValueError(f"{name!r} is no dtype that a checkpoint can hold")
    return dtype


def entries_in_json(path: str | os.PathLike[str], dtype: torch.dtype) -> list[Entry]:
    """The state in a file of `{name: [4096, 1024], name: {"shape": [8], "dtype": "float32"}, name: {"bytes": 64}}`.

    `dtype` is that of tensors without their own. Raises `ValueError`, naming the entry, for anything else.
    """
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    if not isinstance(content, dict):
        raise ValueError(f"{os.fspath(path)} holds no JSON object of names and shapes")
    return [_entry(name, value, dtype) for name, value in content.items()]


def _entry(name: str, value: Any, dtype: torch.dtype) -> Entry:
    fields = {"shape": value} if isinstance(value, list) else value
    if isinstance(fields, dict) and fields.keys() == {"bytes"} and _is_size(fields["bytes"]):
        return Entry(name, bytes=fields["bytes"])
    if not isinstance(fields, dict) or not {"shape"} <= fields.keys() <= {"shape", "dtype"}:
        raise ValueError(f"{name}: expected a shape, or an object of shape and dtype, or of bytes, got {value!r}")
    shape = fields["shape"]
    dtype = dtype_named(fields["dtype"]) if "dtype" in fields else dtype
    if not isinstance(shape, list) or not all(map(_is_size, shape)) or len(shape) > _MOST_DIMS:
        raise ValueError(f"{name}: {shape!r} is no shape")
    if math.prod(filter(None, shape)) * dtype.itemsize > MOST_BYTES:
        raise ValueError(f"{name}: {shape!r} is more than memory can ever hold")
    return Entry(name, tuple(shape), dtype)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST_BYTES


def entries_in_checkpoint(directory: str | os.PathLike[str]) -> list[Entry]:
    """The state in a checkpoint, read from its metadata, or from the headers of safetensors files. Raises
    `CheckpointError` if these are missing or damaged."""
    found = open_to_load(readable_path(directory), None, verify=True, by_index=False)
    metadata = found.metadata
    lengths = {index.fqn: info.length for index, info in (metadata.storage_data or {}).items()}
    entries = []
    for name, stored in metadata.state_dict_metadata.items():
        if name in found.aliases:
            continue
        if isinstance(stored, BytesStorageMetadata):
            entries.append(Entry(name, bytes=lengths.get(name, 0)))
        else:
            entries.append(Entry(name, tuple(stored.size), stored.properties.dtype))
    return entries
