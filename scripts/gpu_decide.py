"""Checks that decide what reading CUDA's documents could not: gpu_decide.py CHECK.

Each check is a step of gpu_check.sh, in a process with a time limit: a crash or a hang of it is an answer, too. Those
whose names begin with `raw_` call CUDA's runtime alone, without the engine. A check records what it finds and raises
`Fault` where the package must not be used as it is.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import gpu_two_ranks
from gpu_cuda import PIECE, Copy, Cuda, GiB, MiB
from gpu_machine import memory_folder
from gpu_plan import NO_BATCHES

from benchmarks.figures import record

SLOWEST_SWAP = 10.0  # seconds for 16 MiB between two ranks on one device, above which tests of NCCL would not end


class Fault(Exception):
    """What must not be so."""


def batches_are_off() -> bool:
    """Whether `raw_batches` failed before."""
    return all(os.environ.get(name) == value for name, value in NO_BATCHES.items())


# --- Copies in batches


def raw_batches() -> None:
    """Many and large batches, repeated. A driver was reported to crash at 51,828 copies in a call, and to hang at
    repeated smaller calls (vllm-project/vllm#49276)."""
    cuda = Cuda()
    memory = 512 * MiB
    device, host = cuda.allocate(memory), cuda.map_locked(memory)
    sizes, small = (512, 4096, 65536, 131072, 1536, 70000), (512, 1536, 4096)
    for count, times in ((512, 200), (4096, 400), (11000, 20), (51828, 3)):
        copies = _adjacent(host, device, memory, count, small if count > 20000 else sizes)
        began = time.perf_counter()
        for number in range(times):
            code = cuda.copy_batch(copies, to_device=False)
            if number % 3 == 2:
                code = code or cuda.wait()
            if code != 0:
                break
        code = code or cuda.wait()
        seconds = time.perf_counter() - began
        rate = times * sum(size for _, _, size in copies) / seconds / 1e9
        record(**{f"raw batches, {len(copies)} x {times}": f"{cuda.name(code)}, {rate:.1f} GB/s"})
        if code != 0:
            raise Fault(f"{times} batches of {len(copies)} copies: {cuda.name(code)}")


def _adjacent(host: int, device: int, memory: int, count: int, sizes: tuple[int, ...]) -> list[Copy]:
    """As many copies to the host as are wanted and as there is memory for, each at a multiple of 512 bytes."""
    copies: list[Copy] = []
    at = 0
    for number in range(count):
        size = sizes[number % len(sizes)]
        if at + size > memory:
            break
        copies.append((host + at, device + at, size))
        at += -(-size // 512) * 512
    return copies


def raw_pageable_batch() -> None:
    """Batches from and to memory that is not locked, as where a lock was refused."""
    if batches_are_off():
        return record(raw_pageable_batch="not tried: batches crashed or hung before")
    cuda = Cuda()
    device, host = cuda.allocate(64 * MiB), cuda.map_on_host(64 * MiB)
    for way, ends, to_device in (("to_host", (host, device), False), ("to_device", (device, host), True)):
        to, source = ends
        copies = [(to + at, source + at, MiB) for at in range(0, 64 * MiB, MiB)]
        began = time.perf_counter()
        code = cuda.copy_batch(copies, to_device=to_device)
        called = time.perf_counter() - began
        code = code or cuda.wait()
        taken = time.perf_counter() - began
        cuda.forget_error()
        record(
            **{f"raw_pageable_batch_{way}": f"{cuda.name(code)}, call {called * 1e3:.1f} ms, all {taken * 1e3:.1f} ms"}
        )


# --- What CUDA refuses


def raw_across_allocations() -> None:
    """Whether one copy may span two allocations that are neighbours. The engine makes none."""
    cuda = Cuda()
    size = 32 * MiB
    host = cuda.map_locked(2 * size)
    blocks = sorted(cuda.allocate(size) for _ in range(64))
    neighbours = [block for block, behind in pairwise(blocks) if block + size == behind]
    record(raw_across_neighbours_of_63=len(neighbours))
    if not neighbours:
        return
    across = (neighbours[0], host, 2 * size)
    alone = cuda.copy_to_device(across) or cuda.wait()
    cuda.forget_error()
    batched = cuda.copy_batch([across, (blocks[0], host, 4096)], to_device=True) or cuda.wait()
    record(raw_across_allocations=f"a copy: {cuda.name(alone)}, in a batch: {cuda.name(batched)}")


def raw_wrong_address() -> None:
    """What a copy from an address of nothing does. Where the device reads all of the host's memory the error sticks."""
    cuda = Cuda()
    host = cuda.map_locked(2 * MiB)
    code = cuda.copy_to_host((host, 64, 8))
    code = code or cuda.wait()
    cuda.forget_error()
    try:
        cuda.allocate(MiB)
        later = "ok"
    except RuntimeError as error:
        later = str(error)
    record(raw_wrong_address=f"{cuda.name(code)}, the call after it: {later}")


# --- Speed


def raw_bandwidth() -> None:
    """GB/s of large copies by kind of memory and alignment, and of batches beside the same copies one by one."""
    cuda = Cuda()
    size = GiB
    device, locked = cuda.allocate(size), cuda.map_locked(size + 8192)
    allocated = cuda.allocate_on_host(size + 8192)

    def rate(name: str, action: Callable[[], int], total: int = size) -> None:
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            cuda.must(action() or cuda.wait())
            seconds.append(time.perf_counter() - began)
        record(**{f"raw GB/s, {name}": round(total / statistics.median(seconds[1:]) / 1e9, 2)})

    rate("allocated, to host", lambda: cuda.copy_to_host((allocated, device, size)))
    rate("registered, to host", lambda: cuda.copy_to_host((locked, device, size)))
    rate("registered + 64, to host", lambda: cuda.copy_to_host((locked + 64, device, size)))
    rate("registered + 4, to host", lambda: cuda.copy_to_host((locked + 4, device, size)))
    rate("registered, to device", lambda: cuda.copy_to_device((device, locked, size)))
    for piece in (4096, 65536, 262144, MiB, 8 * MiB):
        count = min(4096, size // piece)
        copies = [(locked + at, device + at, piece) for at in range(0, count * piece, piece)]

        def one_by_one(copies: list[Copy] = copies) -> int:
            return max(cuda.copy_to_host(copy) for copy in copies)

        def batch(overlap: bool, copies: list[Copy] = copies) -> int:
            return cuda.copy_batch(copies, to_device=False, overlap=overlap)

        title = f"{count} x {piece >> 10} KiB"
        rate(f"{title} one by one", one_by_one, count * piece)
        if not batches_are_off():
            rate(f"{title} batch", partial(batch, True), count * piece)
            rate(f"{title} batch, no overlap", partial(batch, False), count * piece)


def raw_page_tables() -> None:
    """Device memory that 4 GiB of locked host memory takes, and how fast it is locked."""
    cuda = Cuda()
    size = 4 * GiB
    before = cuda.free_bytes()
    began = time.perf_counter()
    address = cuda.map_on_host(size)
    touched = time.perf_counter() - began
    seconds = []
    for at in range(0, size, PIECE):
        began = time.perf_counter()
        cuda.lock(address + at, PIECE)
        seconds.append(time.perf_counter() - began)
    record(
        raw_page_tables_mib=(before - cuda.free_bytes()) / MiB,
        raw_page_lock_piece_ms=round(statistics.median(seconds) * 1e3, 2),
        raw_page_lock_gb_s=round(size / sum(seconds) / 1e9, 1),
        raw_touched_gb_s=round(size / touched / 1e9, 1),
    )


def launches_beside_locks() -> None:
    """Launches of a small kernel while another thread locks memory, with pauses between its pieces, and without."""
    import torch

    cuda = Cuda()
    size = 4 * GiB
    small = torch.zeros(64, device="cuda")

    def launches(done: Callable[[], bool]) -> list[float]:
        taken = []
        while not done():
            began = time.perf_counter()
            small.add_(1)
            taken.append(time.perf_counter() - began)
        return taken

    def lock(address: int, pause: float) -> None:
        for at in range(0, size, PIECE):
            cuda.lock(address + at, PIECE)
            if pause:
                time.sleep(pause)

    def tell(name: str, taken: list[float]) -> None:
        worst = sorted(taken)[int(0.99 * len(taken))]
        record(**{f"launches_{name}_us": f"p99 {worst * 1e6:.1f}, most {max(taken) * 1e6:.0f}, of {len(taken)}"})

    end = time.perf_counter() + 1
    tell("alone", launches(lambda: time.perf_counter() > end))
    for pause in (0, 50, 200):  # microseconds
        thread = threading.Thread(target=lock, args=(cuda.map_on_host(size), pause / 1e6))
        began = time.perf_counter()
        thread.start()
        beside = launches(lambda: not thread.is_alive())  # noqa: B023
        tell(f"beside_locks_with_pauses_of_{pause}_us", beside)
        record(**{f"locks_with_pauses_of_{pause}_ms": round((time.perf_counter() - began) * 1e3, 1)})


def direct_into_pinned() -> None:
    """Whether direct I/O takes memory of torch's pinned allocator, which broadcast loads over NCCL read into."""
    import torch

    memory = torch.empty(8 * MiB, dtype=torch.uint8, pin_memory=True)
    with tempfile.NamedTemporaryFile(dir=os.getcwd()) as file:
        file.write(os.urandom(8 * MiB))
        file.flush()
        os.fsync(file.fileno())
        try:
            handle = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
            read = os.preadv(handle, [memory.numpy()], 0)
            answer = f"{read >> 20} MiB of 8, address {memory.data_ptr() % 4096} in its page"
        except OSError as error:
            answer = f"refused: {error}"
    record(direct_into_pinned=answer)


def first_call_costs() -> None:
    """What the first save pays that `prepare` does not pay for."""
    import torch

    import vescale_ckpt
    from vescale_ckpt._engine import _C

    state = {str(number): torch.randn(1024, device="cuda") for number in range(64)}
    state["large"] = torch.randn(64 * MiB, device="cuda")
    vescale_ckpt.prepare(state)
    stalls = []
    with tempfile.TemporaryDirectory(dir=memory_folder()[0]) as folder:
        for _ in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            handle = vescale_ckpt.save(folder, state, async_checkpoint=True)
            stalls.append(round((time.perf_counter() - began) * 1e3, 2))
            handle.result()
    record(prepared_stalls_ms=stalls, device_notes=_C.device_notes())


# --- NCCL: two ranks on one device


def nccl_speed() -> None:
    """Whether two ranks on one device swap over NCCL at all, and fast enough for the tests."""
    ranks = gpu_two_ranks.run("speed", seconds=35)
    record(nccl_speed=ranks.text)
    if not all(" swapped 16 MiB " in text for text in ranks.texts):
        raise Fault("two ranks on one device did not swap over NCCL")
    if ranks.slowest_swap > SLOWEST_SWAP:
        raise Fault(f"16 MiB took {ranks.slowest_swap:g} s: more than {SLOWEST_SWAP:g} s")


def nccl_absent() -> None:
    """A rank never comes to the connecting: the other must raise, and not wait for as long as torch would."""
    ranks = gpu_two_ranks.run("absent", seconds=gpu_two_ranks.TIMEOUT + 15)
    record(nccl_absent=ranks.texts[0])
    if " raised " not in ranks.texts[0]:
        raise Fault("the rank that waits did not raise")


def nccl_death() -> None:
    """A rank dies before a swap: the other must raise and live on. torch's own monitor must not end it later."""
    ranks = gpu_two_ranks.run("death", seconds=50)
    record(nccl_death=ranks.texts[0])
    if " raised " not in ranks.texts[0] or " lives on " not in ranks.texts[0]:
        raise Fault("the rank that is left did not raise and live on")


CHECKS = {
    check.__name__: check
    for check in (
        raw_batches,
        raw_across_allocations,
        raw_wrong_address,
        raw_bandwidth,
        raw_page_tables,
        raw_pageable_batch,
        launches_beside_locks,
        direct_into_pinned,
        first_call_costs,
        nccl_speed,
        nccl_absent,
        nccl_death,
    )
}


def main() -> None:
    try:
        CHECKS[sys.argv[1]]()
    except Fault as fault:
        sys.exit(f"fault: {fault}")


if __name__ == "__main__":
    main()
