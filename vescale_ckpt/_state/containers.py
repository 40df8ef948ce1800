"""Fills containers of a state that lack elements which the checkpoint has. What containers mean is decided here alone:

- An empty mapping, a list that is shorter, and None or a list in the place of a container ask for all that is stored
  under their key. New elements are those of a load without a state: mappings are dicts, tensors are on the CPU.
- A mapping with elements names what it asks for. Modules and optimizers decide for themselves.
- A container of another kind than the stored one is a mismatch, and so is a container for a value, or the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from copy import copy
from typing import Any, NamedTuple

import torch

from ..errors import Mismatch
from .application import Application
from .flatten import is_path, nest, own_name, place, stays_whole
from .key_selection import Selection
from .per_rank import is_name_part
from .stored_entries import StoredEntries
from .structure import Path, Structure, is_number

_ONE = "one value, stored whole"


class _Growth(NamedTuple):
    path: tuple[Any, ...]  #: the container in the state
    replaces: bool  #: whether a new container takes the place of the value at `path`
    base: Path  #: the container in the checkpoint
    paths: dict[str, Path]  #: {key of the checkpoint: path in the checkpoint} of what the container lacks
    empty: set[Path]  #: paths of stored mappings without elements that it lacks


class Containers:
    """The containers of one state that is being loaded. Call `find`, load `keys`, then call `fill`."""

    def __init__(
        self,
        application: Application,
        stored: StoredEntries,
        selection: Selection,
        of: Callable[[str, Path], str],
        path_of: Callable[[str], Path],
    ) -> None:
        """`of`: maps a key below a path of the state to its key in the checkpoint. `path_of`: maps the key in the
        checkpoint of a value to its path in the state."""
        self._application, self._stored, self._selection = application, stored, selection
        self._of, self._path_of = of, path_of
        self._growths: list[_Growth] = []
        self.keys: dict[str, str] = {}  #: {key of the checkpoint that a container lacks: its key in the state}
        self.replaced: set[str] = set()  #: keys of the checkpoint for values that new containers replace
        self.mismatched: list[Mismatch] = []

    def find(self, selected: Collection[str], flat: Mapping[str, Any]) -> None:
        """`flat`: the values of the flat state, by their keys in the checkpoint; `selected`: the keys to load."""
        for path, value in self._open(self._application.form, ()):
            self._decide(path, value, selected, replaces=False)
        for key, value in flat.items():
            is_placeholder = value is None or type(value) is list
            if is_placeholder and key not in self._stored.keys and not self._application.closes(self._path_of(key)):
                self._decide(self._path_of(key), value, selected, replaces=True)

    def conflicts(self, missing: Iterable[str], selected: Mapping[str, Any]) -> dict[str, Mismatch]:
        """Returns the mismatches among missing keys: the checkpoint has a container and the state a value, or the
        reverse."""
        found: dict[str, Mismatch] = {}
        for key in missing:
            if key not in selected or self._application.closes(self._path_of(key)):
                continue
            parts = key.split(".")
            above = (".".join(parts[:end]) for end in range(1, len(parts)))
            if (below := self._below(key)) and not any(is_name_part(name[len(key) + 1 :]) for name in below):
                found[key] = Mismatch(key, _kind(selected[key]), _listed(below))
            elif (
                name := next((name for name in above if name in self._stored.keys and name not in selected), None)
            ) is not None:
                known = next((entry for entry in self.mismatched if entry.key == name), None)
                found[key] = known or Mismatch(name, f"a container with {key}", _ONE)
        return found

    def fill(self, state: Any, loaded: Mapping[str, Any]) -> None:
        """Puts the loaded values of `keys` in their places. Stateful objects get copies of the containers that their
        state consists of, which they may still refer to."""
        for growth in self._growths:
            values = {key: loaded[key] for key in growth.paths if key in loaded}
            known = self._stored.structure
            kinds = None if known is None else Structure(known.numbered, known.keys, growth.empty)
            made: Any = nest(values, growth.paths, kinds)
            for name in growth.base:
                made = made[own_name(made, name)]
            form, path = self._application.form, growth.path
            owned = self._application.owns(path)
            if not growth.replaces:
                target: Any = form if owned else state
                for name in path:
                    target = target[name]
                target = copy(target) if owned else target
                if isinstance(target, list):
                    target.extend(made[len(target) :])
                else:
                    target.update(made)
                made = target
            place(form, path, made)
            if not owned:
                place(state, path, made)

    def _open(self, container: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Yields the empty mappings, and the lists whose elements have keys of their own."""
        for name, value in list(enumerate(container) if isinstance(container, list) else container.items()):
            if isinstance(value, torch.Tensor) or not isinstance(value, (Mapping, list)):
                continue
            at = (*path, name)
            if self._application.closes(at) or (isinstance(value, list) and stays_whole(value)):
                continue
            if isinstance(value, list) or not value:
                yield at, value
            yield from self._open(value, at)

    def _decide(self, path: tuple[Any, ...], value: Any, selected: Collection[str], replaces: bool) -> None:
        key = name = ".".join(map(str, path))
        with suppress(Exception):  # of a function that knows keys of values only
            name = self._of(key, path)
        of_tensors = value and isinstance(value, list) and all(isinstance(each, torch.Tensor) for each in value)
        if of_tensors and not replaces and all(stored in selected for stored in self._below(name)):
            return  # without the metadata, which takes seconds to build at thousands of ranks
        base, paths, empty = self._tree(name, isinstance(value, list))
        held, depth = len(value) if isinstance(value, list) and not replaces else 0, len(base)

        def lacks(at: Path) -> bool:
            return type(at[depth]) is str or at[depth] >= held if len(at) > depth else bool(value) or replaces  # type: ignore[operator]

        def is_named(at: Path, stored: str) -> bool:
            with suppress(Exception):
                return self._of(_joined(key, at[depth:]), path) == stored
            return False

        if not replaces and not paths and not empty and name in self._stored.keys and name in self._selection:
            self.mismatched.append(Mismatch(name, _kind(value), _ONE))
        paths = {k: at for k, at in paths.items() if k not in selected and lacks(at) and is_named(at, k)}
        empty = set(filter(lacks, empty))
        if not paths and not empty:
            return
        lacking = [at[depth:] for at in (*paths.values(), *empty)]
        kinds = {type(at[0]) if at else str for at in lacking}
        takes = {int} if isinstance(value, list) else {str} if isinstance(value, MutableMapping) else {int, str}
        fits = kinds <= takes if isinstance(value, (list, MutableMapping)) or value is None else False
        indices = {at[0] for at in lacking if at and isinstance(at[0], int)}
        fits = fits and indices == set(range(held, held + len(indices)))  # else elements would have no values
        of_ranks = any(isinstance(part, str) and is_name_part(part) for at in lacking for part in at)
        of_objects = any(self._application.owns((*path, i)) for i in range(held)) and not self._application.owns(path)
        if replaces and all(at and is_name_part(str(at[0])) for at in lacking):
            return  # the key is missing, and the error proposes a PerRank
        if not fits or of_ranks or of_objects:
            found = _listed(list(paths)) if paths else "an empty mapping"
            self.mismatched.append(Mismatch(name, _kind(value), found + " of a PerRank" * of_ranks))
        else:
            self._growths.append(_Growth(path, replaces, base, paths, empty))
            self.keys.update({k: _joined(key, at[depth:]) for k, at in paths.items()})
        if replaces:
            self.replaced.add(name)

    def _tree(self, name: str, is_list: bool) -> tuple[Path, dict[str, Path], set[Path]]:
        """Returns the path of the container `name` in the checkpoint, and the paths of the selected keys below it and
        of the empty mappings at it or below it."""
        base: Path = (name,) if name else ()
        paths: dict[str, Path] = {}
        below, structure = self._below(name), self._stored.structure
        empty = () if structure is None else structure.empty
        found = {at for at in empty if _depth(at, name) is not None and ".".join(map(str, at)) in self._selection}
        for at in found:
            base = at[: _depth(at, name)]
        for key in below:
            at = self._stored.paths.get(key, ())
            if is_path(at) and (depth := _depth(at, name)) is not None:
                base, paths[key] = at[:depth], at
            else:  # of safetensors, which have no paths: what follows the name is one name
                inside = key.removeprefix(f"{name}." if name else "")
                first, _, inner = inside.partition(".")
                relative: Path = (int(first), *filter(None, [inner])) if is_list and is_number(first) else (inside,)
                paths[key] = (*base, *relative)
        return base, paths, found

    def _below(self, name: str) -> list[str]:
        return self._selection.of(self._stored.below(f"{name}." if name else ""))


def _depth(path: Path, name: str) -> int | None:
    """Returns how many elements of a path make up the name. None if it does not begin with the name."""
    return next((end for end in range(len(path) + 1) if ".".join(map(str, path[:end])) == name), None)


def _joined(key: str, relative: Path) -> str:
    return ".".join((key, *map(str, relative)))


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _listed(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more under it"
