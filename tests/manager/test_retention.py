"""Which checkpoints are kept, against a model that says the same in another way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vescale_ckpt.manager import step_metrics
from vescale_ckpt.manager.retention import Candidate, Retention

metrics = st.one_of(st.none(), st.floats(allow_nan=True))
checkpoints = st.lists(
    st.builds(Candidate, st.integers(0, 60), metrics), unique_by=lambda kept: kept.step, max_size=12
).map(lambda found: sorted(found, key=lambda kept: kept.step))
rules = st.builds(
    Retention,
    st.one_of(st.none(), st.integers(1, 5)),
    st.one_of(st.none(), st.integers(1, 7)),
    st.one_of(st.none(), st.just("loss")),
    st.sampled_from(["max", "min"]),
    st.lists(st.integers(0, 60), max_size=3),
)


@settings(deadline=None)
@given(checkpoints, rules)
@example([Candidate(1, -math.inf), Candidate(2), Candidate(3)], Retention(1, best="loss", best_mode="max"))
def test_what_is_kept(found: list[Candidate], rule: Retention) -> None:
    surplus = rule.surplus(found)
    assert surplus == sorted(set(surplus)) and set(surplus) <= {kept.step for kept in found}
    pinned = [step for step in rule.pinned if step in {kept.step for kept in found}][-1:]
    for candidate in found:
        better = sum(
            other.step in pinned or (candidate.step not in pinned and is_better(other, candidate, rule))
            for other in found
            if other is not candidate
        )
        wanted = (
            rule.newest is None
            or better < rule.newest
            or candidate.step in pinned
            or candidate.step == max(kept.step for kept in found)
            or (rule.period is not None and candidate.step % rule.period == 0)
        )
        assert (candidate.step not in surplus) == wanted


def is_better(a: Candidate, b: Candidate, rule: Retention) -> bool:
    if rule.best is not None:
        known = [kept.metric is not None and not math.isnan(kept.metric) for kept in (a, b)]
        if known[0] != known[1]:
            return known[0]
        if known[0] and a.metric != b.metric:
            assert a.metric is not None and b.metric is not None
            return (a.metric > b.metric) == (rule.best_mode == "max")
    return a.step > b.step


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), unique=True, min_size=1, max_size=12), st.integers(1, 5))
def test_what_was_saved_last_stays_whatever_its_step(in_order: list[int], most: int) -> None:
    found = [*map(Candidate, in_order)]
    stay = set(in_order) - set(Retention(most).surplus(found))
    assert stay == {*in_order[-most:], max(in_order)}


def test_infinities_are_stored_as_they_are_and_nan_is_not(tmp_path: Path) -> None:
    step_metrics.write(str(tmp_path), 1, {"a": math.inf, "b": -math.inf, "c": math.nan, "d": 1e300})
    json.loads((tmp_path / "metrics.json").read_text(), parse_constant=pytest.fail)  # only what JSON knows
    (tmp_path / ".metadata").write_bytes(b"of the later save")
    assert step_metrics.read(str(tmp_path)) == {"a": math.inf, "b": -math.inf, "d": 1e300}


def test_a_bit_that_is_flipped_in_metrics_gives_no_other_metrics(tmp_path: Path) -> None:
    step_metrics.write(str(tmp_path), 1, {"loss": 0.5, "steps": math.inf})
    (tmp_path / ".metadata").write_bytes(b"of the later save")
    path = tmp_path / "metrics.json"
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert step_metrics.read(str(tmp_path)) in ({}, {"loss": 0.5, "steps": math.inf})


def test_metrics_that_cannot_be_written_leave_none_of_an_earlier_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_metrics.write(str(tmp_path), 1, {"loss": 0.5})
    monkeypatch.setattr(step_metrics._C, "commit_file", mock.Mock(side_effect=OSError("full")))
    with pytest.raises(OSError, match="full"):
        step_metrics.write(str(tmp_path), 1, {"loss": 3.0})
    (tmp_path / ".metadata").write_bytes(b"of the later save")
    assert step_metrics.read(str(tmp_path)) == {}
