"""Train, get killed, resume, compare with stock DCP: what `make demo` runs.

    PYTHONPATH=. python examples/demo.py [--dir DISK] [--rounds N]

Real weights (MiniLM, 22.7 M parameters) are trained with FSDP2 on two ranks and saved; the job is killed with
SIGKILL and resumed on two ranks and on one; the same directory goes through stock `dcp.load`, and a stock one
through ours. Every check prints `ok: ...` or ends the program with a message and a non-zero status. A table
of times and memory closes it.
"""

from __future__ import annotations

import argparse
import math
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from job import Job, Progress
from minilm import load_pretrained
from table import table_of_candidates
from torch import Tensor
from whole_state import first_difference, load_whole

import vescale_ckpt

STEPS = 12
SAVE_AT = 4
KILL_AFTER = 7  # the job is killed once it has logged this step, three past its checkpoint
TOLERANCE = 1e-4  # relative, between losses on one rank and on two: batch sums are rounded in another order


def check(holds: bool, claim: str, otherwise: str = "") -> None:
    """Print that the claim holds, or end the demo saying that it does not."""
    if not holds:
        raise SystemExit(f"FAILED: {claim}" + (f": {otherwise}" if otherwise else ""))
    print(f"ok: {claim}", flush=True)


def kill_and_resume(directory: Path, ours: Path, stock: Path, network: list[str]) -> None:
    """A job's life with and without a kill; leaves the checkpoint of step SAVE_AT in both directories."""
    to_end = [f"--steps={STEPS}", *network]
    from_checkpoint = [*to_end, f"--checkpoint={ours}", "--resume"]
    with Job("uninterrupted", directory, 2, *to_end) as job:
        reference = job.wait()
    finite = all(math.isfinite(float.fromhex(loss)) for loss in reference.losses.values())
    check(
        len(reference.losses) == STEPS and finite,
        f"trained {STEPS} steps on 2 ranks uninterrupted, every loss finite",
    )

    saving = [f"--checkpoint={ours}", f"--save-at={SAVE_AT}", f"--stock-copy={stock}"]
    far_on = ["--steps=1000", *saving, *network]  # not for ever, should nobody be left to kill it
    with Job("killed", directory, 2, *far_on) as job:
        job.wait_for(lambda progress: progress.saved and KILL_AFTER in progress.losses)
        processes = job.kill()
        killed = Progress.read(job.log)
        status = job.process.returncode
    reached = max(killed.losses)
    past = reached - SAVE_AT
    check(
        status == -signal.SIGKILL and killed.digests is None,
        f"killed {processes} processes with SIGKILL at step {reached}, {past} past the checkpoint",
    )
    check_same_losses("until the kill", killed, reference, range(1, min(reached, STEPS) + 1))

    with Job("resumed", directory, 2, *from_checkpoint) as job:
        resumed = job.wait()
    check(resumed.resumed_at == SAVE_AT, f"resumed on 2 ranks from step {resumed.resumed_at}")
    check_same_losses("resumed on 2 ranks", resumed, reference, range(SAVE_AT + 1, STEPS + 1))
    check(
        resumed.digests == reference.digests,
        "the final state (weights, moments, data position) is the uninterrupted one, bit for bit",
    )

    with Job("resumed-on-one", directory, 1, *from_checkpoint) as job:
        alone = job.wait()
    check(alone.resumed_at == SAVE_AT, f"resumed on 1 rank from step {alone.resumed_at}")
    check_close_losses("resumed on 1 rank", alone, reference, range(SAVE_AT + 1, STEPS + 1))


def check_same_losses(when: str, run: Progress, reference: Progress, steps: range) -> None:
    different = [step for step in steps if run.losses.get(step) != reference.losses[step]]
    check(
        not different,
        f"{when}: the losses of steps {steps[0]}-{steps[-1]} are the uninterrupted ones, bit for bit",
        f"steps {different} differ",
    )


def check_close_losses(when: str, run: Progress, reference: Progress, steps: range) -> None:
    def relative_difference(step: int) -> float:
        one, other = (float.fromhex(progress.losses.get(step, "nan")) for progress in (run, reference))
        return abs(one - other) / abs(other)

    differences = [relative_difference(step) for step in steps]
    check(
        all(difference <= TOLERANCE for difference in differences),  # false for NaN too
        f"{when}: the losses of steps {steps[0]}-{steps[-1]} are the uninterrupted ones within {TOLERANCE:g} "
        f"(largest relative difference {max(differences):.1e})",
    )


def check_interchange(ours: Path, stock: Path) -> None:
    """Both directories hold one state, saved at one time; what stock wrote and stock read is the truth."""

    def by_stock(path: Path) -> dict[str, Any]:
        return load_whole(path, dcp.FileSystemReader(path), dcp.DefaultLoadPlanner())

    def by_us(path: Path) -> dict[str, Any]:
        return load_whole(path, vescale_ckpt.StorageReader(path), vescale_ckpt.LoadPlanner())

    truth = by_stock(stock)
    tensors = sum(isinstance(value, Tensor) for value in truth.values())
    what = f"{tensors} tensors and {len(truth) - tensors} objects"
    for claim, state in (
        ("our checkpoint read by stock dcp.load", by_stock(ours)),
        ("a stock checkpoint read by us", by_us(stock)),
        ("our checkpoint read by us in one process", by_us(ours)),
    ):
        difference = first_difference(state, truth)
        check(difference is None, f"{claim}: {what} equal bit for bit", difference or "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where the checkpoints go; a real disk, else loads are not cold")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the table")
    parser.add_argument("--tiny", action="store_true", help="a tiny network with random weights, for tests")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP's answer to no_dist=True

    with tempfile.TemporaryDirectory(prefix="vescale_ckpt_demo_", dir=args.dir) as scratch:
        directory = Path(scratch).resolve()
        ours, stock = directory / "ours", directory / "stock"
        if not args.tiny:
            parameters = sum(parameter.numel() for parameter in load_pretrained().parameters())
            check(True, f"published MiniLM weights map one to one, {parameters / 1e6:.1f} M parameters")
        kill_and_resume(directory, ours, stock, ["--tiny"] if args.tiny else [])
        check_interchange(ours, stock)
        table = table_of_candidates(directory, stock, args.rounds)
        check(True, "every measured load gave back every bit")
        print(f"\n{table}")


if __name__ == "__main__":
    main()
