"""Two ranks on one device that talk over NCCL as broadcast loads do: gpu_two_ranks.py RANK FOLDER CASE.

NCCL wants a device a rank. With an `NCCL_HOSTID` for each rank it takes two ranks of one device for two hosts.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MiB = 1 << 20
TIMEOUT = 20.0  # seconds for a swap; half of them for the first, which connects
MONITOR_SECONDS = 5  # after which torch ends a process of which it believes that it hangs; 480 by itself
#: So that NCCL takes two ranks on one device: they seem to be on hosts of their own, and talk by sockets.
TWO_ON_ONE = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}


@dataclass(frozen=True)
class Ranks:
    texts: list[str]  #: what each rank said of itself, or was said of its end

    @property
    def text(self) -> str:
        return "; ".join(self.texts)

    @property
    def slowest_swap(self) -> float:
        return max((float(found) for found in re.findall(r"swapped \d+ MiB in ([0-9.]+) s", self.text)), default=0.0)


def run(case: str, seconds: float) -> Ranks:
    """Both ranks, which have so much time from the second's start on."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(0, folder, case)]
        until = time.monotonic() + 60
        while not Path(folder, "port").exists() and ranks[0].poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        ranks.append(_start(1, folder, case))
        until = time.monotonic() + seconds
        return Ranks([_end(rank, until) for rank in ranks])


def _start(rank: int, folder: str, case: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, str(rank), folder, case]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _end(rank: subprocess.Popen[str], until: float) -> str:
    try:
        text, _ = rank.communicate(timeout=max(1.0, until - time.monotonic()))
        ended = f"status {rank.returncode}"
    except subprocess.TimeoutExpired:
        rank.kill()
        text, _ = rank.communicate()
        ended = "killed: it did not end in time"
    print(text, flush=True)  # all of it is in the step's log
    said = [line[:250] for line in text.splitlines() if re.match(r"rank \d ", line) or "Terminating" in line]
    return ", ".join([*said, ended])


# --- One rank


def _main(rank: int, folder: str, case: str) -> None:
    os.environ.update(TWO_ON_ONE, NCCL_HOSTID=f"host{rank}")
    if case == "death":  # read by the user's own group, whose monitor ends the process
        os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(MONITOR_SECONDS)
        os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "500"
    import torch
    import torch.distributed as dist

    from vescale_ckpt._ranks import nccl

    def told(text: str) -> None:
        print(f"rank {rank} {text}", flush=True)

    store = _store(rank, Path(folder))
    users = dist.ProcessGroupNCCL(dist.PrefixStore("default_pg/0", store), rank, 2, dist.ProcessGroupNCCL.Options())
    torch.zeros(1, device="cuda")
    device = nccl.CudaDevice(torch.device("cuda", 0))
    backend = nccl.nccl_backend(dist.PrefixStore("ours", store.clone()), rank, 2, TIMEOUT)
    group = nccl.DeviceGroup(device, backend, TIMEOUT)
    if case == "absent" and rank == 1:
        time.sleep(TIMEOUT + 5)
        os._exit(0)
    began = time.monotonic()
    try:
        _swap(group, torch, told, rank, case)
    except Exception as error:
        told(f"raised after {time.monotonic() - began:.1f} s: {type(error).__name__}: {error}"[:240])
    until = time.monotonic() + 2 * MONITOR_SECONDS + 3
    group.end()
    if case == "death":
        time.sleep(max(0.0, until - time.monotonic()))
        told("lives on when torch's monitor would have ended it")
    del users
    os._exit(0)  # without the farewells of a group whose other rank is gone


def _store(rank: int, folder: Path) -> Any:
    """The ranks' store, whose port rank 0 leaves in the folder."""
    import torch.distributed as dist

    if rank == 1:
        return dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), 2, False)
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    (folder / "port.new").write_text(str(store.port))
    os.rename(folder / "port.new", folder / "port")
    return store


def _swap(group: Any, torch: Any, told: Callable[[str], None], rank: int, case: str) -> None:
    def memory(size: int) -> Any:
        return torch.full((size,), rank, dtype=torch.uint8, device="cuda")

    sent, received = memory(2), memory(2)
    torch.cuda.synchronize()
    began = time.monotonic()
    group.connect(list(torch.split(received, 1)), list(torch.split(sent, 1)))
    told(f"connected in {time.monotonic() - began:.1f} s")
    if received.tolist() != [0, 1]:
        raise RuntimeError(f"it received {received.tolist()}")
    if case == "death" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for size in (MiB, 16 * MiB):
        sent, received = memory(size), memory(size)
        torch.cuda.synchronize()
        began, nothing = time.monotonic(), sent[:0]
        outputs, inputs = [nothing, received], [nothing, sent]
        if rank == 1:
            outputs, inputs = outputs[::-1], inputs[::-1]
        group.swap(outputs, inputs)
        if not received.eq(1 - rank).all():
            raise RuntimeError(f"{size >> 20} MiB came wrong")
        told(f"swapped {size >> 20} MiB in {time.monotonic() - began:.2f} s")


if __name__ == "__main__":
    _main(int(sys.argv[1]), *sys.argv[2:4])
