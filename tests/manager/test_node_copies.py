"""Which nodes get copies of which files."""

from __future__ import annotations

import pytest

from vescale_ckpt._ranks.file_places import copies_of_each

NODES = [0, 2, 4, 6]  # the lowest of two ranks each


def _places(*ranks: int) -> dict[int, int]:
    return dict.fromkeys(ranks, 10)


def test_files_go_around_the_nodes() -> None:
    places = {f"of {node}": _places(node) for node in NODES}
    assert copies_of_each(places, NODES, 1) == {2: {"of 0"}, 4: {"of 2"}, 6: {"of 4"}, 0: {"of 6"}}
    two = copies_of_each(places, NODES, 2)
    assert {node: len(names) for node, names in two.items()} == dict.fromkeys(NODES, 2)
    assert two[0] == {"of 4", "of 6"}


def test_replicas_count() -> None:
    assert copies_of_each({"w": _places(0, 4)}, NODES, 1) == {}
    assert copies_of_each({"w": _places(0, 4)}, NODES, 2) == {2: {"w"}}


@pytest.mark.parametrize("copies", [4, 9])
def test_no_more_copies_than_nodes(copies: int) -> None:
    assert copies_of_each({"w": _places(2)}, NODES, copies) == {0: {"w"}, 4: {"w"}, 6: {"w"}}


@pytest.mark.parametrize(("nodes", "copies"), [(24, 1), (24, 2), (24, 5), (2048, 1)])
def test_copies_are_even(nodes: int, copies: int) -> None:
    wanted = copies_of_each({f"of {node}": _places(node) for node in range(nodes)}, range(nodes), copies)
    assert {node: len(names) for node, names in wanted.items()} == dict.fromkeys(range(nodes), copies)
    for node in range(nodes):
        have = {node, *(target for target, names in wanted.items() if f"of {node}" in names)}
        assert len(have) == copies + 1
