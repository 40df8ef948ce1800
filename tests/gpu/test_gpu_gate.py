"""Gates with compiled models and optimizers on a CUDA device; `scripts/check_gpu.py` runs these where there is one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from harness.snapshots import late_copies
from harness.states import assert_same
from torch import nn

import vescale_ckpt
from vescale_ckpt import Gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BOUND = 120.0
WIDTH = 2048


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_waits(tmp_path: Path, backend: str) -> None:
    if backend == "inductor":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    module = nn.Linear(WIDTH, WIDTH, device="cuda")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    model, step = torch.compile(module, backend=backend), torch.compile(optimizer.step, backend=backend)
    for _ in range(2):
        model(torch.ones(WIDTH, device="cuda")).sum().backward()
        step()
    gate = Gate(optimizer, allow_capturable=True)  # the compiler has set it
    for number in (1, 2):
        state = {"w": module.weight, "average": optimizer.state[module.weight]["exp_avg"]}
        before = {name: tensor.detach().cpu() for name, tensor in state.items()}
        with late_copies() as ready:
            handle = vescale_ckpt.save(tmp_path / str(number), state, async_checkpoint=True, gate=gate)
            model(torch.ones(WIDTH, device="cuda")).sum().backward()
            threading.Timer(0.3, ready.set).start()
            step()
            assert handle.staged.done()
            handle.result(BOUND)
        assert not torch.equal(module.weight.cpu(), before["w"])
        loaded = {name: torch.zeros(WIDTH, WIDTH) for name in state}
        vescale_ckpt.load(tmp_path / str(number), loaded)
        assert_same(loaded, before)
