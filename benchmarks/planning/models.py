"""Lists the names, dtypes and shapes of published models and of Adam's state, for ranks that do not exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Entry(NamedTuple):
    """A tensor or an object of a state."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None  #: None: an object
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
                if self.experts:
                    yield f"{prefix}.mlp.experts.{name}_proj", (self.experts, *shape)
                else:
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
    groups = (Entry(f"optim.param_groups.0.{name}") for name in ("lr", "betas", "weight_decay"))
    return [*entries, *state, *groups]
