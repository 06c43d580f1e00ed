"""One process of the Flax loop that ``make attack`` attacks: ``python tests/loop_process.py FOLDER``.

It saves every batch, and goes on after the last one that is saved. At the end, the first process writes all weights and
moments. The variable ``TROUBLE`` has the index of a process, a batch, and the number of the call of our functions which
raises an error while the process prepares the batch.
"""

import os
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from support.expert_state import Run
from support.loop_attacks import Arena, is_ours

from experiments.miniature.sharing import shared_programs
from experiments.rl.process_group import join_processes
from relibra_jax.nnx import from_logical, logical_optimizer_state, restore_training, save_training


def prepare(run, number):
    """Prepare a batch, with the trouble that is asked for."""
    process, batch, left = map(int, os.environ.get("TROUBLE", "-1 -1 0").split())

    def trace(frame, event, argument):
        nonlocal left
        if event == "call" and is_ours(frame):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise ValueError(f"injected in {frame.f_code.co_qualname}")

    if (process, batch) == (jax.process_index(), number):
        sys.settrace(trace)
    try:
        return run.prepare(number)
    finally:
        sys.settrace(None)


def put_back(run):
    """Set weights and moments from copies of them, on the host and on the mesh."""
    params, moments = run.logical()[0], logical_optimizer_state(run.model, run.optimizer)
    from_logical(run.model, params, optimizer=run.optimizer, optimizer_state=moments)


def main(folder):
    with join_processes(), shared_programs():
        run, first = Run(), 0
        with ocp.CheckpointManager(folder / "checkpoints") as manager:
            if manager.latest_step() is not None:
                first, _ = restore_training(manager, run.model, run.optimizer, run.balancer)
            for number in range(first, Arena.BATCHES):
                put_back(run)
                run.step(prepare(run, number), number)
                save_training(manager, number + 1, run.model, run.optimizer, run.balancer)
                manager.wait_until_finished()
        leaves = jax.tree.leaves(run.logical())
        if jax.process_index() == 0:
            np.savez(folder / "end.npz", *leaves)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"  # 2 x 2 ranks over two processes
    main(Path(sys.argv[1]))
