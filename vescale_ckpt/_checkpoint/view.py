"""`View` offers the tensors of a checkpoint in the form in which a load or a conversion wants them, and reads boxes of
them.

A tensor of a view has a name, a logical shape and a logical dtype. It is one of three:

- a stored tensor, under its key or a new name;
- a composite of stored tensors, by the rules of `stack=`: boxes of it are boxes of these (`stacking`);
- values of a quantised tensor: numbers and scales of the box are read, and the values are made of them
  (`quantized_tensors`).

A conversion names, stacks and converts with `View.of`, and reads boxes by `read`. A load plans on an index, in which a
composite is rows of the stored tensors (`LoadableCheckpoint.stacked`), so that ranks can read for each other. Only the
values are not in the index: the load asks `values_for` which of its targets take values, and fills these by the same
`read`, with its own reader. Both ask `check_cast` before they convert what is stored. Nothing outside of this folder
knows of scales, blocks and layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from .._engine.options import threads_of
from .._engine.torch_types import local_of
from .._engine.wrapper_tensors import is_wrapper
from .._state.chunks import tells_chunks, whole_shape
from ..errors import CheckpointError, Mismatch
from .checkpoint import Checkpoint, Read
from .quantized_names import scales_of
from .quantized_tensors import VALUE_DTYPES, Quantized, fill, find, of_values, stacked_with_scales
from .stacking import Composite, Stack, check_names


class View:
    """The constructor makes a view with the tensors of the checkpoint, or values for them, under their keys."""

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        self.names: Mapping[str, str] = {}  #: new names of the keys that `View.of` has chosen, tensors and objects
        self.tensors: dict[str, Composite] = {}  #: those of `View.of`

    @classmethod
    def of(
        cls,
        source: Checkpoint,
        choose: Callable[[Sequence[str]], Mapping[str, str]],
        stack: Stack,
        dtype_of: Callable[[str, torch.dtype], torch.dtype],
    ) -> View:
        """Makes the view of a conversion.

        `choose`: returns {key: new name} of the keys that it takes of all. `dtype_of`: returns the wanted dtype for a
        key and a dtype of numbers; where it is a dtype of values, the view offers these. Raises ValueError and
        `CheckpointError` for rules that do not fit.
        """
        view = cls(source)
        infos = of_values(source.tensors, view.known, dtype_of)
        view.names = names = choose([*infos, *source.objects])
        chosen = [Composite(names[key], info.shape, info.dtype, (key,)) for key, info in infos.items() if key in names]
        made = stacked_with_scales(chosen, stack, source.tensors, view.known, source.aliases)
        check_names(made, {names[key]: key for key in source.objects if key in names})
        view.tensors = {of.name: of for of in made}
        return view

    def read(
        self,
        reads: Iterable[Read],
        read_stored: Callable[[list[Read]], None] | None = None,
        thread_count: int | None = None,
    ) -> None:
        """Fills the targets with boxes of the view's tensors: with values, if the target does not have the dtype of the
        stored numbers. `read_stored`: reads boxes of stored tensors; None: the checkpoint does. `thread_count`: None:
        the setting."""
        read_stored = read_stored or self.source.read
        stored: list[Read] = []
        values: list[tuple[Quantized, Sequence[int], torch.Tensor]] = []
        for whole in reads:
            of = self.tensors.get(whole.key)
            for read in [whole] if of is None else of.reads(whole.offsets, whole.target):
                known = self.known.get(read.key)
                if known is None or read.target.dtype == known.numbers_dtype:
                    stored.append(read)
                else:
                    values.append((known, read.offsets, read.target))
        if stored:
            read_stored(stored)
        if values:
            fill(values, read_stored, threads_of(thread_count))

    # --- Values

    @property
    def known(self) -> Mapping[str, Quantized]:
        """The tensors whose values are made of stored numbers and scales, by their keys."""
        return self._quantization[0]

    @cached_property
    def _quantization(self) -> tuple[Mapping[str, Quantized], str]:
        """`known`, and why no values are made of other numbers that have scales."""
        config = self.source.quantization_config
        if not config:
            return {}, "" if config is None else "no config.json beside it has a quantization_config"
        return find(config, self.source.tensors)

    def values_for(self, targets: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Mismatch]]:
        """Returns the tensors of a state that take values, and those that cannot. A tensor of the dtype of the stored
        numbers takes these, and so does one beside whose scales are loaded, too."""
        found, unfit = {}, {}
        for key, of in self.known.items():
            target = targets.get(key)
            if not isinstance(target, torch.Tensor) or target.dtype == of.numbers_dtype or of.scales in targets:
                continue
            shape, local = whole_shape(target), local_of(target)
            if shape != of.shape:
                unfit[key] = Mismatch(key, f"shape {tuple(shape)}", f"shape {of.shape}")
            elif target.dtype not in VALUE_DTYPES or tells_chunks(target, loading=True) or is_wrapper(local):
                stored = f"values of {of.numbers} and {of.scales}, for a plain tensor of a floating-point dtype"
                unfit[key] = Mismatch(key, f"a {type(target).__name__} of dtype {target.dtype}", stored)
            else:
                found[key] = target
        return found, unfit

    def made_of(self, keys: Iterable[str]) -> set[str]:
        """Returns the keys of the stored tensors that values are made of."""
        known = self.known
        return {stored for key in keys for stored in (known[key].numbers, known[key].scales)}

    # --- Casts that would leave scales out

    def scales_of(self, key: str, dtype: torch.dtype) -> str | None:
        """Returns the key of what a stored tensor of `dtype` means nothing without; None if there is no such key."""
        return scales_of(key, str(dtype).removeprefix("torch."), self._keys)

    def check_cast(self, key: str, stored: torch.dtype, wanted: torch.dtype) -> None:
        """Raises `CheckpointError` if a cast of a stored tensor would leave out its scales."""
        if stored == wanted:
            return
        name = self.source.aliases.get(key, key)
        if (scales := self.scales_of(name, stored)) is not None:
            why = self._quantization[1]
            if name != key:
                why = f"{key} is another name of it, and values are made for the stored name only"
            raise CheckpointError(
                f"{name}: it is quantised, stored as {stored} with the scales {scales}. A conversion to {wanted} would "
                f"leave them out and give wrong values{why and ': '}{why}. Load it as {stored}, together with {scales}",
                key=name,
            )

    @cached_property
    def _keys(self) -> frozenset[str]:
        return frozenset(self.source.keys())
