"""Which nodes get copies of which files."""

from __future__ import annotations

import pytest

from vescale_ckpt._ranks.file_places import copies_of_each

NODES = [0, 2, 4, 6]  # the lowest of two ranks each
RACKS = ["a", "a", "a", "a", "b", "b", "b", "b"]


def _places(*ranks: int) -> dict[int, int]:
    return dict.fromkeys(ranks, 10)


def test_files_go_around_the_nodes() -> None:
    places = {f"of {node}": _places(node) for node in NODES}
    assert copies_of_each(places, NODES, [""] * 8, 1) == {2: {"of 0"}, 4: {"of 2"}, 6: {"of 4"}, 0: {"of 6"}}
    two = copies_of_each(places, NODES, [""] * 8, 2)
    assert {node: len(names) for node, names in two.items()} == dict.fromkeys(NODES, 2)
    assert two[0] == {"of 4", "of 6"}


def test_other_domains_come_first() -> None:
    places = {f"of {node}": _places(node) for node in NODES}
    assert copies_of_each(places, NODES, RACKS, 1) == {4: {"of 0"}, 2: {"of 4"}, 6: {"of 2"}, 0: {"of 6"}}
    assert copies_of_each({"of 0": _places(0)}, NODES, RACKS, 3) == {4: {"of 0"}, 2: {"of 0"}, 6: {"of 0"}}


def test_replicas_count() -> None:
    assert copies_of_each({"w": _places(0, 4)}, NODES, [""] * 8, 1) == {}
    assert copies_of_each({"w": _places(0, 4)}, NODES, [""] * 8, 2) == {2: {"w"}}


@pytest.mark.parametrize("copies", [4, 9])
def test_no_more_copies_than_nodes(copies: int) -> None:
    assert copies_of_each({"w": _places(2)}, NODES, [""] * 8, copies) == {0: {"w"}, 4: {"w"}, 6: {"w"}}


@pytest.mark.parametrize(("nodes", "racks", "copies"), [(24, 4, 1), (24, 4, 2), (24, 4, 3), (24, 4, 5), (2048, 64, 1)])
def test_copies_are_even_and_in_other_racks(nodes: int, racks: int, copies: int) -> None:
    """Each rack has nodes behind one another, as launchers number them."""
    domains = [f"rack {node * racks // nodes}" for node in range(nodes)]
    wanted = copies_of_each({f"of {node}": _places(node) for node in range(nodes)}, range(nodes), domains, copies)
    assert {node: len(names) for node, names in wanted.items()} == dict.fromkeys(range(nodes), copies)
    for node in range(nodes):
        have = [node, *(target for target, names in wanted.items() if f"of {node}" in names)]
        assert len(have) == copies + 1
        assert len({domains[one] for one in have}) == min(racks, copies + 1)


def test_racks_of_different_sizes() -> None:
    domains = ["a", "a", "a", "b", "b", ""]
    wanted = copies_of_each({f"of {node}": _places(node) for node in range(6)}, range(6), domains, 1)
    for target, names in wanted.items():
        assert all(domains[target] != domains[int(name.split()[1])] for name in names)
    assert max(map(len, wanted.values())) <= 2
