"""Reads and fills wrapper subclasses (quantized weights and optimizer states) for loads.

The record of a wrapper is what `torch.save` writes, as in stock DCP. A wrapper of the same class gets the bits of the
inner tensors. A plain tensor gets the values that `copy_` computes.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence

import torch

from .._engine.wrapper_tensors import checksum, copy_inner, is_wrapper, type_name
from .._state.tensor_table import narrowed
from ..errors import CheckpointError, IncompatibleStateError, UntrustedCheckpointError, some

logger = logging.getLogger(__name__)


class WrapperLoad:
    """The wrappers that one load reads and fills."""

    def __init__(self) -> None:
        self._as_values: dict[str, str] = {}  # {key: stored class} of plain tensors that got the values
        self._filled: list[tuple[str, Callable[[], torch.Tensor], int]] = []  # (key, target, checksum of its content)

    def fill(
        self,
        key: str,
        target: torch.Tensor,
        stored: torch.Tensor,
        offset: Sequence[int],
        again: Callable[[], torch.Tensor] | None,
    ) -> None:
        """Fills a target, plain or a wrapper, with the part at `offset` of a stored wrapper. Raises `CheckpointError`
        with the key if a wrapper cannot hold it bit for bit. `again`: returns the same part of the state's tensor
        again, for `end`; None if that is not possible."""
        if not is_wrapper(target):
            self._as_values[key] = type_name(stored)
            target.copy_(narrowed(_values(key, stored, target.dtype), offset, target.shape))
            return
        if type(target) is not type(stored):
            raise IncompatibleStateError(key, f"a {type_name(target)}", f"a {type_name(stored)}")
        try:
            part = narrowed(stored, offset, target.shape)
        except CheckpointError as error:
            raise CheckpointError(f"{key}: {error}", key=key) from error
        if reason := copy_inner(target, part):
            raise CheckpointError(
                f"{key}: the {type_name(stored)} to load into cannot take the stored one bit for bit ({reason}): load "
                "into one that was made with the same settings",
                key=key,
            )
        self._note(key, target, again)

    def fill_with_values(
        self, key: str, target: torch.Tensor, values: torch.Tensor, again: Callable[[], torch.Tensor] | None
    ) -> None:
        """Fills a wrapper from a plain tensor: its class computes the inner tensors."""
        try:
            with torch.no_grad():
                target.copy_(values)
        except Exception as error:  # code of the class may raise anything
            found = f"a plain tensor, which it cannot take ({type(error).__name__}: {error})"
            raise IncompatibleStateError(key, f"a {type_name(target)}", found) from error
        self._note(key, target, again)

    def _note(self, key: str, target: torch.Tensor, again: Callable[[], torch.Tensor] | None) -> None:
        if again is not None:
            self._filled.append((key, again, checksum(target)))

    def end(self) -> None:
        """Checks that the wrappers of the state hold what was copied to them: a class may return copies as parts of a
        tensor, or parts that share an inner tensor. Raises `CheckpointError` with the key."""
        filled, self._filled = self._filled, []
        for key, again, expected in filled:
            tensor = again()
            if checksum(tensor) != expected:
                raise CheckpointError(
                    f"{key}: a {type_name(tensor)} cannot be filled part by part: load it with the sharding that it "
                    "was saved with",
                    key=key,
                )
        if self._as_values:
            logger.warning(
                "%s: stored as inner tensors, loaded as the values that these stand for. A tensor of the same class "
                "gets the inner tensors bit for bit",
                some([f"{key} ({kind})" for key, kind in self._as_values.items()]),
            )
            self._as_values = {}


def _values(key: str, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = torch.empty(stored.shape, dtype=dtype, device="cpu")
    try:
        with torch.no_grad():
            try:
                return values.copy_(stored)
            except Exception:  # many classes copy only to their own class
                return values.copy_(stored.dequantize())
    except Exception as error:  # code of the class may raise anything
        hint = "which has no values for a plain tensor: load into a tensor of this class"
        raise IncompatibleStateError(key, "a plain tensor", f"a {type_name(stored)}, {hint}") from error


def check_classes(key: str, data: bytes) -> None:
    """Raises `UntrustedCheckpointError` if a record that torch refused to load names classes that it does not trust."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except Exception:  # the record is damaged: the caller raises that error
        return
    if names:
        raise UntrustedCheckpointError(
            f"{key}: it is stored as a tensor that takes {some(sorted(names))} to load, which torch does not trust "
            "here: import the package that it is from (torchao registers its classes), or, if you trust the "
            "checkpoint, pass the class to torch.serialization.add_safe_globals",
            key=key,
        )
