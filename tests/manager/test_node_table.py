"""What the coordinator decides from one gather of all folders: what stays, whose run it is, and who gets copies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from unittest import mock

import pytest

from vescale_ckpt import CheckpointError, Retention, UntrustedCheckpointError
from vescale_ckpt._checkpoint.native.file_names import INDEX_NAME
from vescale_ckpt._checkpoint.native.step_order import FIRST, Branch, SavedOrder
from vescale_ckpt._collective.node_files import copies_of_each
from vescale_ckpt._engine import _C
from vescale_ckpt.manager import run_id
from vescale_ckpt.manager.branch_tracker import BranchTracker
from vescale_ckpt.manager.node_table import NodeTable, Part
from vescale_ckpt.manager.node_tier import file_ends_of
from vescale_ckpt.manager.retention import Candidate
from vescale_ckpt.manager.run_id import Run

SECOND = Branch(1, ((0, 1),))  # it left the first branch at step 1


def table(**steps: str) -> NodeTable:
    """Of three nodes. `s3="ab b -"`: what each node has of step 3; "ab" files of a and b, "-" nothing."""
    parts: dict[int, dict[int, Part]] = {}
    for name, of_nodes in steps.items():
        for rank, files in enumerate(of_nodes.split()):
            if files != "-":
                parts.setdefault(int(name[1:]), {})[rank] = Part(f"save {name}", FIRST, dict.fromkeys(files, 1))
    made = NodeTable(parts)
    for step in parts:
        made.note_ends(step, dict.fromkeys("abc", 1))
    return made


TWO = "ab bc ca"  # each file lies on two nodes
ONE = "a b c"
LOST = "a b -"


@pytest.mark.parametrize(
    ("there", "copies", "most", "sent", "stays"),
    [
        ({"s1": TWO, "s2": ONE}, 1, 1, None, {1, 3}),  # no later step has its copies
        ({"s1": TWO, "s2": ONE}, 0, 1, None, {3}),
        ({"s1": TWO, "s2": TWO}, 1, 1, None, {2, 3}),
        ({"s1": TWO, "s2": ONE}, 2, 1, None, {1, 3}),  # as many as there are
        ({"s1": ONE, "s2": LOST}, 0, 2, None, {1, 2, 3}),  # what is not whole does not count, and goes as if it did
        ({"s1": ONE, "s2": LOST}, 0, 1, None, {3}),
        ({"s1": ONE, "s2": ONE}, 1, 1, 1, {1, 3}),  # it gets its copies now
        ({"s1": TWO, "s2": ONE}, 1, 2, None, {1, 2, 3}),
        ({"s1": TWO, "s2": ONE}, 1, None, None, {1, 2, 3}),
    ],
)
def test_what_stays(there: dict[str, str], copies: int, most: int | None, sent: int | None, stays: set[int]) -> None:
    made = table(**there)
    gone = made.removal(3, FIRST, None, Retention(most), copies, sent)
    assert {1, 2, 3} - {*gone.steps} == stays
    made.note_saved(3, FIRST, None, gone)
    made.note_copied(3, copies)
    later = made.removal(4, FIRST, None, Retention(1), copies, None)
    assert {*made.rows, 4} - {*later.steps} == ({3, 4} if copies else {4})


def test_nothing_goes_if_a_rule_raises(caplog: pytest.LogCaptureFixture) -> None:
    class Raises(Retention):
        def keeps(self, checkpoints: Sequence[Candidate]) -> Collection[int]:
            raise ZeroDivisionError

    made = table(s1=ONE, s2=ONE)
    gone = made.removal(3, FIRST, None, Raises(), 0, None)
    assert (gone.steps, gone.kept) == ([], [1, 2, 3])
    assert "that step 3 supersedes stay" in caplog.text


def test_a_step_with_copies_on_an_abandoned_line_protects_nothing() -> None:
    made = table(s1=TWO, s2=TWO)
    gone = made.removal(2, SECOND, None, Retention(1), 1, None)  # it is saved again
    assert gone.steps == []


def test_metadata_of_one_node_is_lost_with_it() -> None:
    made = table(s1=TWO)
    made.parts[1][1] = made.parts[1][2] = Part("", FIRST, made.parts[1][1].files)
    made.note_ends(1, {"b": 1})
    assert made.rows[1].survives == 0


def test_the_lines_of_all_nodes_count() -> None:
    """The coordinator's folder may be new."""
    parts = {step: {1: Part(str(step), FIRST, {})} for step in (1, 2, 3)}
    made = NodeTable(parts)
    made.durable = {2: SECOND}
    tracker = BranchTracker("", lambda _: SavedOrder.of(made.branches))
    tracker.look()
    assert tracker.note_restored(2) == [3]
    assert tracker.branch_of(3)[0] == SECOND
    assert made.candidates(2) == [[], [1]]  # the durable one is newer


HERE = Run("new", "durable", "local")
OURS, THEIRS = Run("1", "durable", "local"), Run("2", "other", "local")
MOVED = Run("1", "before", "where it was")


@pytest.mark.parametrize(
    ("durable", "folders", "of"),
    [
        (None, {}, "new"),
        (OURS, {}, "1"),
        (OURS, {0: OURS, 1: OURS}, "1"),
        (OURS, {0: MOVED}, "1"),
        (None, {0: OURS}, "1"),  # the durable place is lost, or away
        (None, {0: MOVED}, "1"),
        (None, {0: None}, "new"),
        (OURS, {0: None}, "a run without an id"),
        (None, {0: OURS, 1: None}, "a run without an id"),
        (OURS, {0: THEIRS}, "run 2 (local='local' in front of 'other')"),
        (None, {0: THEIRS}, "run 2 (local='local' in front of 'other')"),  # a new run behind an old folder
        (None, {0: OURS, 1: THEIRS}, "run 2 (local='local' in front of 'other')"),
        (None, {0: OURS, 1: OURS._replace(id="3")}, "run 3"),
    ],
)
def test_whose_run_it_is(durable: Run | None, folders: dict[int, Run | None], of: str) -> None:
    if len(of) < 4:
        assert run_id.choose(HERE, durable, folders) == HERE._replace(id=of)
        return
    with pytest.raises(CheckpointError) as raised:
        run_id.choose(HERE, durable, folders)
    assert of in str(raised.value) and "Move that folder away" in str(raised.value)


# --- Which nodes get copies of which files


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


def test_a_file_outside_of_the_step_is_refused() -> None:
    index = SimpleNamespace(files=["../x"], file_ends=lambda: [1])
    with mock.patch.object(_C.Index, "from_bytes", return_value=index), pytest.raises(UntrustedCheckpointError):
        file_ends_of("step", {INDEX_NAME: b""})
