"""SIGKILL while an asynchronous save goes on and training changes the state: a checkpoint is there, the old or the new.

`VESCALE_CKPT_TEST_KILLS` sets how many processes are killed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from harness.children import Shared
from harness.states import change_all, state
from test_kill import kill_again_and_again

import vescale_ckpt

KILLS = int(os.environ.get("VESCALE_CKPT_TEST_KILLS", "16"))


def train_for_ever(directory: Path, committed: Shared) -> NoReturn:
    k = committed[0]
    while True:
        k += 1
        values = state(k)
        handle = vescale_ckpt.save(directory, values, async_checkpoint=True)

        def done(handle: vescale_ckpt.SaveHandle, k: int = k) -> None:
            if handle.exception() is None:
                committed[0] = k

        handle.add_done_callback(done)
        change_all(values)


def test_a_killed_process_leaves_the_old_checkpoint_or_the_new_one(checkpoint: Path) -> None:
    kill_again_and_again(checkpoint, train_for_ever, KILLS)
