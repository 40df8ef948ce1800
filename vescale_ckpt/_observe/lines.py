"""Writes the lines of logs that say what a save or load does, did, and waits for."""

from __future__ import annotations

import logging
import os

from .. import settings
from ..reports import LoadStats, SaveStats
from .amounts import seconds_text, size
from .phase_times import Phase, PhaseTimes

logger = logging.getLogger("vescale_ckpt")

_LEAST_SHARE = 0.005  # a phase is named if it takes this part of all time
_LATE_SHARE = 0.1  # the rank that came last is named if others waited this part of all time

_handler: logging.Handler | None = None


class _WithRank(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.rank = os.environ.get("RANK", "0")
        return super().format(record)


def set_up_logging() -> None:
    """Sets up logging to standard error as `VESCALE_CKPT_LOG` asks, for programs that do not set up logging. Called at
    the beginning of each save and load. The setting counts at its first call with one."""
    global _handler
    level = str(settings.lenient("log"))
    if level == "off" or _handler is not None:
        return
    _handler = logging.StreamHandler()
    _handler.setFormatter(_WithRank("%(asctime)s vescale_ckpt [rank %(rank)s] %(levelname)s %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def log_begin(timeline: PhaseTimes, note: str) -> None:
    ranks = f" with {timeline.ranks} ranks" if timeline.ranks > 1 else ""
    logger.log(_level(timeline), "%s%s%s: begins", timeline.doing, ranks, note)


def log_end(timeline: PhaseTimes, stats: SaveStats | LoadStats | None, error: BaseException | None) -> None:
    if stats is None:
        logger.log(
            _level(timeline), "%s: failed after %s: %s%s",
            timeline.doing, seconds_text(timeline.seconds), type(error).__name__, f": {error}" if str(error) else "",
        )  # fmt: skip
        return
    if logger.isEnabledFor(_level(timeline)):
        logger.log(_level(timeline), "%s: %s", timeline.doing, summary(stats))


def log_still(timeline: PhaseTimes, phase: Phase, seconds: float, moved: bool) -> None:
    """A phase goes on for long. `moved`: whether bytes were written or read since the last such line."""
    text = f"{timeline.doing}: rank {timeline.rank} of {timeline.ranks} is in '{phase.name}'"
    text += f" ({phase.detail})" if phase.detail else ""
    text += f" for {seconds_text(seconds)} now"
    if phase.who is not None:
        try:
            who = phase.who()
        except Exception as error:  # the store does not answer
            who = f"other ranks ({error})"
        # One rank names those that all wait for.
        must = "" if timeline.have_met else "; all ranks must call it"
        logger.log(logging.WARNING if who else logging.INFO, "%s, and waits for %s%s", text, who or "other ranks", must)
        return
    if timeline.progress is not None:
        done, total = timeline.progress()
        done = min(done, total or done)  # framing and fill count as done
        text += f": {size(done)}" + (f" of {size(total)}" if total else "")
    logger.log(logging.INFO if moved else logging.WARNING, "%s%s", text, "" if moved else ", and nothing moves")


def summary(stats: SaveStats | LoadStats) -> str:
    """What a save or load did, in one line."""
    job, total = stats.job, stats.total_seconds
    count = stats.bytes if job is None else job.bytes
    texts = [f"{size(count)} in {seconds_text(total)} ({size(count / max(total, 1e-9))}/s)"]
    if isinstance(stats, SaveStats):
        if stats.blocked_seconds < total:
            texts.append(f"training waited {seconds_text(stats.blocked_seconds)}")
        if stats.plan_reused is not None:
            texts.append("plan reused" if stats.plan_reused else "planned anew")
    named = {name: spent for name, spent in stats.phases.items() if spent >= _LEAST_SHARE * total}
    texts.append(", ".join(f"{name} {seconds_text(spent)}" for name, spent in named.items()))
    if job is not None and job.ranks > 1:
        if job.late_seconds >= _LATE_SHARE * total:
            texts.append(f"last to come: rank {job.last_rank}, {seconds_text(job.late_seconds)} after the first")
        texts.append(
            f"slowest: rank {job.slowest_rank} with {seconds_text(job.slowest_seconds)} "
            f"(mean {seconds_text(job.mean_seconds)})"
        )
        texts.append(f"most bytes of a rank: {size(job.most_bytes)} ({100 * job.imbalance:+.0f} % of the mean)")
    return "; ".join(text for text in texts if text)


def _level(timeline: PhaseTimes) -> int:
    """One rank of the job tells what all do."""
    return logging.INFO if timeline.rank == 0 else logging.DEBUG
