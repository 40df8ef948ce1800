"""Turn a checkpoint of this folder's training into a folder that transformers loads.

    python examples/export_hf.py CHECKPOINT FOLDER [--dtype bfloat16] [--max-shard-size 5GB]

`vescale_ckpt.convert` does it in bounded memory: it takes the model's weights out of the checkpoint, under the names
that they have in the model, and leaves the optimizer's state where it is. What is missing then is `config.json`, whose
numbers are read off the weights' shapes.

    model = transformers.BertModel.from_pretrained(FOLDER)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import vescale_ckpt

PREFIX = "train.model"  # in checkpoints of train_fsdp.py
LEFT_OUT = f"!{PREFIX}.embeddings.position_ids"  # a buffer that transformers makes by itself
HEAD = 32  # width of an attention head, which no shape tells; TINY has another


def export(checkpoint: Path, folder: Path, dtype: torch.dtype | None, max_shard_size: str, head: int = HEAD) -> None:
    report = vescale_ckpt.convert(
        checkpoint,
        folder,
        format="safetensors",
        keys=[PREFIX, LEFT_OUT],
        rename={PREFIX: ""},
        dtype=dtype,
        max_shard_size=max_shard_size,
        overwrite=True,
    )
    (folder / "config.json").write_text(json.dumps(config_of(shapes_of(folder), head, dtype), indent=2))
    print(f"{report.tensors} tensors, {report.bytes / 1e6:.1f} MB in {report.seconds:.2f} s: {folder}")


def shapes_of(folder: Path) -> dict[str, list[int]]:
    """Shapes of all tensors, from the headers alone."""
    shapes: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        with vescale_ckpt.safetensors.safe_open(path) as file:
            shapes.update({name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
    return shapes


def config_of(shapes: dict[str, list[int]], head: int, dtype: torch.dtype | None) -> dict[str, object]:
    """What transformers asks for of a BERT encoder."""
    vocabulary, hidden = shapes["embeddings.word_embeddings.weight"]
    layers = {name.split(".")[2] for name in shapes if name.startswith("encoder.layer.")}
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": len(layers),
        "num_attention_heads": hidden // head,
        "intermediate_size": shapes["encoder.layer.0.intermediate.dense.weight"][0],
        "max_position_embeddings": shapes["embeddings.position_embeddings.weight"][0],
        "type_vocab_size": shapes["embeddings.token_type_embeddings.weight"][0],
        "torch_dtype": str(dtype or torch.float32).removeprefix("torch."),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as stored")
    parser.add_argument("--max-shard-size", default="5GB")
    parser.add_argument("--head", type=int, default=HEAD, help="width of an attention head (default: %(default)s)")
    args = parser.parse_args()
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    export(args.checkpoint, args.folder, dtype, args.max_shard_size, args.head)


if __name__ == "__main__":
    main()
