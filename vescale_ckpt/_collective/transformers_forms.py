"""Proposes `stack=` and `rename=` for a folder written by transformers, which stores some tensors in other forms and
under older names than its models use.

The rules are transformers' own. A proposal is made only if it produces all tensors of the state.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from .._checkpoint.checkpoint import Checkpoint
from .._checkpoint.stacking import Composite, restacked
from .._state.key_selection import rename_function

_MERGES = (["MergeModulelist"], ["MergeModulelist", "Concatenate"], ["Concatenate"])


def propose(checkpoint: Checkpoint, flat: Mapping[str, Any]) -> str:
    """Returns advice for a load whose state `flat` has keys that the folder lacks. Empty if the caller did
    not import transformers, or its rules cannot make all tensors of the state from what is stored."""
    folder = checkpoint.root
    if "transformers" in sys.modules and os.path.isfile(os.path.join(folder, "config.json")):
        with suppress(Exception):  # advice for an error: whatever another library raises must not replace that error
            wanted = {key: tuple(value.shape) for key, value in flat.items() if isinstance(value, torch.Tensor)}
            infos = {**checkpoint.tensors, **{key: checkpoint.tensors[of] for key, of in checkpoint.aliases.items()}}
            stored = [Composite(key, info.shape, info.dtype, (key,)) for key, info in infos.items()]
            stack, rename = _rules(folder, list(infos))
            rename = {name: key for name, key in rename.items() if name in wanted}
            for mapping in (_by_prefix(rename), rename):
                name_of = rename_function(mapping)
                made = {tensor.name: tensor.shape for tensor in restacked(stored, stack)}
                if (stack or mapping) and all(made.get(name_of(key)) == shape for key, shape in wanted.items()):
                    given = [f"{name}={value!r}" for name, value in (("stack", stack), ("rename", mapping)) if value]
                    return f"transformers stores this model in another form: {', '.join(given)} makes it fit"
    return ""


def _rules(folder: str, keys: Sequence[str]) -> tuple[dict[Any, str], dict[str, str]]:
    """Returns stacking rules and {name in the model: name in the folder}, for the model that `config.json` names."""
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    transforms = get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    others = [transform for transform in transforms if not isinstance(transform, WeightConverter)]
    stack: dict[Any, str] = {}
    rename: dict[str, str] = {}
    left: dict[str, dict[str, str]] = {}  # {name with * for numbers: {pattern of transformers: stored name with *}}
    for key in keys:
        name, pattern = rename_source_key(key, others, converters, model.base_model_prefix, model.state_dict())
        if pattern is not None:
            left.setdefault(_starred(name), {})[pattern] = _starred(key)
        elif name != key:
            rename[name] = key
    for name, of_pattern in left.items():
        converter = next(each for each in converters if set(of_pattern) <= set(each.source_patterns))
        operations = [type(operation).__name__ for operation in converter.operations]
        if operations not in _MERGES:
            continue
        names = tuple(of_pattern[pattern] for pattern in converter.source_patterns)
        stack[names if len(names) > 1 else names[0]] = name
    return stack, rename


def _starred(key: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", key)


def _by_prefix(rename: Mapping[str, str]) -> dict[str, str]:
    """Shortens the mapping to prefixes where these do not contradict each other."""
    result: dict[str, str] = {}
    for name, key in rename.items():
        ours, theirs = name.split("."), key.split(".")
        while len(ours) > 1 and len(theirs) > 1 and ours[-1] == theirs[-1]:
            ours, theirs = ours[:-1], theirs[:-1]
        if result.setdefault(".".join(ours), ".".join(theirs)) != ".".join(theirs):
            result[name] = key
    return result
