"""A job on three machines loses one with its disk, and goes on from what the others have: on one computer.

    python examples/lose_a_machine.py [--dir DIR]

Each "machine" is a `torchrun` in a mount namespace of its own (`unshare`, without privileges on most systems): all
have a folder under one path, and see no other's. Checkpoints go there (`Tier(local=)`), and each machine's files to one
other (`copies=1`). The durable place gets a step only every 1,000, so it is empty when the machine is lost. On real
machines the training below is the same; there `local` is a disk of each, `/nvme/run` say.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

MACHINES = 3
STEPS = 60
SAVE_EVERY = 5
LOST_AFTER = 22  # the machine is lost once this step is logged, or a little later
SECONDS = 180.0  # for a job; a few are usual


def train(local: str, durable: str, steps: int) -> None:
    """What each rank runs: a small network, sharded over all machines."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import vescale_ckpt

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    tier = vescale_ckpt.Tier(local, copies=1, durable_interval_steps=1000)
    options = {"save_interval_steps": SAVE_EVERY, "max_to_keep": 2, "timeout": 30}
    with vescale_ckpt.CheckpointManager(durable, tier=tier, **options) as manager:
        if manager.latest() is not None:
            manager.restore(state)
            if dist.get_rank() == 0:
                print(f"resumed at step {state['step']}", flush=True)
        for step in range(state["step"] + 1, steps + 1):
            generator = torch.Generator().manual_seed(step * MACHINES + dist.get_rank())
            batch = torch.randn(32, 64, generator=generator)
            loss = torch.nn.functional.mse_loss(model(batch), batch.flip(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state["step"] = step
            manager.save(step, state)
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item().hex()}", flush=True)
            time.sleep(0.05)  # a real step takes longer
    survived = manager.losses_survived()  # after the last copies
    if dist.get_rank() == 0:
        print(f"machines that may be lost: {survived}", flush=True)
    dist.destroy_process_group()


class Job:
    """The training on all machines, each in a process group of its own."""

    def __init__(self, directory: Path, name: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        (directory / "local").mkdir(exist_ok=True)
        self.output = directory / f"{name}.log"
        self._machines = []
        for machine in range(MACHINES):
            folder = directory / f"machine-{machine}"
            folder.mkdir(exist_ok=True)
            command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={MACHINES}", f"--node-rank={machine}"]
            command += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", __file__, "--train"]
            command += [str(directory / "local"), str(directory / "durable")]
            mount = f'mount --bind "{folder}" "{directory / "local"}" && exec "$@"'
            with open(self.output if machine == 0 else directory / f"{name}-{machine}.log", "w") as output:
                self._machines.append(
                    subprocess.Popen(
                        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *command],
                        # Two "machines" of one computer need to be told apart.
                        env={**os.environ, "VESCALE_CKPT_NODE": str(machine), "OMP_NUM_THREADS": "1"},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def losses(self) -> dict[int, str]:
        return {int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)$", self.output.read_text(), re.M)}

    def said(self, pattern: str) -> str:
        found = re.search(pattern, self.output.read_text())
        check(found is not None, f"the job says: {pattern}", self.output.read_text()[-4000:])
        assert found is not None
        return found[1]

    def wait_for(self, step: int) -> None:
        until = time.monotonic() + SECONDS
        while step not in self.losses():
            ended = any(machine.poll() is not None for machine in self._machines)
            if ended or time.monotonic() > until:
                raise SystemExit(f"FAILED: step {step} was not reached:\n{self.output.read_text()[-4000:]}")
            time.sleep(0.05)

    def lose(self, machine: int) -> None:
        """All processes of the machine die at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._machines[machine].pid, signal.SIGKILL)
        self._machines[machine].wait()

    def wait(self) -> None:
        statuses = [machine.wait(SECONDS) for machine in self._machines]
        check(statuses == [0] * MACHINES, "all machines end well", self.output.read_text()[-4000:])

    def stop(self) -> None:
        for machine in range(MACHINES):
            self.lose(machine)


def check(holds: bool, claim: str, otherwise: str = "") -> None:
    """Print that the claim holds, or end the program saying that it does not."""
    if not holds:
        raise SystemExit(f"FAILED: {claim}: {otherwise}")


def run(directory: Path) -> None:
    alone = directory / "uninterrupted"
    alone.mkdir()
    job = Job(alone, "job")
    try:
        job.wait()
        reference = job.losses()
    finally:
        job.stop()
    print(f"ok: trained {len(reference)} steps on {MACHINES} machines uninterrupted", flush=True)

    lost = MACHINES - 1
    job = Job(directory, "first")
    try:
        job.wait_for(LOST_AFTER)
        job.lose(lost)
        reached = max(job.losses())
    finally:
        job.stop()
    shutil.rmtree(directory / f"machine-{lost}")
    durable = [path.name for path in (directory / "durable").glob("step-*")]
    check(not durable, "the durable place has no checkpoint", str(durable))
    print(f"ok: lost machine {lost} and its folder at step {reached}; the durable place has no checkpoint", flush=True)

    job = Job(directory, "again")
    try:
        job.wait()
        resumed = int(job.said(r"resumed at step (\d+)"))
        losses = job.losses()
    finally:
        job.stop()
    print(f"ok: an empty machine took its place, and the job resumed at step {resumed}", flush=True)
    check(resumed >= SAVE_EVERY and set(losses) == set(range(resumed + 1, STEPS + 1)), "all later steps", str(losses))
    different = [step for step, loss in losses.items() if loss != reference[step]]
    check(not different, "the losses are the uninterrupted ones", f"steps {different} differ")
    print(f"ok: the losses of steps {resumed + 1}-{STEPS} are the uninterrupted ones, bit for bit", flush=True)
    print(f"ok: steps on the machines, and how many may be lost now: {job.said('may be lost: (.*)')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where the folders of the machines are made")
    parser.add_argument("--train", nargs=2, metavar=("LOCAL", "DURABLE"), help="what torchrun calls")
    args = parser.parse_args()
    if args.train:
        train(*args.train, STEPS)
        return
    with tempfile.TemporaryDirectory(prefix="vescale_ckpt_machines_", dir=args.dir) as directory:
        run(Path(directory).resolve())


if __name__ == "__main__":
    main()
