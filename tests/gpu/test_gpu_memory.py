"""Memory of a CUDA device that is freed, replayed into or full, locks and copies that CUDA refuses, and a device that
has failed; `scripts/check_gpu.py` runs these.

Errors that a device keeps, and memory that is taken once a process, are in processes of their own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vescale_ckpt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

BOUND = 120.0  # seconds after which something counts as hung
DEVICE = "cuda"


def run(program: str, folder: Path) -> str:
    """What it prints."""
    command = [sys.executable, "-c", program, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=BOUND)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_memory_that_is_freed_and_given_out_again_is_saved_as_it_was(tmp_path: Path) -> None:
    for number in range(3):
        state = {str(i): torch.full((1 << 19,), float(100 * number + i), device=DEVICE) for i in range(64)}
        handle = vescale_ckpt.save(tmp_path / str(number), state, async_checkpoint=True)
        del state
        dirt = [torch.full((1 << 19,), -1.0, device=DEVICE) for _ in range(64)]  # in the same memory
        handle.result(BOUND)
        found = {str(i): torch.zeros(1 << 19, device=DEVICE) for i in range(64)}
        vescale_ckpt.load(tmp_path / str(number), found)
        assert all(found[str(i)].eq(100 * number + i).all() for i in range(64))
        assert all(tensor.eq(-1).all() for tensor in dirt)


def test_a_graph_is_replayed_as_soon_as_a_save_is_staged(tmp_path: Path) -> None:
    value = torch.zeros(8 << 20, device=DEVICE)
    value.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.add_(1)
    value.zero_()
    for number in range(3):
        handle = vescale_ckpt.save(tmp_path / str(number), {"v": value}, async_checkpoint=True)
        handle.staged.result(BOUND)
        graph.replay()
        handle.result(BOUND)
        found = {"v": torch.full_like(value, -1)}
        vescale_ckpt.load(tmp_path / str(number), found)
        assert found["v"].eq(number).all()


# --- Refusals

FULL = """
import sys
import torch
import vescale_ckpt
from vescale_ckpt._engine import _C

folder = sys.argv[1]
state = {f"s{number}": torch.randn(1 + number, device="cuda") for number in range(500)}
state["large"] = torch.randn(4096, 4096, device="cuda")
state["columns"] = state["large"][:, :100]
wanted = {name: tensor.cpu() for name, tensor in state.items()}
on_device = {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def save(name):
    vescale_ckpt.save(f"{folder}/{name}", state, async_checkpoint=True).result(100)
    on_host = {key: torch.zeros_like(tensor) for key, tensor in wanted.items()}
    vescale_ckpt.load(f"{folder}/{name}", on_host)
    assert all(torch.equal(on_host[key], tensor) for key, tensor in wanted.items())


filling, size = [], 1 << 30
while size >= 1 << 20:
    try:
        filling.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        size //= 2
try:
    save("full")
    print("saved while the device was full")
except vescale_ckpt.CheckpointError as error:
    print("refused while the device was full:", error)
filling.clear()
torch.cuda.empty_cache()
save("free")
vescale_ckpt.load(f"{folder}/free", on_device)
assert all(torch.equal(on_device[key].cpu(), tensor) for key, tensor in wanted.items())
print(_C.device_notes())
print("saved and loaded when it was not")
"""


def test_a_full_device_is_saved_from_or_named(tmp_path: Path) -> None:
    said = run(FULL, tmp_path)
    assert "saved while the device was full" in said or "memory" in said.lower(), said
    assert "saved and loaded when it was not" in said, said


LOCKED = """
import ctypes
import sys
import torch
import vescale_ckpt
from vescale_ckpt._engine import _C
from vescale_ckpt._write.host_batches import write_table

folder, size = sys.argv[1], 192 << 20
in_host_memory = torch.zeros(size, dtype=torch.uint8)
snapshot = _C.Snapshot(write_table([in_host_memory]), 1 << 40, 4)
memory = memoryview(snapshot)
address, bytes = ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory.nbytes
torch.zeros(1, device="cuda")
print("locked by somebody else:", int(torch.cuda.cudart().cudaHostRegister(address, bytes, 1)) == 0)
del memory
snapshot.release()

state = {f"s{number}": torch.randn(1 + number, device="cuda") for number in range(500)}
state["large"] = torch.randn(4096, 4096, device="cuda")
for number in range(2):
    vescale_ckpt.save(f"{folder}/{number}", state, async_checkpoint=True).result(100)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    vescale_ckpt.load(f"{folder}/{number}", found)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
print("notes:", _C.device_notes())
torch.zeros(10, device="cuda").add_(1).cpu()  # raises if CUDA still remembers our error
torch.cuda.synchronize()
print("torch goes on")
"""


def test_a_refused_page_lock_is_noted_and_not_found_by_the_framework(tmp_path: Path) -> None:
    """Memory that is locked already is locked no second time."""
    said = run(LOCKED, tmp_path)
    assert "locked by somebody else: True" in said, said
    assert "could not be page-locked" in said and "torch goes on" in said, said


FAILED = """
import os
import sys
import torch
import vescale_ckpt

folder = sys.argv[1]
value = torch.zeros(1 << 20, device="cuda")
vescale_ckpt.save(f"{folder}/before", {"v": value})
torch.zeros(4, device="cuda")[torch.tensor([1 << 40], device="cuda")]
try:
    torch.cuda.synchronize()
    print("the device did not fail")
except RuntimeError:
    pass
state = {"v": value}
for name, act in (
    ("save", lambda: vescale_ckpt.save(f"{folder}/after", state)),
    ("asynchronous save", lambda: vescale_ckpt.save(f"{folder}/later", state, async_checkpoint=True).result(100)),
    ("load", lambda: vescale_ckpt.load(f"{folder}/before", state)),
):
    try:
        act()
        print(f"{name}: no error", flush=True)
    except vescale_ckpt.CheckpointError as error:
        print(f"{name}: {error}".replace("\\n", " "), flush=True)
os._exit(0)  # without the farewells to a device that has failed
"""


def test_a_device_that_failed_before_is_named_as_such(tmp_path: Path) -> None:
    """By an index out of range in the user's own kernel."""
    lines = run(FAILED, tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines] == ["save", "asynchronous save", "load"], lines
    assert all("had failed before, by work of this process" in line for line in lines), lines
